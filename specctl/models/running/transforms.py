"""Passes that wrap another slot and change its input and output: checks, fixed-width blocks, fewer tokens, masks."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.tree_sight import grown_tree
from specctl.models.passes.watching import cut_states, kept_states
from specctl.models.running.passes import FACTS, Passes, Request
from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.watching import States


class Transform(Passes):
    """Passes of one sequence through another slot, with changes: rules, translation or checks.

    Several of them can be nested; see `Slot.transforms`. All methods here forward to the inner slot. Sampling within a
    pass is not available, since it would bypass the change.

    Args:
        inner: the slot inside.
    """

    inner: Slot

    def __init__(self, inner: Slot) -> None:
        self.inner = inner
        for name in FACTS:
            setattr(self, name, getattr(inner, name))
        self.multiplies, self.holds_everything, self.index = False, False, None

    def over_slot(self, inner: Slot) -> Slot:
        """The same transform over another slot; that slot itself if the transform only applies to this one."""
        return inner

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        if request.parents is not None:
            return [self.extend_tree(request.tokens, request.parents, before=request.before, hidden=request.hidden)]
        return [self.extend(request.tokens, request.keep, hidden=request.hidden)]

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        self.take_back(length)
        return self.length

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:  # noqa: ARG002 - the slot inside knows it
        self.keep(path)
        return self.length

    def begin(self, prompt: int) -> None:
        self.inner.begin(prompt)

    @property
    def length(self) -> int:
        return self.inner.length

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """`Slot.extend`."""
        return self.inner.extend(tokens, keep, hidden=hidden)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """`Slot.extend_tree`."""
        assert self.no_trees is None, self.no_trees
        return self.inner.extend_tree(tokens, parents, before=before, hidden=hidden)

    def take_back(self, length: int) -> None:
        """`Slot.rollback`."""
        self.inner.rollback(length)

    def keep(self, path: Sequence[int]) -> None:
        """`Slot.keep_path`."""
        assert self.no_trees is None, self.no_trees
        self.inner.keep_path(path)

    @property
    def engine(self) -> str:
        return self.inner.engine

    @property
    def preparing_seconds(self) -> float | None:
        return self.inner.preparing_seconds

    def over(self, slots: int, width: int | None = None) -> Passes:
        return self.inner.over(slots, width)

    def watch(self, layers: Iterable[int]) -> None:
        self.inner.watch(layers)

    @property
    def observed(self) -> int:
        return self.inner.observed

    def observe_states(self, start: int, states: "States") -> None:
        self.inner.observe_states(start, states)


class NarrowPasses(Transform):
    """Passes of a draft with fewer ids than its target's vocabulary.

    Models of one family pad their output layers to different sizes. Where the tokenizer's size is unknown the target
    keeps all its rows. A token that the draft cannot read is replaced by its last one. That only makes drafts worse
    after such a token.

    Args:
        inner: the draft model's slot, with all its rows.
        rows: the number of these rows.
        vocabulary: V, the target's.
    """

    def __init__(self, inner: Slot, rows: int, vocabulary: int) -> None:
        super().__init__(inner)
        self.no_trees = "its draft has fewer output rows than the target"
        self.draft_vocabulary = inner.draft_vocabulary or DraftVocabulary(range(rows), vocabulary)
        self._rows, self._vocabulary = rows, vocabulary

    def over_slot(self, inner: Slot) -> Slot:
        return Slot(NarrowPasses(inner, self._rows, self._vocabulary))

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        found = self.inner.extend([min(token, self._rows - 1) for token in tokens], keep, hidden=hidden)
        return Forward(found.columns, found.hidden, found.states, self.draft_vocabulary)


LIMITS = {"torch.float32": 0.01, "torch.float64": 0.01}
LIMIT = 0.25
"""The largest difference that rounding explains, as a share of the logits' standard deviation; by dtype, else this."""


