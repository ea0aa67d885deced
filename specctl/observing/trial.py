"""A loaded pair tried out: whether the target forgets rejected tokens, and a few tokens with and without drafts."""

from dataclasses import dataclass

import torch

from specctl.decoding.session import Session, build_drafter
from specctl.models.loading.pair import Pair
from specctl.models.running.checked import CheckedRunner
from specctl.models.running.runner import Runner
from specctl.profile.schema import Profile

PROMPT = "Once upon a time, there was a"
TOKENS = 32


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial showed.

    Attributes:
        tokens: how many were generated, greedily; fewer than `TOKENS` where the text ended.
        same: whether drafting gave the target's own tokens; None without a draft that is used.
        difference: between the target after a rollback and a fresh read, as a share of the logits' standard deviation.
        alone_per_second, drafted_per_second: tokens a second without and with drafts, the prompt's time included.
        acceptance_rate: accepted of drafted tokens.
    """

    tokens: int
    same: bool | None
    difference: float
    alone_per_second: float
    drafted_per_second: float | None
    acceptance_rate: float | None


def try_out(pair: Pair, profile: Profile) -> Trial:
    """Generate a few tokens with a pair that was loaded with ``check = true``, and roll the target back at least once.

    Raises:
        ModelError: the target does not forget rejected tokens.
    """
    prompt: list[int] = pair.tokenizer.encode(PROMPT)
    settings = profile.sampling.model_copy(update={"temperature": 0.0, "max_new_tokens": TOKENS, "stop": []})
    Session(pair, None).generate(prompt, settings.model_copy(update={"max_new_tokens": 2}))  # the first pass is slow
    alone = Session(pair, None).generate(prompt, settings)
    drafter = build_drafter(pair, profile.draft.setting) if profile.draft is not None else None
    drafted = Session(pair, drafter).generate(prompt, settings) if drafter is not None else None
    rounds = drafted.rounds if drafted is not None else ()
    total = sum(round_.drafted for round_ in rounds)
    return Trial(
        tokens=len(alone.tokens),
        same=None if drafted is None else drafted.tokens == alone.tokens,
        difference=_difference(pair.target, [*prompt, *alone.tokens]),
        alone_per_second=len(alone.tokens) / alone.total_seconds,
        drafted_per_second=None if drafted is None else len(drafted.tokens) / drafted.total_seconds,
        acceptance_rate=sum(round_.accepted for round_ in rounds) / total if total else None,
    )


def _difference(target: Runner, text: list[int]) -> float:
    """What the check of the target found; where nothing was rejected so far, some of a text is taken back."""
    checked = target
    while not isinstance(checked, CheckedRunner):
        checked = checked.runner  # type: ignore[attr-defined]
    if checked.difference is None:
        with torch.inference_mode():
            checked.rollback(0)
            checked.extend(text[:-1], keep=0)
            checked.rollback(len(text) - 1)
            checked.extend([text[-1], *text[:3]], keep=4)
            checked.rollback(len(text))
            checked.extend([*text[checked.length :], text[0]], keep=1)
            checked.rollback(0)
    assert checked.difference is not None
    return checked.difference
