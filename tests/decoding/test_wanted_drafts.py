"""A draft that is not wanted reads nothing, and catches up in one pass when it is."""

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.slot import Slot
from specctl.policies import TextRead
from specctl.records import Round
from tests.support.toys import Script, TableRunner, related_table, table

PROMPT = [1, 2, 3, 1, 2, 4]
TARGET = table(3)


def test_a_draft_reads_what_it_missed_when_it_is_wanted() -> None:
    target, draft = TableRunner(TARGET), TableRunner(related_table(TARGET, seed=4))
    policy = Script(0, 0, 0, 2, 2, 0)
    drafter = ModelDrafter(draft, policy)
    with torch.inference_mode():
        prefill(target, drafter, PROMPT)
        assert draft.extended == []
        text, passes = list(PROMPT), []
        for round_ in decode(target, drafter, PROMPT, 12, Sampling()):
            assert round_.context == len(text)
            text += round_.emitted
            passes.append((round_.drafted, list(draft.extended)))
            draft.extended.clear()
    assert [drafted for drafted, _ in passes[:4]] == [0, 0, 0, 2]
    assert [read for _, read in passes[:3]] == [[], [], []]
    assert passes[3][1] == [len(PROMPT) + 3, 1]
    alone = decode(TableRunner(TARGET), None, PROMPT, 12, Sampling())
    assert text == [*PROMPT, *(token for round_ in alone for token in round_.emitted)]


def test_a_draft_that_is_wanted_reads_the_prompt_with_its_first_step_unless_another_may_draft_before() -> None:
    draft = TableRunner(TARGET)
    drafter = ModelDrafter(draft, Script(2))
    drafter.prefill(PROMPT)
    assert draft.extended == []
    drafter.draft(PROMPT, 4)
    assert draft.extended == [len(PROMPT), 1]
    draft.rollback(0)
    drafter.prefill(PROMPT, first=False)
    assert draft.extended[2:] == [len(PROMPT) - 1]
    draft.rollback(1)
    drafter.prefill(PROMPT)
    assert draft.extended[3:] == [len(PROMPT) - 2], "a beginning was cached"


def test_a_lookup_and_the_drafts_of_a_hierarchy_wait_as_well() -> None:
    lookup = LookupDrafter(Slot(LookupPasses(5)), Script(0))
    lookup.prefill(PROMPT)
    lookup.draft([*PROMPT, 1], 4)
    assert lookup.runner.length == 0
    middle, lowest = TableRunner(TARGET), TableRunner(TARGET)
    hierarchy = PreVerifiedDrafter(ModelDrafter(lowest, Script(2)), middle, Script(0))
    hierarchy.prefill(PROMPT)
    assert middle.extended == lowest.extended == []
    hierarchy = PreVerifiedDrafter(ModelDrafter(lowest, Script(0)), middle, Script(2))
    hierarchy.prefill(PROMPT)
    assert (middle.extended, lowest.extended) == ([len(PROMPT) - 1], [])


@pytest.mark.parametrize("prefilled", [True, False])
def test_what_a_draft_has_read_is_told_from_its_rounds(prefilled: bool) -> None:
    read = TextRead()
    rounds = [(10, prefilled, 3), (13, False, 1), (14, False, 1), (15, True, 2), (17, True, 1)]
    assert [read.round(*round_) for round_ in rounds] == [0, 0, 0, 2 if prefilled else 15, 0]
    assert read.missing(18) == 0
    assert read.missing(21) == 3


class Resting(Script):
    """Rests for some rounds, then looks at one, for ever."""

    def __init__(self, rounds: int) -> None:
        super().__init__(0)
        self.length, self.told = rounds, list[int]()

    def rests(self) -> int:
        return self.length

    def rested(self, rounds: int) -> None:
        self.told.append(rounds)

    def observe(self, round_: Round) -> None:
        self.told.append(-round_.index)


def test_a_policy_that_rests_is_told_of_rounds_together() -> None:
    for drafter in (
        ModelDrafter(TableRunner(TARGET), Resting(3)),
        LookupDrafter(Slot(LookupPasses(5)), Resting(3)),
    ):
        rounds = [*decode(TableRunner(TARGET), drafter, PROMPT, 11, Sampling())]
        alone = decode(TableRunner(TARGET), None, PROMPT, 11, Sampling())
        assert [round_.emitted for round_ in rounds] == [round_.emitted for round_ in alone]
        assert {(round_.stop, round_.threshold) for round_ in rounds} == {(rounds[0].stop, rounds[0].threshold)}
        assert drafter.policy.told == [0, 3, 3, 3, 1]


class UntilReset(Script):
    """Wants drafts until a text begins."""

    limit = 2

    def reset(self) -> None:
        self.limit = 0

    def draft_limit(self) -> int:
        return self.limit


def test_whether_a_draft_reads_the_prompt_is_decided_for_the_text_that_begins() -> None:
    draft = TableRunner(TARGET)
    for begins, read in ((True, []), (False, [len(PROMPT) - 1])):
        prefill(TableRunner(TARGET), ModelDrafter(draft, UntilReset()), PROMPT, begins=begins)
        assert draft.extended == read
