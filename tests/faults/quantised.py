"""Texts and laws of targets in every form that a CPU runs, plain and quantised, whatever drafts for them.

python -m tests.faults.quantised --greedy 300 --laws 50

A text is compared with that of the same form without drafts. A law is enumerated, branch by branch of chance, and
compared with the enumerated law without drafts. What is tried is the same for the same ``--seed``.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in (".", "decoding")]
from enumeration import largest_difference
from law_table import DRAFT, ENDS, HEAD, MID, SAMPLINGS, SETTINGS, enumerate_decode
from onnx_models import exported_once
from quantised_forms import (
    BFLOAT16,
    ONNX,
    OTHER_WAYS,
    PLAIN,
    TORCHAO,
    TREES,
    Drafts,
    Form,
    noisy_drafts,
    prompts_of,
    target_of,
)
from toys import STOPPING, WITHOUT_FORESIGHT, TableRunner, random_head

from specctl.decoding.drafters import Drafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.rounding import ROUNDING, widths_apart
from specctl.policies import POLICIES

Case = tuple[Form, str, str]
"""A form, a way to draft, and a family or a sampling."""
FAMILIES = "llama", "qwen3", "gpt-neox"
LENGTH = 24
ROUNDED = 2e-5
"""The largest error of a probability: float32 passes of other widths differ by so much."""
GREEDY = tuple(
    (form, way, family)
    for form, way, family in product((*ONNX, *TORCHAO, *BFLOAT16, *PLAIN), (*WITHOUT_FORESIGHT, *OTHER_WAYS), FAMILIES)
    if way != "none" and not (form.deterministic and way in TREES)
)
LAWS = tuple(
    (form, way, sampling)
    for form, way, sampling in product((*ONNX, *TORCHAO, *PLAIN), (*POLICIES, *OTHER_WAYS), SAMPLINGS)
    if way != "none" and not ("block" in sampling and way in TREES)
)


@cache
def greedy_text(form: Form, way: str, family: str, seed: int) -> list[list[int]]:
    """What a target writes after some prompts; cached, for each is compared with several ways."""
    target = target_of(form, family, trees=way in TREES)
    drafts = Drafts(*noisy_drafts(family), 64, random_head(hidden_size=32), STOPPING)
    drafter = None if way == "none" else drafts.drafter(way)
    texts = []
    with torch.inference_mode():
        for prompt in prompts_of(family, 2, seed):
            target.rollback(0)
            if drafter is not None:
                drafter.rollback(0)
            prefill(target, drafter, prompt)
            rounds = decode(target, drafter, prompt, LENGTH, Sampling(), frozenset())
            texts.append([token for round_ in rounds for token in round_.emitted])
    return texts


def greedy_differs(form: Form, way: str, family: str, seed: int = 0) -> bool:
    """Whether drafting changes a text."""
    return greedy_text(form, way, family, seed) != greedy_text(form, "none", family, seed)


@cache
def law(form: Form, way: str, sampling: str, *, trees: bool = False) -> dict[Hashable, float]:
    """The probability of every text of three tokens, of a target with a vocabulary of three."""
    runner = target_of(form, "three", trees=trees)
    drafts = Drafts(
        TableRunner(DRAFT), TableRunner(MID), 3, HEAD, {name: given[-1][0] for name, given in SETTINGS.items()}
    )

    def drafter() -> Drafter | None:
        drafts.draft.rollback(0)
        drafts.middle.rollback(0)
        return None if way == "none" else drafts.drafter(way)

    return enumerate_decode(drafter, SAMPLINGS[sampling], 3, 3, ENDS, target=lambda: runner).law


def law_error(form: Form, way: str, sampling: str) -> float:
    """The largest error of a text's probability."""
    trees = way in TREES
    found, expected = law(form, way, sampling, trees=trees), law(form, "none", sampling, trees=trees)
    assert abs(sum(found.values()) - 1) < 1e-9
    return largest_difference(found, expected)


def drawn(cases: Sequence[Case], count: int, seed: int) -> Iterator[Case]:
    """So many of the cases, every form as often as another."""
    forms: dict[Form, list[Case]] = {}
    for case in cases:
        forms.setdefault(case[0], []).append(case)
    draws = random.Random(seed)
    for each in forms.values():
        draws.shuffle(each)
    turns = zip(*(cycle(each) for each in forms.values()), strict=True)
    return islice(chain.from_iterable(turns), count)


def main() -> None:
    """Print what is wrong, and counts; exit with 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--greedy", type=int, default=300, help="settings of greedy decoding")
    parser.add_argument("--laws", type=int, default=50, help="laws")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exports", type=Path, help="a folder for what is exported, for the next search to use")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder, exported_once(asked.exports or Path(folder)):
        sys.exit(searched(asked.greedy, asked.laws, asked.seed))


def searched(greedy: int, laws: int, seed: int) -> bool:
    """Whether anything is wrong among so many settings and laws."""
    counts: Counter[str] = Counter()
    for form, trees in product((*ONNX, *TORCHAO, *BFLOAT16, *PLAIN), (False, True)):
        if form.deterministic or (trees and form.engine != "onnx"):
            continue
        found = widths_apart(target_of(form, FAMILIES[0], trees=trees), 64)
        counts["forms"] += 1
        if wrong := found > ROUNDING[torch.float32]:
            counts["forms whose widths differ"] += 1
        print(f"widths   {form!s:42} {found:.1e}{' WRONG' if wrong else ''}", flush=True)
    for case in drawn(GREEDY, greedy, seed):
        counts["greedy settings"] += 1
        if greedy_differs(*case):
            counts["wrong texts"] += 1
            print("greedy  ", *case, "WRONG", flush=True)
    worst = 0.0
    for case in drawn(LAWS, laws, seed):
        counts["laws"] += 1
        worst = max(worst, error := law_error(*case))
        if error > ROUNDED:
            counts["wrong laws"] += 1
        print("law     ", *case, f"{error:.1e}", "WRONG" * (error > ROUNDED), flush=True)
    for name in ("forms whose widths differ", "wrong texts", "wrong laws"):
        counts[name] += 0
    print(", ".join(f"{name} {count}" for name, count in counts.items()), f"(largest error of a law {worst:.1e})")
    return any(counts[name] for name in counts if "wrong" in name or "differ" in name)


if __name__ == "__main__":
    main()
