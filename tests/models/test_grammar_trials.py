"""Grammars are compiled in a process that can be ended: what takes too much is an error, and holds up nobody."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from transformers import AutoTokenizer

from specctl.errors import RecordError
from specctl.models.running.grammars import grammar, grammar_text, trials
from specctl.models.running.grammars.grammar import Grammars
from tests.support.waiting_grammars import gone

pytest.importorskip("llguidance")
EMBEDDED = Path(grammar.__file__).parents[2] / "embedded" / "target"


def of_program(program: str, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(trials, "PROGRAM", program)
    monkeypatch.setattr(grammar, "_MADE", WeakKeyDictionary())
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    return Grammars(tokenizer, {tokenizer.eos_token_id})


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    found = of_program("tests.support.waiting_grammars", monkeypatch)
    yield found
    found._trials._end()


def until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        sleep(0.01)
    raise AssertionError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow", "compiling it takes more than 3600 seconds"),
        ("large", "compiling it takes more than 512 MiB of memory"),
        ("fatal", r"llguidance fails over it \(its process ended with 7\)"),
    ],
)
def test_what_takes_too_much_is_one_error(
    grammars: Grammars, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError, match=f"^regex: {message}$") as raised:
        grammars.compiled(("regex", text))
    assert raised.value.kind == grammar.INVALID
    assert grammars.compiled(("regex", "ab")).matcher
    monkeypatch.setattr(grammars._trials, "ask", None)
    with pytest.raises(RecordError, match=message):  # at once, without another trial
        grammars.compiled(("regex", text))


def test_quick_grammars_are_compiled_beside_six_that_go_on(grammars: Grammars, tmp_path: Path) -> None:
    slow = [grammars.compiling(("regex", f"works {tmp_path / str(number)}")) for number in range(6)]
    assert grammars.compiled(("json_schema", '{"enum": ["red"]}')).fit
    until(lambda: any((tmp_path / str(number)).exists() for number in range(6)))
    assert grammars.compiled(("regex", "[ab]{3}")).matcher
    assert not any(one.done() for one in slow)
    written = [*tmp_path.iterdir()]
    assert len(written) == 1, "those that take long wait for each other"
    for one in slow:
        assert one.cancel()
    until(lambda: gone(written[0]))
    assert grammars.compiled(("regex", "[ab]{4}")).matcher


def test_an_interrupt_ends_a_trial(grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = grammars.compiling(("regex", f"works {tmp_path / 'one'}"))
    until((tmp_path / "one").exists)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(found, "result", interrupted)
    monkeypatch.setattr(grammars, "compiling", lambda _: found)
    with pytest.raises(KeyboardInterrupt):
        grammars.compiled(("regex", "works"))
    until(lambda: gone(tmp_path / "one"))


def test_trials_end_with_their_program(grammars: Grammars, tmp_path: Path) -> None:
    grammars.compiling(("regex", f"works {tmp_path / 'one'}"))
    until((tmp_path / "one").exists)
    first = tmp_path / "first"
    first.write_text((tmp_path / "one").read_text())  # a second try writes its own number
    grammars._trials._end()
    until(lambda: gone(first))
    assert grammars.compiled(("regex", "ab")).matcher, "another program is started"


def test_a_program_that_is_killed_is_started_again(grammars: Grammars) -> None:
    with pytest.raises(RecordError, match="the process that compiles grammars died") as raised:
        grammars.compiled(("regex", "ends"))
    assert raised.value.kind == "worker_died"
    assert grammars.compiled(("regex", "ab")).matcher


def test_where_processes_cannot_fork_grammars_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    grammars = of_program("tests.support.waiting_grammars", monkeypatch)
    assert grammars.compiled(("json_schema", '{"enum": ["red"]}')).fit
    for source in (("regex", "(["), ("json_schema", '{"type": 5}'), ("json_schema", "false")):
        with pytest.raises(RecordError, match=f"^{source[0]}: "):
            grammars.compiled(source)


def test_a_grammar_that_a_text_holds_is_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT", 1)
    held = grammars.compiled(("regex", "ab"))
    grammars.compiled(("regex", "cd"))
    assert grammars.compiled(("regex", "ab")) is held


def test_an_error_in_the_middle_of_a_text_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_text, "STATES", 20)
    grammars = of_program(trials.PROGRAM, monkeypatch)
    text = [5, *grammars._tokens.tokenize_str("abc" * 20)]
    rule = grammars.rule(grammars.compiled(("regex", "([ab]{2,9}c?){20}")), [5], 4096)
    with pytest.raises(RecordError, match=r"^the grammar cannot .* after \d+ tokens: [^\n<]*$") as raised:
        rule.apply(np.zeros((len(text), 4096), np.float32), text)
    assert raised.value.kind == grammar.FAILED
    grammars._trials._end()
