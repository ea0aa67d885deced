"""Traces that replicas make for ``calibrate`` are those that one process makes."""

from dataclasses import replace

import pytest

from specctl.models.loading.assembly import load_pair
from specctl.outputs import Outputs
from specctl.profile import parse_policy, resolve
from specctl.prompts.suites import load_records
from specctl.replay.recording import collecting, metering
from specctl.replay.recording.collecting import collect_traces
from specctl.replay.trace_files import read_traces
from specctl.text_engine.engine import Lost
from specctl.text_engine.job import Job
from tests.support.checkpoints import llama_config, save_model
from tests.text_engine.in_process import InProcess


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3))
    flags = {"target.model": str(folder / "target"), "draft.model": str(folder / "draft"), "threads": 1}
    flags |= {"sampling.max_new_tokens": 8, "sampling.temperature": 1.0, "draft.policy": parse_policy("svip")}
    return resolve(flags=flags | {"target.device": "cpu", "draft.device": "cpu"}).profile


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [f'{{"id": "p{number}", "prompt": "the {number} moons"}}\n' for number in range(7)]
    lines[2] = '{"id": "talk", "turns": ["the first", "the second"]}\n'
    lines[4] = '{"id": "long", "prompt": "' + "x" * 3000 + '"}\n'
    lines[5] = '{"id": "deadly", "prompt": "it ends whoever reads it"}\n'
    path.write_text("".join(lines))
    return load_records(path)


@pytest.fixture(autouse=True)
def rough_costs(monkeypatch):
    for name, value in {
        "LENGTHS": (0, 1, 4),
        "IN_A_ROW": 2,
        "ALONE": 2,
        "WARMING": 1,
        "PASSES": metering.WARM_UPS + 1,
    }.items():
        monkeypatch.setattr(metering, name, value)
    monkeypatch.setattr(collecting, "PASSES", metering.WARM_UPS + 1)


class Dying(InProcess):
    """Ends over one prompt, whoever gets it."""

    def step(self, seconds=None):
        for replica, question in self._asked.items():
            if question["prompt"].id == "deadly":
                del self._asked[replica]
                return [Lost(replica, "was ended by signal 9")]
        return super().step(seconds)


def untimed(traces):
    return [replace(trace, prefill_ms=0.0) for trace in traces.traces if trace.prompt != "deadly"]


@pytest.mark.slow
def test_traces_and_their_order_are_the_same_and_costs_are_measured_here(profile, suite, tmp_path):
    pair = load_pair(profile, measured=False)
    job = Job(
        "specctl.commands.calibrate:replica",
        {"profile": profile, "heads": [], "depth": 4, "foreign_head": False},
    )
    expected = collect_traces(pair, profile, suite, 4)
    with Outputs() as outputs:
        file = outputs.file("trace", tmp_path / "trace.jsonl")
        found = collect_traces(pair, profile, suite, 4, output=file, replicas=lambda: Dying(job))
    assert untimed(found) == untimed(expected)
    assert found.prompts == [name for name in expected.prompts if name != "deadly"]
    assert found.failures["long"] == expected.failures["long"]
    assert found.failures["deadly"] == "no replica survived it; was ended by signal 9"
    assert found.costs is not None
    written = read_traces(tmp_path / "trace.jsonl")
    assert written.traces == found.traces
    # What an earlier run has traced needs no replica.
    with Outputs() as outputs:
        file = outputs.file("trace", tmp_path / "trace.jsonl", resumed=True)
        none = lambda: pytest.fail("replicas were started")  # noqa: E731
        again = collect_traces(pair, profile, suite, 4, output=file, earlier=written, replicas=none)
    assert again.prompts == found.prompts
