"""Drafts that read masks in the stead of tokens to come, and so write several in a pass (PARD)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from law_table import DRAFT, SAMPLINGS, enumerate_decode, error, expected_law

from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.decoding.trees import TreeDrafter
from specctl.errors import ModelError, ProfileError
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.loading.assembly import load_pair
from specctl.models.running.eager import EagerPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import ParallelPasses
from specctl.policies import NONE, Setting
from specctl.policies.published import Constant, Svip
from specctl.policies.setting import TreeSize
from specctl.profile.schema import Profile
from specctl.records import Round
from specctl.replay.play import rounds
from tests.support.checkpoints import llama_config, save_model
from tests.support.toy_heads import random_block
from tests.support.toys import TableRunner, noisy_copy, random_model
from tests.support.traced import live, pair_of, shape, trace_of

TEXT, MASK = [5, 9, 2, 40, 33], 63
GREEDY = Sampling()


def draft(count: int = 4, engine: type[EagerPasses] = EagerPasses) -> Slot:
    return Slot(ParallelPasses(Slot(engine(noisy_copy("llama"), 64)), MASK, count))


@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
def test_rows_are_those_of_a_pass_over_the_text_and_masks(engine: Any) -> None:
    """As PARD's code drafts: `draft_k - 1` masks behind the text, and of the logits the last `draft_k` rows."""
    runner, model = draft(4, engine), noisy_copy("llama")
    with torch.inference_mode():
        runner.extend(TEXT[:2], keep=0)
        found = [runner.extend(TEXT[2:], keep=1), *(runner.extend([token], keep=1) for token in (1, 2, 3))]
        expected = model(torch.tensor([[*TEXT, MASK, MASK, MASK]])).logits[0, -4:]
        torch.testing.assert_close(torch.cat([one.logits for one in found]), expected, atol=1e-5, rtol=1e-4)
        assert runner.length == len(TEXT) + 3
        # Behind the last row the tokens are read, and masks behind them.
        again = runner.extend([4], keep=1, hidden=True)
        expected = model(torch.tensor([[*TEXT, 1, 2, 3, 4, MASK, MASK, MASK]]), output_hidden_states=True)
        torch.testing.assert_close(again.logits[0], expected.logits[0, -4], atol=1e-5, rtol=1e-4)
        assert again.hidden is not None
        runner.rollback(len(TEXT) + 1)
        assert runner.length == len(TEXT) + 1
        late = runner.extend([7], keep=1)
        expected = model(torch.tensor([[*TEXT, 1, 7]])).logits[0, -1:]
        torch.testing.assert_close(late.logits, expected, atol=1e-5, rtol=1e-4)


def test_states_are_given_to_who_asks_late() -> None:
    one, other = draft(), draft()
    with torch.inference_mode():
        for runner, asks in ((one, False), (other, True)):
            runner.extend(TEXT, keep=1, hidden=asks)
        mine, theirs = (runner.extend([1], keep=1, hidden=True) for runner in (one, other))
        assert mine.hidden is not None
        assert theirs.hidden is not None
        torch.testing.assert_close(mine.hidden, theirs.hidden)
        assert one.length == other.length


def play(drafter: Drafter | None, count: int) -> list[Round]:
    target = Slot(EagerPasses(random_model("llama"), 64))
    with torch.inference_mode():
        prefill(target, drafter, TEXT)
        return list(decode(target, drafter, TEXT, count, GREEDY))


@pytest.mark.parametrize("tree", [None, TreeSize(16, 2)], ids=["chain", "tree"])
def test_greedy_text_is_the_targets_own(tree: TreeSize | None) -> None:
    drafter = ModelDrafter(draft(), Constant(6)) if tree is None else TreeDrafter(draft(), Constant(6), tree)
    found = play(drafter, 24)
    alone = [token for round_ in play(None, 24) for token in round_.emitted]
    assert [token for round_ in found for token in round_.emitted] == alone
    assert max(round_.drafted for round_ in found) == 4
    assert sum(round_.accepted for round_ in found) > 0


