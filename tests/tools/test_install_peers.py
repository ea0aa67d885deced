"""What installs the engines that are measured; nothing is downloaded, built or converted: commands only leave files."""

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from specctl.peers.engines import ENGINES, MANIFEST
from tools import install_peers
from tools.measure.parts import PEERS


def leave(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands, each of which leaves what the next one looks for."""
    found: list[list[str]] = []
    packed = tmp_path / "packed"
    leave(packed / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py")

    def run(words: list[str], **_: Any) -> None:
        found.append(words)
        if words[1:3] == ["-m", "venv"]:
            leave(Path(words[-1]) / "bin" / "python")
            leave(Path(words[-1]) / "lib" / "python3.11" / "site-packages" / "pip.py")
        elif "specctl.peers.convert" in words:
            leave(Path(words[-1]) / MANIFEST)
        elif "download" in words:
            with tarfile.open(Path(words[-1]) / f"{install_peers.SOURCE}.tar.gz", "w:gz") as archive:
                archive.add(packed, install_peers.SOURCE)
        elif "--build" in words:
            leave(Path(words[2]) / "bin" / "llama-server")

    monkeypatch.setattr(subprocess, "run", run)
    return found


@pytest.mark.parametrize("peer", install_peers.EXPORTERS)
def test_what_was_installed_is_not_installed_again(peer: str, ran: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / peer
    install_peers.install(peer, folder, jobs=3)
    assert (folder / "models" / MANIFEST).exists()
    assert (folder / PEERS[peer][0]).exists(), "where the benchmark looks for the program"
    assert next(folder.glob("export/lib/*/*/beside.pth")).read_text().splitlines() == [
        path for path in sys.path if path.endswith("site-packages")
    ]
    convert = ran[-1]
    assert convert[: convert.index(peer) + 1] == [sys.executable, "-m", "specctl.peers.convert", peer]
    assert convert[convert.index("--python") + 1] == str(folder / "export" / "bin" / "python")
    done = len(ran)
    install_peers.install(peer, folder, jobs=3)
    assert len(ran) == done


def test_llama_cpp_is_built_from_the_source_that_its_package_ships(ran: list[list[str]], tmp_path: Path) -> None:
    install_peers.install("llama.cpp", tmp_path / "llama.cpp", jobs=3)
    source = str(tmp_path / "llama.cpp" / install_peers.SOURCE / "vendor" / "llama.cpp")
    configure, build, convert = ran[-3:]
    assert configure[:3] == ["cmake", "-S", source]
    assert build[-2:] == ["llama-server", "-j3"]
    assert convert[convert.index("--source") + 1] == source


def test_an_environment_that_was_not_finished_is_made_anew(ran: list[list[str]], tmp_path: Path) -> None:
    leave(tmp_path / "env" / "bin" / "python")
    install_peers.environment(tmp_path / "env", ["a-package"])
    assert [words[2] for words in ran] == ["venv", "pip"]
    assert "--clear" in ran[0]


def test_every_peer_with_a_process_of_its_own_is_installed_and_measured() -> None:
    assert install_peers.EXPORTERS.keys() == ENGINES.keys() == PEERS.keys()
