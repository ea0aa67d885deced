"""``python -m tools.measure`` runs what is missing and writes docs/measurements.md."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

import specctl
from specctl.observing.results import cpu_name
from specctl.versions import versions
from tools.measure.page import ROOT, output, page, results, updated
from tools.measure.parts import PARTS, Part, Step

PAGE = ROOT / "docs" / "measurements.md"


def main(
    folder: Annotated[Path, typer.Argument(help="Where outputs are kept, and found again.")] = Path("measurements"),
    part: Annotated[list[str] | None, typer.Option(help="Run only this part; repeatable.")] = None,
    peers: Annotated[Path, typer.Option(help="What tools.install_peers wrote, for the part peers.")] = Path("peers"),
    write: Annotated[
        bool, typer.Option(help="Write docs/measurements.md; without all parts, the sections of those that are there.")
    ] = True,
) -> None:
    """Run every measurement that is not in the folder yet, then write the page.

    An interrupted run goes on where it was. All must be of one commit: outputs of another one are an error.
    """
    names = [one.name for one in PARTS]
    if unknown := sorted(set(part or ()) - set(names)):
        raise typer.BadParameter(f"no part is called {unknown[0]}; there are {', '.join(names)}")
    provenance = _provenance(folder)
    for one in PARTS:
        if not part or one.name in part:
            for step in one.steps:
                _run(one, step, folder / one.name, peers)
    there = [one for one in PARTS if all(output(step, folder / one.name).exists() for step in one.steps)]
    if missing := [one.name for one in PARTS if one not in there]:
        print(f"Still missing: {', '.join(missing)}.", file=sys.stderr)
    if write:
        former = PAGE.read_text("utf-8")
        text = updated(former, provenance, there, folder) if missing else page(provenance, PARTS, folder, former)
        PAGE.write_text(text, encoding="utf-8")


def _provenance(folder: Path) -> dict[str, str]:
    """What everything in the folder is measured with; kept there, since a later run must agree.

    Raises:
        SystemExit: the checkout has changes, or the folder is of another commit or machine.
    """
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout.strip():
        raise SystemExit("The checkout has changes that are in no commit. Commit them first.")
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    found = versions()
    now = {
        "commit": commit.strip(),
        "processor": f"{cpu_name() or platform.processor()}, {os.cpu_count()} cores",
        **{name: found[name] for name in ("python", "torch", "transformers", "cuda")},
    }
    kept = folder / "provenance.json"
    if kept.exists():
        then: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
        if differing := [name for name, value in now.items() if then.get(name) != value]:
            name = differing[0]
            raise SystemExit(
                f"{folder} was measured with {name} {then.get(name)}, and this is {now[name]}. Use another folder."
            )
        return then
    folder.mkdir(parents=True, exist_ok=True)
    then = {"date": date.today().isoformat(), **now}
    kept.write_text(json.dumps(then, indent=1), encoding="utf-8")
    return then


def _run(part: Part, step: Step, folder: Path, peers: Path = Path("peers")) -> None:
    """Run one step unless its output is there; what it prints becomes its output once it has ended well.

    Raises:
        SystemExit: it failed.
    """
    done = output(step, folder)
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(specctl.__file__).parent
    words = [word.format(folder=folder, package=package, peers=peers) for word in step.arguments]
    if step.is_bench:
        words += ["-o", str(results(step, folder)), "--resume", "--json", "-q"]
    print(f"{part.name}: {step.name}", file=sys.stderr)
    environment = {**os.environ, "COLUMNS": "150", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", step.module, *words], stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{part.name}: {step.name} ended with {ran.returncode}")
    partial = done.with_suffix(".partial")
    partial.write_text(ran.stdout, encoding="utf-8")
    partial.rename(done)


if __name__ == "__main__":
    typer.run(main)
