"""`speculative` as ``custom_generate`` of transformers: what it writes, what it refuses by name, what it tells."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    LlamaConfig,
    LlamaForCausalLM,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specctl import hub_folder, speculative
from specctl.decoding.loop import decode
from specctl.errors import ProfileError, SpecctlError, UsageError
from specctl.policies import Setting
from specctl.profile.schema import model_path
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.toys import FAMILIES, STOPPING, noisy_copy, random_model

PROMPT = torch.tensor([[1, 5, 9]])
LONG = torch.tensor([[*range(1, 20)]])
CONFIG: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
NOISY = Setting.of({"name": "svip", **STOPPING["svip"]}).label


def written(family: str, ids: torch.Tensor = PROMPT, **settings: Any) -> torch.Tensor:
    return random_model(family).generate(ids, attention_mask=torch.ones_like(ids), **CONFIG | settings)


@cache
def eos_in(family: str) -> int:
    """A token that plain generation writes after some others."""
    return int(written(family)[0, -6])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["cost-optimal", "constant:draft_length=4", NOISY])
@pytest.mark.representatives(
    "svip:threshold=1.2,c=1-llama",
    "cost-optimal-llama",
    "constant:draft_length=4-gemma2",
    "constant:draft_length=4-gpt-neox",
)
def test_tokens_are_those_of_plain_generate(family, policy):
    fast = speculative(noisy_copy(family), policy)
    for ids in (PROMPT, LONG):
        assert written(family, ids, custom_generate=fast).equal(written(family, ids))
    assert fast.metrics.generated_tokens == CONFIG["max_new_tokens"]
    assert sum(len(round_.emitted) for round_ in fast.rounds) == CONFIG["max_new_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "gemma2")
def test_an_end_of_sequence_ends_it(family):
    fast = speculative(noisy_copy(family), "constant:draft_length=4")
    end = {"eos_token_id": [eos_in(family)]}
    assert written(family, **end, custom_generate=fast).equal(written(family, **end))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_cache_that_is_returned_goes_on(family):
    """Of full attention it is copied, of sliding windows read anew."""
    fast = speculative(noisy_copy(family), "constant")
    found = written(family, custom_generate=fast, return_dict_in_generate=True)
    assert found.sequences.equal(written(family))
    (name,) = {"cache", "past_key_values"} & set(found)
    cache = found[name]
    assert cache.get_seq_length() == found.sequences.shape[1] - 1
    longer = torch.cat([found.sequences, torch.tensor([[3, 4]])], dim=-1)
    assert written(family, longer, **{name: cache}).equal(written(family, longer))


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [11, 33, 34]},
        {"bad_words_ids": [[11], [33, 34]]},
        {"sequence_bias": [[[11], -5.0]]},
        {"min_new_tokens": 12, "eos_token_id": 34},
        {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 34},
        {"forced_eos_token_id": 7},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_rules_about_tokens_hold(rules):
    fast = speculative(noisy_copy("llama"), "constant:draft_length=3")
    expected = written("llama", **rules)
    assert written("llama", **rules, custom_generate=fast).equal(expected)
    assert not expected.equal(written("llama")), "the rule changes nothing here"
    assert fast.metrics.accepted > 0


PENALTY, DECAY = RepetitionPenaltyLogitsProcessor(1.6), ExponentialDecayLengthPenalty((3, 1.3), 34, 3)


@pytest.mark.parametrize("rules", [[PENALTY], [DECAY], [DECAY, PENALTY]], ids=["penalty", "decay", "both"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.representatives("llama-both")
def test_a_normalization_stays_where_a_rule_behind_it_sees_it(family, rules):
    """Rules that depend on a score's sign or size are others after a shift."""
    fast = speculative(noisy_copy(family), "constant:draft_length=3")
    ids = torch.tensor([[1, 5, 9, 5, 1]])
    texts = []
    for order in ([LogitNormalization(), *rules], [*rules, LogitNormalization()], rules):
        given = {"logits_processor": LogitsProcessorList(order), "eos_token_id": [34]}
        texts.append(written(family, ids, **given))
        assert written(family, ids, **given, custom_generate=fast).equal(texts[-1])
    assert not texts[0].equal(texts[2]), "its place makes no difference here"
    assert texts[1].equal(texts[2])


