"""Does `decode` follow the target's law, whatever the policy? Run as a script, prints a table of the exact errors."""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from time import process_time

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from scipy.stats import chi2

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, StoppingPolicy
from specctl.records import Round
from tests.support.enumeration import largest_difference, steady_clocks, walk
from tests.support.toys import EOS, TableRunner, head_for, law, related_table, seeded, table, toy_head

# Three tokens and few places, so that all branches can be walked.
TARGET = table(8, eos_logit=-0.5, spread=1.0, vocabulary=3)
DRAFT = related_table(TARGET, seed=9, noise=0.8)
MID = related_table(TARGET, seed=5, noise=0.6)
FASTEST = related_table(DRAFT, seed=6, noise=0.6)
HEAD = toy_head(DRAFT, seed=5)
PROMPT = [1, 2]
LENGTH = 4
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_k=2, top_p=0.95)
FEW = "T=0.7 top_k=2 top_p=0.95"
BY_BLOCK, FEW_BY_BLOCK = "T=1 by block", f"{FEW} by block"
SAMPLINGS = {
    "T=1": PLAIN,
    FEW: FILTERED,
    BY_BLOCK: replace(PLAIN, verification="block"),
    FEW_BY_BLOCK: replace(FILTERED, verification="block"),
}
ENDS = frozenset({EOS})

# Settings that stop often but not always, so that the stop itself is what is tested; each with the stops that do occur
# when the sampling is plain, beside the end of sequence and the budget, which all have.
SETTINGS: dict[str, list[tuple[dict[str, object], str]]] = {
    "none": [({}, "")],
    "constant": [({"draft_length": 1}, "max_draft"), ({"draft_length": 3}, "max_draft")],
    "heuristic": [({"draft_length": 2}, "max_draft"), ({"draft_length": 1, "carry_over": True}, "max_draft")],
    "max-confidence": [
        ({"adapt": False, "threshold": 0.5}, "policy"),
        ({"adapt": False, "threshold": 0.6, "keep_trigger": False}, "policy"),
        ({"threshold": 0.55, "eps": 0.3, "beta2": 0.0}, "policy"),
        ({"threshold": 0.55, "eps": 0.3, "beta2": 0.0, "carry_over": True}, "policy"),
    ],
    "svip": [
        ({}, "policy"),
        ({"threshold": 0.37}, "policy"),
        ({"c": 1.0, "threshold": 0.87, "keep_trigger": False}, "policy"),
    ],
    "adaedl": [
        ({"threshold": 0.6, "eps": 0.3, "beta2": 0.0}, "policy"),
        ({"threshold": 0.6, "eps": 0.3, "beta2": 0.0, "carry_over": True}, "policy"),
        ({"threshold": 0.6, "keep_trigger": False}, "policy"),
    ],
    "self-verify": [({}, "policy"), ({"carry_over": True}, "policy")],
    # With a threshold of 0 the head's slightest doubt ends a round after two tokens, or even one.
    "specdec++": [
        ({"threshold": 0.0}, "policy"),
        ({"threshold": 0.6, "min_draft": 1, "max_draft": 3}, "policy max_draft"),
        ({"threshold": 0.45}, "policy"),
    ],
    "disco": [
        ({}, "policy"),
        ({"threshold": 0.45, "max_draft": 3}, "policy max_draft"),
        ({"threshold": 0.55}, "policy"),
    ],
    "confidence": [
        ({"threshold": 0.7}, "policy"),
        ({"threshold": 0.4, "max_draft": 3}, "policy max_draft"),
    ],
    # Of three rounds, the third is drafted by whichever arm the first two speak for.
    "bandit": [
        ({"arms": ("max-confidence:adapt=false,threshold=0.5", "constant:draft_length=1")}, "policy max_draft"),
        ({"arms": ("heuristic", "svip:threshold=0.37"), "max_draft": 2, "carry_over": False}, "policy max_draft"),
    ],
    # Learned from all sequences so far.
    "cost-optimal": [
        ({"use_head": True, "cost_ratio": 0.5}, "policy"),
        ({"max_draft": 2}, "max_draft"),
        ({"use_foresight": True, "cost_ratio": 0.5}, "policy"),
        ({"use_agreement": True, "cost_ratio": 0.5}, "policy"),
        ({"carry_over": False, "cost_ratio": 0.5}, "policy"),
        ({}, ""),
    ],
}


