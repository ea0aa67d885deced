"""How likely the target found the tokens that it kept. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target's softmax at temperature 1 gives an emitted token, of logits that follow the token rules.

    Temperature and filters leave it as it is.

    Attributes:
        id: of the token.
        logprob: its log-probability in nats.
        top: the likeliest ids with theirs, falling; none of them that cannot follow.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
