"""A prompt becomes a completion: the loop plus text, stop strings and the clock."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from specctl.decoding.drafters import Drafter
from specctl.decoding.loop import decode, prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import decode_after, find_stop
from specctl.models.running.runner import Runner
from specctl.records import Completion, FinishReason, Round


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate.

    Attributes:
        prompt: ids, at least one.
        max_new_tokens: at least 1.
        sampling: how tokens are drawn.
        seed: of the generator, to be noted.
        stop: strings at whose first appearance the text ends, the string itself left out.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    seed: int = 0


def complete(
    target: Runner,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase,
    request: Request,
    eos: Set[int],
    generator: torch.Generator | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Completion:
    """Run one request to its end; ``on_round`` sees each round as it ends, and what it costs is not counted."""
    rounds: list[Round] = []
    tokens: list[int] = []
    finish = FinishReason.LENGTH
    watching = 0.0
    text: str | None = None
    with torch.inference_mode():
        target.rollback(0)
        if drafter is not None:
            drafter.rollback(0)
        began = perf_counter()
        prefill(target, drafter, request.prompt)
        prefilled = first = perf_counter()
        for round_ in decode(target, drafter, request.prompt, request.max_new_tokens, request.sampling, eos, generator):
            rounds.append(round_)
            tokens.extend(round_.emitted)
            if len(rounds) == 1:
                first = perf_counter()
            if on_round is not None:
                paused = perf_counter()
                on_round(round_)
                watching += perf_counter() - paused
            if request.stop and (found := find_stop(tokenizer, request.prompt, tokens, request.stop)):
                count, text = found
                del tokens[count:]
                finish = FinishReason.STOP
                break
        ended = perf_counter()
    if tokens and tokens[-1] in eos:
        finish = FinishReason.STOP
    if text is None:
        text = decode_after(tokenizer, request.prompt, tokens)
    return Completion(
        prompt=tuple(request.prompt),
        seed=request.seed,
        tokens=tuple(tokens),
        text=text,
        finish_reason=finish,
        rounds=tuple(rounds),
        prefill_seconds=prefilled - began,
        total_seconds=ended - began - watching,
        first_token_seconds=first - began,
    )
