"""Which path of a tree is kept: each token that the verifier draws is looked for among the tree's.

The tree is a function of the text and of what the policy read, so where it branches the draft's law is one-hot at each
sibling. Rejecting them one after the other, the residual renormalised each time, keeps x with probability p(x) and ends
with a draw from p outside of them (EAGLE-2's verification; multi-round rejection). That is a single draw from p,
followed where it leads; so here the draw comes first, and every emitted token is one of the verifier's own.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

import torch

from specctl.decoding.drafters import Draft
from specctl.decoding.host import array, best_of, on_host, picked
from specctl.decoding.sampling import Sampling, pick, uniforms
from specctl.decoding.verification import Verdict, require_numbers
from specctl.models.passes.synchronisation import sent
from specctl.models.running.runner import Forward
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


class Look(NamedTuple):
    """A verifier's own next token after one of a tree's, and the probability that the tree has it; None if greedy."""

    token: int
    chance: float | None


def verify_tree(
    tree: DraftTree,
    levels: int,
    forward: Forward,
    sampling: Sampling,
    eos: Set[int],
    generator: torch.Generator | None,
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
        generator: of the logits' device.

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
    choices, values = best_of(forward)
    require_numbers(*values)
    return lambda number: Look(choices[number], None)


def _drawn(
    tree: DraftTree, forward: Forward, sampling: Sampling, generator: torch.Generator | None
) -> Callable[[int], Look]:
    """A draw from the verifier's law at each token; one number for each depth, since one token of it is looked at."""
    numbers = uniforms((max(tree.depths) + 1,), forward.logits.device, generator)
    here = on_host(forward.logits)
    return (
        _drawn_on_host(tree, forward, sampling, numbers) if here else drawn_on_device(tree, forward, sampling, numbers)
    )


def _drawn_on_host(
    tree: DraftTree, forward: Forward, sampling: Sampling, numbers: torch.Tensor
) -> Callable[[int], Look]:
    """Where nothing waits for a device only the rows on the path are processed."""

    def look(number: int) -> Look:
        row = array(sampling.probs(forward.part(slice(number, number + 1)).logits))[0]  # (V,)
        require_numbers(float(row.sum()))
        chance = float(row[[*tree.children[number]]].sum())
        return Look(picked(row, float(numbers[tree.depths[number]])), min(chance, 1.0))

    return look


def drawn_on_device(
    tree: DraftTree, forward: Forward, sampling: Sampling, numbers: torch.Tensor
) -> Callable[[int], Look]:
    """The same for all tokens at once, in a single transfer."""
    probs = sampling.probs(forward.logits)  # (N + 1, V)
    device = probs.device
    draws = pick(probs, numbers[sent(tree.depths, device)])  # (N + 1,)
    rows, ids = (sent(some, device) for some in (tree.parents, tree.tokens[1:]))
    # float64 holds ids and probabilities alike
    everything = torch.cat([probs.sum().double()[None], draws.double(), probs[rows, ids].double()]).tolist()
    total, found, reached = everything[0], everything[1 : 1 + len(draws)], everything[1 + len(draws) :]
    require_numbers(total)

    def look(number: int) -> Look:
        chance = sum(reached[below - 1] for below in tree.children[number].values())
        return Look(int(found[number]), min(chance, 1.0))

    return look