class CheckedPasses(Transform):
    """A `Slot` that checks, once, that a rollback leaves no trace in its model.

    After the first rollback, the next logits are compared with those of target-only decoding: a fresh cache reads the
    first pass's tokens in one pass, and the rest token by token. The check needs no knowledge of the model.

    Args:
        inner: the target.
        fresh: creates another runner of the same model with an empty cache.
        name: the model's name for the error.
    """

    def __init__(self, inner: Slot, fresh: Callable[[], Slot], name: str) -> None:
        super().__init__(inner)
        self.difference: float | None = None
        """The measured difference, as a share of the logits' standard deviation; None before the check."""
        self._fresh, self._name = fresh, name
        self._text: list[int] = []
        self._first = 0  # tokens of the text's first pass, which reads the prompt
        self._prompt = 0
        self._went_back = False
        self._tree: Sequence[int] = ()

    def begin(self, prompt: int) -> None:
        self._prompt = prompt
        self.inner.begin(prompt)
        del self._text[self.inner.length :]

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`.

        Raises:
            ModelError: the logits differ from those of a fresh read.
        """
        if not self._text:
            self._first = len(tokens) - max(keep - 1, 0)
        self._text += tokens
        found = self.inner.extend(tokens, keep, hidden=hidden)
        if self._went_back and self.difference is None and keep:
            self._compare(found.logits)
        return found

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """As in `Slot`; the logits of a root that is read with its tree are compared.

        Raises:
            ModelError: the logits differ from those of a fresh read.
        """
        self._tree = grown_tree(self._tree, self._text, tokens, before)
        found = super().extend_tree(tokens, parents, before=before, hidden=hidden)
        if self._went_back and self.difference is None and not before:
            self._compare(found.logits[:1])
        return found

    def keep(self, path: Sequence[int]) -> None:
        self._went_back |= len(path) < len(self._tree)
        super().keep(path)
        self._text += [self._tree[place] for place in path[1:]]

    def take_back(self, length: int) -> None:
        self._went_back |= 0 < length < self.inner.length
        self.inner.rollback(length)
        if length:
            del self._text[self.inner.length :]  # a model that went back further reads the rest again
        else:
            self._text, self._went_back = [], False

    def _compare(self, logits: "torch.Tensor") -> None:
        """Compare ``(R, V)`` logits of the last R tokens."""
        import torch

        fresh = self._fresh()
        fresh.begin(self._prompt)
        first = min(self._first, len(self._text) - len(logits))
        if first:
            fresh.extend(self._text[:first], keep=0)
        rows = [fresh.extend([token], keep=1).logits for token in self._text[first:]]
        expected = torch.cat(rows)[-len(logits) :].float()
        error = (logits.float() - expected).square().mean(-1).sqrt() / expected.std(-1)  # (R,)
        self.difference = float(error.max())
        if not self.difference <= LIMITS.get(str(logits.dtype), LIMIT):
            raise ModelError(
                f"The target model {self._name!r} does not forget rejected tokens: after the first of them its logits "
                f"are off by {self.difference:.1%} of their spread. Drafting would change what it writes.",
                'Use it without a draft (--policy none), or with engine = "eager" if another engine is set.',
            )


WIDTH = 16


class FixedWidthPasses(Transform):
    """A `Slot` with logits that are bit for bit the same for any sequence of calls.

    Kernels round differently for different shapes, and even for different rows of one matrix. So the sequence is
    divided into blocks of ``width`` tokens. A pass always reads one whole block, padded after its last token. A token
    then has the same row, the same shape and the same span of keys in every pass that contains it. Only the tokens
    before the first block with wanted logits run in one pass: those of the prompt, which every policy caches the same
    way.

    Args:
        inner: a slot that can roll back to any length and repeats passes bit for bit.
        width: tokens of a block.
    """

    def __init__(self, inner: Slot, width: int = WIDTH) -> None:
        super().__init__(inner)
        self.width = self.fixed_width = width
        self.no_trees = "deterministic passes read chains"
        self.context = inner.context // width * width  # the last block must fit as well
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def engine(self) -> str:
        return f"{self.inner.engine}, blocks of {self.width}"

    def over_slot(self, inner: Slot) -> Slot:
        return Slot(FixedWidthPasses(inner, self.width))

    def over(self, slots: int, width: int | None = None) -> Passes:
        return self.inner.over(slots, width or self.width)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`; each pass costs a whole block, and each block takes a pass."""
        self._tokens.extend(tokens)
        begin, end = len(self._tokens) - len(tokens), len(self._tokens)
        if not keep:
            read, first = self.inner.length, end // self.width * self.width
            spans = (span for span in ((read, first), (max(read, first), end)) if span[0] < span[1])
            found = joined([self._kept(self._tokens[slice(*span)], 0, hidden) for span in spans])
            return Forward(found.logits, found.hidden, cut_states(found.states, slice(begin - read, None)))
        first = (end - keep) // self.width * self.width
        self.inner.rollback(first)
        read = self.inner.length
        parts = [self._kept(self._tokens[read:first], 0, hidden)] if read < first else []
        parts += [self._block(start, end, hidden) for start in range(first, end, self.width)]
        self.inner.rollback(end)
        found, kept = joined(parts), slice(end - keep - first, end - first)
        return Forward(
            found.logits[kept],
            None if found.hidden is None else found.hidden[kept],
            cut_states(found.states, slice(begin - read, end - read)),
        )

    def _block(self, start: int, end: int, hidden: bool) -> Forward:
        block = self._tokens[start : min(end, start + self.width)]
        return self._kept([*block, *[0] * (self.width - len(block))], self.width, hidden)

    def _kept(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        """A copy of a pass's states, which the next pass does not overwrite."""
        found = self.inner.extend(tokens, keep=keep, hidden=hidden)
        return Forward(found.logits, found.hidden, kept_states(found.states))

    def take_back(self, length: int) -> None:
        del self._tokens[length:]
        self.inner.rollback(length)


