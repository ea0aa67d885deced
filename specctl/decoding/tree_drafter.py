"""A draft that grows a tree level by level, deep as its stopping policy wants it (EAGLE-2, arXiv 2406.16858)."""

from collections.abc import Callable, Sequence, Set
from functools import partial

from specctl.decoding.beams import ROOT, BeamTree
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.rows.draft import Draft
from specctl.decoding.rows.reading import AcceptancePredictor, step_of
from specctl.decoding.rows.rows import Beams
from specctl.decoding.rows.rows_of import numbers_on, rows_of
from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import LARGEST_TREE
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.running.slot import Slot
from specctl.policies import Signal, StoppingPolicy, draft_phase
from specctl.policies.tree_shape import TreeSize
from specctl.records import DraftStep, Round


class TreeDrafter(ModelDrafter):
    """A draft model or draft head that follows several beams at once.

    A pass reads the tokens of a level that are continued, the beams, and finds the likeliest continuations of each;
    the best of all these are the next beams. Once drafting stops, the best tokens of all levels are verified (the
    paper's expansion and reranking). Scores come from the softmax at temperature 1 whatever the sampling, and nothing
    is drawn: the tree follows from the text.

    The policy is asked once a level, as it is once a token of a chain: with the law at the best beam that was read, and
    the likeliest token there. That token, like those of other beams, is a part of the tree; the round's steps are these
    tokens, one for each level.

    Args:
        runner: the draft, one that reads trees.
        policy: asked after each level.
        size: of the trees.
        record, head: as for `ModelDrafter`.

    A block head makes no pass for a level: its one pass has the laws of all places. Where they do not depend on the
    tokens between, every token is continued, and the tree is that of the best products of marginals (DDTree, arXiv
    2604.12989); a sequential head is asked about the beams.

    Raises:
        ValueError: the policy reads ``accept_prob`` and there is no head, or ``next_accept_prob`` of what is no draft
            head that predicts it.
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
            raise ValueError("a tree's draft predicts nothing of its next token")
        self.size = size
        self._width = size.tokens - 1 if runner.marginals else size.beams
        self._tree = BeamTree()
        self._places = {ROOT: 0}  # the number of each token that was read, among those of the runner's tree
        self._known: dict[int, Sequence[float]] = {}  # entropy and top probability of the law at each of them

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
        """How deep a tree may be: the last level is not read."""
        room = min(LARGEST_TREE - 1, self.runner.context - self._start)
        longest = self.runner.longest
        if self.runner.marginals and longest is not None:
            return longest  # nothing of the tree is read
        deepest = 1 + max(0, room) // self.size.beams
        return deepest if longest is None else min(deepest, longest)

    def _level(self, pending: Sequence[int], index: int) -> DraftStep:
        """Read the beams and add the level below them; the step is the best beam's."""
        beams, forward = self._passed(pending, index)
        found = self._beams_of(forward, len(beams))
        if self._previous is not None:
            for beam, *law in zip(beams, found.signals["entropy"], found.signals["top_prob"], strict=True):
                self._known[beam] = law
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
        """The beams, the best first, and the pass over them; at first the newest token is the only one."""
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
        """What is read of the laws at so many beams, in a single transfer."""
        # A head may later be asked about any beam, a policy only about the best.
        asked = slice(1 if self._previous is None else None)
        found = rows_of(forward).beams(self._width, asked, self._read, tops=self._disco is not None)
        if not self.runner.marginals or count == 1:
            return found
        # Behind the n-th best beam only so many can be among the best of the level: those better on both counts are.
        most = [self._width // number for number in range(1, count + 1)]
        ids, logs = [found.ids[0][:some] for some in most], [found.logs[0][:some] for some in most]
        return Beams(ids, logs, {name: values * count for name, values in found.signals.items()}, found.tops)

    def _accept_prob(self, beam: int, forward: Forward) -> float:
        """The head's prediction for the best beam; 1 for the newest token, which the target wrote."""
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
            # A draft head goes back to what it was shown by itself, and it was shown the states of what stays.
            self.runner.rollback(self._start + len(round_.kept_tokens))
            return
        if len(self._places) == 1:  # no pass but the one over the text
            self.runner.rollback(self._start)
            return
        path, at = [0], ROOT
        for token in round_.kept_tokens:
            child = self._tree.child(at, token)
            if child is None or child not in self._places:
                break  # of the last level, or not continued
            path.append(self._places[child])
            at = child
        self.runner.keep_path(path)

    def rollback(self, length: int) -> None:
        self._places = {ROOT: 0}
        super().rollback(length)
