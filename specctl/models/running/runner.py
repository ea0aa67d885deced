"""What runs one model over one sequence."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specctl.models.passes.forward import Forward as Forward
from specctl.models.passes.forward import joined as joined
from specctl.models.running.row_passes.row_requests import RowPasses as RowPasses
from specctl.models.running.row_passes.row_requests import RowRequest as RowRequest

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.draft_vocabulary import DraftVocabulary
    from specctl.models.passes.forward import Numbers
    from specctl.models.passes.token_reader import Foresee, PassReader, Token, TokenReader
    from specctl.models.passes.watching import States
    from specctl.models.running.suffix_index import SuffixIndex


class Runner(ABC):
    """A model that extends and rolls back one sequence; it knows nothing of rounds.

    What not every runner can do is told by an attribute, which callers ask before they call its method.

    Attributes:
        context: the most tokens the cache may hold.
        device: of the logits.
        runs_model: whether it runs one of `Pair.models`: neither a draft head nor a draft without files.
        verifies: whether it can read the tokens of a draft in one pass, and so stand above another one.
        judges: whether `extend_judged` can be called: drafts of several texts are judged at once.
        captures: whether its passes are captured, which no other thread may disturb.
        no_trees: why `extend_tree` and `keep_path` cannot be called, as the end of a sentence; None if they can.
        marginals: whether what follows a draft token depends on its place alone: then `extend_tree` gives one row.
        no_rows: why `rows` cannot be called, as the end of a sentence; None if it can.
        multiplies: whether `fresh` can be called: of drafts that are no models, whose passes each text makes by itself.
        holds_everything: whether every layer keeps the whole sequence, and `masked_pass` can be called.
        layers: of a draft head, the layers of its verifier whose states it reads; empty for every other runner.
        state_size: of a draft head D, the width of these states.
        longest: the most tokens that it can draft in a round; None for any number.
        index: of a lookup, where it finds what to copy; None for what drafts by its logits.
        draft_vocabulary: of a draft that writes some ids only, those of its logits' columns, as every `Forward` of it
            says; None where a column is an id.
        translates: of a draft with another tokenizer, what it drafts, in words; None for one with the target's.
        whole_prompts: whether it computes something else of a prompt that it reads in parts.
        fixed_width: tokens of every pass that decides; None where they have any number.
        writes_text: whether that is text of which its target's tokens are cut: what it predicts is certain, and neither
            it nor others can be drafted from a law.
        tells: whether who reads its passes wants `Forward.signals` of them, where the pass has them in less time.
        token_bytes: of its cache for each token; 0 where that is not known.
        rows_bytes: of weights that passes of `rows` hold besides its own; 0 where they read those.
        threads: of its passes on a CPU, where they have a number of their own; None where it is torch's.
        tried: milliseconds of a small round by number of threads that was tried; empty if nothing was.
    """

    context: int
    device: "torch.device"
    runs_model: bool = True
    verifies: bool = True
    judges: bool = False
    captures: bool = False
    no_trees: str | None = "it reads tokens one after the other"
    marginals: bool = False
    no_rows: str | None = "it reads one text at a time"
    multiplies: bool = False
    holds_everything: bool = False
    layers: tuple[int, ...] = ()
    state_size: int = 0
    longest: int | None = None
    index: "SuffixIndex | None" = None
    draft_vocabulary: "DraftVocabulary | None" = None
    translates: str | None = None
    whole_prompts: bool = False
    fixed_width: int | None = None
    writes_text: bool = False
    tells: bool = False
    token_bytes: int = 0
    rows_bytes: int = 0
    threads: int | None = None
    tried: Mapping[int, float] = MappingProxyType({})

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the cache, always a prefix of the sequence."""

    @abstractmethod
    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """Run ``tokens`` after the cached prefix and cache them; gives logits of the last ``keep`` of them only."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; no effect if fewer are cached.
        A cache that cannot go back that far may drop more: callers continue from ``length`` as it is afterwards. That
        of a draft head goes back to what came from its verifier's states, so that what it drafts does not depend on
        earlier rounds.
        """

    def begin(self, prompt: int) -> None:  # noqa: B027 - to most models all texts are alike
        """Begin a text with a prompt of ``prompt`` tokens, of which the cache may hold some.

        What the model would compute otherwise in that text is dropped: callers continue from ``length``. Only models
        that rotate positions by the length of the text have such; see `RotatingRunner`.
        """

    def rotate_as(self, length: int) -> None:
        """Rotate the tokens of later passes as in a text of at least ``length``; what is cached stays."""
        raise NotImplementedError("its model rotates by position alone")

    def watch(self, layers: Iterable[int]) -> None:
        """Give the states of these layers with every later pass of `extend`, besides those watched already.

        Args:
            layers: i for the input of decoder layer i, -1 for the last state after the final norm.

        Raises:
            IndexError: the model has no such layer.
        """
        for layer in layers:
            raise IndexError(f"{self.engine} has no layer {layer} that another could read")

    @property
    def engine(self) -> str:
        """Its engine, for reports."""
        return type(self).__name__

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time that it has spent on compiling, capturing or exporting; None if it does none of them."""
        return None

    @property
    def bare(self) -> "Runner":
        """The runner inside of those around it."""
        return self

    def same_around(self, bare: "Runner") -> "Runner":
        """Another bare runner with such runners around it as this one has."""
        return bare

    @property
    def reads_states(self) -> bool:
        """Whether it reads its verifier's states: a draft head."""
        return bool(self.layers)

    @property
    def drafts_by_round(self) -> bool:
        """Whether what it drafts at a place depends on where the round began, and not on the text before it alone."""
        return self.reads_states or self.longest is not None

    def room(self, length: int) -> int:
        """How many tokens it can draft behind a text of ``length`` tokens: 0 where its context cannot hold the text."""
        return max(0, self.context + 1 - length)  # the last token drafted is not read

    @property
    def witnessed(self) -> int:
        """Of a draft head W, the first W places of the sequence are those whose states it was given."""
        return 0

    def witness(self, start: int, states: "States") -> None:
        """Let a draft head take its verifier's states of places from ``start`` on; those known already are ignored.
        Where the state of the place before a token is not known, it reads its own output in its stead.

        Args:
            start: at most W.
            states: of places that stay in the sequence, and of no other.
        """
        raise NotImplementedError("only a draft head reads states")

    @property
    def foresee(self) -> "Foresee | None":
        """What it predicts of tokens not drawn yet, after the last pass; `read` gives its reader its own. Or None."""
        return None

    @property
    def widest_read(self) -> int:
        """The most tokens that `read` takes; 0 where it cannot be called."""
        return 0

    @property
    def specialises(self) -> bool:
        """Whether every reader has a pass of its own compiled or captured, which takes long."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether starting a pass takes the host so little time that the next one may be started ahead.

        That is over the token that is on the device, before the numbers of the last are read.
        """
        return False

    def read(
        self,
        tokens: "Sequence[Token]",
        reader: "TokenReader",
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        """Extend by tokens and read the last of them in the same pass.

        Args:
            tokens: at least one, or a single one that is on the device.
            reader: the same one for a whole sequence, because each reader has a pass compiled or captured for it.
            uniform: for the reader, or None.
            previous: ``(S,)`` for the reader, or None; of one S for the whole of a sequence.

        Returns:
            The reader's numbers, on the host or ``(F,)`` float64, and its distribution ``(V,)`` if it gives one.
        """
        raise NotImplementedError("its logits are read after the pass")

    def extend_judged(
        self, tokens: Sequence[int], keep: int, judge: "PassReader", about: Any, *, hidden: bool = False
    ) -> Any:
        """`extend`, and what a judge, who is told ``about``, makes of it with others' passes."""
        raise NotImplementedError

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """Run tokens of a tree after the cached prefix: each sees the prefix, its ancestors and itself.

        A token's position is its depth after the prefix, so it computes what it would in a chain of its ancestors.
        A tree may be read in several passes, one right after the other. Next comes `keep_path`, or a `rollback` to the
        prefix.

        Args:
            tokens: T ids, at most `masks.WIDEST`, and at most `masks.LARGEST_TREE` in all passes.
            parents: the numbers of their parents, each an earlier token of the tree; without the root's.
            before: B, how many of the tree's tokens were read by the passes right before. With 0 the first of the
                tokens is the root, which continues the sequence; with 1 the last token of an `extend` is the root, and
                with more this pass goes on where the last `extend_tree` ended.
            hidden: whether hidden states are wanted.

        Returns:
            A row for each token: logits ``(T, V)``, and the states of all; one for all of them with ``marginals``.
        """
        raise NotImplementedError(self.no_trees)

    def keep_path(self, path: Sequence[int]) -> None:
        """Cache the prefix and then these tokens of the last tree, and nothing else.

        A draft head keeps what came from its verifier's states, and nothing of a tree.

        Args:
            path: numbers of tokens, from the root on, each the parent of the next.
        """
        raise NotImplementedError(self.no_trees)

    def fresh(self) -> "Runner":
        """Another one that has read nothing."""
        raise NotImplementedError

    def rows(self, count: int, width: int | None = None) -> RowPasses:
        """The same model over several sequences at once, with caches of their own.

        Args:
            count: how many sequences, at least 2.
            width: of all passes that give logits, which then hang on no others; None for any.
        """
        raise NotImplementedError(self.no_rows)

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        """Cache tokens that see only some of those cached and of each other.

        Args:
            tokens: T ids.
            positions: ``(T,)``, their positions in the texts that they belong to.
            seen: ``(T, S)`` bool, S the length afterwards.
            hidden: whether hidden states are wanted.

        Returns:
            A row for each token.
        """
        raise NotImplementedError("it reads a sequence in its order")
