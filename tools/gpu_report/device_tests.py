"""The project's tests that need a device."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import TESTS, Stage

MARK = "pytest.mark.gpu"


def run_tests(to: Recorder, stage: Stage) -> None:
    """Run every file of tests that has the mark ``gpu``; in a rehearsal all of them skip."""
    if find_spec("pytest") is None:
        to.check("the tests that need a device ran", False, "pytest is not installed")
        return
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    with TemporaryDirectory() as folder:
        found = Path(folder, "found.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={found}"]
        ran = subprocess.run(
            [*command, *map(str, files)], cwd=TESTS.parent, capture_output=True, text=True, check=False
        )
        if not found.exists():
            to.check("the tests that need a device ran", False, ran.stdout[-500:] + ran.stderr[-500:])
            return
        cases = list(ElementTree.parse(found).iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    for case in wrong:
        what = case.find("failure") if case.find("failure") is not None else case.find("error")
        said = "" if what is None else str(what.get("message")).splitlines()[0][:200]
        to.check(f"{case.get('classname')}::{case.get('name')}", False, said)
    passed = len(cases) - len(wrong) - skipped
    detail = f"{passed} passed, {len(wrong)} failed, {skipped} skipped in {len(files)} files"
    stage.judge(to, "the tests that need a device pass", not wrong and passed > 0, detail)
