"""The interface between drafting and the policies that stop it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from specctl.records import DraftStep, Round

if TYPE_CHECKING:
    from specctl.policies.cost_optimal import CostOptimalBatch

Signal = Literal["entropy", "top_prob", "token_prob", "accept_prob", "next_accept_prob", "own_accept_prob", "agreement"]
"""A field of `DraftStep` that a policy may read."""
SIGNALS: tuple[Signal, ...] = get_args(Signal)
SIGNAL_NAMES = {
    "entropy": "draft entropy",
    "top_prob": "top probability",
    "token_prob": "drafted token's probability",
    "accept_prob": "predicted acceptance",
    "next_accept_prob": "acceptance predicted before drawing",
    "own_accept_prob": "acceptance predicted from the distribution",
    "agreement": "agreement with a lookup",
}
"""Names of the signals in tables."""
DISTRIBUTION_SIGNALS: tuple[Signal, ...] = ("entropy", "top_prob", "token_prob")
"""The signals computed from the draft's own distribution, in the order in which an acceptance head reads them."""
TRAINED_SIGNALS: frozenset[Signal] = frozenset({"accept_prob", "own_accept_prob"})
"""The signals that an acceptance head computes, each by a kind of head of its own (`train-head`)."""
TOP_PROBS = 10
"""How many of the draft's largest probabilities a DISCO head reads."""
LOOKUP_SIGNALS: frozenset[Signal] = frozenset({"next_accept_prob"})
"""The signals of a draft that copies from the text: it has no distribution."""


class StoppingPolicy(Protocol):
    """Decides after each draft token whether drafting stops. Works on plain numbers, live and in replay.

    Attributes:
        signals: the fields of `DraftStep` that `should_stop` or `observe` reads.
        keep_trigger: whether the token that triggers a stop is verified too. Dropping it keeps the output distribution
            exact only if the policy reads the draft's distribution but not the token drawn from it.
        drafts: whether the policy ever drafts; False for target-only decoding, which needs no draft model.
        current_threshold: the threshold that the signal is compared with now, for display; None for a policy without
            one.
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
        """Start a new sequence; called at least once before its first round."""

    def draft_limit(self) -> int:
        """The most tokens to draft in the next round; repeated calls before that round return the same number."""

    def should_stop(self, step: DraftStep) -> bool:
        """Whether drafting stops after this token; called for each draft token of a round, in order."""

    def observe(self, round_: Round) -> None:
        """Learn from a verified round."""


class Rule(ABC):
    """Defaults for policies: no state, no threshold, no signals; the triggering token is kept.

    Attributes:
        reads: the signals that the policy reads with any settings.
        grid: for each setting the values that ``calibrate`` combines; those of the built-in policies are in
            ``calibration/compared_settings.py``.
        keep_trigger, drafts: see `StoppingPolicy`.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset()
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    keep_trigger = True
    drafts = True

    @classmethod
    def signals_of(cls, values: Mapping[str, Any]) -> frozenset[Signal]:  # noqa: ARG003 - some policies need it
        """The signals that the policy reads with these settings; missing settings take their defaults."""
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

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - signature of the interface
        return False

    def observe(self, round_: Round) -> None:  # noqa: B027 - most policies learn nothing
        pass

    def expect(self, chance: float) -> None:  # noqa: B027 - most policies expect nothing
        """Receive the probability that a round's first token is accepted, before `draft_limit`.

        Only a lookup knows it, because it need not draft to learn how often it is right; 0 where it would copy nothing.
        """

    def rests(self) -> int:
        """The number of coming rounds in which the policy drafts nothing and needs no `observe`."""
        return 0

    def rested(self, rounds: int) -> None:  # noqa: B027 - most policies never rest
        """Count this many rounds of `rests`."""

    def joint(self) -> "CostOptimalBatch | None":
        """The object that decides for all texts of a batch together; None for a policy that is copied for each text."""
        return None


def never_stops(policy: StoppingPolicy) -> bool:
    """Whether a policy only limits the length of drafts, so that no token stops one early."""
    return isinstance(policy, Rule) and type(policy).should_stop is Rule.should_stop


@runtime_checkable
class Resting(Protocol):
    """A policy that may rest; see `Rule` for its methods."""

    def rests(self) -> int: ...

    def rested(self, rounds: int) -> None: ...


def rests(policy: StoppingPolicy) -> int:
    """`Rule.rests`; 0 of policies without it."""
    return policy.rests() if isinstance(policy, Rule) or isinstance(policy, Resting) else 0  # noqa: SIM101 - it is faster


def joint_of(policy: StoppingPolicy) -> "CostOptimalBatch | None":
    """`Rule.joint`; None for policies without it."""
    return policy.joint() if isinstance(policy, Rule) else None


def read(signal: float | None) -> float:
    """The value of a signal in the policy's ``signals``; raises ValueError if the drafter did not compute it."""
    if signal is None:
        raise ValueError("the drafter did not compute a signal this policy reads")
    return signal
