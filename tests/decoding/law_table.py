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
from toys import EOS, TableRunner, Ticks, law, related_table, seeded, table

from specctl.decoding import loop
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.policies import POLICIES, StoppingPolicy

TARGET = table(seed=3, eos_logit=-0.7, spread=1.1)
DRAFT = related_table(TARGET, seed=4)
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
    # Learned from all sequences so far.
    "cost-optimal": [{}, {"max_draft": 2}, {"carry_over": False}],
}


@dataclass(frozen=True)
class Case:
    name: str
    sampling: str
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "defaults"
        return f"{shown}; {self.sampling}"

    def __str__(self) -> str:
        return f"{self.name}: {self.setting}"

    def policy(self) -> StoppingPolicy:
        return POLICIES[self.name](**self.settings)


# A policy without an entry above is still tested, with its defaults.
CASES = [Case(name, "T=1", settings) for name in POLICIES for settings in SETTINGS.get(name, [{}])]
CASES += [Case(name, "T=0.7 top_k=4 top_p=0.9", SETTINGS.get(name, [{}])[-1]) for name in POLICIES]


@dataclass(frozen=True)
class Fit:
    """A chi-square test of sampled completions against the exact law."""

    sequences: int
    chi2: float
    dof: int
    p: float


def sample(
    policy: StoppingPolicy, sampling: Sampling, sequences: int, *, eos: frozenset[int] = frozenset({EOS}), seed: int = 7
) -> Counter[tuple[int, ...]]:
    """How often `decode` gave each completion; one policy object plays all the sequences, as in the program."""
    target = TableRunner(TARGET)
    drafter = ModelDrafter(TableRunner(DRAFT), policy)
    generator = seeded(seed)
    # Time decides what some policies do, and so what a seed draws; here it runs alike every time.
    steady = patch.object(loop, "perf_counter", Ticks(1.0, 3.0, 0.0))
    counts: Counter[tuple[int, ...]] = Counter()
    with torch.inference_mode(), steady:
        for _ in range(sequences):
            target.rollback(0)
            drafter.rollback(0)
            rounds = decode(target, drafter, PROMPT, LENGTH, sampling, eos, generator)
            counts[tuple(token for round_ in rounds for token in round_.emitted)] += 1
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
    for case in CASES:
        sampling = SAMPLINGS[case.sampling]
        found = fit(sample(case.policy(), sampling, sequences), sampling)
        print(
            f"| {case.name} | {case.setting} | {found.sequences} | {found.chi2:.1f} | {found.dof} | {found.p:.3g} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
