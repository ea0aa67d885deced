"""Models that rotate positions by the length of the text write what `generate` writes, on both sides of the border."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specctl import speculative
from specctl.decoding.composition import build_drafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.passes.rotation import rotation_of
from specctl.models.passes.weights import Where
from specctl.models.placing.engine_table import build_runner, chosen
from specctl.models.running.engines import EngineSettings, checked, fixed_width
from specctl.models.running.graph import GraphPasses
from specctl.models.running.one_function import LENGTH as LONG_CHECK
from specctl.models.running.one_function import over_cache, over_rows
from specctl.models.running.pair import Pair
from specctl.models.running.rotating import rotating
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import CheckedPasses
from specctl.policies import Setting
from specctl.policies.setting import TreeSize
from specctl.profile.schema import Profile, SamplingTable
from specctl.replay.play import rounds
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.pair_rows import passes_of, why_alone
from tests.support.checkpoints import tiny_tokenizer
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import on
from tests.support.rotating_models import BORDER, CONFIGS, SHAPE, TEXT, VOCABULARY, weights
from tests.support.toys import Replays, generated, random_model
from tests.support.traced import live, shape, trace_of

LENGTH = 20
PROMPTS = {
    "crossing": TEXT[: BORDER - 6],
    "one below": TEXT[: BORDER - 1],
    "at the border": TEXT[:BORDER],
    "one above": TEXT[: BORDER + 1],
    "above": TEXT[: BORDER + 30],
    "below": TEXT[:12],
}
STEADY = [family for family in CONFIGS if family != "dynamic"]
"""Those with one rotation for all long texts, whose passes can be captured."""
ENGINES = {"eager": list(CONFIGS), "static": STEADY, "graph": STEADY}


@cache
def said(family: str, name: str) -> list[int]:
    """What transformers' own `generate` writes after a prompt."""
    return generated(deepcopy(weights(family)), tuple(PROMPTS[name]), LENGTH)


def runner_of(family: str, engine: str = "eager", noise: float = 0.0) -> Slot:
    model = deepcopy(weights(family, noise))
    if engine == "graph":
        return rotating(GraphPasses(model, VOCABULARY, Replays()), model)
    return build_runner(model, VOCABULARY, family, EngineSettings(engine=engine, notice=refused))  # type: ignore[arg-type]


def refused(notice: str) -> None:
    raise AssertionError(notice)


def pair_of(target: Slot, *drafts: Slot) -> Pair:
    return Pair(target, drafts, tiny_tokenizer(), frozenset(), 4 * BORDER, (), ({},) * len(drafts))


CASES = [(engine, family) for engine, families in ENGINES.items() for family in families]
FIRST = ("constant-eager-phi3", "none-eager-phi3", "svip-eager-dynamic", "constant-static-llama", "svip-graph-phi3")
FAMILY = {"slow": ("phimoe", "llama", "dynamic")}
"""Of tests to which one family is as good as another in the first tier."""


@pytest.mark.parametrize(("engine", "family"), CASES, ids=[f"{engine}-{family}" for engine, family in CASES])
@pytest.mark.parametrize("setting", ["none", "constant", "svip"])
@pytest.mark.representatives(*FIRST, slow=[f"{engine}-{family}" for engine, family in CASES])
def test_texts_are_those_of_generate(engine: str, family: str, setting: str) -> None:
    """Drafts of a model whose border is another one's cross it within a block too, at another place of the round."""
    pair = pair_of(runner_of(family, engine), runner_of(family, engine, noise=0.02))
    policy = Setting.of({"name": setting, **({"threshold": 1.2, "c": 1.0} if setting == "svip" else {})})
    session = Session(pair, None if setting == "none" else build_drafter(pair, policy))
    for name in PROMPTS:
        assert list(session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH)).tokens) == said(family, name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_captured_passes_on_a_card_follow_the_slot(family: str) -> None:
    heard: list[str] = []
    settings = EngineSettings(engine="graph", notice=heard.append)
    with Devices() as cuda, torch.inference_mode():
        runners = [
            build_runner(on(cuda, weights(family, noise), "cuda:0"), VOCABULARY, family, settings)
            for noise in (0.0, 0.02)
        ]
        assert [runner.engine for runner in runners] == ["graph", "graph"]
        pair = pair_of(*runners)
        session = Session(pair, build_drafter(pair, Setting("constant")))
        for name in ("crossing", "above"):
            found = session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH))
            assert list(found.tokens) == said(family, name)
    assert heard == []


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_pass_over_a_text_has_the_logits_of_each_of_its_beginnings(family: str) -> None:
    """As replay and training read texts; also where a part was read before, and behind a rollback across the border."""
    runner, prompt = runner_of(family), PROMPTS["crossing"]
    with torch.inference_mode():
        model, ids = deepcopy(weights(family)), torch.tensor([prompt])
        config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)
        told: Any = {"output_logits": True, "return_dict_in_generate": True, "generation_config": config}
        out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **told)
        wanted, text = torch.cat(out.logits), out.sequences[0].tolist()
        start = len(prompt)
        runner.begin(start)
        for before in (start - 1, start + 4, BORDER, BORDER + 3, start - 1):
            runner.rollback(before)
            if pending := text[runner.length : before]:
                runner.extend(pending, keep=0)
            keep = len(text) - 1 - before
            found = runner.extend(text[before:-1], keep=keep, hidden=True)
            torch.testing.assert_close(found.logits, wanted[-keep:], atol=1e-3, rtol=1e-3)
            assert found.hidden is not None
            assert len(found.hidden) == keep


