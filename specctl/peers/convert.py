"""Converts a pair's models for the engines that `specctl bench --peer` runs in processes of their own.

    python -m specctl.peers.convert onnxruntime-genai --target embedded:target --draft embedded:draft FOLDER
    specctl bench --peer onnxruntime-genai --peer-models onnxruntime-genai=FOLDER

The engines' own exporters do the work, in the Python that ``--python`` names:

    onnxruntime-genai  pip install onnxruntime-genai onnx onnx-ir, next to torch and transformers
    openvino           pip install "optimum-intel[openvino]", which wants an older transformers than specctl does
    llama.cpp          the folder of its source, --source, whose script needs torch and transformers

A folder counts as converted once it is complete.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import SpecctlError, UsageError
from specctl.peers.engines import Converted, write_manifest
from specctl.profile.schema import model_path
from specctl.profile.wording import short_name

EMBEDDED = "embedded:"
ANY_TOKENIZER = Path(__file__).with_name("programs") / "gguf_of_any_tokenizer.py"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of one model."""

    python: str  # the Python with the exporter
    source: Path | None  # llama.cpp's source, where it is needed
    model: Path  # the checkpoint's folder
    role: str  # ``target`` or ``draft``
    folder: Path  # for the whole pair
    precision: str  # the exporter's name for it


def onnx(one: Conversion) -> list[str]:
    """The command that converts a model for onnxruntime-genai; the draft lies within the target's folder."""
    to = one.folder if one.role == "target" else one.folder / one.role
    paths = ["-i", str(one.model), "-o", str(to), "-c", str(one.folder / "cache")]
    return [one.python, "-m", "onnxruntime_genai.models.builder", *paths, "-p", one.precision, "-e", "cpu"]


def openvino(one: Conversion) -> list[str]:
    """The command that converts a model for OpenVINO."""
    what = ["-m", str(one.model), "--task", "text-generation-with-past", "--weight-format", one.precision]
    command = [one.python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    return [*command, *what, str(one.folder / one.role)]


def gguf(one: Conversion) -> list[str]:
    """The command that converts a model for llama.cpp.

    Raises:
        UsageError: no source of llama.cpp is named.
    """
    if one.source is None:
        raise UsageError("llama.cpp's converter is part of its source", "name that folder with --source")
    out = ["--outtype", one.precision, "--outfile", str(one.folder / f"{one.role}.gguf")]
    return [one.python, str(ANY_TOKENIZER), str(one.source), str(one.model), *out]


@dataclass(frozen=True, slots=True)
class Exporter:
    """The conversion of models for a peer."""

    command: Callable[[Conversion], list[str]]  # that converts one model
    package: str  # whose version is noted; empty for none
    # of the weights, with the exporter's word, and how keys and values are held if nothing else is asked
    precisions: Mapping[str, tuple[str, str]]
    caches: tuple[str, ...]  # other formats that the peer supports for them


EXPORTERS = {
    "onnxruntime-genai": Exporter(
        onnx,
        "onnxruntime-genai",
        {"float32": ("fp32", "float32"), "float16": ("fp16", "float16"), "int4": ("int4", "float32")},
        (),
    ),
    "openvino": Exporter(
        openvino,
        "optimum-intel",
        {
            "float32": ("fp32", "float32"),
            "float16": ("fp16", "its default"),
            "int8": ("int8", "its default"),
            "int4": ("int4", "its default"),
        },
        ("float32", "its default"),
    ),
    "llama.cpp": Exporter(
        gguf,
        "",
        {"float32": ("f32", "float16"), "float16": ("f16", "float16"), "int8": ("q8_0", "float16")},
        ("float32",),
    ),
}


def convert(peer: str, arguments: argparse.Namespace) -> None:
    """Convert a target, and its draft if there is one.

    Raises:
        UsageError: the peer has no such weights or cache, a model is not here, or the folder has something in it.
        SpecctlError: the exporter failed; its messages are on standard error.
    """
    exporter, folder = EXPORTERS[peer], Path(arguments.folder).absolute()
    precision, cache = exporter.precisions[_one_of("--weights", arguments.weights, exporter.precisions)]
    cache = _one_of("--cache", arguments.cache or cache, [cache, *exporter.caches])
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty")
    names = {"target": arguments.target} | ({"draft": arguments.draft} if arguments.draft else {})
    conversions = [
        Conversion(arguments.python, arguments.source, _checkpoint(name), role, folder, precision)
        for role, name in names.items()
    ]
    commands = [exporter.command(one) for one in conversions]
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise SpecctlError(f"the exporter failed: {' '.join(command)}", "its requirements are listed in --help")
    target, draft = short_name(arguments.target), arguments.draft and short_name(arguments.draft)
    write_manifest(folder, Converted(peer, target, draft, arguments.weights, cache, _exporter(peer, arguments)))


def _one_of(flag: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise UsageError(f"{flag} {value}: this peer supports {', '.join(dict.fromkeys(known))}")
    return value


def _checkpoint(name: str) -> Path:
    folder = model_path(name.removeprefix(EMBEDDED)) if name.startswith(EMBEDDED) else Path(name).absolute()
    if not (folder / "config.json").is_file():
        raise UsageError(f"{name} is not a folder of a transformers model", "download it first")
    return folder


def _exporter(peer: str, arguments: argparse.Namespace) -> str:
    package = EXPORTERS[peer].package
    if not package:
        return f"{peer}'s converter"
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([arguments.python, "-c", asked], capture_output=True, text=True, check=False)
    return f"{package} {found.stdout.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m specctl.peers.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", choices=EXPORTERS)
    parser.add_argument("folder", help="for the converted models; new or empty")
    parser.add_argument("--target", required=True, help="folder of a transformers model, or embedded:NAME")
    parser.add_argument("--draft", help="the same")
    parser.add_argument("--weights", default="float32", help="float32, float16, int8 or int4 (default float32)")
    parser.add_argument(
        "--cache",
        help="keys and values: float32 or 'its default' with openvino, float16 (the default) or float32 with llama.cpp",
    )
    parser.add_argument("--python", default=sys.executable, help="Python with the exporter; default: this one")
    parser.add_argument("--source", type=Path, help="folder of llama.cpp's source")
    arguments = parser.parse_args()
    try:
        convert(arguments.peer, arguments)
    except SpecctlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
