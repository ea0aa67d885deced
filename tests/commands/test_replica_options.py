"""What the flags about replicas start."""

import pytest
from rich.console import Console

from specctl.commands.flags import ReplicaOptions, Replication
from specctl.commands.loading import start_replicas
from specctl.errors import UsageError
from specctl.profile import resolve
from specctl.terminal.progress import TerminalProgress


class Seen(Exception):  # noqa: N818 - it ends the start at what is of interest
    pass


@pytest.fixture
def begun(monkeypatch):
    """Start replicas as far as their job, their environments and whether they start one by one."""

    def begin(workers, gpus="", overrides=(), spare=False, tokens=100_000):
        def stop(job, environments, *_, one_by_one, **_more):
            raise Seen(job, environments, one_by_one)

        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.setattr("specctl.text_engine.processes.ProcessEngine", stop)
        replication = ReplicaOptions(workers).replication
        silent = TerminalProgress(Console(quiet=True), False)
        profile = resolve("embedded", overrides=overrides).profile
        with (
            pytest.raises(Seen) as seen,
            start_replicas(replication, profile, "some:job", {"quiet": True}, silent, tokens, spare=spare),
        ):
            pass
        return seen.value.args

    return begin


def test_whether_a_run_is_long_is_decided_by_a_replicas_share(begun):
    """Compiling pays from `LONG_RUN` tokens on, and each replica compiles for itself."""
    job, _, _ = begun("3")
    assert job.setup["expected_tokens"] == 33_334
    assert "expected_tokens" not in begun("3", tokens=None)[0].setup


def test_replicas_that_share_a_gpu_or_compile_start_one_by_one(begun):
    assert begun("3", "0,1")[2]
    assert not begun("2", "0,1")[2]
    assert begun("2", "0,1", ["compile=true"])[2]


def test_gpus_of_a_pair_that_is_loaded_already_are_spared_where_there_are_more(begun):
    def visible(*arguments, **more):
        return [one["CUDA_VISIBLE_DEVICES"] for one in begun(*arguments, **more)[1]]

    assert visible("auto", "0,1,2", spare=True) == ["1", "2"]
    assert visible("auto", "0", spare=True) == ["0"]
    assert visible("auto", "0,1,2") == ["0", "1", "2"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400)])
def test_durations(text, seconds):
    assert ReplicaOptions(None, "auto", text).replication == Replication("auto", "auto", seconds)


@pytest.mark.parametrize("text", ["30", "m", "0s", "-1m", "half an hour"])
def test_what_is_no_duration_is_told(text):
    with pytest.raises(UsageError, match="is not a duration"):
        _ = ReplicaOptions("2", "auto", text).replication
