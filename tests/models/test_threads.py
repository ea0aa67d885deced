from pathlib import Path

import pytest
import torch

from specctl.models.loading.assembly import load_pair
from specctl.models.running import threads
from specctl.models.running.threads import Threads, decided, fastest, timed, use
from specctl.processes import CoreTime, allowed_cpus, busy_seconds, usable_cores
from specctl.profile.schema import Profile
from tests.support.checkpoints import llama_config, save_model


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        ({1: [1.0], 2: [0.6]}, 2),
        ({1: [1.0], 2: [3.0]}, 1),
        ({1: [1.0], 2: [0.97]}, 1),
        ({2: [0.6], 1: [1.0]}, 2),
        ({1: [1.0, 1.0, 1.0], 2: [0.5, 2.0, 2.0]}, 1),
        ({1: [8.0], 4: [2.0], 16: [2.0]}, 4),
        ({1: [8.0], 4: [9.0], 16: [2.0]}, 16),
        ({1: [1.0], 4: [0.94], 16: [0.9]}, 4),
    ],
    ids=[
        "more are faster",
        "more wait for each other",
        "hardly faster",
        "any order",
        "one lucky time",
        "a few suffice",
        "all are needed",
        "hardly faster than a few",
    ],
)
def test_the_fastest_number_of_threads(seconds: dict[int, list[float]], number: int) -> None:
    assert fastest(seconds) == number


def test_numbers_of_threads_take_turns_until_both_were_timed_long_enough() -> None:
    clock, used, cost = Clock(), list[int](), {1: 0.02, 2: 0.01}

    def work(number: int) -> None:
        used.append(number)
        clock.now += cost[number]

    found = timed(work, (1, 2), clock)

    assert used[:3] == [1, 1, 2], "one pass before anything counts, then in turn"
    assert used == [1, *[1, 2] * 5]
    assert {number: sum(times) for number, times in found.items()} == pytest.approx({1: 0.1, 2: 0.05})


def test_timing_ends_where_a_pass_takes_long() -> None:
    clock = Clock()

    def work(_: int) -> None:
        clock.now += 3.0

    found = timed(work, (1, 2), clock)

    assert {number: len(times) for number, times in found.items()} == {1: 1, 2: 1}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)


@pytest.fixture
def nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("setting", "environ", "told", "chosen"),
    [
        (3, {}, 2, (3, "as set")),
        (3, {"OMP_NUM_THREADS": "1"}, 1, (3, "as set")),
        ("auto", {"OMP_NUM_THREADS": "2"}, 2, (2, "by OMP_NUM_THREADS")),
        ("auto", {"MKL_NUM_THREADS": "1"}, 1, (1, "by MKL_NUM_THREADS")),
        ("auto", {}, 1, (1, "torch's setting")),
        ("auto", {}, 2, None),
        ("auto", {"OMP_NUM_THREADS": ""}, 2, None),
    ],
    ids=["profile", "profile before environment", "OpenMP", "MKL", "torch was told", "nobody chose", "empty"],
)
@pytest.mark.usefixtures("two_cores")
def test_what_a_person_chose_is_kept(setting, environ, told, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: told)
    found = decided(setting, environ)
    assert (found and (found.number, found.reason)) == chosen


def test_a_single_core_leaves_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    found = decided("auto", {})
    assert found is not None
    assert (found.number, found.reason) == (1, "the only core")


@pytest.mark.parametrize(
    ("number", "cores", "busy", "warns"),
    [
        (2, 2, 1.0, True),
        (2, 2, 0.3, False),
        (1, 2, 2.0, False),
        (2, 2, None, False),
        (4, 8, 3.9, False),
        (8, 8, 2, True),
    ],
)
def test_a_warning_where_threads_lack_cores(number: int, cores: int, busy: float | None, warns: bool) -> None:
    warning = Threads(number, cores, "as set", {}, busy).warning
    assert (warning is not None) == warns
    assert not warns or "--threads 1" in str(warning)
    tried = Threads(number, cores, "measured", {1: 2.0, number: 1.0}, busy).warning
    assert (tried is not None) == warns
    assert "--threads" not in str(tried), "one thread was tried and slower"


def test_the_line_that_tells_of_threads() -> None:
    assert str(Threads(1, 1, "the only core")) == "1 of 1 core (the only core)"
    measured = Threads(2, 4, "measured", {1: 30.25, 4: 21.0}, 0.26)
    tried = "measured: a small round takes 30.2 ms with 1 and 21.0 ms with 4"
    assert str(measured) == f"2 of 4 cores ({tried}); other processes keep 0.3 cores busy"


