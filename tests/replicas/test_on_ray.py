"""Replicas on Ray. Only the last test needs Ray, and skips without it."""

import importlib.util
import os
import signal

import pytest

from specctl.errors import UsageError
from specctl.profile import resolve
from specctl.replicas.cluster import connected
from specctl.replicas.job import Job
from specctl.replicas.on_ray import RayReplicas, fingerprint
from specctl.replicas.replica import started
from specctl.replicas.window import GivenUp, Task, in_order

ECHO = "tests.replicas.toy_jobs:echo"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_message_says_how_to_get_it():
    with pytest.raises(UsageError, match="which is not installed") as caught:
        connected("auto")
    assert caught.value.hint == 'pip install "specctl[ray]"'


def test_replicas_that_stay_are_known_by_what_they_do():
    def of(maker=ECHO, tokens=100, **overrides):
        profile = resolve("embedded", overrides=[f"{key}={value}" for key, value in overrides.items()]).profile
        return fingerprint(Job(maker, {"profile": profile, "expected_tokens": tokens}, frozenset({"expected_tokens"})))

    assert of() == of(tokens=7)
    assert len({of(), of("other:job"), of(engine="eager"), of(threads=3)}) == 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_actors_answer_in_order_and_are_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    connected("auto")
    warnings = []
    with RayReplicas([None, None], Job(ECHO, {}), {"num_cpus": 1}, warnings.append) as replicas:
        started(replicas)
        while len(replicas.idle()) < 2:
            replicas.wait()
        os.kill(replicas.pids[0], signal.SIGKILL)
        while len(replicas.idle()) == 2:
            replicas.wait()
        questions = [{"said": number, "seconds": 0.2 * (number % 2)} for number in range(8)]
        questions[2]["dies_once"] = str(tmp_path / "died")
        questions[5] = {"dies": True}
        answers = [answer for _, answer in in_order(replicas, [Task(None, question) for question in questions])]
    assert isinstance(answers.pop(5), GivenUp)
    assert [answer["said"] for answer in answers] == [0, 1, 2, 3, 4, 6, 7]
    assert {answer["threads"] for answer in answers} == {"1"}
    assert len(warnings) == 4  # one was idle, one died once, two died of the same question
