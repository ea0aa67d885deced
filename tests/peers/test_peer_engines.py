"""What `--peer` can name, and how peers are found before anything is loaded."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl.peers.engines import (
    ENGINES,
    MANIFEST,
    WORKER,
    Converted,
    launches,
    parse_peer,
    paths_by_peer,
    write_manifest,
)


@pytest.mark.parametrize(
    ("text", "label", "values"),
    [
        ("openvino", "openvino:constant:5", {"draft": "constant", "tokens": 5}),
        ("openvino:constant:3", "openvino:constant:3", {"draft": "constant", "tokens": 3}),
        ("openvino:confidence", "openvino:confidence:0.4", {"draft": "confidence", "threshold": 0.4}),
        ("onnxruntime-genai:adaptive", "onnxruntime-genai:adaptive:2", {"draft": "adaptive", "tokens": 2}),
        ("llama.cpp:none", "llama.cpp:none", {"draft": "none"}),
        ("llama.cpp:confidence:0.75", "llama.cpp:confidence:0.75", {"draft": "confidence", "threshold": 0.75}),
    ],
)
def test_a_setting_is_named_in_full(text, label, values):
    setting = parse_peer(text)
    assert (setting.label, dict(setting.values)) == (label, values)
    assert parse_peer(setting.label) == setting
    assert setting.engine is ENGINES[setting.peer]


def test_transformers_has_settings_of_its_own():
    setting = parse_peer("hf-constant")
    assert (setting.label, setting.engine) == ("hf-constant", None)
    assert setting.values["num_assistant_tokens"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvnio", "did you mean 'openvino'"),
        ("openvino:adaptive", "cannot draft by 'adaptive'"),
        ("openvino:constant:0", "'0' is not a valid tokens value"),
        ("openvino:constant:2.5", "'2.5' is not a valid tokens value"),
        ("openvino:confidence:1.5", "'1.5' is not a valid threshold value"),
        ("onnxruntime-genai:constant:17", "between 1 and 16"),
        ("openvino:none:3", "cannot draft by 'none'"),
        ("hf-constant:none", "no settings to choose"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UsageError) as caught:
        parse_peer(text)
    assert message in caught.value.full_message


FLAG = "--peer-models"


def converted(folder: Path, peer: str, draft: str | None = "draft") -> Path:
    folder.mkdir(exist_ok=True)
    write_manifest(folder, Converted(peer, "target", draft, "float32", "float16", "exporter 1"))
    return folder


def test_the_process_is_the_worker_in_the_peers_own_python(tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    folder = converted(tmp_path / "models", "openvino")
    (launch,) = launches(
        [parse_peer("openvino"), parse_peer("hf-constant")], {"openvino": folder}, {"openvino": python}
    ).values()
    assert launch.command == (str(python), str(WORKER), "openvino")
    assert (launch.converted.weights, launch.converted.cache) == ("float32", "float16")


def test_a_program_is_run_by_a_worker_in_this_python(tmp_path):
    folder = converted(tmp_path / "models", "llama.cpp", draft=None)
    (launch,) = launches(
        [parse_peer("llama.cpp:none")], {"llama.cpp": folder}, {"llama.cpp": Path(sys.executable)}
    ).values()
    assert launch.command == (sys.executable, str(WORKER), "llama.cpp", sys.executable)


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(tmp_path, monkeypatch):
    folder = converted(tmp_path / "models", "openvino")
    if find_spec("openvino_genai") is None:
        with pytest.raises(UsageError, match="openvino-env/bin/pip install openvino-genai"):
            launches([parse_peer("openvino")], {"openvino": folder}, {})
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = converted(tmp_path / "llama", "llama.cpp")
    with pytest.raises(UsageError, match="needs its program llama-server"):
        launches([parse_peer("llama.cpp")], {"llama.cpp": folder}, {})
    with pytest.raises(UsageError, match="there is no such program"):
        launches([parse_peer("llama.cpp")], {"llama.cpp": folder}, {"llama.cpp": tmp_path / "no"})


def test_models_must_be_those_of_the_peer(tmp_path):
    peer = parse_peer("openvino")
    with pytest.raises(UsageError, match=r"python -m specctl\.peers\.convert openvino"):
        launches([peer], {}, {})
    with pytest.raises(UsageError, match=r"no readable specctl-peer\.json"):
        launches([peer], {"openvino": tmp_path}, {})
    (tmp_path / MANIFEST).write_text('{"peer": "openvino"}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"no readable specctl-peer\.json"):
        launches([peer], {"openvino": tmp_path}, {})
    with pytest.raises(UsageError, match=r"holds models for llama\.cpp, not for openvino"):
        launches([peer], {"openvino": converted(tmp_path, "llama.cpp")}, {})
    with pytest.raises(UsageError, match="has no draft model"):
        launches([peer], {"openvino": converted(tmp_path, "openvino", draft=None)}, {})


def test_paths_belong_to_a_peer_that_is_measured():
    peers = [parse_peer("openvino:none")]
    assert paths_by_peer(FLAG, ["openvino=a=b"], peers) == {"openvino": Path("a=b")}
    for text, message in [
        ("openvino", "is not PEER=PATH"),
        ("openvino=", "is not PEER=PATH"),
        ("hf-constant=x", "not a peer with a process of its own"),
        ("llama.cpp=x", "has no effect without --peer llama.cpp"),
    ]:
        with pytest.raises(UsageError, match=message):
            paths_by_peer(FLAG, [text], peers)
