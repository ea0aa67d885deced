"""Searches for commands on a Ray cluster that are answered by other weights than the files they name hold.

python -m tests.faults.clusters --count 40

A cluster works in one folder; commands come from others, name models by paths of all kinds, and files are replaced
between them while actors are kept. What actors answer is compared with the files as they are.
"""

import argparse
import os
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from specctl.errors import SpecctlError
from specctl.models.files.checkpoint import files_hash
from specctl.profile.schema import Profile
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import wait_until_ready
from specctl.text_engine.job import Job, Sources
from specctl.text_engine.on_ray import RayEngine
from tests.text_engine.ray_cluster import cluster

FOLDERS, MODELS = ("A", "B", "A/deep"), ("big", "small")


@dataclass
class Found:
    """What became of the cases, with reports of the wrong ones."""

    counts: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)


class Files:
    """Folders with models of the same names, none of which holds the same.

    Args:
        root: holds them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._written = 0
        for folder in FOLDERS:
            for model in MODELS:
                path = root / folder / model
                path.mkdir(parents=True)
                (path / "config.json").write_text("{}")
                self.write(path / "model.safetensors")

    def folder(self, name: str) -> Path:
        return self.root / name

    def hash_of(self, folder: str, model: str) -> str:
        return files_hash([self.root / folder / model / "model.safetensors"])

    def write(self, path: Path) -> None:
        """New weights of the same size, in place."""
        self._written += 1
        save_file({"weight": torch.full((64,), float(self._written))}, path)


def profile_of(target: str, draft: str) -> Profile:
    return Profile.model_validate({"target": {"model": target}, "draft": {"model": draft}})


def search(count: int, seed: int) -> Found:
    """Run so many commands, the same for the same seed."""
    draw, found, here = random.Random(seed), Found(), Path.cwd()
    with tempfile.TemporaryDirectory() as root:
        files = Files(Path(root))
        try:
            with cluster(files.folder("B")) as address:
                for number in range(count):
                    _case(number, draw, files, address, found)
        finally:
            os.chdir(here)
    return found


def _case(number: int, draw: random.Random, files: Files, address: str, found: Found) -> None:
    folder = files.folder(draw.choice(FOLDERS[::2]))
    os.chdir(folder)
    named = {
        role: draw.choice((f"./{model}", model, f"../B/{model}", str(folder / model), str(files.folder("B") / model)))
        for role, model in zip(("target", "draft"), MODELS, strict=True)
    }
    change = _changed(draw, files, folder)
    missing = [name for name in named.values() if not Path(name).is_dir()]
    case = f"case {number}: {change}, then {named} from {folder.relative_to(files.root)}"
    try:
        got = _answer(profile_of(named["target"], named["draft"]), address, draw.choice((0.0, 15.0, 15.0)))
    except SpecctlError as error:
        found.counts["refused" if missing else "WRONG"] += 1
        if not missing:
            found.reports.append(f"{case}: {error}")
        return
    wanted = {role: files_hash([Path(name) / "model.safetensors"]) for role, name in named.items()}
    right = got == wanted
    found.counts["right" if right else "WRONG"] += 1
    if not right:
        found.reports.append(f"{case}: got {got} for {wanted}")


def _changed(draw: random.Random, files: Files, folder: Path) -> str:
    """Do something to files, and say what."""
    path = folder / draw.choice(MODELS) / "model.safetensors"
    change = draw.choice(("nothing", "written in place", "replaced", "touched", "taken from B", "config"))
    if change == "written in place":
        state = path.stat()
        files.write(path)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as some tools for copying do
    elif change == "replaced":
        files.write(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    elif change == "touched":
        os.utime(path)
    elif change == "taken from B":
        shutil.copy2(files.folder("B") / path.parent.name / path.name, path)
    elif change == "config":
        (path.parent / "config.json").write_text('{"again": true}')
    return f"{path.relative_to(files.root)} {change}"


def _answer(profile: Profile, address: str, warm: float) -> dict[str, str]:
    job = Job("tests.text_engine.toy_jobs:reader", {"profile": profile}, sources=Sources.of(profile))
    with RayEngine.on(address, 1, profile, lambda _: job, lambda _: None, warm) as replicas:
        wait_until_ready(replicas)
        found: dict[str, str] = next(answer for _, answer in in_order(replicas, [(None, 0)]))
    del found["said"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = search(options.count, options.seed)
    print(", ".join(f"{found.counts[what]} {what}" for what in ("right", "refused", "WRONG")))
    print(*found.reports[:10], sep="\n")
    return 1 if found.counts["WRONG"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