@pytest.mark.parametrize("family", STEADY)
@pytest.mark.parametrize("draft", [None, "phi3", "dynamic"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.representatives("True-phi3-phi3", "True-dynamic-llama", slow=("phi3", "None", "dynamic"))
def test_short_and_long_texts_share_a_batch(family: str, draft: str | None, kept: bool) -> None:
    if draft == "dynamic":
        pair = pair_of(runner_of(family), runner_of("dynamic"))
        assert "again with every token" in (why_alone(pair) or "")
        return
    pair = pair_of(runner_of(family), *([] if draft is None else [runner_of(draft, noise=0.02)]))
    assert why_alone(pair) is None
    names = [*PROMPTS, *PROMPTS]

    def answer(row: Pair, _: Any) -> Any:
        session = Session(row, None if draft is None else build_drafter(row, Setting("constant")), keep_caches=kept)
        return whole(lambda name: list(session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH)).tokens))

    with HereEngine(None, Rows.over(pair, passes_of(pair, 3), answer, kept=kept)) as rows:
        found = [tokens for _, tokens in in_order(rows, [(name, name) for name in names])]
    assert found == [said(family, name) for name in names]


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", "llama", slow=("phimoe", "dynamic"))
def test_a_kept_beginning_is_read_anew_on_the_other_side(family: str) -> None:
    pair = pair_of(runner_of(family), runner_of(family, noise=0.02))
    session = Session(pair, build_drafter(pair, Setting("constant")), keep_caches=True)
    table = SamplingTable(max_new_tokens=LENGTH)
    kept = []
    for name in ("one below", "at the border", "one above", "above", "one above", "at the border", "crossing", "above"):
        assert list(session.generate(PROMPTS[name], table).tokens) == said(family, name)
        kept.append(session.kept)
    once = family != "dynamic"  # where all long texts are rotated alike
    # What crosses leaves a long text behind it where all is read anew, and else one with a short beginning.
    beyond = family in ("phi3", "phimoe")
    assert [bool(tokens) for tokens in kept] == [
        *(False, not beyond, beyond, once, once),
        *(False, not beyond, beyond),
    ]


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", **FAMILY)
def test_a_hierarchy_and_a_draft_that_copies_cross_the_border(family: str) -> None:
    pair = pair_of(runner_of(family), runner_of(family, noise=0.02), runner_of("llama"))
    setting = Setting.of({"name": "constant", "draft_length": 6})
    hierarchy = Setting("constant", setting.values, below=Setting.of({"name": "constant", "draft_length": 3}))
    session = Session(pair, build_drafter(pair, hierarchy))
    for name in ("crossing", "above"):
        assert list(session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH)).tokens) == said(family, name)


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.representatives("static", slow=("eager",))
def test_trees_are_rotated_by_their_depth(engine: str) -> None:
    pair = pair_of(runner_of("llama", engine), runner_of("llama", engine, noise=0.02))
    drafter = build_drafter(pair, Setting("constant", tree=TreeSize(12, 3)))
    session = Session(pair, drafter)
    for name in PROMPTS:
        found = session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH))
        assert list(found.tokens) == said("llama", name)
        assert any(round_.tree for round_ in found.rounds)


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", "dynamic", slow=("phimoe", "llama"))
def test_replayed_rounds_are_those_of_a_live_run(family: str) -> None:
    pair, prompt = pair_of(runner_of(family), runner_of(family, noise=0.02)), PROMPTS["crossing"]
    trace = trace_of(pair, prompt, said(family, "crossing"), LENGTH, 8, Sampling())
    for length in (1, 3, 7):
        setting = Setting.of({"name": "constant", "draft_length": length})
        played = live(pair, setting, prompt, LENGTH, Sampling())
        assert [token for one in played for token in one.emitted] == said(family, "crossing")
        assert [shape(one) for one in rounds(setting.build(), trace, frozenset())] == [shape(one) for one in played]


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", **FAMILY)
def test_a_model_that_drafts_for_itself_has_the_law_that_verifies_it(family: str) -> None:
    pair = pair_of(runner_of(family), runner_of(family))
    session = Session(pair, build_drafter(pair, Setting("constant")))
    for name in ("crossing", "above"):
        found = session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH, temperature=1.0))
        assert all(one.accepted == one.drafted for one in found.rounds)


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", **FAMILY)
def test_generate_of_transformers_itself_drafts_the_same(family: str) -> None:
    """The cache that it gives is one that goes on as transformers' own."""
    model, draft = deepcopy(weights(family)), deepcopy(weights(family, 0.02))
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0, return_dict_in_generate=True)
    for name in ("crossing", "above"):
        ids = torch.tensor([PROMPTS[name]])
        drafting = speculative(draft)
        out: Any = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=drafting
        )
        assert out.sequences[0, ids.shape[1] :].tolist() == said(family, name)
    assert generated(model, tuple(PROMPTS["below"]), LENGTH) == said(family, "below"), "without specctl as before"


