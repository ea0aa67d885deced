from dataclasses import dataclass, field

import pytest
import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import RecordError
from specctl.jsonl import Record
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, FinishReason
from tests.support.checkpoints import tiny_tokenizer
from tests.support.toys import round_of

TOKENIZER = tiny_tokenizer()


@dataclass
class Notes:
    """Answers everything with ``!`` and notes what it was asked."""

    asked: list[tuple[str, SamplingTable, int]] = field(default_factory=list)
    error: Exception | None = None

    def play(self, prompt, settings, *, seed_offset=0):
        if self.error is not None:
            raise self.error
        self.asked.append((TOKENIZER.decode(prompt), settings, seed_offset))
        yield round_of(1, 2)
        return Completion(tuple(prompt), 0, (1,), "!", FinishReason.LENGTH, (), 0.0, 0.0, 0.0)

    @property
    def seeds(self) -> list[int]:
        return [settings.seed + offset for _, settings, offset in self.asked]


def answerer(**settings):
    notes = Notes()
    return notes, Answerer(notes, PromptFormat(TOKENIZER), SamplingTable(**settings))


def test_each_form_of_record_reaches_the_models_as_text():
    notes, answers = answerer()
    answers.answer(Record(1, 1, {"prompt": "a"}))
    answers.answer(Record(2, 2, {"turns": ["a", "b"]}))
    TOKENIZER.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    try:
        answers.answer(Record(3, 3, {"messages": [{"role": "user", "content": "a"}]}))
    finally:
        TOKENIZER.chat_template = None
    assert [prompt for prompt, *_ in notes.asked] == ["a", "a\n", "a\n!\nb\n", "<a>"]


def test_one_completion_a_turn_and_rounds_told_with_their_turn():
    _, answers = answerer()
    turns = []
    completions = answers.answer(Record(1, 1, {"turns": ["a", "b"]}), lambda turn, *_: turns.append(turn))
    assert (len(completions), turns) == (2, [0, 1])


def test_randomness_depends_on_the_line_and_not_on_what_came_before():
    notes, answers = answerer(seed=5)
    for line in (1, 2, 3):
        answers.answer(Record(line, line, {"prompt": "a"}))
    again, others = answerer(seed=5)
    others.answer(Record(3, 3, {"prompt": "a"}))
    assert notes.seeds == [5, 6, 7]
    assert again.seeds == [7]


def test_turns_draw_apart():
    notes, answers = answerer(seed=5)
    answers.answer(Record(1, 1, {"turns": ["a", "a", "a"]}))
    assert len(set(notes.seeds)) == 3


def test_a_record_may_override_the_sampling_for_itself():
    notes, answers = answerer(temperature=0.5, top_k=3)
    answers.answer(Record(9, 9, {"prompt": "a", "sampling": {"temperature": 1, "stop": ["x"], "seed": 7}}))
    answers.answer(Record(10, 10, {"prompt": "a", "sampling": {}}))
    (_, own, _), (_, plain, _) = notes.asked
    assert (own.temperature, own.top_k, own.stop) == (1, 3, ["x"])
    assert plain == answers.settings
    assert notes.seeds[0] == 7, "its own seed means just that, wherever the record stands"


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temprature": 1}, "sampling.temprature: unknown key; did you mean 'temperature'?"),
        ({"temperature": -1}, "sampling.temperature: -1 must be greater than or equal to 0"),
        ({"temperature": "hot"}, 'sampling.temperature: "hot" must be a valid number'),
        ({"top_k": 1.5}, "sampling.top_k: 1.5 must be a valid integer"),
        ({"stop": 1}, "sampling.stop: 1 must be a valid list"),
        ({"stop": ["a", ""]}, 'sampling.stop.1: ""'),
        ({"max_tokens": 0}, "sampling.max_tokens: 0 must be"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "sampling.max_tokens is 3 and sampling.max_new_tokens is 4; they are"),
    ],
)
def test_a_bad_override_is_the_records_own_error(sampling, words):
    _, answers = answerer()
    with pytest.raises(RecordError) as caught:
        answers.answer(Record(1, 1, {"prompt": "a", "sampling": sampling}))
    assert caught.value.kind == "invalid_sampling"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("data", "setting"),
    [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_completion_tokens": 3, "sampling": {"max_new_tokens": 3}}, {"max_new_tokens": 3}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"], "sampling": {"top_k": 2}}, {"stop": ["x", "y"], "top_k": 2}),
        ({"top_p": 0.5, "min_p": 0.1, "top_k": 4}, {"top_p": 0.5, "min_p": 0.1, "top_k": 4}),
        ({"temperature": None, "stop": None, "max_tokens": None, "seed": None}, {}),
        ({"verification": "token"}, {}),
    ],
    ids=str,
)
def test_settings_stand_beside_the_prompt_too(data, setting):
    notes, answers = answerer(max_new_tokens=9, temperature=0.5)
    answers.answer(Record(3, 3, {"prompt": "a", **data}))
    assert notes.asked[0][1] == answers.settings.model_copy(update=setting)


