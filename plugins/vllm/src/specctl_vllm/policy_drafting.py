"""vLLM's drafting loop with policies in it: what is put before its proposer of draft models."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specctl_vllm.batch_drafts import BatchDrafts, Verdict
from specctl_vllm.signals import read_step, signals_of


class _AllStoppedError(Exception):
    """Ends the loop of vLLM's proposer between two passes: no request drafts on."""


if TYPE_CHECKING:

    class Proposer:
        """What is used of vLLM's ``DraftModelProposer``."""

        model: Any
        _last_draft_probs: torch.Tensor | None

        def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor: ...

        def prepare_next_token_ids_padded(
            self, sampled_token_ids: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]: ...

        def _sample_draft_tokens(
            self, hidden_states: torch.Tensor, sampling_metadata: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

        def _sample_from_logits(
            self, logits: torch.Tensor, sampling_metadata: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
else:
    Proposer = object


class PolicyDrafting(Proposer):
    """Stops each request's draft by its policy, and ends the loop when no request drafts on.

    The proposer that follows in the order of bases draws tokens and runs the model as it does alone. A draft that
    ended early is a shorter list of the same tokens.

    Attributes:
        drafts: the policies, with what is drafted.
        runner: vLLM's model runner, which says which request is in which row.
    """

    drafts: BatchDrafts
    runner: Any
    _sampled: torch.Tensor
    _emitted: torch.Tensor
    _probs: list[torch.Tensor] | None = None  # of each step; None outside of `propose`
    _drafting: float = 0.0
    _ended: float | None = None

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's; it comes before `propose` and tells how many tokens each row has emitted."""
        found = super().prepare_next_token_ids_padded(sampled_token_ids, *args, **kwargs)
        self._sampled, self._emitted = sampled_token_ids, found[1]
        return found

    def propose(  # type: ignore[override]  # the runner passes lists on as they are
        self,
        num_speculative_tokens: int,
        *args: Any,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> list[list[int]]:
        """The drafts of all requests, each as long as its policy wants it."""
        drafts, names = self.drafts, list(self.runner.input_batch.req_ids)
        verdicts = self._verdicts(num_rejected_tokens_gpu)
        drafts.observe(names, verdicts, self.runner.requests, self._seconds(verdicts))
        began = perf_counter()
        drafting = [name if verdict is not None else None for name, verdict in zip(names, verdicts, strict=True)]
        self._probs = []
        try:
            longest = drafts.begin(drafting, num_speculative_tokens)
            super().propose(longest, *args, num_rejected_tokens_gpu=num_rejected_tokens_gpu, **kwargs)
        except _AllStoppedError:
            pass
        finally:
            probs, self._probs = self._probs, None
        # The runner cuts them to each request's draft.
        self._last_draft_probs = torch.stack(probs, dim=1).contiguous() if probs else None
        self._ended = perf_counter()
        self._drafting = self._ended - began
        return drafts.tokens

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._probs is None:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        logits = self.model.compute_logits(hidden_states)
        signals = signals_of(logits)  # before the temperature, by which logits are divided in place
        tokens, probs = self._sample_from_logits(logits, sampling_metadata)
        if probs is not None:
            self._probs.append(probs)
        if not self.drafts.step(*read_step(signals, tokens)):
            raise _AllStoppedError
        return tokens, probs

    def _verdicts(self, rejected: torch.Tensor | None) -> list[Verdict | None]:
        """Of each row, in one transfer."""
        emitted, sampled = self._emitted.long(), self._sampled.long()
        none = torch.zeros_like(emitted)
        numbers = torch.stack([emitted, none if rejected is None else rejected.long()], dim=1)
        found: list[Verdict | None] = []
        for count, lost, *tokens in torch.cat([numbers, sampled], dim=1).tolist():
            # Without a token the prompt is not read to its end: a draft would not be verified.
            found.append(Verdict(tuple(tokens[:count]), count - 1 + lost) if count else None)
        return found

    def _seconds(self, verdicts: list[Verdict | None]) -> tuple[float, float]:
        """Of drafting and verifying the last drafts; zeros where the pass read prompts too."""
        names = self.runner.input_batch.req_ids
        if self._ended is None or None in verdicts or not all(map(self.drafts.knows, names)):
            return 0.0, 0.0
        return self._drafting, perf_counter() - self._ended
