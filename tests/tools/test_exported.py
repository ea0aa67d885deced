"""What the runs of an exported setting in its engine say: the costs fitted to them, and the comparison."""

import numpy as np
import pytest

from specctl.export.engines import words_of
from specctl.policies import NONE
from tools.exported import MEASURED, advised, grid_of, length
from tools.timed_runs import Timed, compared, fit, flag_of

PROMPT_TOKENS = np.array([10.0, 40.0, 25.0])


def runs(noise: float = 0.0) -> Timed:
    """Two lengths and an exported setting that takes 2% longer than the better of them."""
    passes = np.array([[20.0, 24, 30], [12, 15, 17], [12, 15, 17]])
    drafted = passes * np.array([[1.0], [4], [4]])
    ms = 1.5 * drafted + 11 * passes + 0.1 * PROMPT_TOKENS
    ms[2] *= 1.02
    ms += noise * np.random.default_rng(0).standard_normal(ms.shape)
    return Timed(["K = 1", "K = 4", "exported"], ms, np.full((3, 3), 32.0), passes, drafted, PROMPT_TOKENS)


def test_costs_are_those_of_the_runs() -> None:
    made = runs()
    two = Timed(made.labels[:2], made.ms[:2], made.tokens[:2], made.passes[:2], made.drafted[:2], PROMPT_TOKENS)
    found, off = fit(two)
    assert (found.draft, found.target, found.alone) == pytest.approx((1.5, 11, 11))
    assert off == pytest.approx(0, abs=1e-9)
    assert fit(runs(noise=5.0))[1] > 0.001


def test_passes_without_a_draft_have_a_price_of_their_own() -> None:
    made = runs()
    passes, drafted = made.passes.copy(), made.drafted.copy()
    passes[2], drafted[2] = 32, 0
    ms = made.ms.copy()
    ms[2] = 7 * passes[2] + 0.1 * PROMPT_TOKENS
    found, off = fit(Timed(made.labels, ms, made.tokens, passes, drafted, PROMPT_TOKENS))
    assert (found.draft, found.target, found.alone) == pytest.approx((1.5, 11, 7))
    assert off == pytest.approx(0, abs=1e-9)
    assert flag_of(found, "openvino") == "--costs 1.5,11,0,7"
    assert flag_of(found, "llama.cpp") == "--costs 1.5,9.5,0,7"


def test_the_exported_setting_is_compared_with_the_fastest_length() -> None:
    best, ratio = compared(runs(), "exported")
    assert best == "K = 4"
    assert ratio.value == pytest.approx(1 / 1.02)
    assert (ratio.low, ratio.high) == pytest.approx((1 / 1.02, 1 / 1.02))


def test_a_part_of_the_runs_is_fitted_alone() -> None:
    made = runs()
    assert made.of([0, 1]).labels == ["K = 1", "K = 4"]
    found, _ = fit(made.of([0, 1]))
    assert (found.draft, found.target) == pytest.approx((1.5, 11))


@pytest.mark.parametrize("engine", MEASURED)
def test_every_kind_of_an_engines_rules_is_run(engine: str) -> None:
    kinds = {one.policy for one in grid_of(engine)}
    others = {"transformers": {"heuristic", "max-confidence"}, "onnxruntime-genai": {"probed-length"}, "vllm": set()}
    assert kinds == {"constant"} | others.get(engine, {"max-confidence"})
    assert len({words_of(one) for one in grid_of(engine)}) == len(grid_of(engine)) >= 12


def test_an_export_that_no_draft_pays_for_says_to_run_none() -> None:
    rule = {"name": "constant", "draft_length": 3}
    assert advised({"engine": "llama.cpp", "pays": True, "rule": rule}) == length(3)
    assert advised({"engine": "llama.cpp", "pays": False, "rule": rule}) == NONE
    assert advised({"engine": "transformers", "pays": False, "rule": rule}) == length(3), "run with drafts only"
