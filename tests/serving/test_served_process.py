"""A server whose models are on llama.cpp: whatever ends their process ends no more than a text."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from rich.console import Console

from specctl.commands import loading
from specctl.commands.loading import may_run_on_llama, served_replicas
from specctl.decoding.session import TextRequest
from specctl.errors import ModelError, RecordError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.profile import Profile, resolve
from specctl.serving.served import Served
from specctl.serving.text_thread import Ended, Event, TextThread, Ticket, Wrote, served_writer
from specctl.terminal.progress import TerminalProgress
from specctl.text_engine.processes import ProcessEngine
from tests.serving.llama_job import ABORTS, AT_LOAD, KILLED
from tests.support.pretended_llama import PretendedLlama
from tests.support.tiny_gguf import write

SECONDS = 120.0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The command's messages, with the pretended library here and in the models' process."""
    import specctl.models.llama.vocabulary  # noqa: F401 - `install` replaces names in imported modules

    lines: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "SERVED_REPLICA", "tests.serving.llama_job:served")
    monkeypatch.setattr(loading, "warn", lines.append)
    monkeypatch.setattr(loading, "print_message", lines.append)
    PretendedLlama().install(monkeypatch)
    return lines


def profile_of(target: object, *settings: str) -> Profile:
    given = [f"target.model={target}", "target.device=cpu", "threads=1", *settings]
    return resolve("embedded", overrides=[*given, "draft.model=prompt:lookup", "draft.policy.name=constant"]).profile


class Texts:
    """A server's thread of texts, and what it reports."""

    def __init__(self, served: Served) -> None:
        assert isinstance(served.engine, ProcessEngine)
        self.engine, self.profile = served.engine, served.profile
        self._events: dict[Ticket, list[Event]] = {}
        self.thread = TextThread(served.engine, served.texts, 64, self._report)
        self.thread.start()

    def _report(self, reports: Any) -> None:
        for ticket, event in reports:
            self._events[ticket].append(event)

    def ask(self, *prompt: int) -> Ticket:
        ticket = Ticket(TextRequest(prompt, self.profile.sampling.model_copy(update={"max_new_tokens": 6})))
        self._events[ticket] = []
        self.thread.submit(ticket)
        return ticket

    def answer(self, ticket: Ticket) -> tuple[int, ...] | Event:
        """The tokens of a text, or its error."""
        due = monotonic() + SECONDS
        while not (found := [event for event in self._events[ticket] if not isinstance(event, Wrote)]):
            assert monotonic() < due, "there is no answer"
            sleep(0.005)
        (event,) = found
        return event.completion.tokens if isinstance(event, Ended) else event


@contextmanager
def texts(profile: Profile, batch: int = 4) -> Iterator[Texts]:
    progress = TerminalProgress(Console(file=StringIO()), False)
    with served_replicas(None, profile, "tiny", batch, progress, quiet=True, foreign_head=False) as served:
        found = Texts(served)
        try:
            yield found
        finally:
            found.thread.give_up()
            found.thread.join(SECONDS)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


@pytest.mark.slow
def test_a_text_that_ends_the_models_is_an_error_of_that_text(said: list[str], tmp_path: Path) -> None:
    why = "the models' process ended with exit code 3 (llama.cpp failed: GGML_ASSERT(n_tokens > 0) failed)"
    profile = profile_of(write(tmp_path / "t.gguf"))
    with texts(profile) as served:
        expected = served.answer(served.ask(5, 6, 7))
        assert isinstance(expected, tuple)
        opened = descriptors()
        for _ in range(2):  # in total more ends than a process may have without a question
            error = served.answer(served.ask(5, ABORTS))
            assert isinstance(error, RecordError)
            assert (error.kind, error.message) == ("worker_died", f"no worker survived this text; {why}")
        assert served.answer(served.ask(5, 6, 7)) == expected
        assert descriptors() == opened, "each process before left something"
        (pid,) = served.engine.pids
    assert said.count(f"{why}; it is started again") == 4
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_texts_next_to_one_that_ends_the_models_are_written(said: list[str], tmp_path: Path) -> None:
    with texts(profile_of(write(tmp_path / "t.gguf"))) as served:
        prompts = [(5, 6, 7), (8, 9), (10,)]
        alone = [served.answer(served.ask(*prompt)) for prompt in prompts]
        first, deadly, *others = [served.ask(*prompt) for prompt in (prompts[0], (5, KILLED), *prompts[1:])]
        error = served.answer(deadly)
        assert isinstance(error, RecordError)
        assert error.message.endswith("the models' process was ended by signal 9")
        assert [served.answer(ticket) for ticket in (first, *others)] == alone
        os.kill(served.engine.pids[0], signal.SIGKILL)
        assert served.answer(served.ask(*prompts[0])) == alone[0]
    assert all(line.endswith("it is started again") for line in said)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("aborts", r"process ended with exit code 3 \(llama.cpp failed: GGML_ASSERT\(n_tokens > 0\) failed\)\n"),
        ("killed", r"process was ended by signal 9\n"),
    ],
)
def test_models_that_cannot_be_loaded_end_the_server(
    said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, why: str
) -> None:
    monkeypatch.setenv(AT_LOAD, how)
    with pytest.raises(ModelError, match=why) as raised, texts(profile_of(write(tmp_path / "t.gguf"))):
        pass
    assert "a smaller model or --batch needs less memory" in raised.value.hint
    assert said == ["error: llama.cpp failed: GGML_ASSERT(n_tokens > 0) failed"] * (how == "aborts")


@pytest.mark.usefixtures("said")
def test_others_go_on_while_a_prompt_is_read(tmp_path: Path) -> None:
    """A text that is alone can be stopped after each piece of its prompt, and what was read is kept."""
    profile = profile_of(write(tmp_path / "t.gguf", context=2048))
    pair = load_pair(profile, engines=EngineSettings.of(profile), models=False)
    library = pair.target.bare.passes.model.library  # type: ignore[attr-defined]
    long, sampling = (
        tuple(5 + place % 200 for place in range(300)),
        profile.sampling.model_copy(update={"max_new_tokens": 4}),
    )
    question = TextRequest(long, sampling), True

    def widths() -> list[int]:
        found = [len(tokens) for tokens in library.decodes()]
        library.calls.clear()
        return found

    def played(parts: Any) -> tuple[list[Any], Ended]:
        given = []
        while True:
            try:
                given.append(next(parts))
            except StopIteration as end:
                return given, end.value

    write_text = served_writer(pair, profile)
    widths()
    stopped = write_text(question)
    assert [next(stopped), next(stopped)] == [None, None]
    stopped.close()
    assert widths() == [pair.target.piece] * 2
    parts, ended = played(write_text(question))
    assert parts[:2] == [None, None]
    assert all(parts[3:])
    assert (ended.kept, widths()[:2]) == (2 * pair.target.piece, [pair.target.piece] * 2)
    whole = played(
        served_writer(load_pair(profile, engines=EngineSettings.of(profile), models=False), profile)(question)
    )
    assert whole[1].completion.tokens == ended.completion.tokens


@pytest.mark.usefixtures("said")
def test_only_what_llama_cpp_runs_has_a_process_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "t.gguf")
    assert may_run_on_llama(profile_of(file))
    assert may_run_on_llama(profile_of("embedded:target").model_copy(update={"target": profile_of(file).target}))
    assert not may_run_on_llama(profile_of(file, "engine=onnx"))
    assert not may_run_on_llama(profile_of("embedded:target"))