@dataclass(frozen=True)
class Case:
    """A draft alone.

    Attributes:
        stops: why its rounds end, beside the end of sequence and the budget.
        length: how many of the tokens are looked at.
        limit: tokens to generate.
    """

    name: str
    sampling: str
    settings: dict[str, object] = field(default_factory=dict)
    stops: str = ""
    length: int = LENGTH
    limit: int = LENGTH

    @property
    def setting(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "defaults"
        far = f"; limit {self.limit}" if self.limit > self.length else ""
        return f"{shown}; {self.sampling}{far}"

    def __str__(self) -> str:
        return f"{self.name}: {self.setting}"

    def policy(self) -> StoppingPolicy:
        return POLICIES[self.name](**self.settings)

    def drafter(self) -> Drafter:
        policy = self.policy()
        return ModelDrafter(TableRunner(DRAFT), policy, predictor=head_for(policy, HEAD))


# A policy without an entry above is still tested, with its defaults.
CASES = [Case(name, "T=1", *setting) for name in POLICIES for setting in SETTINGS.get(name, [({}, "")])]
CASES += [Case(name, FEW, *SETTINGS.get(name, [({}, "")])[-1]) for name in POLICIES]
CASES += [Case(name, BY_BLOCK, *SETTINGS.get(name, [({}, "")])[-1]) for name in POLICIES if name != "none"]
CASES += [Case("constant", FEW_BY_BLOCK, {"draft_length": 3})]


@dataclass(frozen=True)
class Hierarchy:
    """Several drafts, each the verifier of the one below it.

    Attributes:
        levels: policy and settings of each draft, the target's own first.
        stops: why blocks of the first draft end and, behind a slash, why those of the drafts below do.
        once: whether the levels above the lowest offer their block after one inner round.
        length: how many of the tokens are looked at.
        limit: tokens to generate: longer blocks than are looked at are what matters.
    """

    name: str
    levels: tuple[tuple[str, dict[str, object]], ...]
    stops: str = ""
    once: bool = False
    sampling: str = "T=1"
    length: int = 3
    limit: int = 5

    @property
    def setting(self) -> str:
        shown = [
            name + "".join(f" {key}={value}" for key, value in settings.items()) + " once" * (self.once and not place)
            for place, (name, settings) in enumerate(self.levels)
        ]
        return f"{' < '.join(shown)}; {self.sampling}; {self.length} of {self.limit}"

    def __str__(self) -> str:
        return f"{self.name}: {self.setting}"

    def drafter(self) -> Drafter:
        tables = (MID, DRAFT, FASTEST)[: len(self.levels)]
        *upper, ((name, settings), lowest) = zip(self.levels, tables, strict=True)
        drafter: Drafter = ModelDrafter(TableRunner(lowest), POLICIES[name](**settings))
        for (name, settings), middle in reversed(upper):
            drafter = PreVerifiedDrafter(drafter, TableRunner(middle), POLICIES[name](**settings), once=self.once)
        return drafter


# Small caps too: every way a block can end must happen.
SELF_VERIFY = ("self-verify", {"max_draft": 3, "carry_over": True})
SVIP = ("svip", {"c": 1.0, "threshold": 0.87, "max_draft": 3})
SHORT_SVIP = ("svip", {"c": 1.0, "threshold": 0.87, "max_draft": 2})
DROPPING_SVIP = ("svip", {"c": 1.0, "threshold": 0.9, "max_draft": 2, "keep_trigger": False})
HIERARCHIES = [
    Hierarchy("draft by M2", (SELF_VERIFY,), "policy max_draft eos"),
    Hierarchy(
        "pre-verify once",
        (("constant", {"draft_length": 2}), ("constant", {"draft_length": 1})),
        "policy max_draft eos / max_draft eos",
        once=True,
    ),
    Hierarchy(
        "pre-verify + self-verify once",
        (("constant", {"draft_length": 4}), SELF_VERIFY),
        "policy budget eos / policy budget eos",
        once=True,
    ),
    Hierarchy("full", (("self-verify", {}), ("self-verify", {})), "policy budget eos / policy budget eos"),
    Hierarchy(
        "full, near the limit",
        (("self-verify", {}), ("self-verify", {})),
        "policy budget eos / policy budget eos",
        length=4,
        limit=4,
    ),
    Hierarchy("full, tight caps", (SELF_VERIFY, SELF_VERIFY), "policy max_draft eos / policy budget eos", limit=6),
    Hierarchy(
        "both learn what pays",
        (("cost-optimal", {"max_draft": 2}), ("cost-optimal", {"max_draft": 2})),
        "max_draft eos / budget eos",
    ),
    Hierarchy(
        "the upper one chooses a policy each round",
        (("bandit", {"arms": ("svip:threshold=0.37", "constant:draft_length=2")}), ("constant", {"draft_length": 1})),
        "policy max_draft eos / max_draft budget eos",
    ),
    Hierarchy(
        "full, tight caps",
        (SELF_VERIFY, SELF_VERIFY),
        "policy max_draft budget / policy budget",
        sampling=FEW,
        length=4,
        limit=6,
    ),
    Hierarchy(
        "mixed",
        (("max-confidence", {"threshold": 0.6, "adapt": False, "max_draft": 3}), SHORT_SVIP),
        "policy budget eos / policy budget eos",
    ),
    Hierarchy(
        "mixed",
        (SHORT_SVIP, ("adaedl", {"threshold": 0.6, "eps": 0.3, "max_draft": 2})),
        "policy max_draft eos / policy budget eos",
    ),
    Hierarchy(
        "M2 drops its trigger",
        (DROPPING_SVIP, SELF_VERIFY),
        "policy max_draft budget eos / policy budget eos",
        limit=4,
    ),
    Hierarchy(
        "both drop their trigger",
        (DROPPING_SVIP, DROPPING_SVIP),
        "policy max_draft budget eos / policy budget eos",
        limit=4,
    ),
    Hierarchy(
        "both drop their trigger",
        (DROPPING_SVIP, DROPPING_SVIP),
        "policy max_draft eos / policy budget eos",
        length=2,
        limit=4,
    ),
    Hierarchy("M1 never drafts", (SVIP, ("none", {})), "policy budget eos / max_draft"),
    Hierarchy(
        "four levels",
        (SELF_VERIFY, SHORT_SVIP, ("constant", {"draft_length": 1})),
        "policy budget eos / policy max_draft budget eos",
        limit=4,
    ),
    Hierarchy(
        "four levels",
        (SELF_VERIFY, SELF_VERIFY, ("heuristic", {"draft_length": 2})),
        "policy max_draft budget / policy max_draft budget eos",
        sampling=FEW,
        length=4,
        limit=5,
    ),
    Hierarchy(
        "full",
        (("self-verify", {}), ("self-verify", {})),
        "policy budget eos / policy budget eos",
        sampling=BY_BLOCK,
    ),
    Hierarchy(
        "M2 drops its trigger",
        (DROPPING_SVIP, SELF_VERIFY),
        "policy max_draft budget eos / policy budget eos",
        sampling=BY_BLOCK,
        limit=4,
    ),
    Hierarchy(
        "four levels",
        (SELF_VERIFY, SELF_VERIFY, ("heuristic", {"draft_length": 2})),
        "policy max_draft budget / policy max_draft budget eos",
        sampling=FEW_BY_BLOCK,
        length=4,
        limit=5,
    ),
]


Sequences = Sequence[tuple[Sequence[int], int]]
"""Prompts, each with how many tokens of what follows are looked at."""


@dataclass
class Enumeration:
    """Every branch of `decode`.

    Attributes:
        law: the probability of each completion; where several sequences are written, of each tuple of them.
        branches: how many there are.
        stops, inner_stops: why drafting ended in some round of the target, and of the drafts above the lowest.
        extras, inner_extras: where the token that the verifier added came from; None where a sequence ended without.
        paths: of rounds with trees, whether what was accepted is what the policy was asked about.
    """

    law: dict[Hashable, float]
    branches: int
    stops: set[object]
    inner_stops: set[object]
    extras: set[object]
    inner_extras: set[object]
    paths: set[object]


def enumerate_decode(
    drafter: Callable[[], Drafter | None],
    sampling: Sampling,
    length: int = LENGTH,
    limit: int = LENGTH,
    eos: frozenset[int] = ENDS,
    sequences: Sequences | None = None,
    layers: Sequence[int] = (),
    target: Callable[[], Slot] = lambda: TableRunner(TARGET),
) -> Enumeration:
    """Walk all that may come out, as far as the first ``length`` of at most ``limit`` tokens.

    Args:
        drafter: makes a fresh one; it plays all the sequences of a branch, as in the program.
        sequences: several to write one after the other, instead of one.
        layers: of the target, whose states the drafter reads.
        target: gives its runner, by default of the table.
    """
    found = Enumeration({}, 0, set(), set(), set(), set(), set())

    def note(played: Round, stops: set[object], extras: set[object]) -> None:
        stops.add(played.stop)
        extras.add(played.extra_kind)
        if played.tree:
            steps = tuple(step.token for step in played.steps[: played.accepted])
            found.paths.add(played.path == steps)
        for inner in played.inner:
            note(inner, found.inner_stops, found.inner_extras)

    def play() -> tuple[tuple[int, ...], ...]:
        player, verifier = drafter(), target()
        verifier.watch(layers)
        completions = []
        for prompt, looked_at in sequences or ((PROMPT, length),):
            verifier.rollback(0)
            if player is not None:
                player.rollback(0)
            if layers:
                prefill(verifier, player, prompt)
            tokens: list[int] = []
            for played in decode(verifier, player, prompt, limit, sampling, eos, None):
                note(played, found.stops, found.extras)
                tokens += played.emitted
                if len(tokens) >= looked_at:
                    break
            completions.append(tuple(tokens[:looked_at]))
        return tuple(completions)

    for completions, probability in walk(play):
        found.law[completions] = found.law.get(completions, 0.0) + probability
        found.branches += 1
    return found


def expected_law(
    sampling: Sampling,
    length: int = LENGTH,
    eos: frozenset[int] = ENDS,
    sequences: Sequences | None = None,
) -> dict[Hashable, float]:
    """What the target alone would write: sequences are independent of one another."""
    laws = [law(TARGET, prompt, looked_at, sampling, eos) for prompt, looked_at in sequences or ((PROMPT, length),)]
    return {
        tuple(completions): prod(law[completion] for law, completion in zip(laws, completions, strict=True))
        for completions in product(*laws)
    }


def error(found: Enumeration, expected: dict[Hashable, float]) -> float:
    return largest_difference(found.law, expected)


@dataclass(frozen=True)
class Fit:
    """A chi-square test of sampled completions against the exact law."""

    sequences: int
    chi2: float
    dof: int
    p: float


def sample(
    drafter: Drafter,
    sampling: Sampling,
    sequences: int,
    *,
    eos: frozenset[int] = ENDS,
    seed: int = 7,
    length: int = LENGTH,
    limit: int = LENGTH,
) -> Counter[tuple[int, ...]]:
    """How often `decode` gave each completion, its first ``length`` tokens where ``limit`` is more.

    One drafter plays all the sequences, as in the program.
    """
    target = TableRunner(TARGET)
    generator = seeded(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    # Time decides what some policies do, and so what a seed draws; here it runs alike every time.
    with torch.inference_mode(), steady_clocks():
        for _ in range(sequences):
            target.rollback(0)
            drafter.rollback(0)
            tokens: list[int] = []
            for played in decode(target, drafter, PROMPT, limit, sampling, eos, generator):
                tokens += played.emitted
                if len(tokens) >= length:
                    break
            counts[tuple(tokens[:length])] += 1
    return counts


def fit(
    counts: Counter[tuple[int, ...]], sampling: Sampling, *, length: int = LENGTH, eos: frozenset[int] = ENDS
) -> Fit:
    """Compare with the law of the target; completions expected fewer than five times share one cell."""
    expected = law(TARGET, PROMPT, length, sampling, eos)
    impossible = counts.keys() - expected.keys()
    assert not impossible, f"completions of probability zero: {sorted(impossible)[:5]}"
    sequences = counts.total()
    cells: list[tuple[float, int]] = []
    rare_expected, rare_seen = 0.0, 0
    for completion, chance in expected.items():
        if chance * sequences < 5:
            rare_expected += chance * sequences
            rare_seen += counts[completion]
        else:
            cells.append((chance * sequences, counts[completion]))
    if rare_expected:
        cells.append((rare_expected, rare_seen))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    dof = len(cells) - 1
    return Fit(sequences, statistic, dof, float(chi2.sf(statistic, dof)))


def main() -> None:
    print("| policy | setting | branches | seconds | largest error |\n| --- | --- | ---: | ---: | ---: |")
    for case in (*CASES, *HIERARCHIES):
        sampling, began = SAMPLINGS[case.sampling], process_time()
        found = enumerate_decode(case.drafter, sampling, case.length, case.limit)
        wrong, seconds = error(found, expected_law(sampling, case.length)), process_time() - began
        print(f"| {case.name} | {case.setting} | {found.branches} | {seconds:.1f} | {wrong:.1e} |", flush=True)


if __name__ == "__main__":
    main()