def test_engines_say_what_they_cannot_rotate() -> None:
    model = weights("dynamic")
    for engine in ("static", "graph"):
        choice = chosen(engine, model, Where.of(model), EngineSettings(engine=engine))
        assert choice.engine.name == "eager"
        assert "rotates positions again with every token of a long text" in choice.said[0]
    with pytest.raises(ModelError, match="deterministically: it rotates positions by the length of the text"):
        fixed_width(runner_of("phi3"), weights("phi3"))
    assert runner_of("phi3").no_trees == f"it reads the text again at {BORDER} tokens"
    plain = MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](LlamaConfig(**SHAPE))
    assert rotation_of(plain) is None


@pytest.mark.parametrize("family", ["phi3", "mistral"])
def test_doctor_tells_what_cannot_verify_deterministically(family: str, tmp_path: Path) -> None:
    model = weights("phi3") if family == "phi3" else random_model("mistral")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    table = {"target": {"model": str(tmp_path), "device": "cpu"}, "deterministic": True}
    (problem,) = diagnose(Profile.model_validate(table)).problems
    assert problem.message.startswith("The target cannot verify deterministically: it ")
    assert problem.hint == "Set deterministic = false."


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.representatives("phi3", **FAMILY)
def test_a_check_reads_as_generate_does(family: str) -> None:
    model = deepcopy(weights(family))
    runner = checked(rotating(runner_of(family).bare.passes, model), model, VOCABULARY, family)
    pair = pair_of(runner, runner_of(family, noise=0.5))
    session = Session(pair, build_drafter(pair, Setting("constant")))
    for name in ("one below", "above"):
        runner.passes.difference = None
        assert list(session.generate(PROMPTS[name], SamplingTable(max_new_tokens=LENGTH)).tokens) == said(family, name)
        assert isinstance(runner.passes, CheckedPasses)
        assert runner.passes.difference is not None


@pytest.mark.parametrize("family", list(CONFIGS))
def test_passes_over_a_text_on_both_sides_of_a_border_are_one_function(family: str) -> None:
    model = weights(family, border=LONG_CHECK // 2)
    reading = over_cache(model, VOCABULARY)
    assert not reading.wrong, reading.told
    rows = over_rows(model, VOCABULARY, reading.most)
    assert rows is None if family == "dynamic" else rows is not None and not rows.wrong
