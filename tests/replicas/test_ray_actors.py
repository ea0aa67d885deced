"""Replicas on a real Ray, where it is installed: ``pytest -m slow tests/replicas/test_ray_actors.py``."""

import importlib.util
import os
import signal

import pytest

from specctl.replicas.cluster import connected
from specctl.replicas.job import Job
from specctl.replicas.on_ray import RayReplicas
from specctl.replicas.replica import started
from specctl.replicas.window import GivenUp, Task, in_order

if importlib.util.find_spec("ray") is None:  # importing it would settle how it authenticates
    pytest.skip("Ray is not installed", allow_module_level=True)

ECHO = "tests.replicas.toy_jobs:echo"


@pytest.mark.slow
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
