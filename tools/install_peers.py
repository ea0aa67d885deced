"""Installs the engines that `tools.measure` compares specctl with, and converts the embedded pair for each of them.

    python -m tools.install_peers peers

Each gets a folder: `env` or `build` with its program, `models` with the pair. What a folder has is left as it is, so
an interrupted run goes on with the engine at which it was. The exporters run beside this Python's torch, in
environments of their own. llama.cpp is built from the source that llama-cpp-python ships, for this machine's processor,
with cmake and a C++ compiler.
"""

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from specctl.peers.engines import MANIFEST

EXPORTERS = {
    "onnxruntime-genai": ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir"),
    "openvino": (
        *("optimum-intel==2.2.0", "optimum==2.3.0", "transformers==5.5.4", "tokenizers==0.22.2"),
        *("huggingface-hub==1.21.0", "httpx==0.28.1", "httpcore==1.0.9", "nncf==3.4.0", "openvino==2026.4.1"),
        *("openvino-tokenizers==2026.4.1.0", "openvino-telemetry", "natsort", "ninja", "pandas", "pydot"),
        *("scikit-learn", "joblib", "narwhals", "threadpoolctl", "cloudpickle"),
        *("requests", "charset-normalizer", "urllib3", "idna", "certifi"),
    ),
    "llama.cpp": ("sentencepiece",),
}
"""What the exporters need beyond torch, transformers and numpy of this Python; installed without what they name, which
would be another torch."""
ENGINES = {"onnxruntime-genai": "onnxruntime-genai==0.18.0", "openvino": "openvino-genai==2026.4.1.0"}
"""What pip installs for a peer that is a package."""
LLAMA = "llama-cpp-python==0.3.36"
SOURCE = "llama_cpp_python-0.3.36"
BUILD = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DCMAKE_C_FLAGS=-O3 -march=native", "-DCMAKE_CXX_FLAGS=-O3 -march=native"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


def install(peer: str, folder: Path, jobs: int) -> None:
    """Everything for one peer, into a folder of its own.

    Raises:
        CalledProcessError: a command failed; what it said is on standard error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exporter = environment(folder / "export", ["--no-deps", *EXPORTERS[peer]], beside=True)
    source: list[str | Path] = []
    if peer in ENGINES:
        environment(folder / "env", [ENGINES[peer]])
    else:
        source = ["--source", llama_server(folder, exporter, jobs)]
    models = folder / "models"
    if not (models / MANIFEST).exists():
        convert = [sys.executable, "-m", "specctl.peers.convert", peer, "--python", exporter, *source]
        _run([*convert, "--target", "embedded:target", "--draft", "embedded:draft", models])


def environment(folder: Path, packages: Iterable[str], *, beside: bool = False) -> Path:
    """The Python of an environment with some packages; ``beside``: what it lacks it has from this Python."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        _run([sys.executable, "-m", "venv", "--clear", folder])
        if beside:
            own = next((folder / "lib").glob("python*/site-packages"))
            own.joinpath("beside.pth").write_text(
                "\n".join(path for path in sys.path if path.endswith("site-packages")), encoding="utf-8"
            )
        _run([python, "-m", "pip", "install", "--quiet", *packages])
        done.touch()
    return python


def llama_server(folder: Path, python: Path, jobs: int) -> Path:
    """The folder of llama.cpp's source, once its server is built next to it in ``build``."""
    source = folder / SOURCE / "vendor" / "llama.cpp"
    if not source.exists():
        _run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", LLAMA, "-d", folder])
        with tarfile.open(folder / f"{SOURCE}.tar.gz") as packed:
            packed.extractall(folder, filter="data")
    if not (folder / "build" / "bin" / "llama-server").exists():
        _run(["cmake", "-S", source, "-B", folder / "build", *BUILD])
        _run(["cmake", "--build", folder / "build", "--target", "llama-server", f"-j{jobs}"])
    return source


def _run(command: Iterable[str | Path]) -> None:
    words = list(map(str, command))
    print(" ".join(words), file=sys.stderr)
    subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", choices=EXPORTERS, action="append", help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="of the compiler at once")
    arguments = parser.parse_args()
    for peer in arguments.peer or EXPORTERS:
        install(peer, arguments.folder.absolute() / peer, arguments.jobs)


if __name__ == "__main__":
    main()
