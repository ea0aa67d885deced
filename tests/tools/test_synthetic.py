"""Synthetic pairs have the chosen properties and are marked as synthetic."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from specctl.benchmark.digest import digest
from specctl.benchmark.report import tables
from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.observing.results import Header, RunSet, gather
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.prompts.suites import Suite
from tools.synthetic.shapes import MARK, SHAPES, Dials, Shape, require_room
from tools.synthetic.weights import build_pair, dial, measure
from tools.synthetic_pair import write_pair

TARGET, DRAFT = SHAPES["tiny"]


@pytest.mark.parametrize(
    "target",
    [TARGET, Shape(3, 96, 6, 2, 96, 512, 256), Shape(3, 128, 4, 2, 96, 512, 256)],
    ids=["tiny", "more heads", "larger heads"],
)
def test_an_undisturbed_target_is_the_draft_in_a_larger_shape(target: Shape) -> None:
    large, small = build_pair(target, DRAFT, Dials(damping=0.0))
    ids = torch.randint(512, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("wanted", [0.6, 0.75, 0.9])
def test_agreement_is_as_chosen(wanted: float) -> None:
    dials = Dials()
    large, small = build_pair(TARGET, DRAFT, dials)
    assert dial(large, small, dials, wanted) > 0
    assert measure(large, small).agreement == pytest.approx(wanted, abs=0.03)


def test_easy_and_hard_positions_are_mixed() -> None:
    all_hard, mixed = (measure(*build_pair(TARGET, DRAFT, Dials(easy=easy))) for easy in (0.0, 0.5))
    assert mixed.entropy < all_hard.entropy - 0.5
    assert mixed.entropy_deviation > 2 * all_hard.entropy_deviation
    sharper = measure(*build_pair(TARGET, DRAFT, Dials(easy=0.0, sharpness=4.0)))
    assert sharper.entropy < all_hard.entropy


def test_the_same_dials_give_the_same_pair() -> None:
    first, second = (build_pair(TARGET, DRAFT, Dials(seed=3)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name, weight in one.state_dict().items():
            assert torch.equal(weight, other.state_dict()[name]), name


@pytest.mark.parametrize(
    "target", [Shape(2, 64, 8, 4, 160, 512), Shape(5, 64, 8, 1, 160, 512), Shape(5, 96, 8, 4, 160, 512)]
)
def test_a_target_without_room_is_an_error(target: Shape) -> None:
    with pytest.raises(ValueError, match="at least its sizes"):
        build_pair(target, DRAFT, Dials())


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_room_for_its_draft(name: str) -> None:
    require_room(*SHAPES[name])


def test_a_written_pair_runs_and_is_marked_as_synthetic(tmp_path: Path) -> None:
    large, small = build_pair(TARGET, DRAFT, Dials(damping=3.0))
    write_pair(tmp_path, "tiny", large, small, measure(large, small))
    profile = resolve(str(tmp_path / "profile.toml")).profile
    assert profile.description.startswith("SYNTHETIC")
    pair = load_pair(profile)
    assert [getattr(model.config, MARK) for model in pair.models] == [True, True]
    records = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    prompt = pair.tokenizer.encode(records[0]["prompt"])
    assert len(prompt) == 128
    settings = profile.sampling.model_copy(update={"max_new_tokens": 30})
    plain = Session(pair, None).generate(prompt, settings)
    drafted = Session(pair, build_drafter(pair, Setting("constant"))).generate(prompt, settings)
    assert plain.tokens == drafted.tokens
    assert 0 < sum(round_.accepted for round_ in drafted.rounds) < sum(round_.drafted for round_ in drafted.rounds)
    header = Header(**asdict(gather(pair, profile, Suite("x", "0", ()))), candidates=[], repeats=1, lengths=[30])
    assert header.synthetic
    speed = tables(digest(RunSet(header)))[0]
    assert speed.note.startswith("SYNTHETIC pair")
