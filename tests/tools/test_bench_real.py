"""The measurements on real weights, on the embedded target in place of these, with a stand-in for llama.cpp."""

import json
import sys
from pathlib import Path

import pytest

from specctl.profile.schema import model_path
from tools import bench_real
from tools.bench_real import ALONE, NONE, SERVER, Bench, Program, Rows

STAND_IN = """
import sys
sys.path.insert(0, "CLONE")
from tools.real.llama_program import Clocks, resident, serve

class Program:
    def passes(self, widths, context):
        return {"passes": {str(width): {"wall": width, "processor": width} for width in widths}}

    def write(self, ids, count, lookup=0, kind="NONE", draft="", length=0, least=0.0):
        spent = {"wall": 10.0, "processor": 10.0 + lookup + length + least}
        return {"ids": [5] * count, "text": "", "rest": spent, "rest_tokens": count - 1}

    def write_many(self, prompts, count):
        return {"ids": [[5] * count] * len(prompts), "whole": Clocks().read()}

    def memory(self):
        return {"memory": resident()}

serve(Program())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with prompts, and the stand-in that is started as llama.cpp's program."""
    texts = ("Tom had a red kite.", "Sam saw a big dog.", "Mia went home.", "A cat sat.")
    records = [
        {"id": f"{kind}{number}", "category": kind, "prompt": text}
        for kind in ("stories", "more")
        for number, text in enumerate(texts)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN.replace("CLONE", str(bench_real.CLONE)), "utf-8")
    start = Bench.start

    def started(own: Bench, key: str, threads: int) -> Program:
        return Program([sys.executable, program], threads) if key in (ALONE, SERVER) else start(own, key, threads)

    monkeypatch.setattr(Bench, "start", started)
    monkeypatch.setattr(bench_real, "llama_python", lambda *_: Path(sys.executable))
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Measure only what ``more`` says, of one form and on one thread."""
    given = ["--target", str(model_path("target")), "--gguf", str(folder / "model.gguf")]
    given += ["--prompts", str(folder / "prompts.jsonl"), "--forms", "float32", "-n", "8", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_real", str(folder), "--threads", "1", *given, *more])
    bench_real.main()


@pytest.mark.slow
def test_rows_are_made_once_and_shown(folder, monkeypatch, capsys):
    monkeypatch.setattr(Bench, "_calibrated", lambda *_: "constant:draft_length=2")
    run(folder, monkeypatch, "--rows", "[pake]*")
    shown = capsys.readouterr().out
    assert "Passes, one thread" in shown
    assert "| 16 tokens | 5 / 1 |" in shown
    assert "float32, stories, 4 prompts" in shown
    assert "float32, all, 8 prompts" in shown
    assert "Eight texts at once" in shown
    lines = (folder / "rows.jsonl").read_text("utf-8").splitlines()
    names = [json.loads(line)["row"] for line in lines]
    assert sorted(name.split()[0] for name in names) == ["alone"] * 8 + ["eight"] + ["kinds"] * 8 + ["passes"]
    for line in lines:
        row = json.loads(line)
        if row["row"].startswith("kinds"):
            own = {label: one["ids"] for label, one in row["measured"]["of"].items() if not label.startswith(ALONE)}
            assert len(own) == 5
            assert all(ids == own[NONE] for ids in own.values())
            assert SERVER in row["measured"]["of"]


@pytest.mark.slow
def test_settings_of_the_server_are_compared_first(folder, monkeypatch, capsys):
    """The stand-in takes longer for longer drafts, so the shortest one is kept."""
    kept: list[list[str]] = []
    servers = Bench._servers

    def noted(own: Bench) -> list[bench_real.Candidate]:
        found = servers(own)
        kept.append([one.label for one in found])
        return found

    monkeypatch.setattr(Bench, "_servers", noted)
    run(folder, monkeypatch, "--rows", "settings*", "--draft", "small.gguf")
    shown = capsys.readouterr().out
    assert f"{SERVER}, 2 prompts" in shown
    assert f"| {SERVER} small, 8, 0.8 |" in shown
    assert kept == [[SERVER, f"{SERVER} NGRAM_SIMPLE", f"{SERVER} small, 1, 0"]]


def test_a_torn_line_is_made_again(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", "p*")
    rows.add("passes 1", 1)
    rows.add("passes 2", 2)
    whole = rows.path.read_text("utf-8")
    rows.path.write_text(whole[:-5], "utf-8")
    again = Rows(rows.path, "p*")
    assert [again.missing(name) for name in ("passes 1", "passes 2", "sizes int4")] == [False, True, False]
    again.add("passes 2", 2)
    assert rows.path.read_text("utf-8") == whole


def test_tables_of_rows(tmp_path):
    """Twice the tokens/s is a ratio of two; the best of llama.cpp's is what the others are over."""

    def text(label: str, ms: float, ids: list[int]) -> dict[str, object]:
        return {label: {"ids": ids, "rest": {"wall": ms, "processor": ms}, "rest_tokens": 100}}

    of = {
        **text(NONE, 1000, [1, 2]),
        **text("lookup constant", 500, [1, 2]),
        **text("lookup confidence", 2000, [1, 3]),
        **text(ALONE, 2000, [1, 4]),
        **text(f"{ALONE} lookup 2", 1000, [1, 4]),
    }
    rows = Rows(tmp_path / "rows.jsonl", "*")
    for number in range(12):
        rows.add(f"kinds int4 {number}", {"category": "code", "of": of})
    lines = [*bench_real.kind_tables(Rows(tmp_path / "rows.jsonl", "*"), 1)]
    assert "| lookup constant | 200.0 | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] | 12 of 12 |" in lines
    assert "| lookup confidence | 50.0 | 0.50 [0.50, 0.50] | 0.50 [0.50, 0.50] | 0 of 12 |" in lines
    assert f"|  | tokens/s | over {ALONE} lookup 2 | over none | same text |" in lines
    assert not [*bench_real.size_table(rows)]
    decoding = {"int4": {"now": 300e6, "most": 1}, ALONE: {"now": 200e6, "most": 1}}
    sizes = {"files": 110e6, "gguf": 100e6, "weights": 500e6, "exporting": 1e9, "decoding": decoding}
    rows.add("sizes int4", {**sizes, "start_seconds": 0.5})
    shown = [*bench_real.size_table(rows)]
    assert "| int4 | 110 | 1.10 | 1000 | 2.00 | 300 | 190 | 0.50 |" in shown
    assert f"| {ALONE} | 100 | 1.00 |  |  | 200 |  |  |" in shown


def test_llama_cpp_that_cannot_be_had_is_left_out(tmp_path, capsys):
    wanted = ("llama-cpp-python==0", "module_that_is_not_there")
    assert bench_real.llama_python(tmp_path, tmp_path / "none", *wanted) is None
    assert "llama-cpp-python==0 is left out" in capsys.readouterr().err
    assert bench_real.llama_python(tmp_path, Path(sys.executable), *wanted) is None