def test_a_records_own_grammar_takes_the_place_of_another():
    notes, answers = answerer(json_schema={"type": "null"})
    answers.answer(Record(3, 3, {"prompt": "a", "regex": "b"}))
    assert (notes.asked[0][1].regex, notes.asked[0][1].json_schema) == ("b", None)


def test_a_seed_beside_the_prompt_is_the_records_own():
    notes, answers = answerer(seed=1)
    answers.answer(Record(9, 9, {"prompt": "a", "seed": 7}))
    answers.answer(Record(9, 9, {"prompt": "a", "seed": None}))
    assert notes.seeds == [7, 9]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"temperature": "hot"}, 'temperature: "hot" must be a valid number'),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 must be a valid integer"),
        ({"stop": 5}, "stop: 5 must be a valid list"),
        ({"top_p": 0}, "top_p: 0 must be greater than 0"),
        ({"seed": -1, "top_k": "x"}, 'top_k: "x" must be a valid integer; seed: -1 must be'),
        ({"regex": "a", "schema": True}, "json_schema and regex each say what the text may be"),
        ({"seed": 1, "sampling": {"seed": 2}}, "seed is 1 and sampling.seed is 2; they are the same setting"),
    ],
    ids=str,
)
def test_a_wrong_setting_beside_the_prompt_is_called_as_the_record_calls_it(data, words):
    _, answers = answerer()
    with pytest.raises(RecordError) as caught:
        answers.answer(Record(1, 1, {"prompt": "a", **data}))
    assert caught.value.kind == "invalid_sampling"
    assert words in caught.value.message
    assert "sampling.seed: " not in caught.value.message


def test_a_bad_record_is_its_own_error():
    _, answers = answerer()
    error = RecordError("kind", "words")
    with pytest.raises(RecordError) as caught:
        answers.answer(Record(1, 1, error=error))
    assert caught.value is error


class EngineError(Exception):
    __module__ = "onnxruntime.capi.onnxruntime_pybind11_state"


@pytest.mark.parametrize("error", [kind("256 against 257") for kind in (RuntimeError, IndexError, EngineError)])
def test_an_error_of_a_pass_is_the_records_error(error):
    notes, answers = answerer()
    notes.error = error
    with pytest.raises(RecordError, match=f"{type(error).__name__}: 256 against 257") as caught:
        answers.answer(Record(1, 1, {"prompt": "a"}))
    assert caught.value.kind == "failed_pass"


@pytest.mark.parametrize("error", [torch.AcceleratorError("device-side assert"), KeyboardInterrupt(), KeyError("x")])
def test_what_would_fail_for_every_record_ends_the_run(error):
    notes, answers = answerer()
    notes.error = error
    with pytest.raises(type(error)):
        answers.answer(Record(1, 1, {"prompt": "a"}))


def test_an_interrupt_that_native_code_made_another_error_ends_the_run(monkeypatch):
    notes, answers = answerer()
    notes.error = RuntimeError("it was Ctrl-C")
    monkeypatch.setattr("specctl.decoding.answers.interrupt.became", lambda error: error is notes.error)
    with pytest.raises(RuntimeError, match="it was"):
        answers.answer(Record(1, 1, {"prompt": "a"}))


def without_room(kind):
    """What is raised where memory runs out."""
    if kind == "onnxruntime":
        state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
        return state.Fail("1 : FAIL : bfc_arena.cc Failed to allocate memory for requested buffer of size 4")
    if kind == "cpu":
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 60, dtype=torch.uint8)
        return caught.value
    return {"python": MemoryError(), "device": torch.OutOfMemoryError("no room")}[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("device", "no room"),
        ("python", "text: MemoryError"),
        ("cpu", "allocate"),
        ("onnxruntime", "Failed to allocate"),
    ],
)
def test_memory_that_runs_out_is_the_records_error(kind, said):
    notes, answers = answerer()
    notes.error = without_room(kind)
    with pytest.raises(RecordError, match=said) as caught:
        answers.answer(Record(1, 1, {"prompt": "a"}))
    assert caught.value.kind == "out_of_memory"
