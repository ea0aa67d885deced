"""Parts of a report that end as parts should not; `test_gpu_report` runs them in processes of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage


def well(to: Recorder, stage: Stage, *more: str) -> None:
    to.check("one holds", True)
    to.row("Numbers", name="first", value=1234.5, more=",".join(more))
    to.row("Numbers", name="second", other=stage.rehearsal)
    to.fact("bandwidth", 2.0)


def alone(to: Recorder, _: Stage) -> None:
    to.fact("devices", 0)


def knows(to: Recorder, _: Stage) -> None:
    to.note(f"the bandwidth is {to.facts['bandwidth']}")
    to.check("one does not hold", False, "for a reason")


def crashes(to: Recorder, _: Stage) -> None:
    to.check("said before the crash", True)
    os.abort()


def raises(_: Recorder, __: Stage) -> None:
    raise ValueError("some reason")


def hangs(to: Recorder, _: Stage, where: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(where).write_text(str(child.pid))
    to.note("about to hang")
    time.sleep(600)
