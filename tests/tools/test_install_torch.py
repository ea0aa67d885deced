"""Which build of torch `make` installs. Nothing is downloaded: pip and the machine's tools are made up."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from errno import ECONNREFUSED
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tools import install_torch

ROOT = Path(__file__).parents[2]
GPU = "echo 'GPU 0: NVIDIA T4 (UUID: GPU-1)'"
NO_DRIVER = "echo 'NVIDIA-SMI has failed'; exit 9"
PIP = "pip install --quiet --disable-pip-version-check"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index on this machine, with the files of the folder `index`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index"))) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> Path:
    """A Linux machine without a GPU, whose PATH is the folder `bin`; its index has this torch."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in {"system": "Linux", "machine": "x86_64"}.items():
        monkeypatch.setattr(platform, name, lambda value=value: value)
    monkeypatch.setattr(install_torch, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(install_torch, "WSL", str(tmp_path / "wsl"))
    monkeypatch.setattr(install_torch, "CPU_INDEX", index)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    listed(tmp_path, f"torch-2.13.0%2Bcpu-{PYTHON}-{PYTHON}-manylinux_2_28_x86_64.whl")
    return tmp_path


def listed(machine: Path, wheel: str) -> None:
    page = machine / "index" / "torch" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f'<a href="/{wheel}#sha256=0">{wheel}</a>')


def chosen() -> tuple[str, str]:
    arguments, why = install_torch.choice()
    return " ".join(arguments), why


@pytest.mark.usefixtures("machine")
def test_without_a_gpu_the_build_without_cuda(index: str) -> None:
    arguments, why = chosen()
    assert arguments == f"torch==2.13.0+cpu --extra-index-url {index}"
    assert why == f"without CUDA, as no NVIDIA GPU is found, about 190 MB from {index}"


@pytest.mark.parametrize("where", ["bin/nvidia-smi", "wsl/nvidia-smi"])
def test_a_gpu_that_nvidia_smi_lists(machine: Path, where: str) -> None:
    program(machine / where, GPU)
    assert chosen() == ("torch==2.13.0", "with CUDA, as there is an NVIDIA GPU, about 2.7 GB")


def test_a_gpus_device_file(machine: Path) -> None:
    (machine / "dev").mkdir()
    (machine / "dev" / "nvidia0").touch()
    assert chosen()[0] == "torch==2.13.0"


def test_a_tool_without_a_gpu_and_a_driver_without_one_are_no_gpu(machine: Path) -> None:
    program(machine / "bin" / "nvidia-smi", NO_DRIVER)
    (machine / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-modeset", "dxg"):
        (machine / "dev" / name).touch()
    assert chosen()[0].startswith("torch==2.13.0+cpu ")


def test_an_nvidia_smi_that_hangs_is_no_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "bin" / "nvidia-smi", "exec /bin/sleep 60")
    monkeypatch.setattr(install_torch, "SECONDS", 0.05)
    assert not install_torch.has_nvidia_gpu()


def test_an_index_that_is_not_reached_is_said_with_what_that_costs(
    machine: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(machine / "index" / "torch")
    found = [chosen()]
    monkeypatch.setattr(install_torch, "CPU_INDEX", "http://127.0.0.1:1")
    found.append(chosen())
    why = "from pip's index, on PyPI with CUDA, about 2.7 GB: none from"
    assert found == [
        ("torch==2.13.0", f"{why} {index} (it answers 404)"),
        ("torch==2.13.0", f"{why} http://127.0.0.1:1 ([Errno {ECONNREFUSED}] Connection refused)"),
    ]


@pytest.mark.parametrize(
    "wheel",
    [
        "torch-2.13.0%2Bcpu-cp39-cp39-manylinux_2_28_x86_64.whl",
        f"torch-2.13.0%2Bcpu-{PYTHON}-{PYTHON}-manylinux_2_28_s390x.whl",
        f"torch-2.12.0%2Bcpu-{PYTHON}-{PYTHON}-manylinux_2_28_x86_64.whl",
    ],
)
def test_an_index_without_a_wheel_for_this_machine(machine: Path, wheel: str) -> None:
    listed(machine, wheel)
    assert chosen()[0] == "torch==2.13.0"
    assert "no wheel for this Python and machine" in chosen()[1]


def test_elsewhere_than_on_linux_pypi_has_no_cuda(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "bin" / "nvidia-smi", GPU)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    arguments, why = chosen()
    assert arguments == "torch==2.13.0"
    assert "without CUDA" in why


# make


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose `fake-python` makes environments in which pip and specctl only say how they are called."""
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "pyproject.toml", "tools/install_torch.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    pip = tmp_path / "modules" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:])")
    script = f'PYTHONPATH={tmp_path}/modules; export PYTHONPATH; exec {sys.executable} "$@"'
    program(tmp_path / "venv-python", f'case "$1" in tools/*) {script};; *) shift; echo "$@";; esac')
    program(tmp_path / "fake-python", 'mkdir -p "$3/bin" && cp venv-python "$3/bin/python" && cp says "$3/bin/specctl"')
    program(tmp_path / "says", "echo specctl")
    program(tmp_path / "bin" / "nvidia-smi", GPU)
    return tmp_path


def make(clone: Path, *arguments: str) -> list[str]:
    path = f"{clone}/bin{os.pathsep}{os.environ['PATH']}"
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH", "VENV"))
    }
    done = subprocess.run(
        ["make", "--silent", "PYTHON=./fake-python", *arguments],
        cwd=clone,
        env={**kept, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere no GPU is looked for")
def test_make_says_what_torch_is_before_it_is_installed(clone: Path) -> None:
    said, torch, package, demo = make(clone, "demo")
    assert said.startswith("installing torch 2.13.0 with CUDA")
    assert (torch, package) == (f"{PIP} torch==2.13.0", f"{PIP} --editable .")
    assert demo == "specctl"


def test_what_make_is_told_to_install_replaces_the_choice(clone: Path) -> None:
    given = "torch==2.11.0 --index-url https://example.invalid/whl"
    assert make(clone, "demo", f"TORCH={given}")[0] == f"{PIP} {given}"


def test_the_second_make_installs_nothing(clone: Path) -> None:
    first = make(clone, "test", "TORCH=torch")
    assert [line for line in first if line.startswith("pip")] == [
        f"{PIP} torch",
        f"{PIP} --editable .",
        f"{PIP} --editable .[dev]",
    ]
    assert make(clone, "test") == ["pytest -n auto --dist loadscope --no-loadscope-reorder"]