class Until(StoppingCriteria):
    """Stops behind a token, and notes how long the texts were that it was asked about."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, **_):
        assert scores is None
        self.asked.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_stopping_criteria_are_asked_about_every_token_and_the_tail_is_cut():
    model, alike = random_model("llama"), Until(eos_in("llama"))
    fast = speculative(model, "constant:draft_length=7")  # accepts all, so that rounds are long
    found = written("llama", custom_generate=fast, stopping_criteria=[alike])
    plain = Until(eos_in("llama"))
    assert found.equal(written("llama", stopping_criteria=[plain]))
    assert alike.asked == plain.asked
    assert sum(len(round_.emitted) for round_ in fast.rounds) > found.shape[1] - PROMPT.shape[1], "nothing was cut"
    assert fast.metrics.generated_tokens == found.shape[1] - PROMPT.shape[1]


class Heard:
    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.texts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_the_prompt_and_then_every_token():
    heard = Heard()
    found = written("llama", custom_generate=speculative(noisy_copy("llama"), "constant", streamer=heard))
    assert heard.texts[0] == PROMPT[0].tolist()
    assert [token for text in heard.texts for token in text] == found[0].tolist()
    assert heard.ended


def test_tokens_come_as_rounds_end():
    model, fast = random_model("llama"), speculative(noisy_copy("llama"), "constant")
    settings = {**CONFIG, "attention_mask": torch.ones_like(PROMPT)}
    pieces = list(fast.stream(model, PROMPT, **settings))
    assert len(pieces) == len(fast.rounds) > 1
    assert [token for piece in pieces for token in piece] == written("llama")[0, PROMPT.shape[1] :].tolist()
    stream = fast.stream(model, PROMPT, **settings)
    assert next(stream) == pieces[0]
    stream.close()
    assert len(fast.rounds) == 1
    assert written("llama", custom_generate=fast).equal(written("llama"))


def test_a_text_that_another_one_disturbed_does_not_go_on():
    model, fast = random_model("llama"), speculative(noisy_copy("llama"), "constant")
    stream = fast.stream(model, PROMPT, **CONFIG)
    next(stream)
    written("llama", LONG, custom_generate=fast)
    with pytest.raises(UsageError, match="another text"):
        next(stream)


def test_where_the_draft_can_hold_no_more_the_target_goes_on_alone():
    draft = random_model("llama", layers=1, seed=1)
    fast = speculative(draft, "constant")
    written("llama", custom_generate=fast)
    fast._target._drafts[0].context = 10
    assert written("llama", custom_generate=fast).equal(written("llama"))
    assert any(round_.steps for round_ in fast.rounds)
    assert not any(round_.steps for round_ in fast.rounds[-10:])
    assert written("llama", LONG, custom_generate=fast).equal(written("llama", LONG))
    assert not any(round_.steps for round_ in fast.rounds)


def test_a_failed_call_leaves_nothing_behind():
    class Fails(StoppingCriteria):
        def __call__(self, *_, **__):
            raise ValueError("no")

    fast = speculative(noisy_copy("llama"), "constant")
    with pytest.raises(ValueError, match="no"):
        written("llama", LONG, custom_generate=fast, stopping_criteria=[Fails()])
    assert written("llama", custom_generate=fast).equal(written("llama"))


def test_one_object_writes_what_each_model_would():
    fast = speculative(noisy_copy("llama"), "constant")
    for family in ("llama", "gemma2", "llama"):
        assert written(family, custom_generate=fast).equal(written(family))


@pytest.mark.parametrize("rows", [70, 50])
@pytest.mark.parametrize("which", ["target", "draft", "both"])
@pytest.mark.representatives("target-50", "both-70")
def test_models_whose_embeddings_were_resized_since_the_last_call(which, rows):
    with torch.inference_mode(False):
        model, draft = deepcopy(random_model("llama")), deepcopy(noisy_copy("llama"))
        fast = speculative(draft, "constant")
        model.generate(PROMPT, **CONFIG, custom_generate=fast)
        for changed in {"target": (model,), "draft": (draft,), "both": (model, draft)}[which]:
            changed.resize_token_embeddings(rows, mean_resizing=False)
            head = changed.get_output_embeddings().weight
            with torch.no_grad():  # what is new is likely
                head[64:] = 2 * head[: len(head[64:])]
        plain = model.generate(PROMPT, **CONFIG)
        assert model.generate(PROMPT, **CONFIG, custom_generate=fast).equal(plain)
    if which != "draft" and rows > 64:
        assert int(plain.max()) >= 64, "no new token is written"


def test_models_that_have_other_weights_of_another_dtype_or_attention_since_the_last_call():
    with torch.inference_mode(False):
        model = deepcopy(random_model("llama"))
        fast = speculative(deepcopy(noisy_copy("llama")), "constant")
        model.generate(PROMPT, **CONFIG, custom_generate=fast)
        made = fast._target
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        changes = [lambda: None, lambda: model.set_attn_implementation("eager"), model.double]
        for change in changes:
            change()
            plain = model.generate(PROMPT, **CONFIG)
            assert model.generate(PROMPT, **CONFIG, custom_generate=fast).equal(plain)
            assert (fast._target is made) == (change is changes[0])
            made = fast._target


# Drafts


def tiny(rows: int, seed: int) -> LlamaForCausalLM:
    """A model of ``rows`` tokens."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=rows, initializer_range=0.8, bos_token_id=None, eos_token_id=0, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("rows", [60, 70])
