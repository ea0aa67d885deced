"""The host's time for a drafted token is measured over drafts of full length."""

import pytest

from specctl.decoding.sampling import Sampling
from specctl.policies import Setting
from tools import host_time


def test_every_drafted_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "process_time", iter([1.0, 3.0]).__next__)
    policy = Setting("constant", (("draft_length", host_time.DRAFTED),)).build()
    found = host_time.microseconds(policy, Sampling(1.0), rounds=2)
    assert found == pytest.approx(2e6 / (2 * host_time.DRAFTED))
