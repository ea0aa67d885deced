"""The seam between drafting and the rules that end it."""

from typing import Literal, Protocol, get_args

from specctl.records import DraftStep, Round

Signal = Literal["entropy", "top_prob", "token_prob", "accept_prob"]
"""A field of `DraftStep` that a policy may read."""
SIGNALS: tuple[Signal, ...] = get_args(Signal)
DISTRIBUTION_SIGNALS: tuple[Signal, ...] = ("entropy", "top_prob", "token_prob")
"""The signals computed from the draft's own distribution, in the order in which an acceptance head reads them."""


class StoppingPolicy(Protocol):
    """Decides after each drafted token whether the draft should stop. Pure numbers: runs live and in replay alike.

    Attributes:
        signals: the fields of `DraftStep` that `should_stop` or `observe` reads.
        keep_trigger: whether the token that triggers a stop is offered for verification. Dropping it is lawful only
            for rules that read the distribution and not the drawn token.
        drafts: whether it ever drafts; False for target-only decoding, which needs no draft model.
        current_threshold: what the signal is compared with now, for people to watch; None for rules without one.
    """

    @property
    def signals(self) -> frozenset[Signal]: ...

    @property
    def keep_trigger(self) -> bool: ...

    @property
    def drafts(self) -> bool: ...

    @property
    def current_threshold(self) -> float | None: ...

    def reset(self) -> None:
        """A new sequence begins."""

    def draft_limit(self) -> int:
        """The most tokens to draft in the coming round; asked any number of times, it says the same."""

    def should_stop(self, step: DraftStep) -> bool:
        """Asked after each drafted token, in order."""

    def observe(self, round_: Round) -> None:
        """A round was verified: adapt."""


class Rule:
    """Defaults for the rules: nothing to remember, nothing to show, the triggering token kept."""

    keep_trigger = True
    drafts = True

    @property
    def current_threshold(self) -> float | None:
        return None

    def reset(self) -> None:
        pass

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - the seam's own signature
        return False

    def observe(self, round_: Round) -> None:
        pass


def read(signal: float | None) -> float:
    """A signal the rule named in ``signals``; raises ValueError where the drafter left it out."""
    if signal is None:
        raise ValueError("the drafter did not compute a signal this policy reads")
    return signal
