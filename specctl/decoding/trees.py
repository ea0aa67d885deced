"""A draft that grows a tree level by level, as deep as its stopping policy allows (EAGLE-2, arXiv 2406.16858)."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from math import exp

from specctl.decoding.draft import Draft
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.logits.judging import logits_of, numbers_on
from specctl.decoding.logits.logits import IMPOSSIBLE, Beams, Look, Verdict, require_numbers
from specctl.decoding.logits.token_sampler import AcceptancePredictor, step_of
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import LARGEST_TREE
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.running.slot import Slot
from specctl.policies import Signal, StoppingPolicy, draft_phase
from specctl.policies.setting import TreeSize
from specctl.records import DraftStep, ExtraToken, Round

ROOT = -1  # The node number of the newest token, the root of the tree


class BeamTree:
    """A tree's tokens, numbered in the order they were found, level by level; plain numbers.

    A token's score is the sum of the log-probabilities on its path. It estimates how likely the target is to get there
    (EAGLE-2's value, the product of the draft's confidences). All candidates of a level are stored until the tree is
    pruned, since one without children may be better than those of a deeper level.

    Attributes:
        tokens: ids.
        parents: the number of each token's parent, an earlier token, or `ROOT`.
        scores: log-probability of each token's path, falling along every path.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self._ends: list[int] = [0]  # the number of tokens up to each level

    @property
    def depth(self) -> int:
        """The number of levels found so far."""
        return len(self._ends) - 1

    def prob(self, token: int) -> float:
        """A token's probability in the distribution at its parent."""
        return exp(self.scores[token] - self._score(self.parents[token]))

    def child(self, parent: int, token: int) -> int | None:
        """The number of a parent's child with this id; None without one."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((number for number, pair in enumerate(pairs) if pair == (parent, token)), None)

    def grow(self, parents: Sequence[int], ids: Sequence[Sequence[int]], logs: Sequence[Sequence[float]]) -> None:
        """Add a level.

        Args:
            parents: B tokens of the last level.
            ids: the most probable continuations of each.
            logs: their log-probabilities in the distributions at the parents.
        """
        for parent, some, values in zip(parents, ids, logs, strict=True):
            above = self._score(parent)
            for token, value in zip(some, values, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(above + min(value, 0.0))
        self._ends.append(len(self.tokens))

    def beams(self, count: int, ends: Set[int]) -> list[int]:
        """The ``count`` best tokens of the last level, best first, without those that end the sequence.

        Tokens without a probability count only where there are no others, and then a single one.
        """
        last = range(self._ends[-2], self._ends[-1])
        best = sorted((token for token in last if self.tokens[token] not in ends), key=self._falling)[:count]
        return [token for token in best if self._possible(token)] or best[:1]

    def pruned(self, count: int, depth: int) -> list[int]:
        """The ``count`` best tokens of the first levels, in order; every token comes with its ancestors.

        Ancestors are always included: a token's score is at most its parent's, and at equal scores the parent was found
        earlier.
        """
        known = filter(self._possible, range(self._ends[depth]))
        return sorted(sorted(known, key=self._falling)[:count])

    def _possible(self, token: int) -> bool:
        return self.scores[token] > IMPOSSIBLE / 2

    def _score(self, token: int) -> float:
        return 0.0 if token == ROOT else self.scores[token]

    def _falling(self, token: int) -> tuple[float, int]:
        return -self.scores[token], token


class TreeDrafter(ModelDrafter):
    """A draft model or draft head that follows several beams at once.

    A pass reads the tokens of a level that are to be continued, the beams, and finds the most probable continuations of
    each. The best of all these are the next beams. Once drafting stops, the best tokens of all levels are verified (the
    paper's expansion and reranking). Scores always come from the softmax at temperature 1, and nothing is drawn: the
    text determines the tree.

    The policy is asked once per level, with the distribution at the pass's best beam and the most probable token there.
    The round's steps are these tokens, one for each level.

    Args:
        runner: the draft; it must read trees.
        policy: asked after each level.
        size: of the trees.
        record, head: as for `ModelDrafter`.

    The single pass of a block head has the distributions of all positions. Where they do not depend on the tokens
    between, every token is continued, and the tree has the best products of marginals (DDTree, arXiv 2604.12989). A
    sequential head predicts at the beams.

    Raises:
        ValueError: the policy reads ``accept_prob`` without a head, or ``next_accept_prob`` from a draft that does not
            predict it.
    """

    def __init__(
        self,
        runner: Slot,
        policy: StoppingPolicy,
        size: TreeSize,
        record: Set[Signal] = frozenset(),
        predictor: AcceptancePredictor | DiscoPredictor | None = None,
    ) -> None:
        super().__init__(runner, policy, record, predictor)
        if self._foresees and not runner.reads_states:
            raise ValueError("a tree's draft makes no prediction for its next token")
        self.size = size
        self._width = size.tokens - 1 if runner.marginals else size.beams
        self._tree = BeamTree()
        self._places = {ROOT: 0}  # the place in the runner's tree of each token that was read
        # Entropy and top probability of the distribution at each token that was read.
        self._known: dict[int, Sequence[float]] = {}

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        self._start = len(sequence)
        budget = min(budget, self.runner.room(self._start))
        self._tree, self._places, self._known = BeamTree(), {ROOT: 0}, {}
        pending = sequence[self.runner.length :]
        draw: Callable[[int], DraftStep] = partial(self._level, pending)
        self._prompt_seconds = 0.0
        if self._begins:
            draw, self._begins = self._noting(draw, len(pending) - 1, 1), False
        steps, stop = draft_phase(self.policy, budget, self._eos, draw, self._most_levels)
        chosen = self._tree.pruned(self.size.tokens - 1, len(steps))
        numbers = {ROOT: ROOT, **{token: number for number, token in enumerate(chosen)}}
        return Draft(
            [self._tree.tokens[token] for token in chosen],
            None,
            tuple(steps),
            stop,
            threshold,
            parents=tuple(numbers[self._tree.parents[token]] for token in chosen),
            prompt_seconds=self._prompt_seconds,
        )

    @property
    def _most_levels(self) -> int:
        """The largest depth of a tree: the last level is not read."""
        room = min(LARGEST_TREE - 1, self.runner.context - self._start)
        longest = self.runner.longest
        if self.runner.marginals and longest is not None:
            return longest  # no tree node is read
        deepest = 1 + max(0, room) // self.size.beams
        return deepest if longest is None else min(deepest, longest)

    def _level(self, pending: Sequence[int], index: int) -> DraftStep:
        """Read the beams and add the level below them; the step is the best beam's."""
        beams, forward = self._passed(pending, index)
        found = self._beams_of(forward, len(beams))
        if self._previous is not None:
            for beam, *signals in zip(beams, found.signals["entropy"], found.signals["top_prob"], strict=True):
                self._known[beam] = signals
        numbers: dict[str, float] = {name: values[0] for name, values in found.signals.items()}
        numbers["token"] = found.ids[0][0]
        if self._predictor is not None:
            numbers["accept_prob"] = self._accept_prob(beams[0], forward)
        if self._disco is not None:
            numbers["own_accept_prob"] = self._disco.own_accept_prob(found.tops, numbers["entropy"], index)
        if self._foresee is not None and self._foresees:
            numbers["next_accept_prob"] = float(
                self._foresee(numbers_on(self.runner.device, [numbers["token"]])[0].long())
            )
        self._tree.grow(beams, found.ids, found.logs)
        return step_of(index, numbers, self._signals)

    def _passed(self, pending: Sequence[int], index: int) -> tuple[list[int], Forward]:
        """The beams, best first, and the pass over them; in the first pass the newest token is the only beam."""
        if index == 1:
            return [ROOT], self.runner.extend(pending, keep=1)
        beams = self._tree.beams(self._width, self._eos)
        forward = self.runner.extend_tree(
            [self._tree.tokens[beam] for beam in beams],
            [self._places[self._tree.parents[beam]] for beam in beams],
            before=len(self._places),
            hidden=self._predictor is not None,
        )
        self._places |= {beam: len(self._places) + number for number, beam in enumerate(beams)}
        return beams, forward

    def _beams_of(self, forward: Forward, count: int) -> Beams:
        """The continuations and signals of the beams, in a single transfer."""
        # A head may later predict for any beam, a policy is asked only about the best.
        asked = slice(1 if self._previous is None else None)
        found = logits_of(forward).beams(self._width, asked, self._read, tops=self._disco is not None)
        if not self.runner.marginals or count == 1:
            return found
        # All beams share one distribution, so beam n contributes at most this many of the level's best: the better
        # beams' more probable continuations come first.
        most = [self._width // number for number in range(1, count + 1)]
        ids, logs = [found.ids[0][:some] for some in most], [found.logs[0][:some] for some in most]
        return Beams(ids, logs, {name: values * count for name, values in found.signals.items()}, found.tops)

    def _accept_prob(self, beam: int, forward: Forward) -> float:
        """The head's prediction for the best beam; 1 for the newest token, which the target chose."""
        if beam == ROOT or self._predictor is None:
            return 1.0
        assert forward.hidden is not None
        previous = None
        if self._previous is not None:
            numbers = [*self._known[self._tree.parents[beam]], self._tree.prob(beam)]
            previous = numbers_on(self.runner.device, numbers)
        return self._predictor.accept_prob(forward.hidden[0], previous).item()

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        if self.runner.reads_states:
            # A draft head rolls back to its observed states by itself, and it has received those of the accepted
            # tokens.
            self.runner.rollback(self._start + len(round_.accepted_tokens))
            return
        if len(self._places) == 1:  # only the text itself was read
            self.runner.rollback(self._start)
            return
        path, at = [0], ROOT
        for token in round_.accepted_tokens:
            child = self._tree.child(at, token)
            if child is None or child not in self._places:
                break  # a token of the last level, or one that was not continued
            path.append(self._places[child])
            at = child
        self.runner.keep_path(path)

    def rollback(self, length: int) -> None:
        self._places = {ROOT: 0}
        super().rollback(length)


class DraftTree:
    """The newest token and a draft's tree after it, in the form that a verifier reads in one pass.

    Args:
        root: the newest token.
        draft: with `Draft.parents`.

    Attributes:
        tokens: all N + 1 tokens, the root first.
        parents: for all but the root, as indices into ``tokens``.
        children: for each token the indices of its children by id.
        depths: the depth of each token, 0 for the root.
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
        """The number of tokens at each of the first ``count`` depths below the root."""
        return tuple(self.depths.count(depth) for depth in range(1, count + 1))


def verify_tree(
    tree: DraftTree,
    levels: int,
    forward: Forward,
    sampling: Sampling,
    eos: Set[int],
    generator: DrawGenerator | None,
) -> tuple[Verdict, list[int]]:
    """The verdict on a tree, and the indices of the accepted path, the root first.

    Block verification is the same rule here: for a one-hot draft both accept a token x with probability p(x).

    Args:
        tree: of N + 1 tokens.
        levels: the largest number of chances, see `specctl.records.Round.tree`.
        forward: the verifier's, with logits ``(N + 1, V)``.
        sampling: how tokens are drawn.
        eos: ids that end the sequence; children of such a token are ignored.
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
    choices, values = logits_of(forward).best()
    require_numbers(*values)
    return lambda number: Look(choices[number], None)


def _drawn(
    tree: DraftTree, forward: Forward, sampling: Sampling, generator: DrawGenerator | None
) -> Callable[[int], Look]:
    return logits_of(forward).look(tree, sampling, generator)
