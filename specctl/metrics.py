"""The figures that policies are compared by, summed over rounds and completions."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specctl.records import Completion, CompletionSummary, Round, RoundSummary

UNKNOWN = "-"  # Shown for a missing value, such as the acceptance rate without drafts


@dataclass(slots=True)
class Level:
    """One draft, summed over rounds."""

    # its own forward passes: one per drafted token for the lowest draft, one per inner round for the others
    forwards: int = 0
    drafted: int = 0  # tokens it passed to its verifier
    accepted: int = 0  # drafted tokens that its verifier accepted
    seconds: float = 0.0  # spent in its own forward passes, without those of the levels below

    @property
    def redundancy(self) -> float:
        """HSDDW's sigma: 1 - accepted / drafted."""
        return 1 - self.accepted / self.drafted if self.drafted else 0.0

    @property
    def utilisation(self) -> float:
        """HSDDW's eta: forward passes per drafted token; 1 for the lowest draft."""
        return _ratio(self.forwards, self.drafted)


@dataclass(slots=True)
class Metrics:
    """Running sums over one or more sequences, and the rates derived from them.

    ``generated_tokens`` counts the tokens that completions keep; for a running sequence, the tokens that its rounds
    emitted. Times are seconds. Rates whose denominator is zero are 0.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    extras: int = 0  # tokens that verifiers added to their rounds
    nodes: int = 0  # verified tokens of dynamic trees; 0 for chains
    # copied, accepted_copies: how many of the drafted and of the accepted tokens came from a chain's lookup
    copied: int = 0
    accepted_copies: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overlap_seconds: float = 0.0  # drafting time during verification, not counted in ``draft_seconds``
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    # summed time to the first token (the end of the first round) of all finished sequences
    ttft_seconds: float = 0.0
    # summed time per output token after the first round, over the ``timed_outputs`` sequences that have one
    tpot_seconds: float = 0.0
    timed_outputs: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    # the drafts of a hierarchy, starting with the one that the target verifies. A single draft is a level too.
    levels: list[Level] = field(default_factory=list)

    @classmethod
    def of(cls, completions: Iterable[Completion | CompletionSummary]) -> "Metrics":
        metrics = cls()
        for completion in completions:
            metrics.add(completion.summary)
        return metrics

    def add_round(self, round_: Round) -> None:
        """Count a round of a sequence that is still running."""
        self._count(round_.summary)
        self.generated_tokens += len(round_.emitted)
        self.total_seconds += round_.total_seconds

    def add(self, completion: CompletionSummary) -> None:
        """Count a finished sequence with all its rounds."""
        for round_ in completion.rounds:
            self._count(round_)
        self.sequences += 1
        self.prompt_tokens += completion.prompt_tokens
        self.generated_tokens += len(completion.tokens)
        self.prefill_seconds += completion.prefill_ms / 1e3
        self.total_seconds += completion.total_ms / 1e3
        self.ttft_seconds += completion.first_token_ms / 1e3
        if completion.tpot_ms is not None:
            self.tpot_seconds += completion.tpot_ms / 1e3
            self.timed_outputs += 1

    def _count(self, round_: RoundSummary) -> None:
        self.rounds += 1
        self.drafted += round_.drafted
        self.accepted += round_.accepted
        self.extras += round_.overlap_ms is None or round_.accepted < round_.drafted
        self.nodes += sum(round_.tree)
        self.copied += round_.copied
        self.accepted_copies += round_.accepted_copies
        self.draft_seconds += round_.draft_ms / 1e3
        self.verify_seconds += round_.verify_ms / 1e3
        self.overlap_seconds += (round_.overlap_ms or 0.0) / 1e3
        if round_.stop is not None:
            self.stops[str(round_.stop)] += 1
            self._count_level(round_, 0)

    def _count_level(self, round_: RoundSummary, depth: int) -> None:
        if depth == len(self.levels):
            self.levels.append(Level())
        level = self.levels[depth]
        level.forwards += round_.draft_forwards
        level.drafted += round_.drafted
        level.accepted += round_.accepted
        if not round_.inner:
            level.seconds += round_.draft_ms / 1e3
        for inner in round_.inner:
            level.seconds += inner.verify_ms / 1e3
            self._count_level(inner, depth + 1)

    @property
    def acceptance_rate(self) -> float:
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        return _ratio(self.extras + self.accepted, self.rounds)

    @property
    def verification_rate(self) -> float:
        return _ratio(self.rounds, self.generated_tokens)

    @property
    def discard_rate(self) -> float:
        return _ratio(self.drafted - self.accepted, self.generated_tokens)

    @property
    def tokens_per_second(self) -> float:
        return _ratio(self.generated_tokens, self.total_seconds)

    def as_record(self) -> dict[str, Any]:
        """The ``metrics`` object of an output record; times in milliseconds.

        A hierarchy also has ``levels``, and runs with trees or copies have their counts.
        """
        record: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "verification_rate": round(self.verification_rate, 4),
            "discard_rate": round(self.discard_rate, 4),
            "draft_ms": round(self.draft_seconds * 1e3, 3),
            "verify_ms": round(self.verify_seconds * 1e3, 3),
            "prefill_ms": round(self.prefill_seconds * 1e3, 3),
            "total_ms": round(self.total_seconds * 1e3, 3),
            "ttft_ms": round(_ratio(self.ttft_seconds, self.sequences) * 1e3, 3),
            "tpot_ms": round(self.tpot_seconds / self.timed_outputs * 1e3, 3) if self.timed_outputs else None,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
        if self.overlap_seconds:
            record["overlap_ms"] = round(self.overlap_seconds * 1e3, 3)
        if self.nodes:
            record["nodes"] = self.nodes
        if self.copied:
            record |= {"copied": self.copied, "accepted_copies": self.accepted_copies}
        if len(self.levels) < 2:
            return record
        levels = [
            {
                "draft": ".".join(["draft"] * (depth + 1)),
                "forwards": level.forwards,
                "forwards_per_token": round(_ratio(level.forwards, self.generated_tokens), 4),
                "drafted": level.drafted,
                "accepted": level.accepted,
                "redundancy": round(level.redundancy, 4),
                "utilisation": round(level.utilisation, 4),
                "ms": round(level.seconds * 1e3, 3),
            }
            for depth, level in enumerate(self.levels)
        ]
        return {**record, "levels": levels}


def shown_rates(metrics: Metrics) -> list[tuple[str, str]]:
    """Drafting rates as names and values for display; missing values are `UNKNOWN`."""
    rates = [
        ("acceptance rate", f"{metrics.acceptance_rate:.1%}" if metrics.drafted else UNKNOWN),
        ("mean acceptance length", f"{metrics.mean_acceptance_length:.2f}"),
        ("verification rate", f"{metrics.verification_rate:.3f}"),
        ("discard rate", f"{metrics.discard_rate:.3f}"),
    ]
    if metrics.nodes:
        rates.append(("nodes a round", f"{metrics.nodes / metrics.rounds:.1f}"))
    if metrics.copied:
        rates.append(("accepted copies", f"{metrics.accepted_copies} of {metrics.copied}"))
    return rates


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
