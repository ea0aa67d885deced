"""Texts that follow a grammar have the target's law over what the grammar lets follow, whatever drafts them."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from law_table import CASES, DRAFT, ENDS, HIERARCHIES, LENGTH, MID, PROMPT, SAMPLINGS, TARGET, enumerate_decode, error

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, Numbers
from specctl.models.running.grammars.grammar import GrammarRule
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant
from tests.support.toys import EOS, TableRunner

pytestmark = pytest.mark.usefixtures("drafts_at_will")

FOLLOWERS = {None: {1, 2}, 1: {2}, 2: {EOS, 1, 2}}
"""What may follow a token of the text, None for its beginning: behind a 1 there is no choice."""


class ToyMatcher:
    """What `GrammarRule` asks of llguidance's matcher, of a grammar that `FOLLOWERS` tells."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def deep_copy(self) -> "ToyMatcher":
        twin = copy(self)
        twin.read = list(self.read)
        return twin

    def rollback(self, count: int) -> bool:
        del self.read[len(self.read) - count :]
        return True

    def consume_token(self, token: int) -> bool:
        self.read.append(token)
        return True

    def compute_bitmask(self) -> bytes:
        allowed = FOLLOWERS[self.read[-1] if self.read else None]
        return np.packbits([token in allowed for token in range(3)], bitorder="little").tobytes()

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


def rule(prompt: Sequence[int] = PROMPT) -> GrammarRule:
    matcher: Any = ToyMatcher()
    return GrammarRule(matcher, prompt, 3, ENDS)


