"""`draft.tokens`: which ids the draft of a profile can write, and what stands against it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads.mtp_targets import head_of
from transformers import AutoModelForCausalLM

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.errors import ModelError, ProfileError
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.files.token_counts import TokenCounts
from specctl.models.loading.assembly import assembled, in_memory, load_pair
from specctl.models.loading.pair_members import PairMember
from specctl.models.loading.vocabularies import draft_vocabulary, fitting
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.running.pair import Pair
from specctl.profile import resolve
from specctl.profile.schema import DraftTable, Profile
from tests.support.checkpoints import llama_config, save_model, tiny_tokenizer
from tests.support.eagle_references import reference
from tests.support.toy_heads import random_eagle3


def profile(*settings: str, draft: str = "embedded:draft") -> Profile:
    given = [f"draft.model={draft}", "policy.name=constant", "engine=eager", "threads=1", *settings]
    return resolve("embedded", overrides=given).profile


def table(**keys: Any) -> DraftTable:
    return DraftTable.model_validate({"model": "embedded:draft", **keys})


def written(pair: Pair, settings: Profile, **sampling: Any) -> tuple[int, ...]:
    assert settings.draft is not None
    drafter = build_drafter(pair, settings.draft.setting)
    values = settings.sampling.model_copy(update={"max_new_tokens": 24, **sampling})
    return Session(pair, drafter).generate(pair.tokenizer.encode("Once upon a time"), values).tokens


@pytest.fixture(scope="module")
def whole() -> tuple[Pair, tuple[int, ...]]:
    pair = load_pair(profile())
    return pair, written(pair, profile())


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.representatives("1-static", "300-eager")
def test_a_draft_of_few_tokens_changes_no_text(whole: tuple[Pair, tuple[int, ...]], count: int, engine: str) -> None:
    settings = profile(f"draft.tokens={count}", f"engine={engine}")
    pair = load_pair(settings)
    vocabulary = pair.drafts[0].draft_vocabulary
    assert vocabulary is not None
    assert len(vocabulary) == count
    assert vocabulary.ids[0] in pair.eos, "a text may always end"
    assert written(pair, settings) == whole[1]
    eager = pair.eagerly()
    assert eager.drafts[0].draft_vocabulary is vocabulary
    assert written(eager, settings) == whole[1]


def test_all_tokens_are_no_fewer(whole: tuple[Pair, tuple[int, ...]]) -> None:
    pair = load_pair(profile("draft.tokens=4096"))
    assert pair.drafts[0].draft_vocabulary is None
    assert whole[0].drafts[0].draft_vocabulary is None


def test_more_tokens_than_there_are() -> None:
    with pytest.raises(ModelError, match=r"cannot write 4,097 tokens: it shares 4,096"):
        load_pair(profile("draft.tokens=4097"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"tokens": -5}, "greater than or equal to 1"),
        ({"tokens": "some"}, "auto"),
        ({"token_counts": "counts.json"}, "set tokens too"),
        ({"model": "prompt:lookup", "tokens": 5}, "copies from the text"),
        ({"tokens": 5, "draft": {"model": "embedded:draft"}}, "which needs all tokens"),
        ({"tokens": 5, "shards": 2}, "in one piece"),
    ],
    ids=str,
)
def test_tables_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**keys)


def test_the_key_is_named_where_it_is_wrong() -> None:
    with pytest.raises(ProfileError, match=r"draft\.tokens"):
        profile("draft.tokens=0")


def test_the_lowest_of_several_drafts_may_write_few() -> None:
    lower = {"model": "embedded:draft", "policy": {"name": "constant", "draft_length": 2}, "tokens": 200}
    settings = Profile.model_validate(
        {
            "engine": "eager",
            "target": {"model": "embedded:target"},
            "draft": {"model": "embedded:mid", "policy": {"name": "self-verify"}, "draft": lower},
        }
    )
    pair = load_pair(settings)
    assert [draft.draft_vocabulary is None for draft in pair.drafts] == [True, False]
    assert written(pair, settings) == written(load_pair(profile()), profile())


def test_counts_that_were_written_are_read(tmp_path: Path) -> None:
    counts = TokenCounts.of([[3, 3, 5], [3, 9]])
    path = tmp_path / "counts.json"
    path.write_text(counts.text(), encoding="utf-8")
    assert TokenCounts.read(path).counts == {3: 3, 5: 1, 9: 1}
    assert counts.likeliest(4, 12) == [3, 5, 9, 0]
    assert counts.likeliest(2, 12, always=[7, 40]) == [7, 3]
    assert counts.covered([3, 9]) == pytest.approx(4 / 5)
    assert counts.expected(range(12), 12) == 1
    assert counts.expected([3, 9, 0], 12) == pytest.approx((3 + 2 * 3 / 12) / 5)
    assert TokenCounts({}).covered([1]) == 1
    assert TokenCounts({}).expected([1], 4) == 1 / 4


@pytest.mark.parametrize(
    "contents",
    [
        None,
        "",
        "[]",
        "{}",
        '{"schema_version": 2, "counts": {}}',
        '{"schema_version": 1, "counts": {"a": 1}}',
        '{"schema_version": 1, "counts": {"1": "b"}}',
        '{"schema_version": 1, "counts": {"1": 0}}',
        '{"schema_version": 1, "counts": {"-1": 1}}',
        '{"schema_version": 1, "counts": [1]}',
    ],
)
def test_files_that_hold_no_counts(tmp_path: Path, contents: str | None) -> None:
    path = tmp_path / "counts.json"
    if contents is not None:
        path.write_text(contents, encoding="utf-8")
    with pytest.raises(ModelError, match=r"counts\.json does not hold token counts"):
        TokenCounts.read(path)


def test_counts_say_which_tokens(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(TokenCounts({7: 5, 200: 4, 30: 3}).text(), encoding="utf-8")
    found = draft_vocabulary(table(tokens=4, token_counts=str(path)), tiny_tokenizer(), 258, [0])
    assert found is not None
    assert found.ids.tolist() == [0, 7, 30, 200]
    with pytest.raises(ModelError, match="counts ids up to 200, and the pair shares 100"):
        draft_vocabulary(table(tokens=4, token_counts=str(path)), tiny_tokenizer(), 100, [0])


def test_without_counts_the_packages_prompts_are_counted() -> None:
    tokenizer = tiny_tokenizer()
    shipped = TokenCounts.shipped(tokenizer)
    space, e = tokenizer.encode(" e")
    assert space in shipped.likeliest(3, 258)
    assert e in shipped.likeliest(6, 258)
    assert draft_vocabulary(table(), tokenizer, 258, [0]) is None


def test_auto_takes_as_many_as_pay() -> None:
    """Of 64 ids four are all that occurs, a thousand times: then little is lost where a smaller product gains."""
    often = TokenCounts(dict.fromkeys(range(4), 1000))
    assert fitting(often, 64, share=0.2) == 4
    assert fitting(often, 64, share=0.0) == 64
    evenly = TokenCounts(dict.fromkeys(range(64), 1000))
    assert fitting(evenly, 64, share=0.5) == 64
    assert fitting(TokenCounts({}), 64, share=0.5) == 64
    assert fitting(often, 3, share=0.5) == 3, "fewer ids than the smallest part has"


def test_auto_of_a_pair_that_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(TokenCounts(dict.fromkeys(range(100), 1000)).text(), encoding="utf-8")
    pair = load_pair(profile("draft.tokens=auto", f"draft.token_counts={path}"))
    assert pair.drafts[0].draft_vocabulary is not None
    assert len(pair.drafts[0].draft_vocabulary) == 256


HEADS: dict[str, Callable[[], ChainHead]] = {
    "eagle1": lambda: reference("eagle1-safeailab").build(),
    "mtp": lambda: head_of("glm4_moe"),
    "mtp of a hybrid": lambda: head_of("qwen3_next"),
    "eagle3": lambda: random_eagle3(vocabulary=96),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_heads_that_write_all_tokens_can_write_fewer(make: Callable[[], ChainHead]) -> None:
    head, whole = make(), make()
    PairMember("draft", table(tokens=10), network=head).write_fewer(tiny_tokenizer(), 30, [0])
    assert head.draft_vocabulary == 10
    hidden = torch.randn(3, head.width)
    vocabulary = head.vocabulary_in(30)
    assert vocabulary is not None
    with torch.inference_mode():
        found, expected = head.output_layer(hidden), whole.output_layer(hidden)
    torch.testing.assert_close(found, expected[:, vocabulary.ids])
    assert head.widened(found).shape == (3, head.vocabulary)


def test_a_head_with_tokens_of_its_own_keeps_them() -> None:
    head = random_eagle3(vocabulary=96, tokens=[*range(40)])
    with pytest.raises(ModelError, match="it was trained to write 40 of them"):
        PairMember("draft", table(tokens=10), network=head).write_fewer(tiny_tokenizer(), 60, [0])
    PairMember("draft", table(tokens="auto"), network=head).write_fewer(tiny_tokenizer(), 60, [0])
    assert head.draft_vocabulary == 40
    assert head.vocabulary_in(30) is not None
    assert len(head.vocabulary_in(30) or ()) == 30, "ids that the pair does not share are left out"


def test_a_draft_in_memory_is_its_users(tmp_path: Path) -> None:

    folder = save_model(tmp_path / "model", llama_config())
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ModelError, match="is in memory"):
        assembled(in_memory(model, "target"), table(tokens=9), AutoModelForCausalLM.from_pretrained(folder))
    made = assembled(in_memory(model, "target"), table(model=str(folder), tokens=9), None)
    assert len(made.drafts[0].draft_vocabulary or ()) == 9
    assert made.target.draft_vocabulary is None


def test_a_vocabulary_is_told_by_its_digest() -> None:
    assert DraftVocabulary([1, 2], 5).digest != DraftVocabulary([1, 3], 5).digest
    assert json.loads(TokenCounts({1: 2}).text()) == {"schema_version": 1, "counts": {"1": 2}}