def test_a_draft_may_have_other_output_rows(rows):
    """The target may write ids that a narrower draft cannot read."""
    fast = speculative(tiny(rows, 1), "constant:draft_length=3")
    ids = torch.tensor([[63, 5, 62]])
    for sample in (False, True):
        torch.manual_seed(1)
        found = written("llama", ids, custom_generate=fast, do_sample=sample)
        assert sample or found.equal(written("llama", ids))
        assert found.shape[1] == ids.shape[1] + CONFIG["max_new_tokens"]


def test_a_lookup_drafts():
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    fast = speculative("prompt:lookup")
    assert written("llama", ids, custom_generate=fast).equal(written("llama", ids))
    assert fast.metrics.drafted > 0


@pytest.mark.parametrize(
    ("draft", "policy", "head"),
    [
        (None, "embedded-eagle3", None),
        (None, "embedded-hsddw", None),
        ("embedded:draft", "specdec++", "embedded:draft-head"),
        (str(model_path("draft")), None, None),
    ],
    ids=["draft head", "hierarchy", "acceptance head", "folder"],
)
@pytest.mark.representatives("acceptance head")
@pytest.mark.usefixtures("drafts_at_will")
def test_a_draft_by_name(embedded, draft, policy, head):
    ids = torch.tensor([[5, 300, 7, 42]])
    fast = speculative(draft, policy, head=head)
    plain = embedded.generate(ids, max_new_tokens=16, do_sample=False)
    assert embedded.generate(ids, max_new_tokens=16, do_sample=False, custom_generate=fast).equal(plain)
    assert fast.metrics.accepted > 0
    assert not any(parameter.is_inference() for parameter in embedded.parameters())


def test_the_draft_reads_the_prompt_with_its_first_step(monkeypatch):
    read: list[int] = []

    def watched(target, drafter, text, *more):
        read.append(drafter.runner.length)
        for round_ in decode(target, drafter, text, *more):
            read.append(drafter.runner.length)
            yield round_

    monkeypatch.setattr("specctl.api.speculative.decode", watched)
    written("llama", LONG, custom_generate=speculative(noisy_copy("llama"), "constant"))
    assert read[0] == 0
    assert read[1] >= LONG.shape[1]


@pytest.fixture(scope="module")
def embedded():
    """In float32: in bfloat16 two tokens tie now and then, and the clock decides how wide the passes are."""
    return LlamaForCausalLM.from_pretrained(model_path("target"), dtype=torch.float32)


def test_the_folder_of_the_hub_form():
    settings = {"custom_generate": str(hub_folder()), "trust_remote_code": True, "policy": "constant"}
    heard = Heard()
    found = written("llama", assistant_model=noisy_copy("llama"), streamer=heard, **settings)
    assert found.equal(written("llama"))
    assert found[0].tolist() == [token for text in heard.texts for token in text]
    assert written("llama", draft="prompt:lookup", **settings).equal(written("llama"))


# What is refused


class Unknown(LogitsProcessor):
    def __call__(self, _, scores):
        return scores


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 2}, "num_beams = 2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences = 2"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1, 2]}, "PrefixConstrainedLogitsProcessor"),
        ({"logits_processor": [Unknown()]}, "Unknown"),
        ({"do_sample": True, "logits_processor": [TopPLogitsWarper(0.5)], "temperature": 0.5}, "TopPLogitsWarper"),
        (
            {"do_sample": True, "top_k": 0, "logits_processor": [TopPLogitsWarper(0.5, min_tokens_to_keep=2)]},
            "min_tokens_to_keep",
        ),
        (
            {"do_sample": True, "logits_processor": [TemperatureLogitsWarper(0.5)], "temperature": 0.5, "top_k": 0},
            "each once",
        ),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "prompt:lookup"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "padded"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_verified_is_refused_by_name(settings, named):
    with pytest.raises(UsageError, match=named):
        random_model("llama").generate(
            PROMPT, **{**CONFIG, **settings}, custom_generate=speculative(noisy_copy("llama"))
        )


