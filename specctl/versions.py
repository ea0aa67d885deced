"""Versions of what a run depends on."""

import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

PACKAGES = ("torch", "transformers", "huggingface_hub")


def versions() -> dict[str, str]:
    """Versions of Python and the libraries, for bug reports; none of the libraries is imported."""
    import specctl

    return {
        "specctl": specctl.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cuda": torch_builds()["cuda"] or "none",
    }


def torch_builds() -> dict[str, str | None]:
    """The version of each kind of accelerator's library that torch was built with, None without it, as
    ``torch.version`` says."""
    found = find_spec("torch")
    assert found is not None, "specctl requires it"
    assert found.origin is not None, "it is a package with files"
    told = run_path(str(Path(found.origin).with_name("version.py")))
    return {kind: told.get(kind) for kind in ("cuda", "hip", "xpu")}
