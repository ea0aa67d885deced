"""A draft with another tokenizer changes how many tokens are accepted, and never which follow."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from law_table import SAMPLINGS, enumerate_decode, error, expected_law
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.decoding import round as one_round
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.host import CertainLogits
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.translation import OwnTextPasses, TokenMap, TranslatedPasses, WrittenPasses
from specctl.policies import NONE, POLICIES, Setting
from specctl.policies.published import Constant
from specctl.replay.play import rounds
from tests.support.onnx_models import needs_onnx, onnx_runner
from tests.support.other_tokenizers import byte_level, map_of, sentence_pieces, toy_map
from tests.support.toys import Replays, TableRunner, Ticks, generated, table
from tests.support.traced import live, pair_of, shape, trace_of

EXACT, BIASED = 3e-7, 1e-2
TOYS = {
    "in another order, and more": (("<end>", "a", "b"), ("b", "ab", "<stop>", "a")),
    "one is cut in two": (("<end>", "a", "ab"), ("a", "b", "<stop>")),
    "words are cut anew": (("<end>", " a", "a"), ("<stop>", " a", " aa", "a")),
}
LENGTH = 3
TOKENS = 40
KINDS: dict[str, type[OwnTextPasses]] = {"shared": TranslatedPasses, "text": WrittenPasses}


def toy_draft(name: str, seed: int = 3, kind: str = "shared") -> Slot:
    tokens = toy_map(*TOYS[name])
    return Slot(KINDS[kind](TableRunner(table(seed, spread=1.0, vocabulary=tokens.draft.whole)), tokens))


def chain(name: str, policy: str = "constant", kind: str = "shared", **settings: object) -> Drafter:
    return ModelDrafter(toy_draft(name, kind=kind), POLICIES[policy](**settings))


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "a chain": lambda name: chain(name, draft_length=3),
    "a policy that reads the law": lambda name: chain(name, "svip", c=1.0, threshold=0.75),
    "a policy that learns": lambda name: chain(name, "cost-optimal", max_draft=2),
    "text": lambda name: chain(name, "svip", "text", c=1.0, threshold=0.9),
    "text, and a policy that learns": lambda name: chain(name, "cost-optimal", "text", max_draft=2),
    "below another one": lambda name: PreVerifiedDrafter(
        ModelDrafter(toy_draft(name, 4, "text"), Constant(1)), toy_draft(name), Constant(2)
    ),
    "above another one": lambda name: PreVerifiedDrafter(
        ModelDrafter(toy_draft("one is cut in two", 4), Constant(1)), toy_draft(name), Constant(2)
    ),
}


@pytest.mark.parametrize("sampling", ["T=1", "T=0.7 top_k=2 top_p=0.95", "T=1 by block"])
@pytest.mark.parametrize("toys", TOYS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.representatives(
    "a chain-in another order, and more-T=1",
    "a policy that reads the law-words are cut anew-T=0.7 top_k=2 top_p=0.95",
    "above another one-one is cut in two-T=1 by block",
    "text-words are cut anew-T=1 by block",
    "text, and a policy that learns-one is cut in two-T=0.7 top_k=2 top_p=0.95",
    "below another one-in another order, and more-T=1",
)
def test_the_output_has_the_law_of_the_target(drafter: str, toys: str, sampling: str) -> None:
    found = enumerate_decode(lambda: DRAFTERS[drafter](toys), SAMPLINGS[sampling], LENGTH, LENGTH)
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(SAMPLINGS[sampling], LENGTH)) < EXACT


def test_a_law_that_is_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft gives tokens that the target has not belongs to none that are shared."""
    whole = ModelDrafter.draft

    def with_the_rest(*asked: Any) -> Draft:
        found = whole(*asked)
        return replace(found, probs=None if found.probs is None else found.probs * 0.7)

    monkeypatch.setattr(ModelDrafter, "draft", with_the_rest)
    found = enumerate_decode(lambda: chain("one is cut in two"), SAMPLINGS["T=1"], LENGTH, LENGTH)
    assert error(found, expected_law(SAMPLINGS["T=1"], LENGTH)) > BIASED


