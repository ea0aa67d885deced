"""Runs of `generate` that are interrupted in random rounds, tried with something changed, and resumed.

python -m tests.faults.resumes --count 100

What was changed must be refused with every file as it was; what was not must lead to the files of a whole run.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specctl import __main__ as entry
from specctl.decoding.session import Session
from tests.faults.mutations import Tally, main
from tests.support.checkpoints import llama_config, save_model

WORDS = ("the moon", "a kite", "one", "x", "who came to the door")


@cache
def models() -> Path:
    """A folder with a target, a draft and another target, all tiny."""
    folder = Path(tempfile.mkdtemp(prefix="specctl-resumes-"))
    for number, (name, layers) in enumerate((("target", 2), ("draft", 1), ("other", 3))):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3 + number / 100))
    return folder


def records(draw: random.Random) -> list[Any]:
    """Good ones, conversations, ids that occur twice, and what is none."""
    found: list[Any] = []
    for number in range(draw.randint(2, 6)):
        match draw.randrange(8):
            case 0:
                found.append({"id": max(0, number - 1), "prompt": "perhaps an id that another has"})
            case 1:
                found.append({"id": number})
            case 2:
                found.append("not JSON")
            case 3 | 4:
                turns = [draw.choice(WORDS) for _ in range(draw.randint(2, 4))]
                found.append({"id": number, "turns": turns, "max_tokens": draw.randint(1, 6)})
            case 5:
                found.append({"prompt": draw.choice(WORDS), "temperature": draw.choice((0, 1, "hot"))})
            case _:
                found.append({"id": number, "prompt": draw.choice(WORDS), "seed": draw.randrange(3)})
    return found


def fuzz(count: int, seed: int) -> Tally:
    """Count runs that were resumed to the files of a whole run (valid), and changed ones that were refused."""
    tally, draw = Tally(), random.Random(seed)
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            tally.case(f"case {number} of seed {seed}", lambda: _case(draw, Path(folder), tally))
    return tally


def _case(draw: random.Random, folder: Path, tally: Tally) -> bool:
    asked = records(draw)
    source = folder / "in.jsonl"
    _write(source, asked)
    sampling = draw.choice(([], ["-t", "1"], ["-t", "0.7", "--seed", "4"]))
    options = ["-i", str(source), "-n", "8", "--policy", draw.choice(("svip", "constant")), *sampling]
    options += draw.choice(([], ["--rounds"], ["--token-ids"]))
    whole, out = folder / "whole", folder / "out"
    whole.mkdir()
    out.mkdir()
    expected, most = _run([*options, *_files(whole)])
    for _ in range(draw.randint(1, 3)):
        left = _run([*options, *_files(out), "--resume"], draw.randint(0, max(1, most)))[0]
        if left not in (130, expected):
            tally.uncaught(f"an interrupted run ended with {left}")
        if draw.random() < 0.5:
            _changed(draw, options, asked, source, out, tally)
    again, _ = _run([*options, *_files(out), "--resume"])
    if again != expected or _untimed(out) != _untimed(whole):
        tally.uncaught(
            f"{options}, {asked}: ended with {again} and {_untimed(out)}, not {expected} and {_untimed(whole)}"
        )
    return True


def _changed(
    draw: random.Random, options: Sequence[str], asked: list[Any], source: Path, out: Path, tally: Tally
) -> None:
    """Try to go on with something changed."""
    results = out / "out.jsonl"
    if not results.exists() or not results.stat().st_size:
        return
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    kept = json.loads(results.read_text().splitlines()[0])
    more: list[str] = []
    match draw.randrange(4):
        case 0:
            more = ["--seed", "77"]
        case 1:
            more = ["--target", str(models() / "other")]
        case 2:
            more = ["--stop", "zz"]
        case 3 if "prompt" in kept and "error" not in kept:
            other = [
                {**each, "prompt": "another"} if isinstance(each, dict) and "prompt" in each else each for each in asked
            ]
            _write(source, other)
        case _:
            return
    code, _ = _run([*options, *_files(out), "--resume", *more])
    _write(source, asked)
    if code != 2 or {path.name: path.read_bytes() for path in out.iterdir()} != before:
        tally.uncaught(f"{more or 'another prompt'} after {options}, {asked}: ended with {code}")
    tally.counts["refused"] += 1


def _with_another_prompt(line: Any) -> Any:
    return {**line, "prompt": "another"} if isinstance(line, dict) and "prompt" in line else line


def _run(arguments: Sequence[str], rounds: int | None = None) -> tuple[int, int]:
    """The exit code of a run that is interrupted after this many rounds, if any, and how many rounds there were."""
    pair = ["--target", str(models() / "target"), "--draft", str(models() / "draft"), "--engine", "eager"]
    # The last one of a flag counts.
    command = ["specctl", "generate", *pair, "--threads", "1", "-q", *arguments]
    with _interrupted(rounds) as seen, patch.object(sys, "argv", command), redirect_stderr(StringIO()):
        return entry._run(), len(seen)


@contextmanager
def _interrupted(rounds: int | None) -> Iterator[list[None]]:
    play: Callable[..., Any] = Session.play
    seen: list[None] = []

    def watched(self: Session, *arguments: Any, **named: Any) -> Any:
        playing, stops = play(self, *arguments, **named), None
        while True:
            try:
                round_ = playing.send(stops)
            except StopIteration as end:
                return end.value
            stops = yield round_
            seen.append(None)
            if rounds is not None and len(seen) > rounds:
                raise KeyboardInterrupt

    with patch.object(Session, "play", watched):
        yield seen


def _files(folder: Path) -> list[str]:
    return ["-o", f"{folder}/out.jsonl", "--trace", f"{folder}/trace.jsonl"]


def _write(path: Path, lines: Sequence[Any]) -> None:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))


def _untimed(folder: Path) -> list[Any]:
    paths = sorted(folder.glob("*.jsonl"))  # results, rounds, and turns, of which none are left
    lines = [(path.name, line) for path in paths for line in path.read_text().splitlines()]
    return [(name, _without_times(json.loads(line))) for name, line in lines]


def _without_times(value: Any) -> Any:
    """Times differ from run to run, and signals by their last digits where a turn was read again."""
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not key.endswith(("_ms", "per_second"))}
        return {key: _without_times(each) for key, each in kept.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main(fuzz, "Interrupted, changed and resumed runs.")
