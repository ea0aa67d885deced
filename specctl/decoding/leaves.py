"""Drafts with leaves: at each place of a chain, other tokens that are verified in the same pass.

The chain is drawn and verified as ever. Where it is rejected the verifier draws its own token, and if that token is a
leaf, the pass has the verifier's distribution after it as well, so that one more token comes from there.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from specctl.decoding.rows.draft import Draft, Drafter
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.rows_of import rows_over
from specctl.decoding.sampling import Sampling
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.passes.watching import States
from specctl.policies.leaf_rule import LeafRule, Place
from specctl.records import Round


class LeafDrafter(Drafter):
    """A drafter whose drafts get leaves: the likeliest other tokens of the law behind each drafted token.

    Args:
        inner: drafts the chain; it keeps its `Draft.laws`.
        rule: says how many leaves each place gets.
    """

    def __init__(self, inner: Drafter, rule: LeafRule) -> None:
        self.inner = inner
        self.rule = rule

    @property
    def witnessed(self) -> int | None:
        return self.inner.witnessed

    def witness(self, start: int, states: States) -> None:
        self.inner.witness(start, states)

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:
        self.inner.begin(sampling, eos, generator)

    def starts(self) -> bool:
        return self.inner.starts()

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:
        self.inner.prefill(sequence, begins=begins, first=first)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = self.inner.draft(sequence, budget)
        room = WIDEST - 1 - len(draft.tokens)
        if draft.laws is None or room <= 0:
            return draft
        if (known := draft.vocabulary) is None:
            places = rows_over(draft.laws).others(draft.tokens, self.rule.most)
        else:
            columns = rows_over(draft.laws).others(known.columns(draft.tokens).tolist(), self.rule.most)
            places = [Place(one.prob, [(int(known.ids[at]), prob) for at, prob in one.others]) for one in columns]
        widths = self.rule.widths(places, room)
        leaves = (
            tuple(token for token, _ in place.others[:width]) for place, width in zip(places, widths, strict=True)
        )
        return replace(draft, leaves=tuple(leaves))

    def observe(self, round_: Round) -> None:
        self.rule.observe(round_)
        self.inner.observe(round_)

    def rollback(self, length: int) -> None:
        self.inner.rollback(length)


@dataclass(frozen=True)
class LeafTree:
    """The newest token, a draft's chain behind it and its leaves, as a verifier reads them in one pass.

    Args:
        root: the newest token.
        draft: with leaves.
    """

    root: int
    draft: Draft

    @cached_property
    def tokens(self) -> list[int]:
        return [self.root, *self.draft.tokens, *(leaf for leaves in self.draft.leaves for leaf in leaves)]

    @cached_property
    def parents(self) -> list[int]:
        """Of all tokens but the root, as numbers among ``tokens``."""
        beside = (place for place, leaves in enumerate(self.draft.leaves) for _ in leaves)
        return [*range(len(self.draft.tokens)), *beside]

    def leaf(self, place: int, token: int) -> int | None:
        """The number of the leaf that holds a token beside a place of the chain, counted from 0; None without one."""
        leaves = self.draft.leaves[place] if place < len(self.draft.leaves) else ()
        if token not in leaves:
            return None
        before = sum(len(others) for others in self.draft.leaves[:place])
        return 1 + len(self.draft.tokens) + before + leaves.index(token)
