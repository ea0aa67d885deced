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
        "cuda": _cuda() or "none",
    }


def _cuda() -> str | None:
    """The version of CUDA that torch was built for, as its module ``torch.version`` says."""
    found = find_spec("torch")
    assert found is not None, "specctl requires it"
    assert found.origin is not None, "it is a package with files"
    cuda: str | None = run_path(str(Path(found.origin).with_name("version.py"))).get("cuda")
    return cuda
