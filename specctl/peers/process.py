"""Other engines, each in a process that answers lines of JSON with lines of JSON and is paused in between."""

import json
import os
import select
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

from specctl.decoding.text import decode_after
from specctl.errors import ModelError, UsageError
from specctl.models.running.pair import Pair
from specctl.models.running.ruled import RuledPasses
from specctl.peers.engines import Launch
from specctl.peers.programs.worker import Answer
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, FinishReason, Round

HELLO_SECONDS = 120.0  # Seconds until the first line, which include importing a package
NOT_PASSED_ON = ("OMP_", "GOMP_", "KMP_")
"""Prefixes of environment variables about threads; not passed on, because a peer has its own defaults."""


class PeerError(ModelError):
    """A peer's process cannot be used, or not any more."""


class PeerProcess:
    """A process with a process group of its own, which its children share.

    It is paused (SIGSTOP) except between a question and its answer, so that spinning threads do not slow others. If
    this process dies without ending it, the system continues it and sends it SIGHUP, because its group has no parent in
    the session.

    Args:
        label: names it in messages.
        command: its arguments.

    Attributes:
        hello: its first line.

    Raises:
        PeerError: it does not start, or its first line does not come.
    """

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self._label = label
        self._answer = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
                process_group=0,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{label}: {command[0]} cannot be started: {error.strerror}") from error
        try:
            self.hello = self._exchange(b"", HELLO_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            PeerError: it does not come within ``seconds``, is an error, or the process has ended. The process is then
                killed, so that it takes no more time from others.
        """
        self._signal(signal.SIGCONT)
        try:
            return self._exchange(json.dumps(question).encode() + b"\n", seconds)
        except PeerError:
            self._signal(signal.SIGKILL)
            raise

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Write a line, read a line, and pause the process."""
        text = self._read(line, monotonic() + seconds, seconds)
        self._signal(signal.SIGSTOP)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PeerError(f"{self._label}: its process wrote something that is not an answer")
        if "error" in found:
            raise PeerError(f"{self._label}: {found['error']}", str(found.get("hint", "")))
        return found

    def _read(self, line: bytes, deadline: float, seconds: float) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        to, of = self._process.stdin.fileno(), self._process.stdout.fileno()
        while b"\n" not in self._answer:
            readable, writable, _ = select.select([of], [to] if line else [], [], max(0.0, deadline - monotonic()))
            if not readable and not writable:
                raise PeerError(f"{self._label}: its process did not answer within {seconds:.0f} s")
            try:
                if writable:
                    line = line[os.write(to, line[: select.PIPE_BUF]) :]
                if readable:
                    found = os.read(of, 1 << 16)
                    if not found:
                        raise BrokenPipeError
                    self._answer += found
            except BrokenPipeError:
                raise PeerError(f"{self._label}: {self._end()}") from None
        answer, _, self._answer = self._answer.partition(b"\n")
        return answer

    def _end(self) -> str:
        """A description of how the process ended, and its last line on standard error."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            how = "its process closed its output"
        else:
            how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1].strip()}" if lines else how

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # all of the group have ended
            os.killpg(self._process.pid, number)


def completion_of(
    pair: Pair,
    prompt: Sequence[int],
    seed: int,
    tokens: Sequence[int],
    total_seconds: float,
    first_token_seconds: float,
    arrivals: tuple[float, ...] = (),
) -> Completion:
    """A peer's answer as a `Completion` without rounds; its times include the prompt's.

    Args:
        pair: the same models.
        prompt, tokens: ids; an end of sequence can only be the last token.
        seed: of the draws.
        total_seconds, first_token_seconds, arrivals: see `Completion`.
    """
    ended = bool(tokens) and tokens[-1] in pair.eos
    return Completion(
        prompt=tuple(prompt),
        seed=seed,
        tokens=tuple(tokens),
        text=decode_after(pair.tokenizer, prompt, tokens, pair.eos),
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        rounds=(),
        prefill_seconds=0.0,
        total_seconds=total_seconds,
        first_token_seconds=first_token_seconds,
        arrivals=arrivals,
    )


LOADING_SECONDS = 600.0
RUN_SECONDS, TOKEN_SECONDS = 60.0, 2.0
"""The time limit of an answer: seconds, plus seconds for each token of the prompt and of the limit."""


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt for a peer: its ids, and how many tokens may follow."""

    ids: list[int]
    most: int
    size: float = 1.0


class Peer(ABC):
    """Completes prompts of ids as `Generates` does, each text as a whole.

    Args:
        pair: the models that the peer runs.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._pair.eos

    def play(
        self, prompt: Sequence[int], settings: SamplingTable, *, seed_offset: int = 0
    ) -> Generator[Round, bool | None, Completion]:
        """`generate`, without rounds: they are not visible."""
        yield from ()
        return self.generate(prompt, settings, seed_offset=seed_offset)

    @abstractmethod
    def generate(self, prompt: Sequence[int], settings: SamplingTable, *, seed_offset: int = 0) -> Completion:
        """Complete one prompt of ids."""


class MeasuredPeer(Peer):
    """A peer whose models are loaded; its rounds are not visible, but it counts its passes where it can.

    Times are measured in its process, from ids to ids, without the communication. Several prompts at once share the
    time of their batch, as texts of specctl's batches share passes; the peer acts as the shared object of a `Hub`.

    Args:
        pair: the same models, loaded here, with the context, the ids that end a text, and the tokenizer.
        launch: how the peer drafts, and its models.
        process: was started by the launch's command.

    Attributes:
        passes: for each completion so far, forward passes of the target and of the draft.
        version: of the engine.
        batches: whether `run` accepts several prompts.

    Raises:
        UsageError: the pair's target has rules that the peer does not follow.
        PeerError: the process cannot load the models.
    """

    def __init__(self, pair: Pair, launch: Launch, process: PeerProcess) -> None:
        super().__init__(pair)
        self._process = process
        self._label = launch.setting.label
        if any(isinstance(each, RuledPasses) for each in pair.target.transforms):
            raise UsageError(
                f"{launch.setting.peer} does not follow the rules in the target's generation_config.json",
                "leave the rules out with --set generation_config=false",
            )
        self.passes: list[tuple[int, int]] = []
        self.batches = launch.setting.batches
        self._answered: Callable[[PeerPrompt], Answer | PeerError] = lambda prompt: self.run([prompt])[0]
        self.version = str(process.hello.get("version", "unknown"))
        question = {
            "do": "load",
            "folder": str(launch.folder),
            **launch.setting.values,
            "weights": launch.converted.weights,
            "cache": launch.converted.cache,
            "threads": pair.thread_count,
            "context": pair.context,
            "stop": sorted(pair.eos),
        }
        process.ask(question, LOADING_SECONDS)

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
    ) -> Completion:
        """Complete one prompt of ids greedily.

        Raises:
            RecordError: the prompt leaves no room in the context.
            PeerError: the process does not answer, or its answer is not one of that many tokens with their times.
        """
        most = min(settings.max_new_tokens, self._pair.room(prompt))
        found = self._answered(PeerPrompt(list(prompt), most))
        if isinstance(found, PeerError):
            raise found
        end = next((place for place, token in enumerate(found.ids) if token in self._pair.eos), None)
        tokens = found.ids[: most if end is None else end + 1]
        self.passes.append((found.passes, found.drafted))
        seed, arrivals = settings.seed + seed_offset, tuple(found.arrivals[: len(tokens)])
        return completion_of(self._pair, prompt, seed, tokens, found.seconds, found.first_seconds, arrivals)

    def run(self, requests: Sequence[PeerPrompt]) -> list[Answer | PeerError]:
        """Answer all prompts at once; each answer gets an equal share of the time.

        Prompts that have no room in the context once they are padded to the longest are run one by one.
        """
        batch, most = [one.ids for one in requests], max(one.most for one in requests)
        longest = max(map(len, batch))
        if len(requests) > 1 and longest + most > self._pair.context:
            return [self.run([one])[0] for one in requests]
        seconds = RUN_SECONDS + TOKEN_SECONDS * len(batch) * (longest + most)
        try:
            found = self._process.ask({"do": "run", "batch": batch, "most": most}, seconds)
            return [self._share(one, len(batch)) for _, one in zip(batch, found["batch"], strict=True)]
        except PeerError as error:
            return [error for _ in requests]
        except (LookupError, TypeError, ValueError) as error:
            return [PeerError(f"{self._label}: its answer lacks something ({error!r})") for _ in requests]

    def row(self, answered: Callable[[PeerPrompt], Answer | PeerError]) -> Self:
        """A copy with its own `passes` that hands its prompts to ``answered``, to be batched with others."""
        one = copy(self)
        one.passes, one._answered = [], answered
        return one

    @staticmethod
    def _share(found: Any, count: int) -> Answer:
        """The answer to one of ``count`` prompts; raises LookupError, TypeError or ValueError for an invalid one."""
        seconds = float(found["seconds"])
        arrivals = [float(one) for one in found["arrivals"]]
        if count > 1 and not arrivals:
            arrivals = [seconds]  # the batch's end: a share of its time is not an arrival
        times = seconds / count, float(found["first_seconds"])
        return Answer([int(one) for one in found["ids"]], *times, int(found["passes"]), int(found["drafted"]), arrivals)
