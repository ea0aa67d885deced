"""How many tokens of a draft are kept, and the verifier's own token after them, by numpy: exactness rests on this.

`device_verdict` has the same by torch. Below, p and q are the verifier's and the draft's probabilities.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specctl.decoding.rows.draft_verdict import Verdict, kept_in_turn, require_numbers, verdict_of
from specctl.decoding.rows.draws import picked
from specctl.decoding.rows.host_laws import TINY, Floats
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.profile.schema import Verification
from specctl.records import ExtraToken


class Kept(NamedTuple):
    """What a rule decides on K draft tokens.

    Attributes:
        accepted: n, how many are kept, from the first.
        weight: w, such that after n < K tokens the verifier's own token is drawn from max(w p - q, 0), normalised.
        chances: of each draft token the probability of being kept, given all K tokens and that those before are kept.
    """

    accepted: int
    weight: float
    chances: Sequence[float]


def verified(
    tokens: Sequence[int],
    draft: Floats,
    target: Floats,
    numbers: Sequence[float],
    verification: Verification = "token",
    vocabulary: DraftVocabulary | None = None,
) -> Verdict:
    """`Rows.verify` where nothing waits for a device, so that token by token only the extra token's row is read whole.

    Args:
        tokens: K ids, drawn from ``draft``.
        draft: ``(K, N)``, the very distributions the tokens were drawn from.
        target: ``(K + 1, V)``; or ``(K, V)``, K > 0, where no token is to follow a draft that is kept as a whole.
        numbers: K + 1 of them, uniform in [0, 1): a coin for each token, and the extra token's draw.
        verification: which of the two rules.
        vocabulary: as of `Rows.verify`.

    Raises:
        RecordError: ``target`` holds NaN.
    """
    count = len(tokens)
    require_numbers(*target[:, 0].tolist())  # a law that holds NaN holds nothing else
    *coins, last = numbers
    if not count:
        return Verdict(0, picked(target[0], last), ExtraToken.BONUS, ())
    columns = tokens if vocabulary is None else vocabulary.columns(tokens)
    # So few numbers are sooner compared one by one.
    target_of = [target.item(place, token) for place, token in enumerate(tokens)]
    draft_of = [draft.item(place, column) for place, column in enumerate(columns)]
    if verification == "block":
        kept = by_block(target_of, draft_of, draft, target, coins, vocabulary)
    else:
        kept = by_token(target_of, draft_of, coins)
    if kept.accepted == len(target):
        return verdict_of(count, None, kept.chances)
    row = target[kept.accepted]  # (V,)
    if kept.accepted < count:
        residual = less(row * np.float32(kept.weight), draft[kept.accepted], vocabulary)
        np.maximum(residual, 0, out=residual)
        row = residual if residual[residual.argmax()] else row
    return verdict_of(kept.accepted, picked(row, last), kept.chances)


def less(rows: Floats, draft: Floats, vocabulary: DraftVocabulary | None) -> Floats:
    """Numbers ``(..., V)``, whose memory may be used, less a draft's probabilities ``(..., N)``."""
    return np.subtract(rows, draft, out=rows) if vocabulary is None else vocabulary.less(rows, draft)


def by_token(target_of: Sequence[float], draft_of: Sequence[float], coins: Sequence[float]) -> Kept:
    """Keep token i with probability min(1, p_i / q_i) while all before it are kept (arXiv 2211.17192, Alg. 1).

    Args:
        target_of, draft_of: p and q of each of K draft tokens.
        coins: K numbers, uniform in [0, 1).
    """
    pairs = list(zip(target_of, draft_of, strict=True))
    tossed = enumerate(zip(pairs, coins, strict=True))
    accepted = next((place for place, ((p, q), coin) in tossed if not (p >= q or coin * q < p)), len(pairs))
    return Kept(accepted, 1.0, [float(np.float32(min(p / max(q, TINY), 1.0))) for p, q in pairs])


def by_block(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft_probs: Floats,
    target_probs: Floats,
    coins: Sequence[float],
    vocabulary: DraftVocabulary | None = None,
) -> Kept:
    """Keep the longest beginning of the draft that passes (Sun et al., arXiv 2403.10444, Alg. 2).

    Whether one of the beginnings passes does not depend on the others, so later ones are looked at even if an early one
    fails. Given its first i tokens alone, i or more are then kept with probability w_i, see `passing`: the most that
    leaves the verifier's distribution as it is.

    Args:
        target_of, draft_of, draft_probs, target_probs, vocabulary: as in `passing`.
        coins: K numbers, uniform in [0, 1).
    """
    weights, chances = passing(target_of, draft_of, draft_probs, target_probs, vocabulary)
    tossed = enumerate(zip(coins, chances, strict=True), start=1)
    accepted = max((number for number, (coin, chance) in tossed if coin < chance), default=0)
    return Kept(accepted, weights[accepted], kept_in_turn(chances))


def passing(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft_probs: Floats,
    target_probs: Floats,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[float], list[float]]:  # K + 1, K
    """Of block verification, the weights w_0 to w_K and the probabilities h_1 to h_K that a beginning passes.

    w_0 = 1 and w_i = min(w_{i-1} p_i / q_i, 1). The first i < K tokens pass with h_i = Z_i / (Z_i + 1 - w_i), Z_i the
    sum over x of max(w_i p(x) - q(x), 0) after these tokens, and the whole draft with h_K = w_K.

    Args:
        target_of, draft_of: p and q of each of K draft tokens.
        draft_probs: ``(K, N)``, q at each draft token.
        target_probs: ``(K, V)`` or more, p at each draft token; rows after the last are not read.
        vocabulary: as of `Rows.verify`.
    """
    ratios = [float(p) / max(float(q), TINY) for p, q in zip(target_of, draft_of, strict=True)]
    weights = list(accumulate(ratios, lambda weight, ratio: min(weight * ratio, 1.0), initial=1.0))
    chances = weights[1:]
    for place, weight in enumerate(chances[:-1], start=1):
        # At 1 it passes: also where p = q and Z / Z has no value, for then a longer beginning passes for certain.
        if 0 < weight < 1:
            above = less(target_probs[place] * np.float32(weight), draft_probs[place], vocabulary)  # (V,)
            surplus = float(np.add.reduce(np.maximum(above, 0, out=above)))
            chances[place - 1] = surplus / (surplus + (1 - weight))
    return weights, chances
