"""One part in a process of its own, which may crash or hang without ending the others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

from tools.gpu_report.parts import Part
from tools.gpu_report.record import Line, lines_of

State = Literal["done", "failed", "timed out", "skipped"]
ROOT = Path(__file__).parents[2]
TAIL = 2000
"""Characters of a failed part's output that are kept."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended.

    Attributes:
        state: ``failed`` for an exception, a signal or an exit code other than 0.
        seconds: wall time that it took.
        lines: all that it wrote until then.
        output: of a part that was not done, the end of what it printed.
    """

    state: State
    seconds: float
    lines: list[Line]
    output: str = ""


def run_part(part: Part, limit: float, facts: Mapping[str, Any], *, rehearse: bool) -> Outcome:
    """Run a part and wait until it ends; with all processes that it started it is killed when its time is over.

    Args:
        part: which.
        limit: seconds.
        facts: what earlier parts found out.
        rehearse: whether to run it without a device.
    """
    began = perf_counter()
    with TemporaryDirectory(prefix="specctl-gpu-") as folder:
        found, known = Path(folder, "lines.jsonl"), Path(folder, "facts.json")
        known.write_text(json.dumps(facts), encoding="utf-8")
        command = [sys.executable, "-m", "tools.gpu_report.one_part", part.name, part.work, str(found), str(known)]
        with Path(folder, "output").open("w+b") as output:
            child = subprocess.Popen(
                [*command, *part.arguments, *(["--rehearse"] if rehearse else [])],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            state: State = "done"
            try:
                if child.wait(limit):
                    state = "failed"
            except subprocess.TimeoutExpired:
                state = "timed out"
            finally:  # what it started, such as tests or compilers, must not slow the next part
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                code = child.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")[-TAIL:].strip()
        if state == "failed" and code < 0:
            said = f"{said}\nended by {signal.Signals(-code).name}".strip()
        return Outcome(state, perf_counter() - began, lines_of(found), "" if state == "done" else said)