PARD_TOKENS = 8
"""Tokens that PARD's drafts write in a pass: ``para_num`` of their training, which their files do not say."""


def in_parallel(runner: Slot, config: Any, vocabulary: int, name: str) -> Slot:
    """A draft's runner, wrapped in `ParallelPasses` if its configuration names PARD's mask token.

    Args:
        runner: the draft model's; it must not verify another draft.
        config: the model's transformers configuration.
        vocabulary: V, the pair's shared vocabulary.
        name: the draft's name for messages.

    Raises:
        ModelError: the mask is not an id.
    """
    mask = getattr(config, "pard_token", None)
    if mask is None or runner.translates is not None:
        return runner  # a draft with another tokenizer needs rows for several of its own ids
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ModelError(f"{name}: pard_token in its config.json is {mask!r}, not an id from 0 to {vocabulary - 1}.")
    return Slot(ParallelPasses(runner, mask))


class ParallelPasses(Transform):
    """A `Slot` for a parallel draft model, such as PARD's (An et al. 2025, arXiv 2504.18583).

    The first pass of a round reads the text's new tokens followed by K - 1 masks. Its last K rows predict the next K
    tokens, each independent of those before it. Each token fed after that moves to the next row. After the last row, a
    new pass reads the fed tokens followed by masks. Masks and draft tokens are dropped from the cache when the round
    ends.

    Args:
        inner: the model or head.
        mask: the id of the mask token.
        count: K.
    """

    def __init__(self, inner: Slot, mask: int, count: int = PARD_TOKENS) -> None:
        super().__init__(inner)
        self.verifies, self.no_trees, self.marginals = False, None, True
        self.longest = count
        self.context = inner.context - count + 1
        self._mask = mask
        self._block: Forward | None = None
        self._row = 0
        self._newest = 0  # the last token read of the text
        self._fed: list[int] = []  # tokens fed since the block's pass

    @property
    def length(self) -> int:
        return self.inner.length + len(self._fed)

    def over_slot(self, inner: Slot) -> Slot:
        assert self.longest is not None
        return Slot(ParallelPasses(inner, self._mask, self.longest))

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`; rows of a block come from its pass, and tokens of the text before it are read normally."""
        if self._block is None and keep != 1:
            self._newest = tokens[-1]
            return self.inner.extend(tokens, keep, hidden=hidden)
        if self._block is None:
            return self._begun(tokens, hidden)
        rows = [self._next(token, hidden) for token in tokens]
        return joined(rows[-keep:]) if keep else _rows(rows[-1], slice(0))

    def take_back(self, length: int) -> None:
        self._block = None
        self._fed.clear()
        self.inner.rollback(length)

    def extend_tree(
        self,
        tokens: Sequence[int],  # noqa: ARG002 - the signature of `Slot`
        parents: Sequence[int],  # noqa: ARG002
        *,
        before: int = 0,
        hidden: bool = False,
    ) -> Forward:
        """As in `Slot`: all tokens of a level share the next row.

        Raises:
            ValueError: the block has no further row.
        """
        assert before, "the newest token is read by `extend`"
        if self._block is None:  # the last token was read without a block
            self.inner.rollback(self.inner.length - 1)
            self._begun([self._newest], hidden)
        if self._row + 1 == self.longest:
            raise ValueError(f"the block drafts {self.longest} tokens")
        self._row += 1
        return self._given(hidden)

    def keep(self, path: Sequence[int]) -> None:  # noqa: ARG002 - nothing of a tree was read
        """Roll back to the part of the text that was read."""
        self.take_back(self.inner.length)

    def _begun(self, tokens: Sequence[int], hidden: bool) -> Forward:
        """Start a block after these tokens; returns its first row."""
        runner, masks = self.inner, (self.longest or 1) - 1
        self._fed.clear()
        self._newest, self._row = tokens[-1], 0
        self._block = runner.extend([*tokens, *[self._mask] * masks], keep=masks + 1, hidden=hidden)
        runner.rollback(runner.length - masks)
        return self._given(hidden)

    def _next(self, token: int, hidden: bool) -> Forward:
        """The row after a token."""
        self._fed.append(token)
        if self._row + 1 == self.longest:
            return self._begun([*self._fed], hidden)
        self._row += 1
        return self._given(hidden)

    def _given(self, hidden: bool) -> Forward:
        assert self._block is not None
        if hidden and self._block.hidden is None:  # hidden states were not wanted before
            row, fed = self._row, [*self._fed]
            self.inner.rollback(self.inner.length - 1)
            self._begun([self._newest], hidden)
            self._row, self._fed = row, fed
        return _rows(self._block, slice(self._row, self._row + 1))


def _rows(forward: Forward, which: slice) -> Forward:
    states = None if forward.hidden is None else forward.hidden[which]
    return Forward(forward.columns[which], states, None, forward.vocabulary)
