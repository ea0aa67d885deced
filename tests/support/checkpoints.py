"""Tiny random checkpoints and a pretend hub, for tests about loading."""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

SHA = "a" * 40


def tiny_tokenizer(
    merges: Sequence[tuple[str, str]] = (("t", "h"),), added: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: ``<eos>`` is id 0, then 256 bytes, the merged tokens, and what is added."""
    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.add_tokens(list(added))
    return tokenizer


def llama_config(rows: int = 258, **settings: object) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=rows, num_key_value_heads=2, eos_token_id=0, bos_token_id=None, **(sizes | settings))


def save_model(
    folder: Path, config: PreTrainedConfig | None = None, *, shards: str = "1GB", **tokenizer: object
) -> Path:
    """A whole checkpoint folder: random float32 weights, configuration, tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or llama_config())
    model.save_pretrained(folder, max_shard_size=shards)
    tiny_tokenizer(**tokenizer).save_pretrained(folder)
    return folder


@dataclass
class Hub:
    """Answers like the hub for the repositories in ``folders``; others get the error in ``refusals``, or 404."""

    folders: dict[str, Path] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        asked = urlsplit(path)
        path = unquote(asked.path)
        self.requests.append(path)
        for name, (status, code) in self.refusals.items():
            if name in path:
                return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        for name, folder in self.folders.items():
            if path == f"/api/models/{name}/revision/main" or path == f"/api/models/{name}":
                files = sorted(folder.iterdir()) if "blobs" in asked.query else []
                siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
                return 200, {}, json.dumps({"id": name, "sha": SHA, "gated": False, "siblings": siblings}).encode()
            if path.startswith(f"/api/models/{name}/tree/"):
                return 200, {}, json.dumps([self._entry(file) for file in sorted(folder.iterdir())]).encode()
            if path.startswith(f"/{name}/resolve/"):
                file = folder / path.rsplit("/", 1)[1]
                if not file.exists():
                    return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}, b""
                body = file.read_bytes()
                return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": SHA}, body
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    @staticmethod
    def _entry(file: Path) -> dict[str, object]:
        body = file.read_bytes()
        return {"type": "file", "path": file.name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve a pretend hub on localhost; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if (wanted := self.headers.get("Range")) and status == 200:
                first, last = wanted.removeprefix("bytes=").split("-")
                size, body = len(body), body[int(first) : int(last) + 1 if last else None]
                status, headers = 206, headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
