"""The worker of a peer: run by path as ``PYTHON worker.py PEER [PROGRAM]`` with the Python that has the peer's engine.

It imports only the standard library and that engine's package. Its module path has only this folder added. It reads a
line of JSON and writes a line of JSON. The first line that it writes has the engine's ``version``. A question that
loads has the models' ``folder``, the way to ``draft`` with its value, ``weights``, ``cache``, ``threads``, ``context``
and ``stop``, the ids that end a text. A question that runs has a ``batch``, the ids of each prompt, and the ``most``
tokens that may follow each; the answer to it has a ``batch`` too, an `Answer` for each prompt.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

DRAFT = "draft"  # The folder of the draft's model, within that of the target's
SHORT = {"float16": "f16", "float32": "f32"}
LONGEST = 16  # Most tokens of a draft that ends by its confidence


@dataclass
class Answer:
    """The tokens after a prompt, with times and counts."""

    ids: list[int]  # with the id that ended the text
    # seconds, first_seconds: from the prompts' ids to the last token, and to the first
    seconds: float
    first_seconds: float
    passes: int = 0  # of the target, the prompt's not counted; 0 if unknown
    drafted: int = 0  # tokens that the draft wrote; 0 if unknown
    arrivals: list[float] = field(default_factory=list)  # seconds from the prompts' ids to each token; empty if unknown


class Loaded(Protocol):
    """An engine with its models."""

    def run(self, batch: list[list[int]], most: int) -> list[Answer]: ...


def serve(version: Callable[[], str], load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Answer questions until standard input ends.

    Args:
        version: imports the engine's package and returns its version.
        load: makes the engine from a question.
    """
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        say({"version": version()})
    except ImportError as error:
        say({"error": f"{sys.executable} cannot import it: {error}", "hint": _hint(error)})
        return
    except Exception as error:
        say({"error": _line(error)})
        return
    engine = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "load":
                engine = load(question)
                say({})
            else:
                assert engine is not None
                answered = engine.run(question["batch"], question["most"])
                say({"batch": [asdict(each) for each in answered]})
        except Exception as error:
            say({"error": _line(error)})


def _hint(error: ImportError) -> str:
    package = (error.name or "").replace("_", "-")
    return f"{sys.executable} -m pip install {package}" if package else ""


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