def law(sampling: Sampling) -> dict[Any, float]:
    """Token by token, without any of the program's rules."""

    def texts(written: tuple[int, ...], probability: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(written) == LENGTH or EOS in written:
            yield written, probability
            return
        allowed = FOLLOWERS[written[-1] if written else None]
        logits = TARGET[tuple([*PROMPT, *written][-2:])].clone()
        logits[[token not in allowed for token in range(3)]] = -torch.inf
        for token, share in enumerate(sampling.probs(logits).tolist()):
            if share:
                yield from texts((*written, token), probability * share)

    return {(text,): probability for text, probability in texts((), 1.0)}


def lookup() -> Drafter:
    return LookupDrafter(Slot(LookupPasses(3)), Constant(draft_length=2))


class FewIds(TableRunner):
    """Writes the end alone, which may not follow everywhere."""

    draft_vocabulary = DraftVocabulary([EOS], 3)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        found = super().extend(tokens, keep, hidden=hidden)
        return Forward(found.columns[:, [EOS]], found.hidden, found.states, self.draft_vocabulary)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    **{str(case): case.drafter for case in CASES if case.name in ("constant", "svip", "cost-optimal")},
    "hierarchy": HIERARCHIES[3].drafter,
    "lookup": lookup,
    "few ids T=1": lambda: ModelDrafter(FewIds(DRAFT), Constant(draft_length=2)),
    "few ids T=1 by block": lambda: ModelDrafter(FewIds(DRAFT), Constant(draft_length=2)),
    "few ids below": lambda: PreVerifiedDrafter(
        ModelDrafter(FewIds(DRAFT), Constant(draft_length=1)), TableRunner(MID), Constant(draft_length=2)
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.representatives("none", "constant: draft_length=3; T=1", "hierarchy", "lookup", "few ids")
def test_what_is_written_has_the_law_of_the_grammar(name: str) -> None:
    settings = next((SAMPLINGS[one] for one in SAMPLINGS if name.endswith(one)), SAMPLINGS["T=1"])
    sampling = replace(settings, rules=rule())
    found = enumerate_decode(DRAFTERS[name], sampling)
    assert error(found, law(sampling)) < 3e-7
    assert all(set(pair) <= FOLLOWERS[pair[0]] | {pair[0]} for (text,) in found.law for pair in pairwise(text))


def test_a_draft_without_the_grammar_is_another_law() -> None:
    class Free(ModelDrafter):
        def begin(self, sampling: Sampling, *rest: Any) -> None:
            super().begin(Sampling(sampling.temperature), *rest)

    free = enumerate_decode(lambda: Free(TableRunner(DRAFT), Constant(draft_length=2)), Sampling(1.0, rules=rule()))
    assert error(free, law(Sampling(1.0))) < 3e-7  # the target decides, whatever the draft is
    wrong = enumerate_decode(lambda: ModelDrafter(TableRunner(DRAFT), Constant(draft_length=2)), Sampling(1.0))
    assert error(wrong, law(Sampling(1.0))) > 1e-2


def test_no_pass_is_made_where_one_token_may_follow() -> None:
    bare = TableRunner(TARGET)
    runner = Slot(RuledPasses(bare, rule([2]), []))
    runner.extend([2], 1)
    row = runner.extend([1], 1).rows
    assert row.argmax() == 2
    assert torch.isneginf(row).sum() == 2
    assert bare.extended == [1]
    assert (bare.length, runner.length) == (1, 2)
    runner.rollback(1)
    assert (runner.length, bare.length) == (1, 1)
    runner.extend([1], 1)
    found = runner.extend([2, 2], 2).rows
    assert bare.tokens == [2, 1, 2, 2]
    assert torch.equal(torch.as_tensor(found), TARGET[[1, 2], [2, 2]])


def test_the_grammar_goes_back_with_the_text() -> None:
    forth, rng = rule([]), np.random.default_rng(0)
    text: list[int] = []
    for _ in range(60):
        text = text[: rng.integers(len(text) + 1)]
        for _ in range(rng.integers(1, 4)):
            allowed = sorted(FOLLOWERS[text[-1] if text else None] - {EOS})
            text = [*text, int(rng.choice(allowed))]
        rows = np.zeros((len(text), 3), np.float32)
        once = forth.apply(rows, text)
        assert np.array_equal(once, rule([]).apply(rows, text))
        assert [set(np.flatnonzero(row == 0)) for row in once] == [FOLLOWERS[token] for token in text]


def test_nobody_asks_what_follows_a_token_that_may_not_be_written() -> None:
    rows = np.zeros((3, 3), np.float32)
    found = rule([]).apply(rows, [2, 0, 1])
    assert np.isneginf(found).sum() == 0  # behind the end there is nothing, and behind 2 there is any token
    assert np.isneginf(rule([]).apply(rows, [1, 1, 2])).sum(axis=1).tolist() == [2, 0, 0]


class Without:
    """A model's own rule: one id never follows."""

    def __init__(self, token: int) -> None:
        self.token = token

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:  # noqa: ARG002
        found = torch.as_tensor(rows).clone()
        found[:, self.token] = -torch.inf
        return found

    def forced(self, text: Sequence[int]) -> int | None:  # noqa: ARG002
        return None


@pytest.mark.parametrize("drafter", [lambda: None, lambda: ModelDrafter(TableRunner(DRAFT), Constant(2))])
def test_a_place_where_nothing_may_follow_is_an_error(drafter: Callable[[], Drafter | None]) -> None:
    target = Slot(RuledPasses(TableRunner(TARGET), Without(2)))
    with pytest.raises(RecordError, match="no token may follow"):
        for _ in decode(target, drafter(), PROMPT, LENGTH, Sampling(rules=rule()), ENDS):
            pass


def test_passes_of_a_fixed_width_are_all_made() -> None:
    bare = TableRunner(TARGET)
    bare.fixed_width = 4
    runner = Slot(RuledPasses(bare, rule([2])))
    for token in (2, 1):
        runner.extend([token], 1)
    assert bare.extended == [1, 1]


def test_a_drafter_begins_a_text_without_the_rules_of_the_one_before() -> None:
    bare = TableRunner(DRAFT)
    drafter = ModelDrafter(bare, Constant(draft_length=2))
    for _ in decode(TableRunner(TARGET), drafter, PROMPT, LENGTH, Sampling(rules=rule()), ENDS):
        pass
    bare.rollback(1)  # by a text with another drafter
    drafter.rollback(5)
    drafter.prefill([PROMPT[0], 2, 2, 2], first=False)
    assert bare.tokens == [PROMPT[0], 2, 2]


def test_rows_of_a_model_that_writes_every_id_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be one more wait for a device."""
    monkeypatch.setattr(torch.Tensor, "isneginf", None)
    rows = Slot(RuledPasses(TableRunner(DRAFT), rule([2]))).extend([2], 1).rows
    assert np.isneginf(np.asarray(rows)).tolist() == [[True, False, False]]
    with pytest.raises(TypeError):
        Slot(RuledPasses(FewIds(DRAFT), rule([2]))).extend([2], 1)
