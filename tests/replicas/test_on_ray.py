"""Replicas on Ray, as far as it goes without Ray; see `test_ray_actors.py`."""

import importlib.util

import pytest

from specctl.errors import UsageError
from specctl.profile import resolve
from specctl.replicas.cluster import connected
from specctl.replicas.job import Job
from specctl.replicas.on_ray import fingerprint

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