def test_text_that_counts_as_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is certain, whatever law it was chosen from."""
    sample = CertainLogits.sample

    def with_a_law(rows: CertainLogits, *asked: Any, **named: Any) -> Any:
        return sample(rows, *asked, **named)[0], np.full(rows.numbers.shape, 1 / 3, np.float32)

    monkeypatch.setattr(CertainLogits, "sample", with_a_law)
    found = enumerate_decode(lambda: chain("one is cut in two", kind="text"), SAMPLINGS["T=1"], LENGTH, LENGTH)
    assert error(found, expected_law(SAMPLINGS["T=1"], LENGTH)) > BIASED


# Real tokenizers


PAIRS = {
    "a larger one": (lambda: byte_level(340), lambda: byte_level(420, "<|begin|>", "<|end|>")),
    "a smaller one": (lambda: byte_level(420, "<|begin|>", "<|end|>"), lambda: byte_level(340)),
    "pieces": (lambda: byte_level(420, "<|begin|>", "<|end|>"), lambda: sentence_pieces(400)),
    "bytes for pieces": (lambda: sentence_pieces(400), lambda: byte_level(340)),
}


@cache
def tokens_of(name: str) -> TokenMap:
    target, draft = PAIRS[name]
    return map_of(target(), draft())


def llama(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,  # else `generate` ends with what happens to be id 2
    )
    return LlamaForCausalLM(config).eval()


@cache
def models(name: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target, and a draft that knows the shared tokens as the target does."""
    tokens = tokens_of(name)
    target, draft = llama(tokens.target.whole, 1), llama(tokens.draft.whole, 2)
    kept = {key: weight for key, weight in target.state_dict().items() if "embed" not in key and "lm_head" not in key}
    draft.load_state_dict(kept, strict=False)
    with torch.no_grad():
        for ours, theirs in zip(*(one.state_dict().values() for one in (target, draft)), strict=True):
            if ours.shape != theirs.shape:
                theirs[torch.from_numpy(tokens.columns)] = ours[torch.from_numpy(tokens.vocabulary.ids)]
    return target, draft


@cache
def prompt(name: str) -> tuple[int, ...]:
    return tuple(PAIRS[name][0]().encode("Once upon a time 12 naïve \u4f60\u597d said\n\n Zo")[:24])


@cache
def expected(name: str) -> list[int]:
    return generated(models(name)[0], prompt(name), TOKENS)


ENGINES: dict[str, Callable[[LlamaForCausalLM, int], Slot]] = {
    "eager": lambda model, vocabulary: Slot(EagerPasses(model, vocabulary)),
    "static": lambda model, vocabulary: Slot(StaticPasses(model, vocabulary)),
    "graph": lambda model, vocabulary: Slot(GraphPasses(model, vocabulary, Replays())),
    "onnx": lambda model, vocabulary: onnx_runner(model, vocabulary, None),
}


def translated(name: str, engine: str = "eager", kind: str = "shared") -> Slot:
    tokens = tokens_of(name)
    return Slot(KINDS[kind](ENGINES[engine](models(name)[1], tokens.draft.whole), tokens))


def pair(name: str, engine: str = "eager", kind: str = "shared") -> Any:
    return pair_of(Slot(EagerPasses(models(name)[0], tokens_of(name).target.whole)), translated(name, engine, kind))


