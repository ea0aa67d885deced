"""One sequence in the passes of a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast, final

from specctl.models.passes.forward import Forward as Forward
from specctl.models.passes.forward import joined as joined
from specctl.models.running.passes import FACTS, Facts, Passes, Request

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Foresee, Numbers, PassReader, Token, TokenReader
    from specctl.models.passes.watching import States
    from specctl.models.running.transforms import Transform


@final
class Slot(Facts):
    """A model for one sequence that extends and rolls back. It does not know about rounds.

    Optional capabilities are attributes of `Facts`; callers check them before they call a method.

    Args:
        passes: the model's passes.
        number: the sequence's index among those of the passes.
        ask: waits for a pass shared with other sequences and returns the answer; None where passes are for this
            sequence alone, and run at once.
    """

    def __init__(self, passes: Passes, number: int = 0, ask: Callable[[Request], Any] | None = None) -> None:
        self.passes, self.number = passes, number
        self._counts = passes.inner is None
        self._length = 0
        self._rotated_as = 0
        self._tree_start = 0  # the length before the last tree
        self._shared = ask is not None
        self._ask = ask or passes.answer
        for name in FACTS:
            setattr(self, name, getattr(passes, name))

    @property
    def length(self) -> int:
        """The number of cached tokens, always a prefix of the sequence."""
        return self._length if self._counts else self.passes.length

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """Run ``tokens`` after the cached prefix and cache them; returns logits of only the last ``keep`` tokens."""
        if self._shared and len(tokens) > self.piece:
            return self._in_pieces(tokens, keep, hidden)
        found: Forward = self._ask(Request(self.number, self._length, tokens, keep, hidden, self._rotated_as))
        self._length += len(tokens)
        return found

    def _in_pieces(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        parts: list[Forward] = []
        for start in range(0, len(tokens), self.piece):
            piece = tokens[start : start + self.piece]
            after = len(tokens) - start - len(piece)
            parts.append(self.extend(piece, max(0, min(keep - after, len(piece))), hidden=hidden))
        return joined(parts)

    def sample(
        self,
        tokens: "Sequence[Token]",
        reader: "TokenReader",
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        """Extend by at most `widest_sample` tokens and sample after the last of them in the same pass.

        Args:
            tokens: at least one id, or a single token on the device.
            reader: the same one for a whole sequence, since a pass is compiled or captured for each reader.
            uniform: for the reader, or None.
            previous: ``(S,)`` for the reader, or None; with the same S throughout a sequence.

        Returns:
            The reader's numbers, on the host or ``(F,)`` float64, and its distribution ``(V,)`` if it returns one.
        """
        ids: Any = tokens
        if self._shared and reader.hidden:  # reads the last state, which a network does for one text at a time
            return sampled_after(self.extend(ids, 1, hidden=True), reader, uniform, previous)
        found: tuple[list[float] | torch.Tensor, Numbers | None] = self._ask(
            Request(self.number, self._length, ids, 1, False, self._rotated_as, reader, uniform, previous)
        )
        self._length += len(tokens)
        return found

    def extend_judged(
        self, tokens: Sequence[int], keep: int, judge: "PassReader", about: Any, *, hidden: bool = False
    ) -> Any:
        """`extend`, and a judge's answer; judged together with other texts where passes are shared.

        ``about`` is the judge's input for this text.
        """
        if not self.judges or (self._shared and len(tokens) > self.piece):  # a prompt together with the first draft
            return judged_after(self.extend(tokens, keep, hidden=hidden), judge, about)
        found = self._ask(Request(self.number, self._length, tokens, keep, hidden, self._rotated_as, judge, about))
        self._length += len(tokens)
        return found

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """Run tokens of a tree after the cached prefix; each sees the prefix, its ancestors and itself.

        A token's position is its depth after the prefix, so its result is the same as in a chain of its ancestors. A
        tree may be read in several consecutive passes. The next call must be `keep_path`, or a `rollback` to the
        prefix.

        Args:
            tokens: T ids, at most `masks.WIDEST`, and at most `masks.LARGEST_TREE` in all passes.
            parents: the indices of their parents, each an earlier token of the tree; without the root's.
            before: B, the number of the tree's tokens read by the passes right before. With 0 the first of the tokens
                is the root, which continues the sequence; with 1 the last token of an `extend` is the root; with more
                this pass continues the last `extend_tree`.
            hidden: whether hidden states are wanted.

        Returns:
            A row for each token: logits ``(T, V)`` and all states; a single row with ``marginals``.
        """
        count = len(tokens)
        found: Forward = self._ask(
            Request(self.number, self._length, tokens, count, hidden, self._rotated_as, parents=parents, before=before)
        )
        self._tree_start = self._length - before
        self._length += count
        return found

    def keep_path(self, path: Sequence[int]) -> None:
        """Cache the prefix and then only these tokens of the last tree.

        A draft head keeps only entries from its verifier's states, and none of the tree.

        Args:
            path: indices of tokens, from the root on, each the parent of the next.
        """
        self._length = self.passes.keep_path(self.number, self._tree_start, path)

    def rollback(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; no effect if fewer are cached.

        A cache that cannot go back exactly may drop more, so callers continue from the new ``length``. A draft head
        goes back to the entries from its verifier's states, so that its drafts do not depend on earlier rounds.
        """
        # A head may have states of more positions than it has read tokens.
        self._length = self.passes.rollback(self.number, length if self.layers else min(length, self.length))

    def begin(self, prompt: int) -> None:
        """Begin a text with a prompt of ``prompt`` tokens; the cache may hold some of them.

        Entries that would differ in this text are dropped, so callers continue from ``length``. This only affects
        models with a rotation that depends on the text's length; see `RotatingPasses`.
        """
        self.passes.begin(prompt)

    def rotate_as(self, length: int) -> None:
        """Rotate the tokens of later passes as in a text of at least ``length`` tokens; the cache is unchanged."""
        self._rotated_as = length

    def watch(self, layers: Iterable[int]) -> None:
        """Return the states of these layers with every later pass of `extend`, in addition to layers already watched.

        Args:
            layers: i for the input of decoder layer i, -1 for the last state after the final norm.

        Raises:
            IndexError: the model has no such layer.
        """
        self.passes.watch(layers)

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        """Cache tokens that see only some of the cached tokens and of each other.

        Args:
            tokens: T ids.
            positions: ``(T,)``, their positions in their texts.
            seen: ``(T, S)`` bool, with S the length after the pass.
            hidden: whether hidden states are wanted.

        Returns:
            A row for each token.
        """
        found = self.passes.masked_pass(tokens, positions, seen, hidden=hidden)
        self._length += len(tokens)
        return found

    def over(self, slots: int, width: int | None = None) -> Passes:
        """`Passes.over`."""
        return self.passes.over(slots, width)

    def fresh(self) -> "Slot":
        """A new slot with an empty cache, where the model `multiplies`."""
        return Slot(self.passes.fresh())

    @property
    def wants_signals(self) -> bool:
        """Whether the caller wants `Forward.signals`; passes over several sequences ask their readers."""
        return self.passes.wants_signals

    @wants_signals.setter
    def wants_signals(self, wanted: bool) -> None:
        if not self._shared:
            self.passes.wants_signals = wanted

    @property
    def judges(self) -> bool:
        """Whether `extend_judged` judges the drafts of several texts at once."""
        return self._shared or (not self._counts and self.passes.judges)  # an engine judges only several texts together

    @property
    def engine(self) -> str:
        """The engine's name for reports."""
        return self.passes.engine

    @property
    def preparing_seconds(self) -> float | None:
        """`Passes.preparing_seconds`."""
        return self.passes.preparing_seconds

    @property
    def widest_sample(self) -> int:
        """The most tokens that `sample` reads; 0 where it cannot be called."""
        return self.piece if self._shared else self.passes.widest_sample

    @property
    def specialises(self) -> bool:
        """See `Passes.specialises`; always False for passes over several sequences."""
        return not self._shared and self.passes.specialises

    @property
    def runs_ahead(self) -> bool:
        """`Passes.runs_ahead`."""
        return not self._shared and self.passes.runs_ahead

    @property
    def foresee(self) -> "Foresee | None":
        """`Passes.foresee`."""
        return self.passes.foresee

    @property
    def transforms(self) -> "list[Transform]":
        """The transforms of the engine's passes, the outermost first."""
        inner = self.passes.inner
        return [] if inner is None else [cast("Transform", self.passes), *inner.transforms]

    @property
    def bare(self) -> "Slot":
        """The engine's slot, without transforms."""
        inner = self.passes.inner
        return self if inner is None else inner.bare

    def transformed(self, bare: "Slot") -> "Slot":
        """Another slot of an engine, with the transforms of this one."""
        for transform in reversed(self.transforms):
            bare = transform.over_slot(bare)
        return bare

    @property
    def reads_states(self) -> bool:
        """Whether it reads its verifier's states, as draft heads do."""
        return bool(self.layers)

    @property
    def drafts_by_round(self) -> bool:
        """Whether its draft at a position depends on where the round began, not only on the text."""
        return self.reads_states or self.longest is not None

    def room(self, length: int) -> int:
        """How many tokens it can draft after a text of ``length`` tokens; 0 if its context cannot hold the text."""
        return max(0, self.context + 1 - length)  # the last drafted token is not read

    @property
    def observed(self) -> int:
        """`Passes.observed`."""
        return self.passes.observed

    def observe_states(self, start: int, states: "States") -> None:
        """Give a draft head its verifier's states of positions from ``start`` on; known ones are ignored.

        Where the state of the position before a token is unknown, the head reads its own output instead.

        Args:
            start: at most W.
            states: only of positions that stay in the sequence.
        """
        self.passes.observe_states(start, states)


def sampled_after(
    forward: Forward, reader: "TokenReader", uniform: float | None, previous: "torch.Tensor | None"
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """`Slot.sample` by sampling after the pass over the last token, not within it."""
    import torch

    draw = None if uniform is None else torch.tensor(uniform, dtype=torch.float64)
    columns = forward.columns
    logits = columns if isinstance(columns, torch.Tensor) else torch.from_numpy(columns)
    state = None if forward.hidden is None else forward.hidden[-1]
    return reader(logits[-1], draw, state, None if previous is None else previous.float())


def judged_after(forward: Forward, judge: "PassReader", about: Any) -> Any:
    """`Slot.extend_judged` by judging after the pass, without other texts."""
    (found,) = judge.read_rows([forward], [about])
    if isinstance(found, Exception):
        raise found
    return found
