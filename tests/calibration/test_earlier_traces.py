"""Which earlier traces a calibration takes, before it loads a model."""

from pathlib import Path

import pytest

from specctl.calibration.compared_settings import ComparedSettings, require_fits
from specctl.errors import UsageError
from specctl.observing.results import of_request
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.prompts.suites import Suite
from specctl.replay.trace_files import TraceHeader

PROFILE = resolve("embedded").profile
SUITE = Suite("mine", (), "0" * 64)
SETTING = Setting.of({"name": "constant", "draft_length": 7})
PATH = Path("trace.jsonl")


@pytest.mark.parametrize(
    ("depth", "heads", "suite"), [(6, [], SUITE), (7, ["other"], SUITE), (7, [], Suite("mine", (), "1" * 64))]
)
def test_a_trace_to_continue_is_of_the_same_request(depth: int, heads: list[str], suite: Suite) -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    same = TraceHeader(7, [0], [], of_request(PROFILE, SUITE))
    require_fits(same, PROFILE, asked, [], SUITE, PATH)
    other = TraceHeader(depth, [0], [], of_request(PROFILE, suite), heads)
    with pytest.raises(UsageError, match="holds the trace of another calibration"):
        require_fits(other, PROFILE, asked, [], SUITE, PATH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["draft.model=embedded:mid"], "with embedded:draft as draft, not embedded:mid"),
        (["draft.policy.name=none", "draft.head=other/head"], "with embedded:draft-head as the draft's head"),
        (["engine=static"], "with another engine"),
        (["threads=1"], "with another threads"),
        (["sampling.temperature=1"], "with another temperature"),
        (["sampling.top_k=5"], "with another top_k"),
        ([], "for drafts of 6 tokens"),
    ],
)
def test_a_trace_to_search_in_is_of_the_same_models(changes: list[str], message: str) -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    other = resolve("embedded", overrides=changes).profile
    made = of_request(PROFILE, SUITE)
    require_fits(TraceHeader(7, [0], ["accept_prob"], made), PROFILE, asked, [], None, PATH)
    with pytest.raises(UsageError, match=message):
        require_fits(TraceHeader(7 if changes else 6, [0], ["accept_prob"], made), other, asked, [], None, PATH)


def test_a_head_that_was_recorded_is_taken_and_another_is_not() -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    header = TraceHeader(7, [0], ["accept_prob"], of_request(PROFILE, SUITE), ["mine"])
    require_fits(header, PROFILE, asked, ["mine"], None, PATH)
    with pytest.raises(UsageError, match="without the head yours"):
        require_fits(header, PROFILE, asked, ["mine", "yours"], None, PATH)
