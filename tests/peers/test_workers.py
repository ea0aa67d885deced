"""The workers with engines that this test plays: what they ask of an engine, and what they make of its answers."""

import json
import os
import sys
from pathlib import Path

import pytest

from specctl.peers.engines import WORKER
from specctl.peers.process import PeerError, PeerProcess

LOAD = {"do": "load", "weights": "float32", "cache": "float32", "threads": 3, "context": 64, "stop": [9, 8]}
RUN = {"do": "run", "batch": [[1, 2]], "most": 5}

ONNXRUNTIME = """
import json
__version__ = "7.7"
print("noise that no answer may be mixed with")
class Config:
    def __init__(self, folder): self.folder = folder
    def overlay(self, text):
        with open(self.folder + "/seen", "w") as seen: seen.write(text)
class Model:
    def __init__(self, config): pass
class GeneratorParams:
    def __init__(self, model): self.speculative = {}
    def set_search_options(self, **options): self.search = options
    def set_speculative_options(self, **options): self.speculative = options
class Generator:
    def __init__(self, model, params): self.params = params
    def append_tokens(self, ids):
        count = self.params.search["batch_size"]
        width = len(ids) // count
        self.rows, self.left = [ids[width * row :][:width] for row in range(count)], [5, 6, 7]
        assert self.params.search["max_length"] == width + 5
    def generate_next_token(self):
        written = self.left.pop(0)
        for row, ids in enumerate(self.rows): ids.append(written if row == 0 or written == 5 else [8, 0][written - 6])
    def is_done(self): return not self.left
    def get_sequence(self, index): return self.rows[index]
    def get_speculative_stats(self):
        return {"rounds": 2, "draft_tokens_proposed": sum(self.params.speculative.values())}
"""

OPENVINO_GENAI = """
import json
from types import SimpleNamespace as Some
__version__ = "8.8"
class SchedulerConfig: pass
class GenerationConfig: pass
def TokenizedInputs(ids, mask): return Some(ids=ids.data.tolist(), mask=mask.data.tolist())
def draft_model(folder, device, **settings): return [folder, settings]
class LLMPipeline:
    def __init__(self, folder, device, scheduler_config, **settings):
        with open(folder + "/seen", "w") as seen: json.dump([scheduler_config.enable_prefix_caching, settings], seen)
    def generate(self, ids, options):
        assert ids.ids[0] == [1, 2] and options.stop_token_ids == {9, 8} and not options.do_sample
        assert (ids.ids[1:], ids.mask) in (([], [[1, 1]]), ([[3, 0]], [[1, 1], [1, 0]]))
        metrics = lambda count: Some(raw_metrics=Some(m_durations=[0.1] * count))
        return Some(
            tokens=[[5, 6, getattr(options, "num_assistant_tokens", 0)][: options.max_new_tokens] for _ in ids.ids],
            perf_metrics=Some(get_ttft=lambda: Some(mean=2.0)),
            extended_perf_metrics=Some(main_model_metrics=metrics(2), draft_model_metrics=metrics(3)),
        )
"""

SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
if "--version" in sys.argv:
    sys.exit(print("version: 66 (abc)", file=sys.stderr))
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
Path(__file__).with_name("seen").write_text(json.dumps(options))
if options["-m"].startswith("/nowhere"):
    sys.exit(4)
