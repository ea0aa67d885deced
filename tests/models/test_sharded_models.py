"""Models in two shards, in this process and one follower, compared with the same models whole."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from pathlib import Path
from time import sleep

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from specctl.decoding import round as round_module
from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.errors import ModelError
from specctl.models import sharding
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import LoadedModel, load_model
from specctl.models.loading.model_runners import checking_runner, sharded_runner
from specctl.models.passes.compilation import missing_compiler
from specctl.models.running.engines import EngineSettings, fixed_width
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import CheckedPasses
from specctl.policies import Setting
from specctl.policies.setting import TreeSize
from specctl.profile.schema import ModelTable, Profile, SamplingTable
from tests.support.checkpoints import llama_config, save_model, tiny_tokenizer

PROMPT = torch.randint(1, 257, (70,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "eos_token_id": 0, "bos_token_id": None, "initializer_range": 0.2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**SIZES),
}
VOCABULARY = 258
GREEDY, SAMPLED = SamplingTable(max_new_tokens=24), SamplingTable(max_new_tokens=24, temperature=1.0, top_k=50, seed=4)
SVIP = Setting("svip", {"threshold": 3.0})
"""These models' distributions are flat: with the default every draft would be one token long."""


@dataclass
class Family:
    """A target, whole and in shards, and a draft that is often right.

    Attributes:
        folder: the target's.
        pair: whole.
        shares: this process's shares by placement, loaded when first asked for.
    """

    folder: Path
    pair: Pair
    shares: dict[str, LoadedModel]

    def share(self, placement: str) -> LoadedModel:
        if placement not in self.shares:
            table = {"model": str(self.folder), "shards": 2, "placement": placement}
            self.shares[placement] = load_model(ModelTable.model_validate(table), role="target")
        return self.shares[placement]

    def sharded(self, placement: str = "tensor", engine: str = "eager", **settings: object) -> Pair:
        """The pair with the target in shards."""
        return replace(self.pair, target=sharded(self.share(placement), engine, **settings))


def sharded(share: LoadedModel, engine: str = "eager", **settings: object) -> Slot:
    assert share.sharding is not None
    wanted = EngineSettings(**{"engine": engine, "compile": False, **settings})
    return sharded_runner(share.model, share.sharding, VOCABULARY, share.name, wanted)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    """Makes a family when it is first asked for; one follower serves all tests of this module."""
    made: dict[str, Family] = {}

    def family(name: str) -> Family:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            target = save_model(folder / "target", CONFIGS[name])
            draft = deepcopy(AutoModelForCausalLM.from_pretrained(target))
            draws = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for weight in draft.parameters():
                    weight.add_(0.02 * torch.randn(weight.shape, generator=draws))
            draft.save_pretrained(folder / "draft")
            tiny_tokenizer().save_pretrained(folder / "draft")
            tables = {"target": {"model": str(target)}, "draft": {"model": str(folder / "draft")}}
            made[name] = Family(target, load_pair(Profile.model_validate({**tables, "engine": "eager"})), {})
        return made[name]

    yield family
    sharding.dismiss()


def completed(pair: Pair, settings: SamplingTable = GREEDY, setting: Setting = SVIP):
    return Session(pair, build_drafter(pair, setting)).generate(PROMPT, settings)


def loaded_from_a_profile(family: Family) -> Pair:
    tables = {
        "target": {"model": str(family.folder), "shards": 2},
        "draft": {"model": str(family.folder.parent / "draft")},
    }
    heard: list[str] = []
    pair = load_pair(Profile.model_validate({**tables, "check": True}), progress=heard.append)
    assert heard[0] == "2 processes for shards"
    return pair


@pytest.mark.slow
def test_a_profile_loads_its_target_in_shards(families):
    """The first test: it starts followers of its own, and the others go on with them."""
    family = families("llama")
    pair = loaded_from_a_profile(family)
    assert pair.target.engine == "eager, tensor over 2"
    assert completed(pair).tokens == completed(family.pair).tokens
    assert isinstance(pair.target.passes, CheckedPasses)
    assert pair.target.passes.difference is not None


