"""The rounds of a draft along an answer, with the predictors' inputs.

A draft head's tokens and hidden states at a position depend on where its round began. They are stored rather than
recomputed, because recomputing would need the verifier's states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specctl.decoding.draft_tokens import DraftTokens, read_along, token_columns
from specctl.decoding.draws import sibling
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.recording.coupling import draw_draft_tokens
from specctl.replay.recording.head_recording import ReadText, starts_of

LONGEST = 20  # The most tokens of a round, as for the policies specdec++ and disco by default
SIGNALS_END = 1 + len(DISTRIBUTION_SIGNALS)  # Index of the largest probabilities among a token's numbers


@dataclass(frozen=True, slots=True)
class RoundTokens:
    """The draft tokens of an answer's rounds, one after another, on the CPU."""

    drawn: DraftTokens  # N tokens, in each round up to its first rejected token, this one included
    # ``(N, H)`` in the draft's dtype, the hidden state after the draft has read each token: what a predictor reads in
    # the step after the one that sampled it. None where distributions are read.
    hidden: torch.Tensor | None
    # ``(N, 10)`` float32, for DISCO the largest probabilities of each token's distribution; else None
    top_probs: torch.Tensor | None
    index: torch.Tensor  # ``(N,)`` int32, the number of each token in its round, from 1


@dataclass(slots=True)
class _Round:
    """One round, as it grows."""

    start: int  # position in the answer
    tokens: list[int] = field(default_factory=list)  # the draft tokens so far
    # of each token its acceptance probability, then `DISTRIBUTION_SIGNALS`, and for DISCO the largest probabilities
    numbers: list[list[float]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)  # ``(H,)`` after each token that the draft has read
    accepted: int = 0  # the number of accepted tokens

    @property
    def rejected(self) -> bool:
        return self.accepted < len(self.tokens)

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.start + len(self.tokens)


def read_rounds(
    target: Slot,
    draft: Slot,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
    eos: frozenset[int],
    *,
    distributions: bool = False,
) -> RoundTokens | None:
    """Draft the rounds of an answer; each ends with a rejected token or with the most tokens that the draft can draft.

    Every round begins where the one before ended: after its rejected token, or after the target's token that follows a
    draft accepted as a whole. So each position has at most one draft token, as for a draft model, and rounds begin as
    in a live run. Within a round the draft has read its own tokens only. They are the target's up to the first rejected
    one; what follows a rejected token has no acceptance probability. The last token of a round without a rejection is
    left out, because no policy would have read a state after it; where distributions are read in place of states it
    stays.

    See `specctl.replay.play.play` for the joint distribution of draft tokens and answer when sampling.

    Args:
        target: the verifier; its cache is filled from the start.
        draft: drafts from the target's states.
        prompt: at least one id.
        answer: T ids, at least one.
        sampling: as the answer was generated.
        generator: on the target's device; samples draft tokens and verdicts.
        eos: ids that end a sequence.
        distributions: whether to read distributions, for DISCO, and no states.

    Returns:
        None if no token is left.
    """
    with torch.inference_mode():
        verifier = ReadText(target, draft.layers, prompt, answer, sampling)
        running = starts_of(draft, verifier, [*prompt, *answer], len(prompt), hidden=not distributions)
        most = LONGEST if draft.longest is None else min(LONGEST, draft.longest)
        chosen: list[_Round] = []
        reached = 0

        def sample(rounds: Sequence[_Round], logits: torch.Tensor) -> None:
            """Sample the next token of B rounds without a rejection yet, from the draft's logits ``(B, V)``."""
            positions = [one.position for one in rounds]
            written = torch.tensor([answer[position] for position in positions], device=logits.device)
            above = None if sampling.greedy else verifier.probs(positions)  # (B, V)
            tokens, verdicts, acceptance = _judged(written, logits, above, sampling, generator)
            tokens = tokens.to(logits.device)
            columns = token_columns(Forward(logits), tokens, tops=distributions)
            numbers = torch.column_stack([acceptance.to(logits.device), columns]).tolist()
            for one, token, fine, row in zip(rounds, tokens.tolist(), verdicts.tolist(), numbers, strict=True):
                one.tokens.append(token)
                one.numbers.append(row)
                one.accepted += fine

        for first in range(0, len(answer), running.at_once):
            starts = range(first, min(first + running.at_once, len(answer)))
            if starts.stop <= reached:
                continue
            verifier.forget(first)
            # A draft head with batched rounds runs them from every position; rounds that do not follow on are dropped.
            going = rounds = [_Round(start) for start in starts]
            forward = running.first(starts)
            while True:
                judged = [n for n, one in enumerate(going) if not one.rejected and one.position < len(answer)]
                if judged:
                    sample([going[n] for n in judged], forward.logits[judged])
                longer = [n for n in judged if len(going[n].tokens) < most and going[n].tokens[-1] not in eos]
                if not longer:
                    break
                going = [going[n] for n in longer]
                forward = running.further(longer, [one.tokens[-1] for one in going])
                if not distributions:
                    assert forward.hidden is not None
                    for one, state in zip(going, forward.hidden.cpu(), strict=True):
                        one.states.append(state)
            for one in rounds:
                if one.start == reached:
                    chosen.append(one)
                    reached += one.accepted + 1
    counts = [len(one.tokens if distributions else one.states) for one in chosen]
    if not sum(counts):
        return None
    numbers = torch.tensor([row for one, count in zip(chosen, counts, strict=True) for row in one.numbers[:count]])
    tokens = torch.tensor([token for one, count in zip(chosen, counts, strict=True) for token in one.tokens[:count]])
    index = torch.cat([torch.arange(1, count + 1, dtype=torch.int32) for count in counts])
    drawn = DraftTokens(tokens, numbers[:, 0], numbers[:, 1:SIGNALS_END])  # numbers: (N, 4), for DISCO (N, 14)
    if distributions:
        return RoundTokens(drawn, None, numbers[:, SIGNALS_END:], index)
    return RoundTokens(drawn, torch.stack([state for one in chosen for state in one.states]), None, index)


