"""The report of a GPU's first ten minutes, without a GPU: its processes, its pages, and some of its parts rehearsed."""

import json
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from specctl.decoding import round as decoding_round
from specctl.models.passes.cuda_capture import CudaCapture
from tools.gpu_report import attention, captures, counts, draws, prompts, speeds
from tools.gpu_report import run as command
from tools.gpu_report.parts import PARTS, Part
from tools.gpu_report.process import run_part
from tools.gpu_report.record import Line, Recorder, lines_of
from tools.gpu_report.stage import Stage
from tools.synthetic.shapes import Shape

REHEARSAL = Stage(rehearsal=True)


def ended(name: str, *arguments: str, limit: int = 60) -> Part:
    return Part(name, f"The part that {name}", f"tests.tools.ended_parts:{name}", limit, arguments)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, list[Line]]]:
    """Run parts as a report; gives exit code, page and lines."""

    def run(*parts: Part, minutes: float = 10, rehearse: bool = False) -> tuple[int, str, list[Line]]:
        monkeypatch.setattr(command, "PARTS", parts)
        names = [part.name for part in parts]
        more = ["--rehearse"] if rehearse else []
        code = command.main([str(tmp_path / "out"), "--minutes", str(minutes), "--parts", *names, *more])
        lines = (tmp_path / "out" / "report.jsonl").read_text().splitlines()
        return code, (tmp_path / "out" / "report.md").read_text(), [json.loads(line) for line in lines]

    return run


def test_parts_that_crash_or_raise_end_alone(report: Callable[..., tuple[int, str, list[Line]]]) -> None:
    code, page, lines = report(ended("crashes"), ended("raises"), ended("well", "a", "b"), ended("knows"))

    assert code == 1
    states = {line["part"]: line["state"] for line in lines if line["kind"] == "part"}
    assert states == {"crashes": "failed", "raises": "failed", "well": "done", "knows": "done"}
    assert "2 checks held, 1 did not; not answered: crashes, raises" in page
    assert page.index("## What did not hold\n\n- one does not hold (`knows`): for a reason") < page.index(
        "## What held"
    )
    assert "- said before the crash (`crashes`)" in page
    assert "ended by SIGABRT" in page
    assert "ValueError: some reason" in page
    assert "- `knows`: the bandwidth is 2.0" in page
    assert "| name | value | more | other |\n| --- | --- | --- | --- |\n| first | 1,234 | a,b | - |" in page
    assert "| second | - | - | False |" in page
    assert "REHEARSAL" not in page


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    for limit in (2, 10, 50):  # a busy machine may take long to start it
        found = run_part(ended("hangs", str(tmp_path / "pid")), limit, {}, rehearse=False)
        if found.lines:
            break

    assert found.state == "timed out"
    assert [line["text"] for line in found.lines] == ["about to hang"]
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1000):  # killed, and perhaps not yet scheduled to die
        if not runs(pid):
            return
        sleep(0.1)
    pytest.fail("it runs on")


