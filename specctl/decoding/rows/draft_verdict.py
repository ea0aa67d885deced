"""What was decided on a draft, and what follows from numbers alone: no arrays here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isnan

from specctl.errors import RecordError
from specctl.records import ExtraToken


# Nobody changes these; frozen ones take four times as long to make, and a round makes several.
@dataclass(slots=True)
class Verdict:
    """How many draft tokens are accepted, and the verifier's own token after them.

    Attributes:
        accepted: n.
        extra: id of the verifier's token; None after a draft that is kept as a whole, where the verifier has read no
            place behind it.
        kind: correction after a rejection, else bonus; None where there is no such token.
        chances: of each accepted token and of the first rejected one, see `specctl.records.Round.chances`; None when
            greedy.
    """

    accepted: int
    extra: int | None
    kind: ExtraToken | None
    chances: tuple[float, ...] | None = None


def verdict_of(accepted: int, extra: int | None, chances: Sequence[float]) -> Verdict:
    """The verdict on a draft of at least one token, from the chances of all its tokens."""
    if extra is None:
        return Verdict(accepted, None, None, tuple(chances))
    kind = ExtraToken.BONUS if accepted == len(chances) else ExtraToken.CORRECTION
    return Verdict(accepted, extra, kind, tuple(chances[: accepted + 1]))


def require_numbers(*values: float) -> None:
    """Raise a RecordError if something that a verifier computed is not a number."""
    if any(map(isnan, values)):
        raise RecordError(
            "not_a_number",
            "a verifying model computed NaN instead of logits; float16 may be too narrow for it (try dtype bfloat16 or "
            "float32), or its weights are damaged",
        )


def verify_greedy(tokens: Sequence[int], target_choices: Sequence[int]) -> Verdict:
    """The verdict at temperature 0, where both distributions are one-hot: tokens are kept while they are the target's
    argmax.

    Args:
        tokens: the K drafted ids.
        target_choices: the target's argmax at each of them and after the last, K + 1 ids; or K, K > 0, where no token
            is to follow a draft that is kept as a whole.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == target_choices[accepted]:
        accepted += 1
    if accepted == len(target_choices):
        return Verdict(accepted, None, None)
    kind = ExtraToken.BONUS if accepted == len(tokens) else ExtraToken.CORRECTION
    return Verdict(accepted, target_choices[accepted], kind)


def kept_in_turn(passing: Sequence[float]) -> list[float]:
    """Of each of K draft tokens, the probability that it is kept, given all K and that those before it are.

    Args:
        passing: of block verification h_1 to h_K, the probabilities that the draft's beginnings pass; see
            `specctl.decoding.rows.host_verdict.passing`.
    """
    # Fewer than i tokens are kept if neither these i nor a longer beginning passes: a product from the end.
    fewer = [*accumulate(reversed(passing), lambda failed, chance: failed * (1 - chance), initial=1.0)][:0:-1]
    at_least = [1.0, *(1 - failed for failed in fewer)]  # of 0 to K tokens
    return [kept / before if before else 0.0 for before, kept in pairwise(at_least)]