def _judged(
    written: torch.Tensor,
    logits: torch.Tensor,
    above: torch.Tensor | None,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`draw_draft_tokens` from logits ``(B, V)``, or their likeliest tokens without the verifier's distributions."""
    if above is None:
        tokens = logits.argmax(-1)
        return tokens, tokens == written, (tokens == written).float()
    probs = sampling.probs(logits).to(above.device)
    return draw_draft_tokens(written.to(above.device), probs, above, sibling(generator, above.device))


def read_model_rounds(
    target: Slot,
    draft: Slot,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> RoundTokens:
    """The rounds of `read_rounds` for a draft model, with distributions, from one pass of each model.

    A draft model drafts the same token at a position in every round, so the verdicts along the answer determine the
    rounds' starts.

    Args:
        target: the verifier; both caches are filled from the start.
        draft: the draft model.
        prompt: at least one id.
        answer: T ids, at least one.
        sampling: as the answer was generated.
        generator: on the target's device; samples draft tokens and verdicts.
    """
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for part, (by_target, by_draft) in read_along([target, draft], prompt, answer):
            logits = by_draft.logits.to(by_target.logits.device)  # (C, V)
            written = torch.tensor(answer[part], device=logits.device)
            above = None if sampling.greedy else sampling.probs(by_target.logits)
            tokens, verdicts, acceptance = _judged(written, logits, above, sampling, generator)
            columns = [tokens, verdicts, acceptance, token_columns(Forward(logits), tokens, tops=True)]
            # float64 holds ids and probabilities alike
            parts.append(torch.column_stack([column.double() for column in columns]).cpu())
    whole = torch.cat(parts)  # (T, 16)
    places: list[int] = []
    indices: list[int] = []
    index = 1
    for position, accepted in enumerate(whole[:, 1].bool().tolist()):
        if index > LONGEST:  # after a draft accepted as a whole the target writes a token of its own
            index = 1
            continue
        places.append(position)
        indices.append(index)
        index = index + 1 if accepted else 1
    used = whole[places]
    numbers = used[:, 2:].float()
    drawn = DraftTokens(used[:, 0].long(), numbers[:, 0], numbers[:, 1:SIGNALS_END])
    return RoundTokens(drawn, None, numbers[:, SIGNALS_END:], torch.tensor(indices, dtype=torch.int32))
