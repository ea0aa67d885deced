"""The rounds in which a draft model drafts along an answer, with what DISCO heads read in them."""

from collections.abc import Sequence

import torch

from specctl.decoding.along import read_along
from specctl.decoding.draft_tokens import DraftTokens
from specctl.decoding.rows.token_columns import token_columns
from specctl.decoding.sampling import Sampling
from specctl.models.running.runner import Forward, Runner
from specctl.replay.recording.coupling import draw_draft_tokens
from specctl.training.predictors import example_rounds as rounds
from specctl.training.predictors.example_rounds import SIGNALS_END, RoundTokens


def read_model_rounds(
    target: Runner,
    draft: Runner,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> RoundTokens:
    """The rounds of `example_rounds.read_rounds` with laws, of a draft model, in one pass of each model.

    What a draft model drafts at a position is the same whichever round it is in, so that the verdicts along the answer
    tell where the rounds begin.

    Args:
        target: the verifier; both caches are read anew.
        draft: the draft model.
        prompt: at least one id.
        answer: T ids, at least one.
        sampling: as the answer was generated.
        generator: on the target's device; draws draft tokens and verdicts when sampling.
    """
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for part, (by_target, by_draft) in read_along([target, draft], prompt, answer):
            logits = by_draft.logits.to(by_target.logits.device)  # (C, V)
            written = torch.tensor(answer[part], device=logits.device)
            if sampling.greedy:
                tokens = logits.argmax(-1)
                verdicts = tokens == written
                acceptance = verdicts.float()
            else:
                above, probs = sampling.probs(by_target.logits), sampling.probs(logits)
                tokens, verdicts, acceptance = draw_draft_tokens(written, probs, above, generator)
            columns = [tokens, verdicts, acceptance, token_columns(Forward(logits), tokens, tops=True)]
            # float64 holds ids and probabilities alike
            parts.append(torch.column_stack([column.double() for column in columns]).cpu())
    whole = torch.cat(parts)  # (T, 16)
    places: list[int] = []
    indices: list[int] = []
    index = 1
    for position, accepted in enumerate(whole[:, 1].bool().tolist()):
        if index > rounds.LONGEST:  # behind a draft accepted as a whole the target writes a token of its own
            index = 1
            continue
        places.append(position)
        indices.append(index)
        index = index + 1 if accepted else 1
    kept = whole[places]
    numbers = kept[:, 2:].float()
    drawn = DraftTokens(kept[:, 0].long(), numbers[:, 0], numbers[:, 1:SIGNALS_END])
    return RoundTokens(drawn, None, numbers[:, SIGNALS_END:], torch.tensor(indices, dtype=torch.int32))