def test_one_prompt_at_a_time():
    with pytest.raises(UsageError, match="2 prompts"):
        written("llama", torch.tensor([[1, 2], [3, 4]]), custom_generate=speculative(noisy_copy("llama")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("small", "nope"), "is not a policy"),
        (("small", "svip:foo=1"), "unknown setting of svip"),
        (("small", "specdec++"), "draft.head: is required"),
        (("prompt:lookup", "svip"), "signals that a lookup does not have"),
        (("small", "nowhere.toml"), "there is no profile file"),
        ((), "there is no draft"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(arguments, message):
    with pytest.raises(SpecctlError, match=message) as error:
        speculative(*arguments)
    assert isinstance(error.value, ProfileError | UsageError)


def test_a_draft_with_another_tokenizer_drafts_what_both_have(embedded, tmp_path):
    from tests.support.checkpoints import llama_config, save_model

    fast = speculative(str(save_model(tmp_path / "other", llama_config(258))), "constant:draft_length=2")
    found = embedded.generate(PROMPT, max_new_tokens=6, do_sample=False, custom_generate=fast)
    assert torch.equal(found, embedded.generate(PROMPT, max_new_tokens=6, do_sample=False))


# Sampling


FILTERED = {"temperature": 0.8, "top_k": 2, "top_p": 0.95, "min_p": 0.02}


def exact(model: LlamaForCausalLM, prompt: list[int], length: int, processors: LogitsProcessorList) -> dict[Any, float]:
    """The probability of every completion, with transformers' own processors in the order of ``generate``."""
    found: dict[Any, float] = {}

    def grow(text: list[int], chance: float) -> None:
        new = tuple(text[len(prompt) :])
        if len(new) == length or (new and new[-1] == 0):
            found[new] = chance
            return
        ids = torch.tensor([text])
        probs = processors(ids, model(ids).logits[:, -1].float())[0].double().softmax(-1)
        for token, share in enumerate(probs.tolist()):
            if share:
                grow([*text, token], chance * share)

    with torch.no_grad():
        grow(prompt, 1.0)
    return found


@pytest.mark.parametrize("policy", ["constant:draft_length=2", "svip:threshold=0.36"])
@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.4}], ids=["", "penalty"])
def test_every_completion_has_its_exact_probability(policy, rules):
    target, draft, prompt, length = tiny(3, 2), tiny(3, 5), [1, 2], 3
    ids = torch.tensor([prompt])
    fast = speculative(draft, policy)
    settings = {"do_sample": True, "max_new_tokens": length, "pad_token_id": 0, **FILTERED, **rules}
    found = law_of(
        (outcome, chance)
        for outcome, chance in walk(
            lambda: tuple(target.generate(ids, **settings, custom_generate=fast)[0, len(prompt) :].tolist())
        )
    )
    filters = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(2), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02)]
    penalties = [RepetitionPenaltyLogitsProcessor(rules["repetition_penalty"])] if rules else []
    expected = exact(target, prompt, length, LogitsProcessorList([*penalties, *filters]))
    assert largest_difference(found, expected) < 3e-7
    assert largest_difference(found, exact(target, prompt, length, LogitsProcessorList(filters[:1]))) > 1e-2


@pytest.mark.parametrize(
    "settings",
    [
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.3},
        {"eta_cutoff": 0.4},
        {"top_h": 0.5},
        {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_h": 0.95, "top_p": 0.98},
        {"encoder_repetition_penalty": 1.8},
        {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 0.7, "repetition_penalty": 1.2},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_completion_has_the_probability_that_generates_own_processors_give(settings):
    target, draft, prompt, length = tiny(3, 2), tiny(3, 5), [1, 2, 1], 3
    ids = torch.tensor([prompt])
    fast = speculative(draft, "constant:draft_length=2")
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "pad_token_id": 0, **settings}
    prepared = []
    target.generate(
        ids, **settings, custom_generate=lambda *_, logits_processor, **__: prepared.append(logits_processor)
    )
    found = law_of(
        walk(lambda: tuple(target.generate(ids, **settings, custom_generate=fast)[0, len(prompt) :].tolist()))
    )
    assert largest_difference(found, exact(target, prompt, length, prepared[0])) < 1e-6
    assert largest_difference(found, exact(target, prompt, length, LogitsProcessorList())) > 1e-2


def test_the_state_of_torchs_generator_seeds_a_text():
    fast = speculative(noisy_copy("llama"), "constant")
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(written("llama", do_sample=True, custom_generate=fast).tolist())
    assert texts[0] == texts[1] != texts[2]
    assert texts[2] != written("llama", do_sample=True, custom_generate=fast).tolist()
    before = torch.get_rng_state()
    written("llama", custom_generate=fast)
    assert torch.get_rng_state().equal(before), "greedy decoding draws nothing"


def test_the_prompts_time_is_the_devices_time(monkeypatch):
    """Whatever any device was given is done before the clock is read."""
    waited = []
    monkeypatch.setattr("specctl.api.speculative.wait", lambda *devices: waited.append(devices))
    written("llama", custom_generate=speculative(noisy_copy("llama"), "constant"))
    assert waited == [(torch.device("cpu"),) * 2]
