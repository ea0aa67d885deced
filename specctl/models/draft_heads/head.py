"""What all draft heads have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.running.passes import Passes, Request


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A verifier module that a head uses, wrapped so that it is not moved, trained or saved with the head."""

    module: Any


class DraftHead(nn.Module):
    """A network that drafts from the hidden states of its verifier."""

    kind: str  # its name in flags and files
    # the verifier's layers whose states it reads; i is the input of decoder layer i, -1 the last state after the final
    # norm
    layers: tuple[int, ...]
    state_size: int  # width of the verifier's states
    width: int  # H, the width of its own states
    vocabulary: int  # V, the verifier's
    draft_vocabulary: int  # D, the number of the verifier's tokens that it can draft
    tokens: torch.Tensor | None  # ``(D,)`` int64, the verifier's id of each draft token; None if D = V
    num_layers: int  # layers that cache keys and values
    cached_values: int  # numbers in its cache for each token
    context: int  # the most tokens that it can read
    longest: int | None = None  # the most tokens that it drafts in a round; None for any number
    lm_head: nn.Linear  # its own output layer
    _output: Borrowed | None = None  # the verifier's, where it has none of its own

    def __init__(self, tokens: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("tokens", tokens, persistent=False)

    def _take_embeddings(self, embeddings: nn.Module | None) -> None:
        """Embed with the verifier's embeddings, or with some of its own."""
        self._embeddings = None if embeddings is None else Borrowed(embeddings)
        if embeddings is None:
            self.embed_tokens = nn.Embedding(self.vocabulary, self.width)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``(..., H)`` of ids ``(...)``.

        The factor by which some verifiers scale their embeddings is not applied: heads are trained on the raw weights.
        """
        return embedding(ids, (self._embeddings.module if self._embeddings else self.embed_tokens).weight)

    @property
    def borrowed(self) -> list[nn.Module]:
        """The verifier's modules that the head uses."""
        held = [one.module for one in vars(self).values() if isinstance(one, Borrowed)]
        return [module for module in held if module is not None]

    @property
    def no_graphs(self) -> str | None:
        """Why its passes cannot be exported as graphs; None if they can."""
        return None

    @property
    def borrowed_output(self) -> nn.Module | None:
        """The verifier's output layer, where it has none of its own."""
        return None if self._output is None else self._output.module

    @property
    def output_layer(self) -> nn.Linear:
        """Computes logits ``(..., D)`` of hidden states."""
        layer: nn.Linear = self._output.module if self._output else self.lm_head
        return layer

    def vocabulary_in(self, whole: int) -> DraftVocabulary | None:
        """The verifier's id of each logit column; None if D = V."""
        return None if self.tokens is None else DraftVocabulary(self.tokens.tolist(), whole)

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``(..., V)`` of ``(..., D)``, -inf for tokens that it cannot draft."""
        if self.tokens is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        return everything.index_copy(-1, self.tokens, logits)


class DraftHeadPasses(Passes):
    """The passes of a draft head, over one sequence.

    Attributes:
        length: tokens read so far.
    """

    runs_model = False
    verifies = False
    multiplies = True
    head: DraftHead  # the network
    vocabulary: int  # the pair's shared vocabulary V; logits beyond it are padding and are cut off
    length = 0
    _columns: int  # of the head's logits, those of ids that both share

    def _run_head(self, head: DraftHead, vocabulary: int) -> None:
        """Copy the settings that the network determines."""
        self.head, self.vocabulary = head, vocabulary
        self.draft_vocabulary = ids = head.vocabulary_in(vocabulary)
        self._columns = vocabulary if ids is None else len(ids)
        self.layers, self.state_size, self.longest = head.layers, head.state_size, head.longest

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        return [self.answer(request._replace(reader=None))]

    def answer(self, request: Request) -> Any:
        self.length = request.after
        if request.reader is not None:
            return self._sample(request)
        if request.parents is not None:
            return self._extend_tree(request.tokens, request.parents, request.before, request.hidden)
        return self._extend(request.tokens, request.keep, request.hidden)

    @abstractmethod
    def _extend(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        """As `Slot.extend`."""

    def _extend_tree(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        """As `Slot.extend_tree`."""
        raise NotImplementedError(self.no_trees)

    def _sample(self, request: Request) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Slot.sample`."""
        raise NotImplementedError("its logits are read after the pass")