@pytest.mark.parametrize("engine", ["eager", "static", "graph", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives(
    "shared-a smaller one-graph",
    "text-pieces-eager",
    slow=(
        "shared-pieces-onnx",
        "shared-bytes for pieces-static",
        "shared-a larger one-static",
        "text-a smaller one-graph",
    ),
)
def test_greedy_tokens_are_those_of_generate(kind: str, name: str, engine: str) -> None:
    both = pair(name, engine, kind)
    played = live(both, Setting.of({"name": "svip", "threshold": 0.9}), prompt(name), TOKENS, Sampling())
    assert [token for round_ in played for token in round_.emitted] == expected(name)
    drafted = {step.token for round_ in played for step in round_.steps}
    assert len(drafted) > 3
    assert kind == "text" or drafted <= {*tokens_of(name).vocabulary.ids.tolist()}
    if name in ("a larger one", "a smaller one"):  # a random model does not write spaces and words alike
        assert sum(round_.accepted for round_ in played) > 1


PLAYED = [
    ("shared", policy, name)
    for policy in sorted(set(POLICIES) - {"specdec++", "disco", "confidence"})
    for name in PAIRS
]


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("kind", "policy", "name"),
    [*PLAYED, *(("text", policy, "bytes for pieces") for policy in ("svip", "cost-optimal"))],
)
@pytest.mark.representatives("shared-cost-optimal-bytes for pieces", "text-svip-bytes for pieces")
def test_replayed_rounds_are_those_of_a_live_run(
    kind: str, policy: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(2.0, 4.0, 0.0))
    both = pair(name, kind=kind)
    trace = trace_of(both, prompt(name), expected(name), TOKENS, 6, Sampling())
    settings: dict[str, Any] = {"max_draft": 6} if "max_draft" in POLICIES[policy].__dataclass_fields__ else {}
    found = [shape(one) for one in rounds(POLICIES[policy](**settings), trace, frozenset(), lambda *_: (2.0, 4.0))]
    setting = NONE if policy == "none" else Setting.of({"name": policy, **settings})
    assert found == [shape(one) for one in live(both, setting, prompt(name), TOKENS, Sampling())]


@pytest.mark.parametrize("context", [1 << 20, 16])
@pytest.mark.parametrize("name", list(PAIRS)[1:3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("shared-a smaller one-16", "shared-pieces-1048576", "text-pieces-16")
def test_what_is_predicted_depends_on_the_text_alone(kind: str, name: str, context: int) -> None:
    """Read in one pass or token by token, after other texts or not, and of texts longer than its context too."""
    text = [*prompt(name), *expected(name)]
    runners = []
    for _ in range(2):
        bare = Slot(EagerPasses(models(name)[1], tokens_of(name).draft.whole))
        bare.context = context
        runners.append(Slot(KINDS[kind](bare, tokens_of(name))))
    whole, single = runners
    with torch.inference_mode():
        rows = whole.extend(text, keep=len(text)).logits
        for place, token in enumerate(text):
            wrong = [*range(5, 5 + place % 4)]
            if wrong:
                single.extend(wrong, keep=len(wrong) - 1)
                single.rollback(place)
            assert single.length == place
            torch.testing.assert_close(single.extend([token], keep=1).logits[0], rows[place], atol=1e-4, rtol=1e-4)
        whole.rollback(0)
        torch.testing.assert_close(whole.extend(text, keep=3).logits, rows[-3:], atol=1e-4, rtol=1e-4)


def test_states_of_predictions_are_those_of_their_tokens() -> None:
    runner = translated("a smaller one")
    with torch.inference_mode():
        found = runner.extend(prompt("a smaller one"), keep=5, hidden=True)
        assert found.hidden is not None
        rows = models("a smaller one")[1].lm_head(found.hidden)
    columns = torch.from_numpy(tokens_of("a smaller one").columns)
    torch.testing.assert_close(rows[:, columns], found.columns)


def test_what_is_cached_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, read = translated("a smaller one"), list[int]()
    usual = runner.passes.inner.extend
    monkeypatch.setattr(runner.passes.inner, "extend", lambda ids, **how: read.append(len(ids)) or usual(ids, **how))
    with torch.inference_mode():
        for tokens in (prompt("a smaller one"), [5], [6]):
            runner.extend(tokens, keep=1)
    assert read[0] > 2 * max(read[1:]) > 0
