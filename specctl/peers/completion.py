"""A peer's answer as a completion."""

from collections.abc import Sequence

from specctl.decoding.text import decode_after
from specctl.models.running.pair import Pair
from specctl.records import Completion, FinishReason


def completion_of(
    pair: Pair,
    prompt: Sequence[int],
    seed: int,
    tokens: Sequence[int],
    total_seconds: float,
    first_token_seconds: float,
    arrivals: tuple[float, ...] = (),
) -> Completion:
    """What a peer wrote after a prompt, as a `Completion` without rounds; its times hold the prompt's too.

    Args:
        pair: the same models.
        prompt, tokens: ids; an end of sequence can only be the last token.
        seed: of the draws.
        total_seconds, first_token_seconds, arrivals: as in `Completion`.
    """
    ended = bool(tokens) and tokens[-1] in pair.eos
    return Completion(
        prompt=tuple(prompt),
        seed=seed,
        tokens=tuple(tokens),
        text=decode_after(pair.tokenizer, prompt, tokens, pair.eos),
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        rounds=(),
        prefill_seconds=0.0,
        total_seconds=total_seconds,
        first_token_seconds=first_token_seconds,
        arrivals=arrivals,
    )
