"""The process of one part: it imports only what that part needs."""

import argparse
import json
from importlib import import_module
from pathlib import Path

from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_report.one_part")
    parser.add_argument("name", help="of the part")
    parser.add_argument("work", help="package.module:function")
    parser.add_argument("lines", type=Path, help="file for what it finds")
    parser.add_argument("facts", type=Path, help="file with what earlier parts found")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    facts = json.loads(given.facts.read_text(encoding="utf-8"))
    module, _, function = given.work.partition(":")
    work = getattr(import_module(module), function)
    work(Recorder(given.lines, given.name, facts), Stage(given.rehearse), *given.arguments)


if __name__ == "__main__":
    main()