STAT = """cpu  400 0 0 900 0 0 0 0 0 0
cpu0 100 10 20 500 30 1 2 3 50 0
cpu1 200 0 0 400 0 0 0 0 0 0
cpu12 7 0 0 0 0 0 0 0 0 0
intr 12 0 0
ctxt 5
"""


def test_busy_time_is_that_of_the_processors_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    lines = STAT.splitlines()
    assert busy_seconds(lines, {0}) == pytest.approx(1.36)  # neither idle, waiting for a disk, nor guests again
    assert busy_seconds(lines, {0, 1}) == pytest.approx(3.36)
    assert busy_seconds(lines, {12}) == pytest.approx(0.07)


def test_what_others_did_is_what_was_not_done_here() -> None:
    before = CoreTime(at=10.0, busy=100.0, own=5.0)
    assert before.others_until(CoreTime(at=12.0, busy=103.0, own=6.0)) == pytest.approx(1.0)
    assert before.others_until(CoreTime(at=12.0, busy=101.0, own=6.1)) == 0
    assert before.others_until(CoreTime(at=10.1, busy=100.1, own=5.0)) is None


def test_a_system_that_does_not_tell_has_no_core_time(tmp_path: Path) -> None:
    assert CoreTime.now(tmp_path / "stat") is None


def test_usable_cores_are_physical_and_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.processes.allowed_cpus", lambda: frozenset({0, 1, 2, 3}))
    quota = tmp_path / "cpu.max"
    assert usable_cores(tmp_path, quota) == 4
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert usable_cores(tmp_path, quota) == 2
    quota.write_text("max 100000\n")
    assert usable_cores(tmp_path, quota) == 2
    quota.write_text("120000 100000\n")
    assert usable_cores(tmp_path, quota) == 2
    quota.write_text("50000 100000\n")
    assert usable_cores(tmp_path, quota) == 1


def test_this_process_may_use_a_core() -> None:
    assert 1 <= usable_cores() <= len(allowed_cpus())


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch is told, instead of telling it."""
    told = [2]
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1])
    return told


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("models")
    models = {"target": llama_config(258, num_hidden_layers=3), "draft": llama_config(258, num_hidden_layers=1)}
    return {role: {"model": str(save_model(folder / role, config)), "device": "cpu"} for role, config in models.items()}


def test_a_pair_runs_with_the_number_in_its_profile(table, torch_threads: list[int]) -> None:
    pair = load_pair(Profile.model_validate({**table, "threads": 3}))
    assert pair.threads is not None
    assert (pair.threads.number, pair.threads.milliseconds, torch_threads[-1]) == (3, {}, 3)


@pytest.mark.usefixtures("two_cores", "nobody_chose")
def test_a_pair_that_nobody_chose_a_number_for_is_measured(
    table, torch_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "fastest", lambda tried: max(tried))
    pair = load_pair(Profile.model_validate(table))
    assert pair.threads is not None
    assert set(pair.threads.milliseconds) == {1, 2}
    assert set(torch_threads) == {1, 2}
    assert (pair.threads.number, torch_threads[-1]) == (2, 2)
    assert [runner.length for runner in (pair.target, *pair.drafts)] == [0, 0], "the pair's own caches are untouched"


@pytest.mark.usefixtures("two_cores", "nobody_chose")
def test_a_pair_to_train_on_keeps_what_torch_takes(table, torch_threads: list[int]) -> None:
    pair = load_pair(Profile.model_validate(table), measured=False)
    assert pair.threads is not None
    assert (pair.threads.milliseconds, set(torch_threads)) == ({}, {2})


@pytest.mark.usefixtures("two_cores", "nobody_chose")
def test_large_models_take_the_cores_that_are_free(
    table, torch_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LARGE", 0)
    monkeypatch.setattr(CoreTime, "others_until", lambda *_: 0.9)
    pair = load_pair(Profile.model_validate(table))
    assert pair.threads is not None
    assert (pair.threads.number, pair.threads.milliseconds, torch_threads[-1]) == (1, {}, 1)


def test_training_uses_a_number_that_was_set(torch_threads: list[int]) -> None:
    use("auto")
    assert torch_threads == [2]
    use(5)
    assert torch_threads == [2, 5]
