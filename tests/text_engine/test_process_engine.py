"""Replicas in processes of this machine."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from specctl.errors import ModelError, RecordError, UsageError
from specctl.text_engine import processes
from specctl.text_engine.dispatch import GivenUp, in_order
from specctl.text_engine.engine import MOST_FAILURES, Answered, Lost, Part, wait_until_ready
from specctl.text_engine.job import Job, ReplicaError, portable
from specctl.text_engine.processes import ProcessEngine

ECHO, ROWS = "tests.text_engine.toy_jobs:echo", "tests.text_engine.toy_jobs:rows"
CLERK = "tests.text_engine.toy_jobs:clerk"


class Heard(list):
    """Lines that replicas wrote, and what became of them."""

    def __init__(self):
        self.warnings = []


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def start(heard):
    made = []

    def start(count=2, maker=ECHO, setup=None, *, restarts=False, **more):
        environments = [{"OMP_NUM_THREADS": str(7 + number)} for number in range(count)]
        job = Job(maker, setup or {}, restarts=restarts)
        replicas = ProcessEngine(job, environments, heard.append, heard.warnings.append, **more)
        made.append(replicas)
        wait_until_ready(replicas)
        return replicas

    yield start
    for replicas in made:
        replicas.close()


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true, seconds=20.0):
    due = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < due, "it never came true"
        time.sleep(0.01)


def asked(replicas, *questions):
    return [answer for _, answer in in_order(replicas, [(None, question) for question in questions])]


def test_unequal_speeds_keep_the_order_and_threads_are_set_before_anything_is_imported(start):
    replicas = start(2)
    wait_until(lambda: len(replicas.free()) == 2 or replicas.step(0.1) is None)
    questions = [{"said": number, "seconds": 0.15 * (number % 3 == 0)} for number in range(10)]
    answers = asked(replicas, *questions)
    assert [answer["said"] for answer in answers] == list(range(10))
    assert {answer["by"] for answer in answers} == {0, 1}
    assert all(answer["threads"] == str(7 + answer["by"]) for answer in answers)
    assert all(os.getsid(pid) == pid for pid in replicas.pids)


def test_large_questions_and_answers_pass(start):
    long = "x" * 3_000_000
    assert asked(start(1), {"said": long})[0]["said"] == long


def test_a_replica_that_was_killed_is_started_again_and_its_question_is_answered(start, heard, tmp_path):
    replicas = start(2)
    answers = asked(replicas, *({"said": n, "dies_once": str(tmp_path / "died") if n == 3 else None} for n in range(9)))
    assert [answer["said"] for answer in answers] == list(range(9))
    assert len(heard.warnings) == 1
    assert "was ended by signal 9; it is started again" in heard.warnings[0]
    wait_until(lambda: len(replicas.free()) == 2 or replicas.step(0.1) is None)


def test_what_ends_two_ready_replicas_is_given_up(start, heard):
    answers = asked(start(2), {"said": 0}, {"dies": True}, {"said": 2}, {"said": 3})
    assert isinstance(answers[1], GivenUp)
    assert "was ended by signal 9" in answers[1].why
    assert [answer["said"] for answer in answers[::2]] == [0, 2]
    assert len(heard.warnings) == 2


def test_a_replica_that_ends_time_and_again_is_given_up_and_then_all_are(start, heard):
    with pytest.raises(ReplicaError, match="no replica is left"):
        asked(start(1), *[{"dies": True}] * 10)
    assert len(heard.warnings) == MOST_FAILURES + 1
    assert "the others go on without it" in heard.warnings[-1]


def test_a_server_outlives_every_question_that_ends_its_process(start, heard):
    replicas = start(1, restarts=True, name="the models' process")
    deadly = MOST_FAILURES + 2
    *lost, last = asked(replicas, *[{"ends": "error: assertion failed"}] * deadly, {"said": "still here"})
    why = "the models' process ended with exit code 3 (assertion failed)"
    assert lost == [GivenUp(why)] * deadly
    assert last["said"] == "still here"
    assert heard == ["error: assertion failed"] * 2 * deadly
    assert heard.warnings == [f"{why}; it is started again"] * 2 * deadly


def test_a_single_process_that_ends_while_it_loads_is_not_started_again(start, heard):
    why = r"^the models' process ended with exit code 3 \(too little memory\)$"
    with pytest.raises(ReplicaError, match=why):
        start(1, setup={"ends": "too little memory"}, restarts=True, name="the models' process")
    assert not heard.warnings


def test_a_single_process_that_dies_without_a_question_counts(start, heard):
    replicas = start(1, restarts=True, name="it")
    for _ in range(MOST_FAILURES):
        os.kill(replicas.pids[0], signal.SIGKILL)
        wait_until(lambda: not replicas.ready or replicas.step(0.1) is None)
        wait_until(lambda: replicas.ready or replicas.step(0.1) is None)
    os.kill(replicas.pids[0], signal.SIGABRT)
    with pytest.raises(ReplicaError, match=r"^it aborted$"):
        wait_until(lambda: replicas.step(0.1) is None)
    assert len(heard.warnings) == MOST_FAILURES


def test_errors_arrive_as_what_they_are(start):
    with pytest.raises(ModelError, match="there is no such model") as caught:
        start(2, setup={"fails": True})
    assert (caught.value.hint, caught.value.exit_code) == ("look for it", 3)
    with pytest.raises(UsageError, match="it cannot be recorded") as caught:
        asked(start(1), {"raises": "it cannot be recorded"})
    assert caught.value.hint == "a hint"


def test_one_that_cannot_be_loaded_does_not_end_those_that_can(start, heard):
    replicas = start(3, setup={"failing": [1]}, one_by_one=True)
    answers = asked(replicas, *[{"said": number, "seconds": 0.2} for number in range(4)])
    wait_until(lambda: "the others go on without it" in "".join(heard.warnings) or replicas.step(0.1) is None)
    assert [answer["said"] for answer in answers] == [0, 1, 2, 3]
    assert "replica 2 cannot be loaded: there is no such model" in heard.warnings[0]
    wait_until(lambda: replicas.free() == [0, 2] or replicas.step(0.1) is None)
    assert asked(replicas, {"said": "still"})[0]["said"] == "still"


def test_errors_survive_a_pipe(monkeypatch):
    import pickle

    error = pickle.loads(pickle.dumps(RecordError("invalid_json", "the line is not JSON")))
    assert (error.kind, error.message) == ("invalid_json", "the line is not JSON")

    class LocalError(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} of {b}")

    assert str(portable(LocalError(1, 2))) == "LocalError: 1 of 2"
    monkeypatch.setenv("SPECCTL_DEBUG", "1")
    assert pickle.loads(pickle.dumps(portable(error))).__notes__


def test_what_replicas_write_to_standard_error_is_passed_on_once(start, heard):
    replicas = start(2)
    asked(replicas, *[{"says": "it is warm", "seconds": 0.1}] * 4, {"prints": "no answer"})
    wait_until(lambda: len(heard) == 2 or replicas.step(0.1) is None)
    assert sorted(line.partition(": ")[2] for line in heard) == ["it is warm", "no answer"]
    assert all(line.startswith(("replica 1: ", "replica 2: ")) for line in heard)


def test_each_starts_once_the_one_before_is_ready(start):
    replicas = start(3, one_by_one=True)
    assert len(replicas.pids) == 2
    wait_until(lambda: len(replicas.free()) == 3 or replicas.step(0.1) is None)
    assert len(replicas.pids) == 3


@pytest.mark.slow
def test_one_that_is_silent_counts_as_dead(start, heard):
    replicas = start(2, beat=0.2)
    answers = asked(replicas, {"stops": True}, {"said": 1})
    assert isinstance(answers[0], GivenUp)
    assert answers[1]["said"] == 1
    assert "gave no sign of life" in heard.warnings[0]


def test_whatever_is_heard_is_a_sign_of_life(start, heard, monkeypatch):
    """Otherwise each would count as dead some time after its start, however busy."""
    replicas = start(1)
    monkeypatch.setattr(processes, "monotonic", lambda: time.monotonic() + 10 * processes.SILENCE * processes.BEAT)
    replicas.submit(0, {"said": "here"})
    answers = replicas._replicas[0].process.stdout
    assert select.select([answers], [], [], 60.0)[0], "it gave no answer"
    assert [event.answer["said"] for event in replicas.step()] == ["here"]
    assert not heard.warnings


def test_failures_between_which_it_answered_do_not_add_up(start, heard, tmp_path):
    deaths = MOST_FAILURES + 2
    questions = [{"said": number, "dies_once": str(tmp_path / f"died-{number}")} for number in range(deaths)]
    assert [answer["said"] for answer in asked(start(1), *questions)] == list(range(deaths))
    assert len(heard.warnings) == deaths
    assert all(warning.endswith("it is started again") for warning in heard.warnings)


def test_closing_ends_all_of_them(start):
    replicas = start(2)
    pids = replicas.pids
    replicas.submit(0, {"seconds": 60})
    replicas.close()
    assert all(map(gone, pids))


def test_replicas_end_with_the_process_that_started_them_and_ignore_interrupts():
    program = (
        "import sys\n"
        "from specctl.text_engine.job import Job\n"
        "from specctl.text_engine.processes import ProcessEngine\n"
        "from specctl.text_engine.engine import wait_until_ready\n"
        f"replicas = ProcessEngine(Job({ECHO!r}, {{}}), [{{}}, {{}}], print, print)\n"
        "while len(replicas.free()) < 2:\n"
        "    replicas.step()\n"
        "for replica in (0, 1):\n"
        "    replicas.submit(replica, {'seconds': 600})\n"
        "print(*replicas.pids, flush=True)\n"
        "replicas.step()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pids = list(map(int, driver.stdout.readline().split()))
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
        assert not any(map(gone, pids))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    wait_until(lambda: all(map(gone, pids)))


def test_a_replica_takes_as_many_questions_as_it_has_places(start):
    replicas = start(2, ROWS, {"count": 3}, places=3)
    assert replicas.count == 6
    found = asked(replicas, *({"said": number, "seconds": 0.02} for number in range(20)))
    assert [answer["said"] for answer in found] == list(range(20))
    assert {answer["by"] for answer in found} <= {0, 1}
    assert max(answer["together"] for answer in found) == 3


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.representatives("2")
def test_of_those_that_ended_with_a_replica_only_the_one_that_ended_it_is_given_up(start, heard, count):
    replicas = start(count, ROWS, {"count": 4}, places=4)
    questions = [{"said": number, "dies": number == 5, "seconds": 0.01} for number in range(14)]
    found = asked(replicas, *questions)
    assert isinstance(found.pop(5), GivenUp)
    assert [answer["said"] for answer in found] == [number for number in range(14) if number != 5]
    assert 3 <= len(heard.warnings) <= 2 + count


def test_one_that_ends_alone_in_its_replica_is_asked_again(start, tmp_path):
    replicas = start(1, ROWS, {"count": 2}, places=2)
    once = str(tmp_path / "died")
    assert [answer["said"] for answer in asked(replicas, {"said": 1, "dies_once": once}, {"said": 2})] == [1, 2]


def until_ended(replicas, replica):
    """What happens until the question of a replica has ended."""
    found = []
    while not any(isinstance(event, Answered | Lost) and event.place == replica for event in found):
        found += replicas.step(20.0)
    return found


def test_a_process_answers_in_parts_as_many_questions_as_its_engine_takes(start):
    replicas = start(2, CLERK, {"places": 2}, places=8)
    wait_until(lambda: replicas.ready == 2 or replicas.step(0.1) is None)
    assert replicas.free() == [0, 1, 8, 9]
    assert replicas.about in ({"by": 0}, {"by": 1})
    replicas.submit(0, {"said": "one two..."})
    assert replicas.free() == [8, 9, 1], "the one with the fewest questions is the first"
    replicas.submit(8, {"said": "three four"})
    found = [event for event in until_ended(replicas, 8) if event.place == 8]  # the other one writes meanwhile
    assert found == [Part(8, "three"), Part(8, "four"), Answered(8, "three four")]
    replicas.submit(1, {"said": "five"})
    until_ended(replicas, 1)
    replicas.cancel(0)
    wait_until(lambda: 0 in replicas.free() or replicas.step(0.1) == [])


def test_a_process_that_was_killed_takes_questions_again(start, heard):
    replicas = start(1, CLERK, {"places": 2}, places=8)
    replicas.submit(0, {"said": "one..."})
    replicas.submit(1, {"said": "two", "dies": True})
    lost = [event for event in until_ended(replicas, 0) if isinstance(event, Lost)]
    assert [(event.place, event.alone) for event in lost] == [(1, False), (0, False)]
    wait_until(lambda: replicas.free() == [0] or replicas.step(0.1) is None)
    for _ in range(2):
        replicas.submit(0, {"said": "again"})
        assert until_ended(replicas, 0) == [Part(0, "again"), Answered(0, "again")]
    assert replicas.free() == [0, 1]
    assert "was ended by signal 9; it is started again" in heard.warnings[0]


def test_a_step_is_woken_from_another_thread(start):
    replicas = start(1)
    thread = threading.Timer(0.01, replicas.wake)
    thread.start()
    assert replicas.step() == []
    thread.join()
    for _ in range(100_000):  # more than a pipe holds
        replicas.wake()
    assert replicas.step(0.0) == []
