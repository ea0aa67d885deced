"""Traces: all that is recorded about one generated text, so that any policy can be replayed on it. No torch here.

A trace contains the text and what its draft drafts in the rounds that may begin at each position, in a hierarchy every
draft: see `specctl.replay.recorded`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.replay.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Trace:
    """One generated sequence with everything that a policy could have read while it was generated.

    Attributes:
        prompt, category, turn: the prompt's id and category, and which of its turns was generated.
        prompt_tokens: length of the prompt.
        limit: the token limit in force.
        tokens: N ids, the text that the target wrote.
        draft: what the first draft drafts along this text.
        prefill_ms: time in which all models read the prompt, in milliseconds.
        prompt_ids: of the prompt, from which a lookup in a chain copies; empty where they are not known.
    """

    prompt: str
    category: str
    turn: int
    prompt_tokens: int
    limit: int
    tokens: list[int]
    draft: Recorded
    prefill_ms: float
    prompt_ids: list[int] = field(default_factory=list)

    def of_predictor(self, name: str | None) -> "Trace":
        """This trace with the predictions of another head of the draft; itself for None."""
        return self if name is None else replace(self, draft=self.draft.of_predictor(name))

    def of_disco(self, levels: Sequence[DiscoPredictor | None]) -> "Trace":
        """This trace with a DISCO head for each draft, from the top down; itself where no draft has one."""
        return replace(self, draft=self.draft.of_disco(levels)) if any(levels) else self
