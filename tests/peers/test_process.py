"""The process of a peer: asked, stopped in between, and gone at the end whatever it does."""

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from specctl.peers.process import PeerError, PeerProcess
from tests.support.fake_peer import ended, install

QUESTION = {"do": "run", "batch": [[1, 2]], "most": 3}
ANSWERS = {"1 2": [5, 6, 7, 8]}

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the states of processes are read from /proc")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def becomes(pid: int, wanted: str) -> bool:
    """Whether a process comes to a state within some seconds; a signal takes effect a little later than it is sent."""
    end = monotonic() + 20
    while monotonic() < end:
        if state(pid) == wanted:
            return True
        sleep(0.01)
    return False


def gone(pid: int) -> bool:
    end = monotonic() + 20
    while monotonic() < end and not ended(pid):
        sleep(0.01)
    return ended(pid)


@linux
def test_it_is_stopped_but_for_the_time_of_its_answers(tmp_path):
    with PeerProcess("fake", [str(install(tmp_path, ANSWERS))]) as process:
        assert process.hello == {"version": "1.2.3"}
        assert becomes(process.pid, "T")
        assert process.ask({"do": "load"}, 20) == {}
        assert becomes(process.pid, "T")
        assert [one["ids"] for one in process.ask(QUESTION, 20)["batch"]] == [[5, 6, 7]]
        assert becomes(process.pid, "T")
    assert ended(process.pid)


@linux
def test_its_children_are_stopped_and_ended_with_it(tmp_path):
    """The child of a shell, as a server that a worker starts."""
    script = f"sleep 600 & echo $! > {tmp_path}/child; echo '{{}}'; read line"
    with PeerProcess("fake", ["sh", "-c", script]):
        child = int((tmp_path / "child").read_text(encoding="utf-8"))
        assert becomes(child, "T")
    assert gone(child)


@linux
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("die", "fake: its process was ended by signal 9: the model fell over"),
        ("hang", "fake: its process did not answer within 1 s"),
        ("rubbish", "fake: its process wrote something that is not an answer"),
        ("error", "fake: RuntimeError: out of cheese"),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, behaviour, message):
    with PeerProcess("fake", [str(install(tmp_path, ANSWERS, behaviour))]) as process:
        with pytest.raises(PeerError) as caught:
            process.ask(QUESTION, 1 if behaviour == "hang" else 60)
        assert gone(process.pid), "it would take time from others"
    assert caught.value.message == message


def test_a_question_that_is_not_read_is_given_up_too():
    """It is longer than what a pipe holds."""
    with (
        PeerProcess("fake", ["sh", "-c", "echo '{}'; sleep 600"]) as process,
        pytest.raises(PeerError, match="did not answer"),
    ):
        process.ask({"ids": [0] * 100_000}, 0.5)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "echo no luck >&2; exit 3"], "fake: its process ended with exit code 3: no luck"),
        (["sh", "-c", "echo '[]'"], "fake: its process wrote something that is not an answer"),
        (["/nonexistent/python"], "fake: /nonexistent/python cannot be started: No such file or directory"),
    ],
)
def test_a_process_that_does_not_begin_is_one_line(command, message):
    with pytest.raises(PeerError) as caught:
        PeerProcess("fake", command)
    assert caught.value.message == message


def test_settings_of_specctls_own_threads_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("ELSE", "kept")
    script = 'echo "{\\"found\\": \\"$OMP_WAIT_POLICY$OMP_NUM_THREADS$ELSE\\"}"'
    assert os.environ["OMP_NUM_THREADS"]
    with PeerProcess("fake", ["sh", "-c", script]) as process:
        assert process.hello == {"found": "kept"}


@linux
def test_it_goes_where_its_parent_is_killed(tmp_path):
    """It is stopped, so that it cannot see the end of its input; the system wakes it up and ends it."""
    program = install(tmp_path, ANSWERS)
    parent = f"""
import os, signal, time
from specctl.peers.process import PeerProcess
process = PeerProcess("fake", [{str(program)!r}])
while open(f"/proc/{{process.pid}}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", parent], check=False)
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))
