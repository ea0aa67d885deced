"""The seam between drafting and the rules that end it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, get_args

from specctl.records import DraftStep, Round

Signal = Literal["entropy", "top_prob", "token_prob", "accept_prob"]
"""A field of `DraftStep` that a policy may read."""
SIGNALS: tuple[Signal, ...] = get_args(Signal)
SIGNAL_NAMES = {
    "entropy": "draft entropy",
    "top_prob": "top probability",
    "token_prob": "drafted token's probability",
    "accept_prob": "predicted acceptance",
}
"""What tables call the signals."""
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


class Rule(ABC):
    """Defaults for policies: no state, no threshold, no signals, the triggering token kept.

    Attributes:
        reads: the signals that the policy reads, whatever its settings.
        keep_trigger, drafts: as in `StoppingPolicy`.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset()
    keep_trigger = True
    drafts = True

    @classmethod
    def signals_of(cls, values: Mapping[str, Any]) -> frozenset[Signal]:  # noqa: ARG003 - some policies read by it
        """The signals that the policy reads with these settings; those not given have their defaults."""
        return cls.reads

    @property
    def signals(self) -> frozenset[Signal]:
        return self.reads

    @property
    def current_threshold(self) -> float | None:
        return None

    def reset(self) -> None:  # noqa: B027 - most policies remember nothing
        pass

    @abstractmethod
    def draft_limit(self) -> int: ...

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - the seam's own signature
        return False

    def observe(self, round_: Round) -> None:  # noqa: B027 - most policies learn nothing
        pass


def read(signal: float | None) -> float:
    """A signal the rule named in ``signals``; raises ValueError where the drafter left it out."""
    if signal is None:
        raise ValueError("the drafter did not compute a signal this policy reads")
    return signal