@pytest.mark.parametrize(("engine", "settings"), [("eager", GREEDY), ("static", SAMPLED)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "placement"),
    [("llama", "tensor"), ("qwen3", "tensor"), ("gpt-neox", "tensor"), ("llama", "pipeline"), ("qwen3", "pipeline")],
)
@pytest.mark.representatives(
    "gpt-neox-tensor-greedy", "llama-pipeline-sampled", slow=("qwen3-pipeline-greedy", "llama-tensor-sampled")
)
def test_a_model_in_shards_writes_what_it_writes_whole(families, family, placement, engine, settings):
    pair = families(family).sharded(placement, engine)
    alone, found = completed(families(family).pair, settings), completed(pair, settings)
    assert found.tokens == alone.tokens
    assert pair.target.engine == f"{engine}, {placement} over 2"
    accepted, drafted = sum(r.accepted for r in found.rounds), sum(r.drafted for r in found.rounds)
    assert 0 < accepted < drafted, "a test of nothing but acceptance, or of nothing but rejection"


def test_each_rank_has_its_part_of_the_weights(families):
    whole = sum(weight.numel() for weight in families("llama").pair.models[0].parameters())
    for placement in ("tensor", "pipeline"):
        model = families("llama").share(placement).model
        here = sum(getattr(w, "to_local", lambda w=w: w)().numel() for w in model.parameters())
        assert 0.25 * whole < here < 0.65 * whole


def test_a_pass_is_one_message_and_a_rollback_none(families):
    pair = families("llama").sharded()
    leader = sharding.leader()
    before = leader.messages
    found = completed(pair)
    # Each round's verification, the first one with the prompt; the last tokens are never read.
    assert leader.messages - before == len(found.rounds)
    before = leader.messages
    pair.target.rollback(0)
    pair.target.extend(PROMPT * 6, keep=1)
    assert leader.messages - before == 2, "a long prompt takes more, of one size"


def test_a_policy_that_reads_clocks_cannot_split_the_ranks(families, monkeypatch):
    """Two clocks make `cost-optimal` draft differently; the follower repeats what was decided, and the text stays."""
    alone = Session(families("llama").pair, None).generate(PROMPT, GREEDY)
    drafted = []
    # Milliseconds between looks at the clock: before drafting, after it, after the verdict.
    for steps in ((1.0, 0.1, 8.0), (1.0, 500.0, 1.0)):
        clock = accumulate(cycle(steps))
        monkeypatch.setattr(round_module, "working_seconds", lambda clock=clock: next(clock) / 1e3)
        found = completed(families("llama").sharded(), setting=Setting("cost-optimal"))
        assert found.tokens == alone.tokens
        drafted.append([round_.drafted for round_ in found.rounds])
    assert drafted[0] != drafted[1], "the clocks changed nothing: this shows nothing"


def test_trees_are_verified_by_all_ranks(families):
    tree = Setting("constant", {"draft_length": 3}, tree=TreeSize(12, 3))
    alone = completed(families("llama").pair, setting=tree)
    for engine in ("eager", "static"):
        found = completed(families("llama").sharded(engine=engine), setting=tree)
        assert found.tokens == alone.tokens, engine
        assert any(round_.tree for round_ in found.rounds)


def test_states_of_a_tensor_parallel_model_are_whole_on_the_leader(families):
    whole, share = families("qwen3").pair.target, families("qwen3").sharded().target
    whole.watch([1, -1])
    share.watch([1, -1])
    with torch.inference_mode():
        whole.rollback(0)
        ours, theirs = (runner.extend(PROMPT[:9], keep=9, hidden=True) for runner in (share, whole))
    torch.testing.assert_close(ours.hidden, theirs.hidden)
    assert ours.states is not None
    for layer in (1, -1):
        torch.testing.assert_close(ours.states[layer], theirs.states[layer])


def test_a_pipeline_has_no_states_and_no_trees(families):
    runner = families("llama").sharded("pipeline").target
    with pytest.raises(ModelError, match="are on the cards of its layers"):
        runner.watch([0])
    with pytest.raises(ModelError, match="are on the cards of its layers"):
        runner.extend(PROMPT[:3], keep=1, hidden=True)
    assert runner.no_trees == "it is a pipeline"


@pytest.mark.slow
def test_a_draft_may_be_in_shards_too(families):
    family = families("llama")
    table = {"model": str(family.folder.parent / "draft"), "shards": 2}
    draft = sharded(load_model(ModelTable.model_validate(table), role="draft"))
    pair = replace(family.sharded(), drafts=(draft,))
    for settings in (GREEDY, SAMPLED):
        few = settings.model_copy(update={"max_new_tokens": 10})
        assert completed(pair, few).tokens == completed(family.pair, few).tokens