class Handler(BaseHTTPRequestHandler):
    def answer(self, found):
        body = json.dumps(found).encode()
        self.send_response(200 if found is not None else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["cache_prompt"] is False and asked["temperature"] == 0
        times = {{"prompt_ms": 2.0, "predicted_ms": 8.0, "draft_n": 4, "draft_n_accepted": 1}}
        found = {{"tokens": [5, 6, 7], "stop_type": "eos", "timings": times}}
        self.answer(found if asked["prompt"] == [1, 2] else None)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def started(monkeypatch, folder: Path, peer: str, *arguments: str, **modules: str) -> PeerProcess:
    """The worker of a peer, in a Python that finds these modules."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return PeerProcess(peer, [sys.executable, str(WORKER), peer, *arguments])


@pytest.mark.parametrize(
    ("values", "speculative"),
    [
        ({"draft": "none"}, None),
        ({"draft": "constant", "tokens": 4}, 4),
        ({"draft": "adaptive", "tokens": 2}, 2),
    ],
)
def test_onnxruntime(monkeypatch, tmp_path, values, speculative):
    (tmp_path / "draft").mkdir()
    decoder = {"filename": "model.onnx", "session_options": {"log_id": "x"}, "head_size": 32}
    (tmp_path / "draft" / "genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}), encoding="utf-8")
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"pad_token_id": 0}}), encoding="utf-8")
    with started(monkeypatch, tmp_path, "onnxruntime-genai", onnxruntime_genai=ONNXRUNTIME) as worker:
        assert worker.hello == {"version": "7.7"}
        worker.ask({**LOAD, **values, "folder": str(tmp_path)}, 60)
        (answer,) = worker.ask(RUN, 60)["batch"]
        # The engine stopped early and leaves out the token that ended the text.
        assert answer["ids"] == [5, 6, 7, 9]
        assert 0 < answer["first_seconds"] <= answer["seconds"]
        assert len(answer["arrivals"]) == 3
        wanted = (4, 0) if speculative is None else (2, speculative)
        assert (answer["passes"], answer["drafted"]) == wanted
        if speculative is None:  # the second prompt is padded on the right, and its text ends before the other
            texts = worker.ask({**RUN, "batch": [[1, 2], [3]]}, 60)["batch"]
            assert [(text["ids"], len(text["arrivals"])) for text in texts] == [([5, 6, 7, 9], 3), ([5, 8], 2)]
    model = json.loads((tmp_path / "seen").read_text(encoding="utf-8"))["model"]
    threads = {"intra_op_num_threads": 3, "inter_op_num_threads": 1}
    assert model["decoder"]["session_options"] == threads
    assert model["eos_token_id"] == [9, 8]
    draft = {"filename": "draft/model.onnx", "session_options": {"log_id": "x", **threads}, "head_size": 32}
    assert model.get("draft") == (None if speculative is None else draft)


@pytest.mark.parametrize("values", [{"draft": "none"}, {"draft": "constant", "tokens": 4}])
def test_openvino(monkeypatch, tmp_path, values):
    (tmp_path / "target").mkdir()
    tensor = "class Tensor:\n    def __init__(self, data): self.data = data\n"
    modules = {"openvino_genai": OPENVINO_GENAI, "openvino": tensor}
    with started(monkeypatch, tmp_path, "openvino", **modules) as worker:
        worker.ask({**LOAD, **values, "folder": str(tmp_path)}, 60)
        (answer,) = worker.ask(RUN, 60)["batch"]
        if values["draft"] == "none":
            two = worker.ask({**RUN, "batch": [[1, 2], [3]]}, 60)["batch"]
            assert [one["ids"] for one in two] == [answer["ids"]] * 2
    prefix_caching, settings = json.loads((tmp_path / "target" / "seen").read_text(encoding="utf-8"))
    common = {"INFERENCE_NUM_THREADS": 3, "KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
    assert prefix_caching is False
    if values["draft"] == "none":
        assert (settings, answer["ids"], answer["passes"], answer["drafted"]) == (common, [5, 6, 0], 3, 0)
    else:
        assert settings == {"draft_model": [str(tmp_path / "draft"), common], **common}
        assert (answer["ids"], answer["passes"], answer["drafted"]) == ([5, 6, 4], 2, 3)
    assert answer["first_seconds"] == 0.002


def test_llama(monkeypatch, tmp_path):
    program = tmp_path / "llama-server"
    program.write_text(SERVER, encoding="utf-8")
    program.chmod(0o755)
    with started(monkeypatch, tmp_path, "llama.cpp", str(program)) as worker:
        assert worker.hello == {"version": "66 (abc)"}
        worker.ask({**LOAD, "draft": "confidence", "threshold": 0.3, "folder": str(tmp_path)}, 60)
        (answer,) = worker.ask(RUN, 60)["batch"]
        times = {"seconds": 0.01, "first_seconds": 0.002, "arrivals": []}
        assert answer == {"ids": [5, 6, 7, 9], **times, "passes": 3, "drafted": 4}
        with pytest.raises(PeerError, match="llama-server answered 500"):
            worker.ask({**RUN, "batch": [[3]]}, 60)
    options = json.loads((tmp_path / "seen").read_text(encoding="utf-8"))
    assert (options["-t"], options["-ctk"], options["-fa"], options["--spec-draft-p-min"]) == ("3", "f32", "off", "0.3")
    with (
        started(monkeypatch, tmp_path, "llama.cpp", str(program)) as worker,
        pytest.raises(PeerError, match="ended with exit code 4"),
    ):
        worker.ask({**LOAD, "draft": "none", "cache": "float16", "folder": "/nowhere"}, 60)
    options = json.loads((tmp_path / "seen").read_text(encoding="utf-8"))
    assert options["-ctk"] == "f16"
    assert not {"-fa", "-md", "--spec-type"} & options.keys()


def test_an_engine_that_is_not_there_is_named(monkeypatch, tmp_path):
    missing = "raise ModuleNotFoundError('No module named openvino_genai', name='openvino_genai')"
    with pytest.raises(PeerError) as caught:
        started(monkeypatch, tmp_path, "openvino", openvino_genai=missing)
    assert "cannot import it: No module named openvino_genai" in caught.value.message
    assert caught.value.hint.endswith("-m pip install openvino-genai")
