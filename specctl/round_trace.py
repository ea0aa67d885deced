"""The trace of a generation: one line for each round, with the signals of each drafted token.

A line of ``specctl generate --trace``, wrapped here::

    {"kind": "round", "id": 1, "turn": 0, "round": 0,
     "drafted": 2, "accepted": 1, "stop": "policy", "threshold": 0.6, "draft_ms": 4.1, "verify_ms": 9.7,
     "extra": 17, "extra_kind": "correction",
     "steps": [{"token": 5, "accepted": true, "entropy": 0.1}, {"token": 9, "accepted": false, "entropy": 2.3}]}

In a hierarchy a round also has ``inner``, a list of such rounds.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from specctl.jsonl import Record
from specctl.policies import SIGNALS
from specctl.records import ExtraToken, Round, RoundSummary

Probability = Annotated[float, Field(ge=0, le=1.001, allow_inf_nan=False)]  # a float32 sum may pass 1
Nats = Annotated[float, Field(ge=-0.001, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One drafted token, whether verification accepted it, its signals as in `specctl.records.DraftStep`, and its
    source where a lookup copied it that drafts in turn with a model.

    Of a tree a level, whether the accepted path goes through it, and what the policy was asked about there."""

    token: int
    accepted: bool
    entropy: Nats | None = None
    top_prob: Probability | None = None
    token_prob: Probability | None = None
    accept_prob: Probability | None = None
    next_accept_prob: Probability | None = None
    own_accept_prob: Probability | None = None
    agreement: Annotated[float, Field(ge=-1, le=1)] | None = None
    source: Literal["lookup"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRound(RoundSummary):
    """A round with its tokens."""

    inner: "tuple[TracedRound, ...]" = ()  # in a hierarchy, the rounds in which the draft collected its block
    # extra, extra_kind: the verifier's own token and where it comes from, see `specctl.records.Round`
    extra: int | None
    extra_kind: ExtraToken | None
    steps: tuple[TracedStep, ...]  # the drafted tokens; of a tree its levels, see `specctl.records.Round`
    path: tuple[int, ...] = ()  # of a tree, the ids of the accepted tokens

    def __post_init__(self) -> None:
        if not self.accepted <= len(self.steps) == self.drafted:
            raise ValueError(f"{self.accepted} of {self.drafted} drafted tokens accepted, but {len(self.steps)} steps")

    @classmethod
    def of(cls, round_: Round) -> "TracedRound":
        """Convert a live round; times are rounded to microseconds."""
        summary = round_.summary.rounded()
        steps = (
            TracedStep(
                step.token,
                index < round_.accepted,
                **{name: getattr(step, name) for name in SIGNALS},
                source="lookup" if index >= round_.drafted - round_.copied else None,
            )
            for index, step in enumerate(round_.steps)
        )
        known = {one.name: getattr(summary, one.name) for one in fields(RoundSummary)}
        known["inner"] = tuple(map(TracedRound.of, round_.inner))
        return TracedRound(
            **known, extra=round_.extra, extra_kind=round_.extra_kind, steps=tuple(steps), path=round_.path
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine(TracedRound):
    """A round of a record: the record's ``id``, the ``turn`` and the number of the ``round`` within it, from 0; and the
    ``policy`` that the record named."""

    id: Any
    turn: int
    round: int
    policy: str | None = None


def trace_line(record: Record, turn: int, round_: Round) -> dict[str, Any]:
    """The line of a round, as JSON values; unknown values (a signal, inner rounds) are left out."""
    traced = _writer().dump_python(TracedRound.of(round_), mode="json", exclude_defaults=True)
    named = {"policy": record.data["policy"]} if record.data.get("policy") is not None else {}
    return {"kind": "round", "id": record.id, "turn": turn, "round": round_.index, **named, **traced}


@cache  # made when first needed, since every start of the program imports this module
def _writer() -> TypeAdapter[TracedRound]:
    return TypeAdapter(TracedRound)
