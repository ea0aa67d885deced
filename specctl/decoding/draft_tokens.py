"""Draft tokens at every position of an existing text, and their probabilities of acceptance."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from specctl.decoding.logits.device import draw
from specctl.decoding.logits.judging import logits_of
from specctl.decoding.logits.token_sampler import AcceptancePredictor
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward, Numbers
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, disco_predictors, state_predictors
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS

CHUNK = 64  # Number of tokens with distributions in memory at once


def read_along(
    runners: Sequence[Slot], prompt: Sequence[int], text: Sequence[int], *, hidden: bool = False, cached: bool = False
) -> Iterator[tuple[slice, list[Forward]]]:
    """Run models over the text after a prompt, at most `CHUNK` tokens at a time.

    Row i of a pass over ``text[part]`` is the prediction of ``text[part][i]``, given everything before it. Run it in
    inference mode.

    Args:
        runners: the models.
        prompt: at least one id.
        text: T ids.
        hidden: whether the hidden states of the first model are wanted.
        cached: whether the caches hold a prefix of the prompt, followed by anything, of a text already begun. Otherwise
            the prompt is read again.

    Yields:
        A part of the text, and the pass of each model over it: ``(C, V)`` logits for the C tokens of the part.
    """
    for runner in runners:
        if not cached:
            runner.begin(len(prompt))
        runner.rollback(len(prompt) - 1 if cached and not runner.whole_prompts else 0)
        if (pending := prompt[runner.length : -1]) and not runner.whole_prompts:
            runner.extend(pending, keep=0)
    read = [prompt[-1], *text]
    for start in range(0, len(text), CHUNK):
        part = slice(start, min(start + CHUNK, len(text)))
        chunk = read[part]
        before = () if start else prompt[:-1]
        yield (
            part,
            [
                runner.extend([*before[runner.length :], *chunk], keep=len(chunk), hidden=hidden and not n)
                for n, runner in enumerate(runners)
            ],
        )


NOTHING = (0.0,) * len(DISTRIBUTION_SIGNALS)
"""The signals of the step before the first token of a text, where none is known."""


def token_columns(
    forward: Forward,
    chosen: torch.Tensor,
    previous: Sequence[float] | Sequence[Sequence[float]] | None = None,
    predictors: Mapping[str, TrainedPredictor] | None = None,
    *,
    tops: bool = False,
) -> torch.Tensor:
    """The signals of tokens, the heads' predictions for the tokens fed before them, and the inputs of DISCO heads.

    Args:
        forward: logits ``(B, V)`` that predict the tokens and, for heads that read them, the hidden states ``(B, H)``
            of the tokens before.
        chosen: ``(B,)`` int64, the tokens.
        previous: for heads, ``(B, 3)`` `DISTRIBUTION_SIGNALS` of the steps that drew the tokens before; ``(3,)``, those
            of the step before the first, if each further token follows the one in the row before. None for the first
            tokens of rounds, which no draft token precedes.
        predictors: the draft's trained heads by name.
        tops: whether to read the largest probabilities although no DISCO head does.

    Returns:
        ``(B, W)`` float32: `DISTRIBUTION_SIGNALS`, a prediction of each head that reads hidden states and, where there
        is a DISCO head, the `specctl.policies.TOP_PROBS` largest probabilities.
    """
    predictors = predictors or {}
    rows = logits_of(forward)
    found = [_tensor(column) for column in rows.signals(chosen, frozenset(DISTRIBUTION_SIGNALS)).values()]
    if reading := state_predictors(predictors).values():
        if previous is None:
            found += [torch.ones_like(found[0])] * len(reading)
        else:
            assert forward.hidden is not None
            own = torch.stack(found, dim=1)  # (B, 3)
            before = own.new_tensor(previous)
            # A row's hidden state belongs to the token before its position, so the signals must too.
            before = torch.cat([before[None], own[:-1]]) if before.ndim == 1 else before
            found += [predictor.accept_prob(forward.hidden, before) for predictor in reading]
    if tops or disco_predictors(predictors):
        found += _tensor(rows.top_probs()).unbind(-1)
    return torch.stack(found, dim=1)


def token_row(forward: Forward, token: int) -> list[float]:
    """`DISTRIBUTION_SIGNALS` of a token after a pass with one row of logits."""
    row: list[float] = token_columns(forward, torch.tensor([token], device=forward.logits.device))[0].tolist()
    return row


def _tensor(column: Numbers) -> torch.Tensor:
    return column if isinstance(column, torch.Tensor) else torch.from_numpy(column)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """One token drawn from the draft at each of T positions, on the CPU."""

    tokens: torch.Tensor  # ``(T,)`` int64, Y
    acceptance: torch.Tensor  # ``(T,)`` float32, min(1, p(Y)/q(Y)) of the processed distributions
    signals: torch.Tensor  # ``(T, 3)`` float32, `DISTRIBUTION_SIGNALS` of the draft when it drew Y


def draw_along(
    target: Slot,
    draft: Slot,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> DraftTokens:
    """Run both models over an answer to a prompt, and draw a draft token at each of its positions.

    SpecDec++ makes its training data in this way (arXiv 2405.19715, section 4.4).

    Args:
        target: the verifier.
        draft: the draft model.
        prompt: at least one id.
        answer: X, at least one id.
        sampling: of both, see `decode`.
        generator: for the draws, on the target's device.
    """
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for _, (by_target, by_draft) in read_along([target, draft], prompt, answer):
            target_logits = by_target.logits  # (C, V)
            draft_logits = by_draft.logits.to(target_logits.device)
            draft_probs = sampling.probs(draft_logits)
            tokens = draw(draft_probs, generator)[:, None]  # (C, 1)
            ratio = sampling.probs(target_logits).gather(1, tokens) / draft_probs.gather(1, tokens)
            columns = tokens, ratio.clamp(max=1), token_columns(Forward(draft_logits), tokens[:, 0])
            # float64 holds ids and probabilities alike
            parts.append(torch.cat([column.double() for column in columns], dim=1).cpu())
    whole = torch.cat(parts)  # (T, 5)
    return DraftTokens(whole[:, 0].long(), whole[:, 1].float(), whole[:, 2:].float())


def predict_acceptance(
    draft: Slot, predictor: AcceptancePredictor, prompt: Sequence[int], answer: Sequence[int], drawn: DraftTokens
) -> torch.Tensor:
    """A head's acceptance probability of each draft token, ``(T,)`` float32 on the CPU.

    Costs a short pass of the draft for each token.

    Args:
        draft: the draft model.
        predictor: on the draft's device.
        prompt: at least one id.
        answer: T ids.
        drawn: the draft tokens at the answer's positions.
    """
    text = [*prompt, *answer]
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        signals = drawn.signals.to(draft.device)
        # Backwards: each pass then rolls back only one draft token and one token of the text.
        for position in reversed(range(len(answer))):
            end = len(prompt) + position
            draft.rollback(end)
            pending = [*text[draft.length : end], int(drawn.tokens[position])]
            hidden = draft.extend(pending, keep=1, hidden=True).hidden
            assert hidden is not None
            found.append(predictor.accept_prob(hidden[0], signals[position]))
    return torch.stack(found[::-1]).float().cpu()


def draft_token_generator(target: Slot, seed: int) -> torch.Generator:
    """A generator for draft tokens, independent of the one that drew the answer with the same seed."""
    return torch.Generator(target.device).manual_seed(random.Random(f"proposals/{seed}").getrandbits(63))
