"""What is measured: for each question the commands that answer it, and the columns of its table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.observing.results import RunSet
from tools.measure.engines import engines_table
from tools.measure.rules import rules_table

Summary = Mapping[str, Any]
"""What the JSON document of `specctl bench` says of one candidate under ``overall``."""


Tabled = tuple[list[str], list[list[str]], str]
"""Headings, rows, and what stands below the table."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of its outputs, once in a part; heads its columns.
        module: run as ``python -m MODULE``; a step of ``specctl`` whose first argument is ``bench`` gives a table's
            columns, and any other's output is shown as it is printed.
        arguments: of the command. ``{folder}`` stands for the part's folder, in which earlier steps left their files,
            ``{peers}`` for what `tools.install_peers` wrote.
    """

    name: str
    arguments: tuple[str, ...]
    module: str = "specctl"

    @property
    def is_bench(self) -> bool:
        """Whether this is `specctl bench`, whose runs are kept one by one and whose document becomes a table."""
        return self.module == "specctl" and self.arguments[0] == "bench"


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        name: on the command line.
        question: the heading.
        reading: what to know before the table is read; no figures, so that it stays true of every run.
        steps: in the order in which they run.
        columns: of the table of all steps that are benchmarks: for each of them, these.
        table: makes that table instead from the runs of each such step, by its name.
        kept: titles of the tables that are shown of steps that print text; all where empty.
    """

    name: str
    question: str
    reading: str
    steps: tuple[Step, ...]
    columns: tuple[str, ...] = ("speedup",)
    kept: tuple[str, ...] = ()
    table: Callable[[Mapping[str, RunSet]], Tabled] | None = None


def _ratio(summary: Summary) -> str:
    found = summary["speedup"] and summary["speedup"]["of_totals"]
    if not found:
        return "-"
    interval = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['value']:.2f}{interval}"


def _two(key: str) -> Callable[[Summary], str]:
    return lambda summary: "-" if summary[key] is None else f"{summary[key]:.2f}"


CELLS: dict[str, Callable[[Summary], str]] = {
    "speedup": _ratio,
    "tokens a round": _two("mean_acceptance_length"),
    "draft steps a token": _two("draft_rate"),
    "target passes a token": _two("verification_rate"),
}
"""The cell of each column, by its heading."""

GREEDY, DRAWN = "greedy", "T = 1"
FEW = ("-n", "64", "--threads", "1", "--samples-per-category", "3")
DRAFTS = ("embedded-cost-optimal", "embedded-eagle3", "embedded-dspark", "embedded-lookup")
ALIKE = (
    "--policy",
    "constant:draft_length=5",
    "--policy",
    "constant:draft_length=10",
    "--policy",
    "svip",
    "--policy",
    "cost-optimal",
)
RULES = ("--policy", "cost-optimal", "--policy", "constant", "--policy", "max-confidence")
CALIBRATE = (
    "calibrate",
    "-p",
    "embedded",
    "--policy",
    "all",
    "-n",
    "96",
    "--threads",
    "1",
    "--trace",
    "{folder}/trace.jsonl",
)


PEERS = {
    "onnxruntime-genai": ("env/bin/python", "none", "constant:3", "constant:4", "constant:5", "adaptive"),
    "openvino": ("env/bin/python", "none", "constant:3", "constant:4", "constant:5", "confidence"),
    "llama.cpp": ("build/bin/llama-server", "none", "constant:3", "constant:4", "confidence"),
}
"""For each peer in a process of its own: its program, and the ways to draft among which is its best."""


def _peers(threads: str) -> tuple[str, ...]:
    words = ["-p", "embedded-cost-optimal", "--policy", "cost-optimal", "--samples-per-category", "10"]
    words += ["--lengths", "16,128", "--threads", threads]
    for peer, (program, *ways) in PEERS.items():
        words += [word for way in ways for word in ("--peer", f"{peer}:{way}")]
        words += ["--peer-models", f"{peer}={{peers}}/{peer}/models"]
        words += ["--peer-program", f"{peer}={{peers}}/{peer}/{program}"]
    return tuple(words)


def _bench(name: str, *arguments: str, temperature: float = 0) -> Step:
    return Step(name, ("bench", *arguments, "-t", f"{temperature:g}"))


def _both(*arguments: str) -> tuple[Step, Step]:
    return _bench(GREEDY, *arguments), _bench(DRAWN, *arguments, temperature=1)


USELESS = tuple(
    word for name in ("useless-draft", "useless-head", "lookup") for word in ("-p", f"{{folder}}/{name}.toml")
)

