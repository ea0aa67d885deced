"""Drafts that bring nothing, for measuring what a policy then costs: ``python -m tools.useless_drafts FOLDER``.

Writes a draft model and a draft head of the embedded pair's shapes whose weights are the embedded ones in random order,
and a profile for each; and a profile of the lookup, which brings nothing on texts that do not repeat themselves.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import specctl
from specctl.profile.writing import write_profile

EMBEDDED = Path(specctl.__file__).parent / "models" / "embedded"
PROFILES = {
    "useless-draft": {"model": "draft", "policy": {"name": "cost-optimal"}},
    "useless-head": {"model": "eagle3", "policy": {"name": "cost-optimal"}},
    "lookup": {"kind": "lookup", "policy": {"name": "cost-optimal", "use_foresight": True}},
}


def shuffled(source: Path, folder: Path, seed: int = 0) -> None:
    """Copy a checkpoint with the numbers of each tensor in random order; integers stay as they are."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    draws = torch.Generator().manual_seed(seed)
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point():
            order = torch.randperm(weight.numel(), generator=draws)
            weights[name] = weight.flatten()[order].reshape(weight.shape).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_profiles(folder: Path) -> None:
    """Write the checkpoints and the profiles."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draft in PROFILES.items():
        table = {"device": "auto", "dtype": "float32"}
        own: dict[str, object] = {**draft}
        if "model" in draft:
            shuffled(EMBEDDED / str(draft["model"]), folder / name)
            own["model"] = str((folder / name).absolute())
        if name == "useless-draft":
            own |= table
        profile = {
            "schema_version": 1,
            "description": f"The embedded target with {name.replace('-', ' ')}",
            "target": {"model": "embedded:target", **table},
            "draft": own,
            "prompt": {"chat": False},
        }
        write_profile(folder / f"{name}.toml", profile, overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    write_profiles(folder)
    print("\n".join(f"{folder}/{name}.toml" for name in PROFILES))


if __name__ == "__main__":
    main()
