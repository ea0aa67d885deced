"""Texts that name a policy of their own, alone and among others."""

from typing import Any, cast

import pytest

from specctl.decoding.answers import KEPT, NamedDrafters
from specctl.decoding.drafters import ModelDrafter
from specctl.errors import RecordError
from specctl.jsonl import Record, deciding
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile.schema import DraftTable, PolicyTable
from specctl.records import Round
from specctl.round_trace import trace_line
from tests.support.toys import TableRunner, related_table, table

TARGET = table(1)
DRAFT = DraftTable(model="draft", policy=PolicyTable(name="svip"), batch_policies={"4": "constant:draft_length=2"})


def drafters(texts: int = 1, draft: DraftTable | None = DRAFT) -> NamedDrafters:
    runners = TableRunner(TARGET), (TableRunner(related_table(TARGET, 2)),)
    return NamedDrafters(Pair(*runners, cast("Any", None), frozenset(), 100, (), texts=texts), draft)


def stopped_by(found: Any) -> str:
    assert isinstance(found, ModelDrafter)
    return type(found.policy).__name__


def test_a_record_has_the_policy_that_it_names_and_else_the_profiles() -> None:
    some = drafters()
    assert stopped_by(some.of_record({"prompt": "a"})) == "Svip"
    assert stopped_by(some.of_record({"policy": "constant:draft_length=2"})) == "Constant"
    assert some.of_record({"draft": False}) is some.of_record({"policy": "none"}) is None
    assert stopped_by(some.of_record({"policy": None, "draft": "a text of its own"})) == "Svip"
    assert some.of_record({"policy": "adaedl"}) is some.of_record({"policy": "adaedl"}), "it keeps what it learned"


def test_several_texts_have_the_policy_of_their_number_and_named_ones_hold_for_all() -> None:
    assert stopped_by(drafters(4).of_record({})) == "Constant"
    assert stopped_by(drafters(4).of_record({"policy": "adaedl"})) == "AdaEdl"
    assert drafters(4).setting("svip") == Setting("svip")


def test_no_more_than_some_named_policies_are_kept() -> None:
    some = drafters()
    first = some.of_record({"policy": "constant:draft_length=1"})
    for length in range(2, KEPT + 2):
        some.of_record({"policy": f"constant:draft_length={length}"})
    assert some.of_record({"policy": "constant:draft_length=1"}) is not first


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"policy": "svpi"}, "did you mean 'svip'"),
        ({"policy": "svip:threshold=x"}, "threshold"),
        ({"policy": 3}, "must be a string"),
        ({"policy": "svip", "draft": False}, "leave one of them out"),
        ({"policy": "specdec++"}, "no head"),
    ],
)
def test_a_policy_that_cannot_be_is_the_error_of_its_record(data: dict[str, Any], told: str) -> None:
    with pytest.raises(RecordError, match=told) as raised:
        drafters().of_record(data)
    assert raised.value.kind == "invalid_policy"


@pytest.mark.parametrize("value", ["no", "false", "", 0, 1, 0.5])
def test_what_seems_to_say_whether_to_draft_is_true_or_false(value: object) -> None:
    with pytest.raises(RecordError, match="draft must be true or false") as raised:
        drafters().of_record({"draft": value})
    assert raised.value.kind == "invalid_draft"
    for data in (True, None, {"text": "no"}, ["no"], "no, a text of its own"):
        assert stopped_by(drafters().of_record({"draft": data})) == "Svip"


def test_without_a_draft_no_policy_can_be_named() -> None:
    with pytest.raises(RecordError, match="no draft for a policy to stop"):
        drafters(draft=None).of_record({"policy": "svip"})
    assert drafters(draft=None).of_record({}) is None


def test_the_policy_is_told_in_traces_and_decides_what_a_record_is() -> None:
    round_ = Round(0, (), 0, 1, None, None, None, 0.0, 0.0, 0.0)
    assert trace_line(Record(1, 1, {"policy": "svip"}), 0, round_)["policy"] == "svip"
    assert "policy" not in trace_line(Record(1, 1, {}), 0, round_)
    assert deciding({"prompt": "a", "policy": "svip", "other": 1}) == {"prompt": "a", "policy": "svip"}
