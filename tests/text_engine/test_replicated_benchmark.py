"""A benchmark split by prompt over replicas has the runs of one process."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specctl import __main__ as entry
from specctl.benchmark.plan import Plan
from specctl.benchmark.run import run_benchmark, run_by_replicas
from specctl.errors import UsageError
from specctl.models.loading.assembly import load_pair
from specctl.observing.candidates import candidates_of, competing_drafts
from specctl.observing.progress import SILENT
from specctl.observing.results import read_results
from specctl.outputs import Outputs
from specctl.profile import parse_policy, resolve
from specctl.prompts.suites import load_records
from specctl.text_engine.engine import Answered
from specctl.text_engine.job import Job, require_gpus
from tests.support.checkpoints import llama_config, save_model
from tests.text_engine.in_process import InProcess

PROMPTS = 5


@pytest.fixture(autouse=True, scope="module")
def few_widths_are_timed():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specctl.observing.pass_times.WIDTHS", (1, 4))
        yield


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The profile, candidates, suite and plan of a benchmark."""
    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3))
    flags = {"target.model": str(folder / "target"), "draft.model": str(folder / "draft"), "threads": 1}
    flags |= {"sampling.max_new_tokens": 8, "draft.policy": parse_policy("svip")}
    profile = resolve(flags=flags | {"target.device": "cpu", "draft.device": "cpu"}).profile
    lines = [f'{{"id": "p{number}", "prompt": "the {number} moons"}}\n' for number in range(PROMPTS)]
    lines[3] = '{"id": "long", "prompt": "' + "x" * 3000 + '"}\n'
    (folder / "prompts.jsonl").write_text("".join(lines))
    suite = load_records(folder / "prompts.jsonl")
    return Plan(profile, candidates_of(competing_drafts([profile], [])), suite, [2, 4], repeats=2)


@pytest.fixture(scope="module")
def alone(asked):
    pair = load_pair(asked.profile, measured=False)
    return run_benchmark(pair, asked, None, unwatched, SILENT)


def unwatched(*_):
    return nullcontext(SimpleNamespace(start=lambda *_: None, add=lambda _: None, fail=lambda _: None))


def run(asked, output=None, earlier=None, replicas=InProcess):
    job = Job(
        "specctl.commands.bench:replica",
        {"profile": asked.profile, "plan": asked, "foreign_head": False, "expected_tokens": 0},
    )
    start = lambda: replicas(job)  # noqa: E731
    return run_by_replicas(start, asked, output, unwatched, earlier)


def outcomes(results):
    return [(run.key, [turn.tokens for turn in run.turns]) for run in results.runs]


@pytest.mark.slow
def test_runs_are_those_of_one_process_in_its_order_and_are_resumed(asked, alone, tmp_path):
    path = tmp_path / "results.jsonl"
    with Outputs() as outputs:
        found = run(asked, outputs.file("output", path))
    assert outcomes(found) == outcomes(alone)
    assert found.skipped == alone.skipped
    assert "long" in found.skipped
    assert found.costs is not None
    assert replace(found.header, created="", others_busy=None) == replace(alone.header, created="", others_busy=None)

    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    with Outputs() as outputs:
        file = outputs.file("output", path, resumed=True)
        again = run(asked, file, read_results(path))
    assert sorted(outcomes(again)) == sorted(outcomes(alone))
    assert sorted(outcomes(read_results(path))) == sorted(outcomes(alone))
    assert run(asked, None, again, lambda _: pytest.fail("replicas were started")) is again


@pytest.mark.slow
def test_replicas_that_run_several_prompts_at_once_have_the_runs_of_one_process(asked, alone):
    asked = replace(asked, batch=2)
    found = run(asked)
    assert sorted(outcomes(found)) == sorted(outcomes(alone))
    assert (found.header.batch, alone.header.batch) == (2, 1)
    assert run(asked, None, found, lambda _: pytest.fail("replicas were started")) is found


def test_a_difference_that_was_not_written_is_found_on_resuming(asked, alone):
    """An end between a prompt's last run and its comparison: the replica runs nothing and compares."""
    one = next(each for each in alone.runs if each.candidate != "none")
    (turn,) = one.turns
    other = replace(one, turns=(replace(turn, tokens=(*turn.tokens[:-1], turn.tokens[-1] + 1)),))
    earlier = replace(alone, runs=[other if each is one else each for each in alone.runs])
    found = run(asked, None, earlier)
    assert len(found.runs) == len(alone.runs)
    (difference,) = [each.difference for each in found.runs if each.difference is not None]
    assert difference.position == len(turn.tokens) - 1


def test_unlike_devices_are_not_pooled(asked):
    class Unlike(InProcess):
        def step(self, seconds=None):
            (event,) = super().step(seconds)
            header = event.answer["header"]
            other = replace(header, devices={**header.devices, "target": f"cuda:0 (GPU {event.place})"})
            return [Answered(event.place, {**event.answer, "header": other})]

    with pytest.raises(UsageError, match="the replicas' devices differ"):
        run(asked, None, None, Unlike)


def test_replicas_that_would_share_are_refused(asked, capsys, monkeypatch):
    with pytest.raises(UsageError, match="replicas on the CPU share its cores"):
        require_gpus(asked.profile, 2)
    on_gpus = resolve("embedded", overrides=["target.device=cuda", "draft.device=cuda"]).profile
    require_gpus(on_gpus, 2)
    for gpus, said in (("", "replicas on the CPU share"), ("0", "2 replicas would share 1 GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.setattr("sys.argv", ["specctl", "bench", "--workers", "2", "-n", "4", "--limit", "1"])
        assert entry._run() == 2
        assert said in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("sys.argv", ["specctl", "bench", "--workers", "2", "--oracle"])
    assert entry._run() == 2
    assert "--oracle needs all prompts on one device" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["specctl", "bench", "--workers", "2", "--batch", "auto"])
    assert entry._run() == 2
    assert "--batch auto may be another number in each replica" in capsys.readouterr().err
