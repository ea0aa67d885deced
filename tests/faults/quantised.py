"""Texts and laws of targets in every form that a CPU runs, plain and quantised, whatever drafts for them.

python -m tests.faults.quantised --greedy 300 --laws 50

Half of the texts are of the trained models that ship with the package, the others of random ones. A text is compared
with that of the same form without drafts. A law is enumerated, branch by branch of chance, and compared with the
enumerated law without drafts. What is tried is the same for the same ``--seed``.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain, cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in (".", "decoding")]
from law_table import DRAFT, ENDS, HEAD, MID, SAMPLINGS, SETTINGS, enumerate_decode

from specctl.decoding.draft import Drafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.one_function import ROUNDING, widths_apart
from specctl.policies import POLICIES
from tests.support.enumeration import largest_difference
from tests.support.onnx_models import exported_once
from tests.support.quantised_forms import (
    BFLOAT16,
    ONNX,
    OTHER_WAYS,
    PLAIN,
    TORCHAO,
    TRAINED,
    TREES,
    Drafts,
    Form,
    drafts_of,
    prompts_of,
    target_of,
)
from tests.support.toys import WITHOUT_FORESIGHT, TableRunner

Case = tuple[Form, str, str]
"""A form, a way to draft, and a family or a sampling."""
FAMILIES = "llama", "qwen3", "gpt-neox"
WITH_TRAINED = (*ONNX, Form("onnx"), Form("eager", "int8"), Form("eager", "int4"))
"""The forms in which the trained target is tried too."""
PROMPTS = 12
"""Pairs of prompts that settings have in turn."""
LENGTH = 24
TRAINED_LENGTH = 80
"""Tokens of a text of random and of trained models."""
ROUNDED = 2e-5
"""The largest error of a probability: float32 passes of other widths differ by so much."""
GREEDY = tuple(
    (form, way, family)
    for form, way, family in product(
        (*ONNX, *TORCHAO, *BFLOAT16, *PLAIN), (*WITHOUT_FORESIGHT, *OTHER_WAYS), (*FAMILIES, TRAINED)
    )
    if way != "none" and not (way in TREES and form.no_trees) and (family != TRAINED or form in WITH_TRAINED)
)
LAWS = tuple(
    (form, way, sampling)
    for form, way, sampling in product((*ONNX, *TORCHAO, *PLAIN), (*POLICIES, *OTHER_WAYS), SAMPLINGS)
    if way != "none" and not (way in TREES and (form.no_trees or "block" in sampling))
)


@cache
def greedy_text(form: Form, way: str, family: str, seed: int) -> list[list[int]]:
    """What a target writes after some prompts; cached, for each is compared with several ways."""
    target = target_of(form, family, trees=way in TREES)
    drafter = None if way == "none" else drafts_of(family).drafter(way)
    length = TRAINED_LENGTH if family == TRAINED else LENGTH
    texts = []
    with torch.inference_mode():
        for prompt in prompts_of(family, 2, seed):
            target.rollback(0)
            if drafter is not None:
                drafter.rollback(0)
            prefill(target, drafter, prompt)
            rounds = decode(target, drafter, prompt, length, Sampling(), frozenset())
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
    """So many of the cases: every form as often as another, and half of them trained models' where there are such."""
    halves = [[case for case in cases if (case[2] == TRAINED) is trained] for trained in (True, False)]
    turns = [_in_turn(half, seed) for half in halves if half]
    return islice(chain.from_iterable(zip(*turns, strict=True)), count)


def _in_turn(cases: Sequence[Case], seed: int) -> Iterator[Case]:
    """The cases over and over, in a random order, but for the forms, which take turns."""
    forms: dict[Form, list[Case]] = {}
    for case in cases:
        forms.setdefault(case[0], []).append(case)
    draws = random.Random(seed)
    for each in forms.values():
        draws.shuffle(each)
    return chain.from_iterable(zip(*(cycle(each) for each in forms.values()), strict=True))


@contextmanager
def single_rows() -> Iterator[None]:
    """Single tokens are read as they are by quantised graphs, and nobody checks what they compute.

    That is the fault that this search is for, and it must find it.
    """
    with pytest.MonkeyPatch.context() as unmended:
        unmended.setattr("specctl.models.onnx.passes.ATTENDED", 1)
        unmended.setattr("specctl.models.running.one_function.widths_apart", lambda *_: 0.0)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for each in (target_of, greedy_text, law):
        each.cache_clear()


def main() -> None:
    """Print what is wrong, and counts; exit with 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--greedy", type=int, default=300, help="settings of greedy decoding")
    parser.add_argument("--laws", type=int, default=50, help="laws")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exports", type=Path, help="a folder for what is exported, for the next search to use")
    parser.add_argument("--single-rows", action="store_true", help="with the fault that the search is for, to see it")
    asked = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        exported_once(asked.exports or Path(folder)),
        single_rows() if asked.single_rows else nullcontext(),
    ):
        sys.exit(searched(asked.greedy, asked.laws, asked.seed))


def searched(greedy: int, laws: int, seed: int) -> bool:
    """Whether anything is wrong among so many settings and laws."""
    counts: Counter[str] = Counter()
    forms = [(form, FAMILIES[0]) for form in (*ONNX, *TORCHAO, *PLAIN)] + [(form, TRAINED) for form in WITH_TRAINED]
    for (form, family), trees in product(forms, (False, True)):
        if trees and (form.engine != "onnx" or form.no_trees):
            continue
        found = widths_apart(target_of(form, family, trees=trees), 64)
        counts["forms"] += 1
        if wrong := found > ROUNDING[torch.float32]:
            counts["forms whose widths differ"] += 1
        print(f"widths   {form!s:14} {family:10} {found:.1e}{' WRONG' if wrong else ''}", flush=True)
    for number, case in enumerate(drawn(GREEDY, greedy, seed)):
        counts["greedy settings"] += 1
        counts["of trained models"] += case[2] == TRAINED
        if greedy_differs(*case, seed=number % PROMPTS):
            counts["wrong texts"] += 1
            print("greedy  ", *case, number % PROMPTS, "WRONG", flush=True)
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
