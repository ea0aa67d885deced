"""Does `decode` follow the target's law, whatever the policy? Run as a script, prints a table of chi-square tests."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from scipy.stats import chi2

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from toys import EOS, TableRunner, Ticks, law, related_table, seeded, table, toy_head

from specctl.decoding import round as one_round
from specctl.decoding.drafters import Drafter, ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.policies import POLICIES, StoppingPolicy

TARGET = table(seed=3, eos_logit=-0.7, spread=1.1)
DRAFT = related_table(TARGET, seed=4)
MID = related_table(TARGET, seed=5, noise=0.7)
FASTEST = related_table(DRAFT, seed=6, noise=0.7)
HEAD = toy_head(DRAFT, seed=5)
PROMPT = [2, 3]
LENGTH = 4
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_k=4, top_p=0.9)
SAMPLINGS = {"T=1": PLAIN, "T=0.7 top_k=4 top_p=0.9": FILTERED}

# Beyond the defaults: settings that stop often, so that the stop itself is what is tested.
SETTINGS: dict[str, list[dict[str, object]]] = {
    "none": [{}],
    "constant": [{"draft_length": 1}, {"draft_length": 3}],
    "heuristic": [{"draft_length": 2}, {"draft_length": 1, "carry_over": True}],
    "max-confidence": [
        {"adapt": False, "threshold": 0.5},
        {"adapt": False, "threshold": 0.5, "keep_trigger": False},
        {"threshold": 0.45, "eps": 0.3, "beta2": 0.0},
        {"threshold": 0.45, "eps": 0.3, "beta2": 0.0, "carry_over": True},
    ],
    "svip": [{}, {"threshold": 0.42}, {"c": 1.0, "threshold": 1.1, "keep_trigger": False}],
    "adaedl": [
        {"threshold": 0.48, "eps": 0.3, "beta2": 0.0},
        {"threshold": 0.48, "eps": 0.3, "beta2": 0.0, "carry_over": True},
        {"threshold": 0.48, "keep_trigger": False},
    ],
    "self-verify": [{}, {"carry_over": True}],
    # With a threshold of 0 the head's slightest doubt ends a round after two tokens, or even one.
    "specdec++": [{"threshold": 0.0}, {"threshold": 0.6, "min_draft": 1, "max_draft": 3}, {"threshold": 0.45}],
    # Learned from all sequences so far.
    "cost-optimal": [{"use_head": True}, {"max_draft": 2}, {"carry_over": False}, {}],
}


@dataclass(frozen=True)
class Case:
    name: str
    sampling: str
    settings: dict[str, object] = field(default_factory=dict)
    limit: int = LENGTH

    @property
    def setting(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "defaults"
        return f"{shown}; {self.sampling}"

    def __str__(self) -> str:
        return f"{self.name}: {self.setting}"

    def policy(self) -> StoppingPolicy:
        return POLICIES[self.name](**self.settings)

    def drafter(self) -> Drafter:
        return ModelDrafter(TableRunner(DRAFT), self.policy(), head=HEAD)


# A policy without an entry above is still tested, with its defaults.
CASES = [Case(name, "T=1", settings) for name in POLICIES for settings in SETTINGS.get(name, [{}])]
CASES += [Case(name, "T=0.7 top_k=4 top_p=0.9", SETTINGS.get(name, [{}])[-1]) for name in POLICIES]


@dataclass(frozen=True)
class Hierarchy:
    """Several drafts, each the verifier of the one below it.

    Attributes:
        levels: policy and settings of each draft, the target's own first.
        once: whether the levels above the lowest offer their block after one inner round.
        limit: tokens to generate, of which the first ones are looked at: longer blocks than those are what matters.
    """

    name: str
    levels: tuple[tuple[str, dict[str, object]], ...]
    once: bool = False
    sampling: str = "T=1"
    limit: int = LENGTH + 8

    @property
    def setting(self) -> str:
        shown = [
            name + "".join(f" {key}={value}" for key, value in settings.items()) + " once" * (self.once and not place)
            for place, (name, settings) in enumerate(self.levels)
        ]
        near = f"; limit {LENGTH}" if self.limit == LENGTH else ""
        return f"{' < '.join(shown)}; {self.sampling}{near}"

    def __str__(self) -> str:
        return f"{self.name}: {self.setting}"

    def drafter(self) -> Drafter:
        tables = (MID, DRAFT, FASTEST)[: len(self.levels)]
        *upper, ((name, settings), lowest) = zip(self.levels, tables, strict=True)
        drafter: Drafter = ModelDrafter(TableRunner(lowest), POLICIES[name](**settings))
        for (name, settings), middle in reversed(upper):
            drafter = PreVerifiedDrafter(drafter, TableRunner(middle), POLICIES[name](**settings), once=self.once)
        return drafter


# Small caps too: every way a block can end must happen often.
SELF_VERIFY = ("self-verify", {"max_draft": 3, "carry_over": True})
DROPPING_SVIP = ("svip", {"c": 1.0, "threshold": 1.1, "keep_trigger": False})
HIERARCHIES = [
    Hierarchy("draft by M2", (SELF_VERIFY,)),
    Hierarchy("pre-verify once", (("constant", {"draft_length": 4}), ("constant", {"draft_length": 2})), once=True),
    Hierarchy("pre-verify + self-verify once", (("constant", {"draft_length": 4}), SELF_VERIFY), once=True),
    Hierarchy("full", (("self-verify", {}), ("self-verify", {}))),
    Hierarchy("full, near the limit", (("self-verify", {}), ("self-verify", {})), limit=LENGTH),
    Hierarchy("full, tight caps", (SELF_VERIFY, SELF_VERIFY)),
    Hierarchy("both learn what pays", (("cost-optimal", {}), ("cost-optimal", {}))),
    Hierarchy("full, tight caps", (SELF_VERIFY, SELF_VERIFY), sampling="T=0.7 top_k=4 top_p=0.9"),
    Hierarchy(
        "mixed", (("max-confidence", {"threshold": 0.5, "adapt": False}), ("svip", {"c": 1.0, "threshold": 1.1}))
    ),
    Hierarchy("mixed", (("svip", {"c": 1.0, "threshold": 1.1}), ("adaedl", {"threshold": 0.48, "eps": 0.3}))),
    Hierarchy("M2 drops its trigger", (DROPPING_SVIP, SELF_VERIFY)),
    Hierarchy("both drop their trigger", (DROPPING_SVIP, DROPPING_SVIP)),
    Hierarchy("M1 never drafts", (("svip", {"c": 1.0, "threshold": 1.1}), ("none", {}))),
    Hierarchy("four levels", (SELF_VERIFY, ("svip", {"c": 1.0, "threshold": 1.1}), ("constant", {"draft_length": 2}))),
    Hierarchy(
        "four levels",
        (SELF_VERIFY, SELF_VERIFY, ("heuristic", {"draft_length": 2})),
        sampling="T=0.7 top_k=4 top_p=0.9",
    ),
]


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
    eos: frozenset[int] = frozenset({EOS}),
    seed: int = 7,
    limit: int = LENGTH,
) -> Counter[tuple[int, ...]]:
    """How often `decode` gave each completion, its first LENGTH tokens where ``limit`` is more.

    One drafter plays all the sequences, as in the program.
    """
    target = TableRunner(TARGET)
    generator = seeded(seed)
    # Time decides what some policies do, and so what a seed draws; here it runs alike every time.
    steady = patch.object(one_round, "perf_counter", Ticks(1.0, 3.0, 0.0))
    counts: Counter[tuple[int, ...]] = Counter()
    with torch.inference_mode(), steady:
        for _ in range(sequences):
            target.rollback(0)
            drafter.rollback(0)
            tokens: list[int] = []
            for round_ in decode(target, drafter, PROMPT, limit, sampling, eos, generator):
                tokens += round_.emitted
                if len(tokens) >= LENGTH:
                    break
            counts[tuple(tokens[:LENGTH])] += 1
    return counts


def fit(counts: Counter[tuple[int, ...]], sampling: Sampling, *, eos: frozenset[int] = frozenset({EOS})) -> Fit:
    """Compare with the law of the target; completions expected fewer than five times share one cell."""
    expected = law(TARGET, PROMPT, LENGTH, sampling, eos)
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


def main(sequences: int = 20_000) -> None:
    print("| policy | setting | sequences | chi2 | dof | p |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for case in (*CASES, *HIERARCHIES):
        sampling = SAMPLINGS[case.sampling]
        found = fit(sample(case.drafter(), sampling, sequences, limit=case.limit), sampling)
        print(
            f"| {case.name} | {case.setting} | {found.sequences} | {found.chi2:.1f} | {found.dof} | {found.p:.3g} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