def runs(pid: int) -> bool:
    """Whether it is there, and not only waited for by the process that took it over."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_without_time_nothing_begins(report: Callable[..., tuple[int, str, list[Line]]]) -> None:
    code, page, _ = report(ended("well"), minutes=0)

    assert code == 1
    assert "- The part that well (`well`): skipped, no time was left" in page


def test_without_a_device_nothing_is_measured(report: Callable[..., tuple[int, str, list[Line]]]) -> None:
    code, page, _ = report(ended("alone"), ended("well"))

    assert code == 1
    assert "- The part that well (`well`): skipped, there is no CUDA device; --rehearse does without" in page


def test_a_rehearsal_says_so(report: Callable[..., tuple[int, str, list[Line]]]) -> None:
    code, page, lines = report(ended("well"), rehearse=True)

    assert code == 0
    assert lines[0]["rehearsal"] is True
    assert "**A REHEARSAL without a device" in page
    assert "| `well` | The part that well | done |" in page
    assert page.rstrip().endswith("| the CPU |")


def test_every_part_can_be_found() -> None:
    from importlib import import_module

    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.work.partition(":")
        assert callable(getattr(import_module(module), function))


def found_by(work: Callable[..., None], tmp_path: Path, *arguments: str, **facts: Any) -> list[Line]:
    path = tmp_path / "lines.jsonl"
    path.unlink(missing_ok=True)
    work(Recorder(path, "tested", facts), REHEARSAL, *arguments)
    return lines_of(path)


def rows(lines: list[Line], table: str) -> list[dict[str, Any]]:
    return [line["values"] for line in lines if line["kind"] == "row" and line["table"] == table]


def broken(lines: list[Line]) -> list[str]:
    return [line["claim"] for line in lines if line["kind"] == "check" and line["held"] is False]


@pytest.mark.slow
def test_speeds_of_an_engine(tmp_path: Path) -> None:
    lines = found_by(speeds.engine_speeds, tmp_path, "static", "plain", bandwidth=1e9)

    told = rows(lines, speeds.SPEEDS)
    assert [(row["drafts"], row["temperature"], row["context"]) for row in told[:3]] == [
        ("none", 0.0, 20),
        ("constant", 0.0, 20),
        ("none", 0.0, 120),
    ]
    assert {row["speedup over none"] for row in told if row["drafts"] == "none"} == {1.0}
    steps = rows(lines, speeds.STEPS)
    assert len(steps) == 4
    for row in steps:
        assert row["times the floor"] == pytest.approx(row["draft step ms"] / row["floor ms"])
    # The draft's weights but its embeddings, and keys and values of 120 tokens, float32.
    draft, context = REHEARSAL.models()[1], 120
    read = sum(weight.nbytes for weight in draft.parameters()) - draft.model.embed_tokens.weight.nbytes
    assert steps[-1]["floor ms"] == pytest.approx((read + context * 2 * 2 * 2 * 8 * 4) / 1e6)


def test_rare_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "RARE", 1e-4)
    monkeypatch.setattr(draws, "AT_A_TIME", 50_000)
    assert broken(found_by(draws.rare_tokens, tmp_path)) == []
    coarse = draws.uniforms
    # Multiples of 1/1000: too coarse for that probability, as float32 is for smaller ones.
    monkeypatch.setattr(draws, "uniforms", lambda *given: (coarse(*given) * 1000).floor() / 1000)
    assert broken(found_by(draws.rare_tokens, tmp_path)) == ["a token of probability 1e-8 gets its due"]


def test_attention_is_timed_for_every_pass(tmp_path: Path) -> None:
    lines = found_by(attention.new_lengths, tmp_path)
    assert len(rows(lines, "Attention at new lengths")) == 4
    assert broken(lines) == []


def test_what_a_token_and_a_round_take() -> None:
    """2 a token and 3 a round, in rounds of 2 and of 4.5 tokens."""
    each, rest = counts.shares([{"waits": 7.0}, {"waits": 12.0}], [2.0, 4.5])
    assert (each, rest) == ({"waits": 2.0}, {"waits": 3.0})


@pytest.fixture
def small_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair small enough for a simulation in a test."""
    small = Shape(2, 32, 4, 2, 64, 128, 2048), Shape(1, 32, 4, 2, 64, 128, 2048)
    monkeypatch.setattr(captures, "SHAPES", small)


@pytest.mark.usefixtures("small_pair")
@pytest.mark.slow
def test_the_prompts_time_by_a_simulated_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken(found_by(prompts.prompt_time, tmp_path)) == []
    monkeypatch.setattr(decoding_round, "share_of_round", lambda *_: 1.0)
    assert "the time told for a prompt is the device's" in broken(found_by(prompts.prompt_time, tmp_path))


@pytest.mark.usefixtures("small_pair")
@pytest.mark.slow
def test_captures_on_a_second_simulated_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PLACES", captures.PLACES[:1])
    assert broken(found_by(captures.second_card, tmp_path)) == []

    def nothing(_: CudaCapture, step: Callable[[], Any]) -> Callable[[], Any]:
        """A graph of a pass that went elsewhere: what it leaves is always the same."""
        results = step()
        return lambda: results

    monkeypatch.setattr(CudaCapture, "__call__", nothing)
    wrong = broken(found_by(captures.second_card, tmp_path))
    assert "target on cuda:1, draft on cuda:1: captured passes write what eager ones write" in wrong