PARTS = (
    Part(
        "useless",
        "Is it ever slower than the target alone?",
        "`cost-optimal` with a draft model and a draft head whose weights are in random order, and with copies from "
        "the text, which help where greedy texts repeat themselves and hardly in drawn ones. Texts of 96 tokens.",
        (
            Step("profiles", ("{folder}/.",), "tools.useless_drafts"),
            *(
                _bench(f"{engine}, {name}", *USELESS, "--engine", engine, "-n", "96", "--threads", "1", temperature=t)
                for engine in ("onnx", "eager", "static")
                for name, t in ((GREEDY, 0), (DRAWN, 1))
            ),
        ),
    ),
    Part(
        "simple",
        "Is it ever slower than a simple rule?",
        "`cost-optimal`, which knows nothing of the pair when a run begins, over `constant` with 5 tokens and over "
        "`max-confidence`, live on 48 prompts, each three times.",
        tuple(
            _bench(
                f"{engine}, {name}",
                *("-p", "embedded-cost-optimal", *RULES, "--engine", engine, "-n", "96", "--threads", "1"),
                *("--samples-per-category", "12", "--repeats", "3"),
                temperature=t,
            )
            for engine in ("onnx", "eager")
            for name, t in ((GREEDY, 0), (DRAWN, 1))
        ),
        table=rules_table,
    ),
    Part(
        "policies",
        "Which policy is fastest?",
        "Every policy of the papers with its paper's setting on the embedded pair, and transformers' own assisted "
        "generation (`hf-`), whose passes run eagerly; `none` and one policy ran eagerly too, so that like is compared "
        "with like.",
        _both("-p", "embedded", "--papers", *FEW),
        ("speedup", "tokens a round", "draft steps a token"),
    ),
    Part(
        "drafts",
        "Which draft is fastest?",
        "The embedded target with its draft model, its draft heads, and with copies from the text, each stopped as its "
        "profile says.",
        _both(*(word for profile in DRAFTS for word in ("-p", profile)), *FEW),
        ("speedup", "tokens a round"),
    ),
    Part(
        "hierarchies",
        "Do three models pay?",
        "`A < B` is a middle model stopped by A, whose own draft is stopped by B.",
        _both("-p", "embedded-hsddw", "-p", "embedded-self-verify", "-p", "embedded-constant", *FEW),
        ("speedup", "target passes a token"),
    ),
    Part(
        "verification",
        "Token by token or as a block?",
        "The two rules of `--verification`, each in a run of its own: compare speedups.",
        tuple(
            _bench(
                f"{rule}, T = {temperature:g}",
                "-p",
                "embedded",
                *ALIKE,
                "--verification",
                rule,
                *FEW,
                temperature=temperature,
            )
            for temperature in (0.7, 1)
            for rule in ("token", "block")
        ),
        ("speedup", "tokens a round"),
    ),
    Part(
        "shapes",
        "Chains or trees?",
        "The same policies with chains and with dynamic trees.",
        _both(
            *("-p", "embedded", "--policy", "constant", "--policy", "svip", "--policy", "cost-optimal"),
            *("--tree", "12", "--tree", "32", *FEW),
        ),
        ("speedup", "tokens a round"),
    ),
    Part(
        "calibration",
        "Does a calibration find the fastest setting, and are its predictions right?",
        "`calibrate` replays all settings on half of the prompts, and runs the winners live on the other half.",
        (Step("calibration", (*CALIBRATE, "-o", "{folder}/calibrated.toml", "--force")),),
        kept=("Policies at their best settings", "Predicted against measured"),
    ),
    Part(
        "replay",
        "How near is cost-optimal to the best setting in hindsight?",
        "By replay on the traces of the calibration, under other costs than this machine's too; nothing here is timed.",
        (Step("comparison", ("{folder}/../calibration/trace.jsonl", "--grid", "paper"), "tools.compare_policies"),),
    ),
    Part(
        "signals",
        "What do the draft's signals tell?",
        "How well each signal tells accepted from rejected draft tokens.",
        (Step("signals", ("analyze", "-p", "embedded-specdec++", "-n", "64", "--threads", "1")),),
        kept=("How well each signal separates accepted from rejected tokens", "Draft entropy by verdict (nats)"),
    ),
    Part(
        "passes",
        "What does a pass cost, by engine?",
        "Passes of the embedded target over 1 to 8 tokens; engines take turns.",
        (
            Step(
                "target",
                ("{package}/models/embedded/target", "--engines", "onnx", "eager"),
                "tools.pass_times",
            ),
        ),
    ),
    Part(
        "starts",
        "How long until the first token of a fresh process?",
        "Processes in turn; the first row imports what the onnx path cannot do without.",
        (Step("starts", (), "tools.start_times"),),
    ),
    Part(
        "peers",
        "How do other engines compare?",
        "The same models in the engines that `python -m tools.install_peers peers` installs, all in float32 but for "
        "llama.cpp's keys and values, which it holds in float16; each alone and with drafts of several lengths, in "
        "turn on every prompt: tokens/s, and how many times as fast `cost-optimal` is. Decoding is what 128 tokens "
        "take longer than 16; whole calls are from the prompt's ids to the last token.",
        (_bench("1 thread", *_peers("1")), _bench("2 threads", *_peers("2"))),
        table=engines_table,
    ),
)
"""All parts, in the order of the page."""
