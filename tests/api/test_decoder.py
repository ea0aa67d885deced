"""`load`, `generate`, `stream`, `chat` and `calibrate`, on the embedded models."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import specctl
from specctl.errors import ProfileError, RecordError, UsageError
from specctl.policies import POLICIES
from specctl.prompts.suites import Suite
from specctl.replay.recording import metering

PROMPT = "Tom had a red kite. One windy day"


@pytest.fixture(scope="module")
def pair() -> specctl.Decoder:
    return specctl.load("embedded", overrides=["sampling.max_new_tokens=16"])


@pytest.fixture(scope="module")
def alone() -> specctl.Decoder:
    return specctl.load(target="embedded:target", overrides=["sampling.max_new_tokens=16"])


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, specctl; dir(specctl); sys.exit(any(name in sys.modules for name in ('torch', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_every_name_is_there() -> None:
    assert specctl.POLICIES is POLICIES
    assert all(getattr(specctl, name) is not None for name in specctl.__all__)
    assert set(specctl.__all__) <= set(dir(specctl))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specctl.nothing


def test_a_text_is_the_targets_own(pair: specctl.Decoder, alone: specctl.Decoder) -> None:
    heard = []
    done = pair.generate(PROMPT, on_round=heard.append)
    assert done.tokens == alone.generate(PROMPT).tokens
    assert tuple(heard) == done.rounds
    assert (pair.policy.partition(":")[0], alone.policy) == ("svip", "none")


def test_a_prompt_may_be_ids_or_messages(pair: specctl.Decoder) -> None:
    ids = pair.pair.tokenizer(PROMPT)["input_ids"]
    assert pair.generate(ids).tokens == pair.generate(PROMPT).tokens
    messages = [{"role": "user", "content": PROMPT}]
    through = specctl.load(overrides=["sampling.max_new_tokens=16", "prompt.chat=true"])
    assert pair.generate(messages).text == through.generate(PROMPT).text == through.chat().ask(PROMPT)
    assert pair.generate(messages).text != pair.generate(PROMPT).text
    with pytest.raises(RecordError, match="the prompt is empty"):
        pair.generate([])


@pytest.mark.parametrize("token", [-1, -(1 << 70), 4096, np.int64(4096), 1 << 31, 1 << 70])
def test_an_id_outside_the_vocabulary_is_an_error_of_its_text_alone(pair: specctl.Decoder, token: int) -> None:
    assert pair.pair.vocabulary == 4096
    with pytest.raises(RecordError, match=f"token id {token}, and the model's ids are 0 to 4095"):
        pair.generate([5, token, 6])
    first, bad, last = pair.generate_many([[5], [5, token, 6], [4095]], batch=2)
    assert isinstance(bad, RecordError)
    assert bad.kind == "unknown_token"
    assert not isinstance(first, RecordError)
    assert not isinstance(last, RecordError)
    assert first.tokens == pair.generate([5]).tokens


def test_so_is_a_text_with_a_token_that_the_embeddings_have_no_row_for(tmp_path: Path) -> None:
    folder = Path(specctl.load().profile.target.checkpoint)
    beyond = Path(shutil.copytree(folder, tmp_path / "beyond"))
    contents = json.loads((beyond / "tokenizer.json").read_text(encoding="utf-8"))
    added = {"id": 4096, "content": "<call>", "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    contents["added_tokens"].append(added | flags)
    (beyond / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
    alone = specctl.load(target=str(beyond), overrides=["sampling.max_new_tokens=4", "prompt.chat=false"])

    first, bad, last = alone.generate_many(["Once", "Once <call> more", "Twice"])

    assert isinstance(bad, RecordError)
    assert "token id 4096" in bad.message
    assert not isinstance(first, RecordError)
    assert not isinstance(last, RecordError)


@pytest.mark.parametrize(
    ("prompt", "named"), [(5, "not int"), (None, "not NoneType"), (b"a", "not bytes"), ([1.5], "1.5"), (["a"], '"a"')]
)
def test_what_is_no_prompt_is_named(pair: specctl.Decoder, prompt: object, named: str) -> None:
    for call in (pair.generate, lambda given: next(pair.stream(given))):
        with pytest.raises(TypeError, match="a prompt is a text, a list of token ids or a list of messages") as caught:
            call(prompt)
        assert named in str(caught.value)


def test_a_completion_shows_its_text_and_counts(pair: specctl.Decoder) -> None:
    done = pair.generate(PROMPT)
    assert repr(done).startswith(f"Completion(text={done.text!r}, finish_reason='length', ")
    assert f"{len(done.prompt)} prompt tokens, 16 tokens, {len(done.rounds)} rounds" in repr(done)
    assert len(repr(replace(done, text="a" * 5000, tokens=(1,) * 5000))) < 400


def test_mistakes_are_told_in_pythons_words() -> None:
    with pytest.raises(ProfileError, match=r"^draft names a draft without a target") as caught:
        specctl.load(draft="small")
    assert caught.value.hint == "Add target=MODEL, or profile=NAME."
    with pytest.raises(ProfileError) as caught:
        specctl.load(target="big", policy="svip")
    assert "--" not in caught.value.full_message
    assert "draft=MODEL" in caught.value.hint


def test_settings_are_those_of_the_sampling_table(pair: specctl.Decoder) -> None:
    texts = [pair.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=12).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(RecordError, match=r"sampling\.temperature"):
        pair.generate(PROMPT, temperature=-1.0)
    with pytest.raises(RecordError, match="did you mean 'top_k'"):
        pair.generate(PROMPT, topk=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("stopped", [False, True])
def test_pieces_are_the_text(pair: specctl.Decoder, stopped: bool) -> None:
    whole = pair.generate(PROMPT).text
    settings = {"stop": [whole[9:12]]} if stopped else {}
    pieces = list(pair.stream(PROMPT, **settings))
    assert "".join(pieces) == pair.generate(PROMPT, **settings).text == whole[: 9 if stopped else None]
    assert len(pieces) > 1


def test_a_stream_that_another_text_disturbed_does_not_go_on(pair: specctl.Decoder) -> None:
    stream = pair.stream(PROMPT)
    next(stream)
    pair.generate("The", max_new_tokens=2)
    with pytest.raises(UsageError, match="another text"):
        list(stream)


def test_a_chat_goes_on_whatever_is_written_between_its_turns(pair: specctl.Decoder) -> None:
    said = []
    for between in ((), ("The old man had",)):
        talk = pair.chat(max_new_tokens=8)
        said.append([talk.ask("Who are you?")])
        for prompt in between:
            pair.generate(prompt)
        said[-1].append(talk.ask("And then?"))
    assert said[0] == said[1]
    assert [turn.answer for turn in talk.transcript.turns] == said[1]
    assert talk.metrics.sequences == 2


def test_two_chats_do_not_disturb_one_another(pair: specctl.Decoder) -> None:
    one, other = pair.chat(max_new_tokens=6), pair.chat(max_new_tokens=6)
    said = [(one.ask(text), other.ask(text)) for text in ("Who are you?", "And then?")]
    assert all(mine == theirs for mine, theirs in said)


def test_the_policy_can_be_changed(pair: specctl.Decoder, alone: specctl.Decoder) -> None:
    text, before = pair.generate(PROMPT).text, pair.policy
    pair.use("constant:draft_length=2")
    assert pair.policy == "constant:draft_length=2"
    done = pair.generate(PROMPT)
    assert done.text == text
    assert max(round_.drafted for round_ in done.rounds) == 2
    for wrong in ("nope", "disco", "svip:c=-1"):
        with pytest.raises(ProfileError):
            pair.use(wrong)
    assert pair.policy == "constant:draft_length=2"
    pair.use(before)
    with pytest.raises(UsageError, match="there is no draft"):
        alone.use("svip")


def test_a_pair_whose_graphs_are_there_is_loaded_without_torch(tmp_path: Path) -> None:
    """And the acceptance head that a profile names once a policy reads it."""
    code = """
