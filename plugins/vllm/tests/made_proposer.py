"""A loop like that of vLLM's proposer, over logits that are given, so that the seam can be tested without vLLM."""

from types import SimpleNamespace
from typing import Any

import torch

from specctl.policies import Setting
from specctl_vllm.batch_drafts import BatchDrafts
from specctl_vllm.policy_drafting import PolicyDrafting


class MadeProposer:
    """Drafts the likeliest token of the logits (K, B, V), a step after the other.

    Attributes:
        passes: made so far.
        probs_kept: whether the law of each token is kept, as where draft tokens are drawn.
    """

    def __init__(self, logits: torch.Tensor, probs_kept: bool = False) -> None:
        self.logits, self.probs_kept = logits, probs_kept
        self.passes = 0
        self._last_draft_probs: torch.Tensor | None = None
        self.model = SimpleNamespace(compute_logits=lambda step: self.logits[step].clone())

    def prepare_next_token_ids_padded(self, sampled: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        counts = (sampled >= 0).sum(dim=1)
        return sampled.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1), counts

    def propose(self, num_speculative_tokens: int, **_: Any) -> torch.Tensor:
        found, probs = [], []
        for step in range(num_speculative_tokens):
            self.passes += 1
            tokens, law = self._sample_draft_tokens(step, None)
            found.append(tokens)
            probs.append(law)
        if self.probs_kept and probs:
            self._last_draft_probs = torch.stack(probs, dim=1)
        return torch.stack(found, dim=1) if found else torch.empty(self.logits.shape[1], 0, dtype=torch.long)

    def _sample_draft_tokens(self, step: Any, metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._sample_from_logits(self.model.compute_logits(step), metadata)

    def _sample_from_logits(self, logits: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits.div_(2.0)  # in place, as by a temperature
        return logits.argmax(dim=-1), logits.softmax(dim=-1) if self.probs_kept else None


class Stopped(PolicyDrafting, MadeProposer):
    """That proposer with policies in its loop."""

    def __init__(
        self, policy: dict[str, Any], logits: torch.Tensor, names: list[str], probs_kept: bool = False
    ) -> None:
        super().__init__(logits, probs_kept)
        self.drafts = BatchDrafts(Setting.of(policy))
        self.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names), requests=set(names))

    def after(self, emitted: list[list[int]], verified: list[int], longest: int) -> list[list[int]]:
        """The drafts after a target pass that emitted these tokens, none where a prompt is still read."""
        width = max(map(len, emitted))
        sampled = torch.tensor([row + [-1] * (width - len(row)) for row in emitted])
        _, counts = self.prepare_next_token_ids_padded(sampled)
        rejected = torch.tensor(verified) - (counts - 1)
        return self.propose(num_speculative_tokens=longest, num_rejected_tokens_gpu=rejected)
