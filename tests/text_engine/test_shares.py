"""What of a machine each replica gets."""

import pytest

from specctl.errors import UsageError
from specctl.profile import resolve
from specctl.text_engine.job import gpus_here, shares


def given(workers, gpus="", cores=16, environ=None, **overrides):
    profile = resolve("embedded", overrides=[f"{key}={value}" for key, value in overrides.items()]).profile
    return shares(workers, profile, gpus.split(), cores, environ or {})


@pytest.mark.parametrize(
    ("workers", "gpus", "overrides", "expected"),
    [
        ("auto", "0 1 2 3", {}, ["0", "1", "2", "3"]),
        (2, "0 1 2 3", {}, ["0,1", "2,3"]),
        (3, "4 5 6 7", {}, ["4", "5", "6"]),
        (3, "0 1", {}, ["0", "1", "0"]),
        ("auto", "0 1 2 3", {"draft.device": "cuda:1"}, ["0,1", "2,3"]),
        ("auto", "0 1 2 3", {"target.device": "balanced"}, ["0,1,2,3"]),
        (2, "0 1 2 3", {"target.device": "balanced"}, ["0,1", "2,3"]),
        ("auto", "0 1 2 3 4 5 6 7", {"target.shards": 4}, ["0,1,2,3", "4,5,6,7"]),
        (2, "", {"target.shards": 4}, [None, None]),
        (1, "0 1", {"target.device": "cuda"}, ["0,1"]),
        (2, "0 1", {"target.device": "cpu", "draft.device": "cpu"}, [None, None]),
        (2, "", {}, [None, None]),
    ],
)
def test_gpus_are_dealt_out_whole(workers, gpus, overrides, expected):
    found = given(workers, gpus, **overrides)
    assert [share.environment.get("CUDA_VISIBLE_DEVICES") for share in found] == expected
    names = [name for share in found for name in share.gpus or ()]
    assert all(share.alone for share in found) == (len(names) == len(set(names)))


def test_what_cannot_fit_is_refused_with_what_would():
    with pytest.raises(UsageError, match="3 replicas of 2 GPUs each do not fit on 4") as caught:
        given(3, "0 1 2 3", **{"draft.device": "cuda:1"})
    assert caught.value.hint.startswith("use --workers 2")


def test_cores_are_divided_unless_the_user_said_otherwise():
    assert [share.threads for share in given(3)] == [5, 5, 5]
    assert [share.threads for share in given(40)] == [1] * 40
    assert len(given("auto", cores=6)) == 6
    assert given(2, environ={"OMP_NUM_THREADS": "3"})[0].threads == 3
    assert given(2, environ={"OMP_NUM_THREADS": "30"})[0].threads == 8
    share = given(2, threads=4)[1]
    assert share.environment == {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}


def test_visible_gpus_are_those_that_there_are():
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "2, GPU-5e"}) == ["2", "GPU-5e"]
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}) == []
