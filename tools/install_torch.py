"""Installs torch into the environment of the Python that runs it: the build without CUDA where there is no NVIDIA GPU.

`make` runs it before anything else is installed, so it needs the standard library only. Arguments, if there are any,
are given to pip instead of what it would choose.
"""

import platform
import re
import shutil
import subprocess
import sys
from http.client import HTTPException
from os import environ, pathsep
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Wheels of torch 2.13.0 with what it needs of CUDA, as pip downloads them for Python 3.11 on x86_64.
CPU_SIZE, CUDA_SIZE = "about 190 MB", "about 2.7 GB"
SECONDS = 5
"""To wait for an answer of CPU_INDEX, and for nvidia-smi."""
DEVICES = Path("/dev")
WSL = "/usr/lib/wsl/lib"
"""Where Windows puts nvidia-smi, which is not on every PATH."""


def has_nvidia_gpu() -> bool:
    """Whether there is a device file of the driver or, as on WSL, which has none, a GPU that nvidia-smi lists."""
    if any(DEVICES.glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi", path=environ.get("PATH", "") + pathsep + WSL)
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def fault_of(index: str) -> str | None:
    """Why torch cannot be had from a package index; None if it has a wheel for this Python and machine."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = rf"torch-{re.escape(VERSION)}(\+|%2B)cpu-{python}-{python}-[\w.]*{platform.machine()}\.whl"
    try:
        with urlopen(f"{index}/torch/", timeout=SECONDS) as page:
            listed = re.search(wheel, page.read().decode(), re.IGNORECASE)
    except HTTPError as error:
        return f"it answers {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return None if listed else "it has no wheel for this Python and machine"


def choice() -> tuple[list[str], str]:
    """What pip is to install, and why, with its size, for the user."""
    anywhere = [f"torch=={VERSION}"]
    if platform.system() != "Linux":
        return anywhere, "from pip's index, on PyPI without CUDA for this system, about 110 MB"
    if has_nvidia_gpu():
        return anywhere, f"with CUDA, as there is an NVIDIA GPU, {CUDA_SIZE}"
    if fault := fault_of(CPU_INDEX):
        return anywhere, f"from pip's index, on PyPI with CUDA, {CUDA_SIZE}: none from {CPU_INDEX} ({fault})"
    # A version with +cpu is found in this index only; what torch itself needs comes from pip's own.
    without = [f"torch=={VERSION}+cpu", "--extra-index-url", CPU_INDEX]
    return without, f"without CUDA, as no NVIDIA GPU is found, {CPU_SIZE} from {CPU_INDEX}"


def main(given: list[str]) -> int:
    """Install what is given, or what fits the machine; pip's exit code."""
    chosen = given
    if not given:
        chosen, why = choice()
        print(f"installing torch {VERSION} {why}; another build: make TORCH='...'", flush=True)
    return subprocess.call([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *chosen])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