class OnnxruntimePair:
    """onnxruntime-genai: a target, with a draft where it drafts, in one model of its own."""

    def __init__(self, question: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._engine = onnxruntime_genai
        self._stop = question["stop"]
        folder = Path(question["folder"])
        session = {"intra_op_num_threads": question["threads"], "inter_op_num_threads": 1}
        model: dict[str, Any] = {"decoder": {"session_options": session}}
        if self._stop:
            model["eos_token_id"] = self._stop
        known = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
        self._pad = int(known["pad_token_id"])
        if question["draft"] != "none":
            draft = json.loads((folder / DRAFT / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
            options = {**draft["session_options"], **session}
            model["draft"] = {**draft, "filename": f"{DRAFT}/{draft['filename']}", "session_options": options}
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": model}))
        self._model = onnxruntime_genai.Model(config)
        self._drafting: dict[str, Any] = {
            "none": {},
            "constant": {"max_draft_tokens": question.get("tokens")},
            "adaptive": {"min_adaptive_k": question.get("tokens")},
        }[question["draft"]]
        if question.get("cooldown"):
            self._drafting["cooldown"] = True

    @staticmethod
    def version() -> str:
        import onnxruntime_genai

        return str(onnxruntime_genai.__version__)

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        began = perf_counter()
        longest = max(map(len, batch))
        options = self._engine.GeneratorParams(self._model)
        options.set_search_options(max_length=longest + most, do_sample=False, batch_size=len(batch))
        if self._drafting:
            options.set_speculative_options(**self._drafting)
        generator = self._engine.Generator(self._model, options)
        # On the right, so that padding shifts no position.
        generator.append_tokens([token for ids in batch for token in [*ids, *[self._pad] * (longest - len(ids))]])
        arrivals = []
        while not generator.is_done():
            generator.generate_next_token()
            arrivals.append(perf_counter() - began)
        texts = [self._text(generator.get_sequence(row)[longest:], most) for row in range(len(batch))]
        seconds = perf_counter() - began
        if not self._drafting:
            return [Answer(ids, seconds, arrivals[0], len(ids), arrivals=arrivals[: len(ids)]) for ids in texts]
        counts = generator.get_speculative_stats()
        (ids,) = texts  # it drafts for one text only
        return [Answer(ids, seconds, arrivals[0], counts["rounds"], counts["draft_tokens_proposed"], arrivals)]

    def _text(self, sequence: Iterable[int], most: int) -> list[int]:
        """The output of a row. A single sequence lacks the token that ended it; in a batch, padding follows."""
        found = [int(token) for token in sequence]
        end = next((place for place, token in enumerate(found) if token in (*self._stop, self._pad)), len(found))
        last = [token for token in found[end : end + 1] if token in self._stop] or self._stop[:1]
        return [*found[:end], *last][:most]


class OpenvinoPair:
    """OpenVINO GenAI: its pipeline for text, with a draft model where it drafts."""

    def __init__(self, question: dict[str, Any]) -> None:
        import openvino_genai

        self._engine = openvino_genai
        folder = Path(question["folder"])
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": question["threads"]}
        if question["cache"] == "float32":
            settings["KV_CACHE_PRECISION"] = "f32"
        if question["weights"] == "float32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
        options = openvino_genai.GenerationConfig()
        options.do_sample = False
        options.apply_chat_template = False
        options.stop_token_ids = set(question["stop"])
        draft = {}
        if question["draft"] != "none":
            draft["draft_model"] = openvino_genai.draft_model(str(folder / "draft"), "CPU", **settings)
        if question["draft"] == "constant":
            options.num_assistant_tokens = question["tokens"]
        if question["draft"] == "confidence":
            options.assistant_confidence_threshold = question["threshold"]
            options.logprobs = 1  # without them every greedy token counts as certain, and each draft ends after one
        self._drafts, self._options = bool(draft), options
        self._pipeline = openvino_genai.LLMPipeline(
            str(folder / "target"), "CPU", scheduler_config=scheduler, **draft, **settings
        )

    @staticmethod
    def version() -> str:
        import openvino_genai

        return str(openvino_genai.__version__)

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        import numpy
        from openvino import Tensor

        began = perf_counter()
        self._options.max_new_tokens = most
        ids = numpy.zeros((len(batch), max(map(len, batch))), dtype=numpy.int64)
        given = numpy.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, : len(prompt)], given[row, : len(prompt)] = prompt, 1
        inputs = self._engine.TokenizedInputs(Tensor(ids), Tensor(given))
        result = self._pipeline.generate(inputs, self._options)
        texts = [[int(token) for token in tokens] for tokens in result.tokens]
        seconds = perf_counter() - began
        first = result.perf_metrics.get_ttft().mean / 1e3
        if not self._drafts:
            return [Answer(found, seconds, first, passes=len(found)) for found in texts]
        counts = result.extended_perf_metrics
        target = counts.main_model_metrics.raw_metrics.m_durations if counts is not None else []
        draft = counts.draft_model_metrics.raw_metrics.m_durations if counts is not None else []
        (found,) = texts  # passes of several texts are not counted apart
        return [Answer(found, seconds, first, len(target), len(draft))]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class LlamaPair:
    """llama.cpp: its server with one slot, asked over HTTP on this machine, in the process group of this one."""

    def __init__(self, question: dict[str, Any]) -> None:
        folder, cache = Path(question["folder"]), SHORT[question["cache"]]
        threads = str(question["threads"])
        self._port = free_port()
        command = [sys.argv[2], "-m", str(folder / "target.gguf"), "-c", str(question["context"]), "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "-t", threads, "-tb", threads]
        # A repeated prompt would otherwise cost nothing.
        command += ["--cache-ram", "0", "-ctk", cache, "-ctv", cache]
        if cache == "f32":
            command += ["-fa", "off"]  # flash attention is slow on such a cache
        if question["draft"] != "none":
            most = question.get("tokens", LONGEST)
            command += ["-md", str(folder / "draft.gguf"), "-ctkd", cache, "-ctvd", cache]
            command += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(most), "--spec-draft-n-min", "0"]
            command += ["--spec-draft-p-min", str(question.get("threshold", 0.0))]
        self._stop = question["stop"]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        while not self._ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"{sys.argv[2]} ended with exit code {self._server.returncode}")
            sleep(0.05)

    @staticmethod
    def version() -> str:
        said = subprocess.run([sys.argv[2], "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version: *([^\n]+)", said.stdout + said.stderr)
        if found is None:
            raise RuntimeError(f"{sys.argv[2]} --version prints no version")
        return found[1]

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        (ids,) = batch  # there is one slot
        # Without the other samplers nothing but the largest logit is looked for.
        sampling = {"temperature": 0, "samplers": ["temperature"]}
        question = {"prompt": ids, "n_predict": most, "cache_prompt": False, "return_tokens": True, **sampling}
        status, text = self._ask("POST", "/completion", json.dumps(question))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {text[:200]}")
        found = json.loads(text)
        tokens, times = [int(token) for token in found["tokens"]], found["timings"]
        if found.get("stop_type") == "eos" and self._stop and tokens[-1:] != self._stop[:1]:
            tokens.append(self._stop[0])
        accepted = int(times.get("draft_n_accepted", 0))
        seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        passes, drafted = len(tokens) - accepted, int(times.get("draft_n", 0))
        return [Answer(tokens, seconds, times["prompt_ms"] / 1e3, passes, drafted)]

    def _ready(self) -> bool:
        try:
            return self._ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


PEERS: dict[str, type[OnnxruntimePair | OpenvinoPair | LlamaPair]] = {
    "onnxruntime-genai": OnnxruntimePair,
    "openvino": OpenvinoPair,
    "llama.cpp": LlamaPair,
}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]].version, PEERS[sys.argv[1]])
