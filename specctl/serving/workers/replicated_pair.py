"""A pair that replicas have loaded, as far as who asks them has to know it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.models.files.tokenizer import BareTokenizer, Spelling, Tokenizer, light
from specctl.models.running.pair import Pair, room_in
from specctl.replicas.local import LocalReplicas


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What a replica tells of its pair.

    Attributes:
        spelling: of the target's tokenizer; None where only transformers has all of it.
        eos, context, vocabulary: as of `Pair`.
        offer: what may be asked, as `specctl.serving.offer` says it.
        rows: texts that it writes at once.
    """

    spelling: Spelling | None
    eos: frozenset[int]
    context: int
    vocabulary: int
    offer: dict[str, Any]
    rows: int

    @classmethod
    def of(cls, pair: Pair, offered: dict[str, Any], rows: int) -> "PairFacts":
        """Those of a pair that is loaded."""
        tokenizer = light(pair.tokenizer)
        spelling = tokenizer.spelling if isinstance(tokenizer, BareTokenizer) else None
        return cls(spelling, pair.eos, pair.context, pair.vocabulary, offered, rows)


@dataclass(frozen=True, slots=True)
class ReplicatedPair:
    """Replicas of a pair, each a `specctl.serving.workers.replica_writer.ReplicaWriter`.

    Attributes:
        replicas: one of them is ready.
        workers: how many there are.
        tokenizer: the target's.
        facts: as they tell them.
    """

    replicas: LocalReplicas
    workers: int
    tokenizer: Tokenizer
    facts: PairFacts

    @property
    def eos(self) -> frozenset[int]:
        return self.facts.eos

    @property
    def context(self) -> int:
        return self.facts.context

    @property
    def vocabulary(self) -> int:
        return self.facts.vocabulary

    def room(self, prompt: Sequence[int]) -> int:
        """As of `Pair`."""
        return room_in(self.context, self.vocabulary, prompt)