@pytest.mark.parametrize("tree", [None, TreeSize(4, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", [Constant(3), Svip(c=1.0, threshold=0.9, keep_trigger=False)], ids=str)
@pytest.mark.representatives("Constant(draft_length=3)-chain", "Constant(draft_length=3)-tree")
def test_output_has_the_law_of_the_target(policy: Constant | Svip, tree: TreeSize | None) -> None:
    def drafter() -> Drafter:
        runner: Slot = Slot(ParallelPasses(TableRunner(DRAFT), 2, 2))
        fresh = Constant(3) if isinstance(policy, Constant) else Svip(c=1.0, threshold=0.9, keep_trigger=False)
        return ModelDrafter(runner, fresh) if tree is None else TreeDrafter(runner, fresh, tree)

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], 3, 3)
    assert error(found, expected_law(SAMPLINGS["T=1"], 3)) < 3e-7


def test_replayed_rounds_are_those_of_a_live_run() -> None:
    """What it drafts depends on where a round began, as of a draft head."""
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), draft(5))
    tokens = [token for played in live(pair, NONE, TEXT, 24, GREEDY) for token in played.emitted]
    trace = trace_of(pair, TEXT, tokens, 24, 12, GREEDY)
    for setting in (Setting("constant", {"draft_length": 3}), Setting("svip", {"threshold": 0.5})):
        played = [shape(one) for one in rounds(setting.build(), trace, frozenset())]
        assert played == [shape(one) for one in live(pair, setting, TEXT, 24, GREEDY)]


def saved(folder: Path, mask: object) -> Path:
    save_model(folder, llama_config())
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask}), "utf-8")
    return folder


def test_a_profile_names_one_by_its_files(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", llama_config())
    settings = {"target": {"model": str(target)}, "draft": {"model": str(saved(tmp_path / "draft", 9))}}
    profile = Profile.model_validate(settings)
    pair = load_pair(profile)
    (runner,) = pair.drafts
    assert isinstance(runner.passes, ParallelPasses)
    assert (runner.longest, runner.verifies) == (8, False)
    table = profile.sampling.model_copy(update={"max_new_tokens": 12})
    assert profile.draft is not None
    drafter = build_drafter(pair, profile.draft.setting)
    assert Session(pair, drafter).generate(TEXT, table).tokens == Session(pair, None).generate(TEXT, table).tokens
    with pytest.raises(ProfileError, match="block in one pass"):
        build_drafter(pair, Setting("constant", {}, parallel=True))
    saved(tmp_path / "draft", 258)
    with pytest.raises(ModelError, match=r"pard_token in its config.json is 258"):
        load_pair(profile)


class Forces:
    """A rule by which only one token may follow every third text, and a certain one never."""

    def apply(self, rows: Any, text: Sequence[int]) -> Any:
        ruled = torch.as_tensor(rows).clone()
        for place, row in enumerate(ruled, start=len(text) - len(ruled) + 1):
            row[11] = -torch.inf
            if (token := self.forced(text[:place])) is not None:
                row[:] = -torch.inf
                row[token] = 0
        return ruled

    def forced(self, text: Sequence[int]) -> int | None:
        return 7 + len(text) % 4 if len(text) % 3 == 0 else None


@pytest.mark.parametrize("tree", [None, TreeSize(16, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("prompt", [TEXT, TEXT[:3]], ids=["free", "forced"])
@pytest.mark.parametrize("kind", ["PARD", "DFlash"])
@pytest.mark.representatives("PARD-forced-tree", "PARD-free-chain", "DFlash-forced-tree")
def test_rules_hold_in_a_block(kind: str, prompt: list[int], tree: TreeSize | None) -> None:
    """What may follow depends on the path, so that the tokens of a level do not share a row."""
    rule = Forces()
    layers = LayerShape(hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
    block = Slot(BlockPasses(random_block(layers=(0, 1), block_size=5, vocabulary=64, shape=layers, spread=0.3), 64))

    def said(drafter: Drafter | None) -> list[int]:
        inner = Slot(EagerPasses(random_model("llama"), 64))
        inner.watch((0, 1))
        target = Slot(RuledPasses(inner, rule))
        with torch.inference_mode():
            prefill(target, drafter, prompt)
            return [token for one in decode(target, drafter, prompt, 24, GREEDY) for token in one.emitted]

    runner = Slot(RuledPasses(draft() if kind == "PARD" else block, rule))
    assert not runner.marginals
    drafter = ModelDrafter(runner, Constant(4)) if tree is None else TreeDrafter(runner, Constant(4), tree)
    assert said(drafter) == said(None)