import sys, specctl
pair = specctl.load("embedded", overrides=["engine=onnx", "sampling.max_new_tokens=8", "threads=1"])
text = pair.generate("Tom had a red kite.").text
print("torch" in sys.modules)
pair.use("specdec++")
assert pair.generate("Tom had a red kite.").text == text
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for there in (False, True):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert ran.stdout.split() == [str(not there)]


def test_what_a_profile_no_longer_means_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="left out"):
        specctl.load("embedded", draft="prompt:lookup", policy="constant")


@pytest.mark.slow
def test_a_calibration_becomes_a_profile(pair: specctl.Decoder, tmp_path: Path) -> None:
    texts = [PROMPT, "Sam saw a big dog."]
    with patch.multiple(metering, LENGTHS=(0, 1, 4, 40), IN_A_ROW=2, ALONE=2, WARMING=1, PASSES=metering.WARM_UPS + 1):
        found = specctl.calibrate(pair, texts, policy="constant", grid="paper", samples=1)
    # On a busy machine, live runs may contradict the prediction; then the target alone is advised.
    assert found.policy in (found.found.winner.score.setting.label, "none")
    assert found.ranking[0][1] == max(speed for _, speed in found.ranking) > 0
    assert any("too few" in warning for warning in found.warnings)
    assert {one.setting.label for one in found.measured} >= {found.policy, "none"}
    best = specctl.load(found.write(tmp_path / "fast.toml"))
    assert best.policy == found.policy
    assert best.profile.sampling.max_new_tokens == 16
    assert best.profile.provenance is not None
    if found.policy != "none":
        drafting = specctl.speculative(policy=best.profile)._drafting
        assert drafting.table.setting.label == found.policy


def test_as_many_prompts_are_held_out_as_choose(pair: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def collected(_: object, __: object, suite: Suite, *___: object, **____: object) -> None:
        raise UsageError(f"{len(suite.prompts)} prompts")

    monkeypatch.setattr("specctl.api.calibration.collect_traces", collected)
    with pytest.raises(UsageError, match=r"^6 prompts"):
        specctl.calibrate(pair, [f"text {number}" for number in range(20)], policy="constant", samples=3)


def test_without_a_draft_there_is_nothing_to_calibrate(alone: specctl.Decoder) -> None:
    with pytest.raises(UsageError, match="no draft"):
        specctl.calibrate(alone)
    with pytest.raises(UsageError, match="cannot read"):
        specctl.calibrate(specctl.load("embedded"), "nowhere.jsonl")