def test_blocks_of_one_shape_and_the_check_go_through_all_ranks(families):
    family = families("llama")
    share, pair = family.share("tensor"), family.sharded()
    bare = pair.target
    target = Slot(
        CheckedPasses(
            fixed_width(bare, share.model),
            lambda: checking_runner(share.model, share.sharding, VOCABULARY, share.name),
            share.name,
        )
    )
    assert completed(replace(pair, target=target)).tokens == completed(family.pair).tokens
    assert target.passes.difference is not None
    assert target.passes.difference < 1e-3


def test_an_interrupt_waits_for_the_end_of_a_pass(families):
    """Otherwise the follower would wait in it for a leader that is elsewhere."""
    runner = families("llama").sharded().target
    inner = runner.passes.inner

    class Interrupted:
        """Presses Ctrl-C within a pass."""

        length = 0

        def extend(self, tokens, keep, *, hidden):
            os.kill(os.getpid(), signal.SIGINT)
            return inner.extend(tokens, keep, hidden=hidden)

    runner.passes.inner = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        runner.extend(PROMPT[:5], keep=1)
    runner.passes.inner = inner
    assert inner.length == 5, "the pass was given up half way"
    assert runner.extend(PROMPT[5:8], keep=1).logits.shape == (1, VOCABULARY), "the ranks are out of step"


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no compiler")
def test_compiled_passes_of_shards_write_the_same(families):
    pair = families("llama").sharded(engine="static", compile=True)
    for settings in (GREEDY, SAMPLED):
        assert completed(pair, settings).tokens == completed(families("llama").pair, settings).tokens
    assert pair.target.engine == "static, compiled, tensor over 2"


def test_what_cannot_run_in_shards_falls_back_or_is_refused(families):
    said: list[str] = []
    runner = families("llama").sharded("pipeline", "graph", compile=True, notice=said.append).target
    assert runner.engine == "static, pipeline over 2"
    assert [line.partition("target runs ")[2].partition(":")[0] for line in said] == [
        "on the static engine",
        "uncompiled",
    ]
    with pytest.raises(ModelError, match="onnxruntime does not run"):
        families("llama").sharded(engine="onnx")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("signals", "code"), [([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 143)])
def test_a_command_whose_follower_was_stopped_can_be_ended(tmp_path, signals, code):
    """A collective waits in native code for the follower, for half an hour."""
    target = save_model(tmp_path / "target", llama_config())
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n' * 20_000)  # it would take many minutes
    flags = ["--target", str(target), "-n", "64", "--engine", "eager", "--set", "target.shards=2"]
    asked = ["-i", str(tmp_path / "in.jsonl"), "--set", "target.device=cpu"]
    command = [sys.executable, "-m", "specctl", "generate", *asked, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    followers: list[psutil.Process] = []
    try:
        assert process.stdout.readline()
        followers += [each for each in psutil.Process(process.pid).children() if "follower" in str(each.cmdline())]
        for each in followers:
            each.suspend()
        for each in signals:
            sleep(1.0)
            assert process.poll() is None
            process.send_signal(each)
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
        left = [each for each in followers if each.is_running()]
        for each in left:
            each.kill()
    assert process.returncode == code
    assert followers
    assert not left


@pytest.mark.slow
def test_a_follower_that_cannot_go_on_is_told_once_and_ends_the_run(families):
    """The last test with the shared follower: nothing can be done with its shares afterwards."""
    pair = families("llama").sharded()
    runner = pair.target
    runner.extend(PROMPT[:4], keep=1)
    os.kill(sharding.leader().followers.pids[0], signal.SIGKILL)
    with pytest.raises(ModelError, match=r"Process 2 of the 2 .* was killed \(SIGKILL\)") as caught:
        runner.extend([5], keep=1)
    assert caught.value.exit_code == 3
    with pytest.raises(ModelError, match="SIGKILL"):
        runner.extend([5], keep=1)


@pytest.mark.slow
def test_models_are_loaded_anew_after_a_follower_ended(families):
    """Behind the one before, with followers of its own."""
    family = families("llama")
    assert completed(loaded_from_a_profile(family)).tokens == completed(family.pair).tokens
