"""Turns, and the record that a conversation is saved as."""

import json
from pathlib import Path

import pytest

from specctl.conversation import Transcript, Turn, load_transcript
from specctl.errors import UsageError
from specctl.jsonl import read_records
from specctl.records import CompletionSummary, FinishReason

NUMBERS = CompletionSummary(7, (1, 2, 3), "Hi.", FinishReason.STOP, 1.0, 2.0, 10.0, 2, 1)


def talk() -> Transcript:
    return Transcript(
        [Turn("Hello", "Hi.", FinishReason.STOP, NUMBERS), Turn("And\nnow?", "Now,", FinishReason.LENGTH)]
    )


def saved(path: Path, transcript: Transcript, *, chat: bool = True, system: str | None = None) -> list[dict]:
    transcript.save(path, chat=chat, system=system)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_chat_is_saved_as_messages_with_the_last_answer_as_completion(tmp_path: Path) -> None:
    (record,) = saved(tmp_path / "talk.jsonl", talk(), system="Be brief.")
    assert record["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And\nnow?"},
    ]
    assert (record["completion"], record["finish_reason"]) == ("Now,", "length")
    assert record["metrics"]["generated_tokens"] == 3


def test_plain_turns_are_saved_with_a_completion_each(tmp_path: Path) -> None:
    (record,) = saved(tmp_path / "talk.jsonl", talk(), chat=False)
    assert record["turns"] == ["Hello", "And\nnow?"]
    assert record["completion"] == ["Hi.", "Now,"]
    assert record["finish_reason"] == ["stop", "length"]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pending", [True, False])
def test_what_is_saved_is_a_record_for_generate_and_loads_again(tmp_path: Path, chat: bool, pending: bool) -> None:
    transcript = talk()
    if pending:
        transcript.turns.append(Turn("Still there?"))
    path = tmp_path / "talk.jsonl"
    system = "Be brief." if chat else None
    transcript.save(path, chat=chat, system=system)
    with path.open("rb") as stream:
        (record,) = read_records(stream)
    assert record.error is None
    loaded = load_transcript(path)
    assert loaded.system == system
    assert [(turn.text, turn.answer) for turn in loaded.turns] == [(t.text, t.answer) for t in transcript.turns]


def test_saving_again_adds_a_line_and_loading_takes_the_last(tmp_path: Path) -> None:
    path, transcript = tmp_path / "talk.jsonl", talk()
    transcript.save(path, chat=True, system=None)
    transcript.undo()
    assert len(saved(path, transcript)) == 2
    assert load_transcript(path).texts == ["Hello"]


@pytest.mark.parametrize("content", ["notes of mine\n", '{"kind": "header", "candidates": []}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"holds .*, not conversations"):
        talk().save(path, chat=True, system=None)
    assert path.read_text() == content


def test_a_torn_last_line_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(UsageError, match=r"last line .* is not complete"):
        talk().save(path, chat=True, system=None)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot"):
        talk().save(tmp_path, chat=True, system=None)
    with pytest.raises(UsageError, match="cannot read"):
        load_transcript(tmp_path)


def test_nothing_said_is_nothing_to_save_or_take_back(tmp_path: Path) -> None:
    for action in (lambda: Transcript().save(tmp_path / "x", chat=True, system=None), Transcript().undo):
        with pytest.raises(UsageError, match="nothing has been said"):
            action()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("line", "turns"),
    [
        ('{"prompt": "a"}', [("a", None)]),
        ('{"id": 1, "prompt": "a", "completion": "b"}', [("a", "b")]),
        ('{"turns": ["a", "b", "c"], "completion": ["x"]}', [("a", "x"), ("b", None)]),
        ('{"messages": [{"role": "user", "content": "a"}]}', [("a", None)]),
    ],
)
def test_records_of_generate_can_be_continued(tmp_path: Path, line: str, turns: list[tuple[str, str | None]]) -> None:
    (tmp_path / "f").write_text(line + "\n")
    assert [(turn.text, turn.answer) for turn in load_transcript(tmp_path / "f").turns] == turns


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("no JSON\n", ":1: the line is not JSON"),
        ('{"prompt": "a"}\n{"id": 3}\n', ":2: the record has no prompt"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "user and assistant in turn"),
        ('{"messages": [{"role": "system", "content": "a"}]}\n', "user and assistant in turn"),
        ('{"messages": [{"role": "user", "content": "a", "name": "Bo"}]}\n', "each with a text alone"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}\n', "in turn"),
        ('{"turns": ["a"], "completion": ["x", "y"]}\n', "in turn"),
        ('{"turns": ["a"], "completion": [3]}\n', "in turn"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(UsageError, match=message):
        load_transcript(tmp_path / "f")
