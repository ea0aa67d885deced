"""Which path of a tree is kept: each token that the verifier draws is looked for among the tree's.

The tree is a function of the text and of what the policy read, so where it branches the draft's law is one-hot at each
sibling. Rejecting them one after the other, the residual renormalised each time, keeps x with probability p(x) and ends
with a draw from p outside of them (EAGLE-2's verification; multi-round rejection). That is a single draw from p,
followed where it leads; so here the draw comes first, and every emitted token is one of the verifier's own.
"""

from collections.abc import Callable, Set

from specctl.decoding.rows.draft import Draft
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.rows import Look
from specctl.decoding.rows.rows_of import rows_of
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.records import ExtraToken


class DraftTree:
    """The newest token and a draft's tree behind it, as a verifier reads them in one pass.

    Args:
        root: the newest token.
        draft: with `Draft.parents`.

    Attributes:
        tokens: all N + 1 of them, the root first.
        parents: of all but the root, as numbers among ``tokens``.
        children: below each token the numbers of the others by their ids.
        depths: of each token, 0 for the root.
    """

    def __init__(self, root: int, draft: Draft) -> None:
        assert draft.parents is not None
        self.tokens = [root, *draft.tokens]
        self.parents = [parent + 1 for parent in draft.parents]
        self.children: list[dict[int, int]] = [{} for _ in self.tokens]
        self.depths = [0]
        for number, parent in enumerate(self.parents, start=1):
            self.children[parent][self.tokens[number]] = number
            self.depths.append(self.depths[parent] + 1)

    def levels(self, count: int) -> tuple[int, ...]:
        """How many tokens there are at each of the first ``count`` depths below the root."""
        return tuple(self.depths.count(depth) for depth in range(1, count + 1))


def verify_tree(
    tree: DraftTree,
    levels: int,
    forward: Forward,
    sampling: Sampling,
    eos: Set[int],
    generator: DrawGenerator | None,
) -> tuple[Verdict, list[int]]:
    """The verdict on a tree, and the numbers of the tokens that stay, the root's first.

    Block verification is no other rule here: where the draft's law is one-hot a token is kept with probability p(x) by
    both.

    Args:
        tree: of N + 1 tokens.
        levels: as many chances there are at most, see `specctl.records.Round.tree`.
        forward: the verifier's, with logits ``(N + 1, V)``.
        sampling: how tokens are drawn.
        eos: ids that end the sequence; nothing is looked for below one.
        generator: for the logits' device.

    Raises:
        RecordError: the logits hold NaN.
    """
    look = _greedy(forward) if sampling.greedy else _drawn(tree, forward, sampling, generator)
    path = [0]
    chances: list[float] = []
    while True:
        here = path[-1]
        token, chance = look(here)
        if chance is not None and len(path) <= levels:
            chances.append(chance)
        if (below := tree.children[here].get(token)) is None:
            kind = ExtraToken.CORRECTION if tree.children[here] else ExtraToken.BONUS
            break
        path.append(below)
        if token in eos:
            kind = ExtraToken.BONUS
            break
    return Verdict(len(path) - 1, token, kind, None if sampling.greedy else tuple(chances)), path


def _greedy(forward: Forward) -> Callable[[int], Look]:
    choices, values = rows_of(forward).best()
    require_numbers(*values)
    return lambda number: Look(choices[number], None)


def _drawn(
    tree: DraftTree, forward: Forward, sampling: Sampling, generator: DrawGenerator | None
) -> Callable[[int], Look]:
    return rows_of(forward).look(tree, sampling, generator)
