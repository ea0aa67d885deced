"""Training data that replicas make is what one process makes."""

import pytest

from specctl.observing.progress import SILENT
from specctl.profile import parse_policy, resolve
from specctl.prompts.suites import load_records
from specctl.text_engine.engine import Lost
from specctl.text_engine.job import Job, ReplicaError
from specctl.training import subject
from specctl.training.draft_heads import DraftHeads
from specctl.training.predictors import Predictors
from tests.support.checkpoints import llama_config, save_model
from tests.text_engine.in_process import InProcess

PROMPTS = 11


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3))
    flags = {"target.model": str(folder / "target"), "draft.model": str(folder / "draft"), "threads": 1}
    flags |= {"sampling.max_new_tokens": 8, "sampling.temperature": 1.0, "target.device": "cpu", "draft.device": "cpu"}
    flags["draft.policy"] = parse_policy("svip")  # cost-optimal reads clocks, so what it draws need not repeat
    return resolve(flags=flags).profile


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [f'{{"id": "p{number}", "prompt": "the {number} moons"}}\n' for number in range(PROMPTS)]
    lines[6] = '{"id": "long", "prompt": "' + "x" * 3000 + '"}\n'
    path.write_text("".join(lines))
    return load_records(path)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(subject, "PROMPTS_PER_SHARD", 3)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


@pytest.mark.parametrize("kind", ["specdec++", "disco"])
@pytest.mark.representatives("specdec++")
def test_examples_of_heads(profile, suite, kind, tmp_path):
    found = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        job = Job(Predictors.maker, {"profile": profile, "kind": kind})
        replicas = None if name == "one" else lambda job=job: InProcess(job)
        source = Predictors(profile, kind).collect(tmp_path / name, suite, SILENT, resume=False, replicas=replicas)
        found[name] = source.material
    assert found["two"].done == PROMPTS
    assert found["two"].left_out == found["one"].left_out != {}
    assert contents(tmp_path / "two" / "examples") == contents(tmp_path / "one" / "examples")


def test_answers_of_drafts_go_on_where_an_earlier_run_ended(profile, suite, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    subject = DraftHeads(profile)
    expected = subject.collect(tmp_path / "one", suite, SILENT, resume=False).material

    class Dying(InProcess):
        """Ends over the third shard, whoever gets it."""

        def step(self, seconds=None):
            replica, question = next(iter(self._asked.items()))
            if question["first"] == 6:
                del self._asked[replica]
                return [Lost(replica, "was ended by signal 9")]
            return super().step(seconds)

    job = Job(DraftHeads.maker, {"profile": profile})
    with pytest.raises(ReplicaError, match="no replica survived prompts 7 to 9; was ended by signal 9"):
        subject.collect(tmp_path / "two", suite, SILENT, resume=False, replicas=lambda: Dying(job, count=1))
    found = subject.collect(tmp_path / "two", suite, SILENT, resume=True, replicas=lambda: InProcess(job)).material
    assert found.done == expected.done == PROMPTS
    assert contents(tmp_path / "two" / "answers") == contents(tmp_path / "one" / "answers")


def test_progress_counts_every_prompt(profile, suite, tmp_path):
    counted = []

    def advance(tokens=0):
        counted.append(tokens)

    folder = DraftHeads.folder.create(tmp_path / "answers", {}, PROMPTS)
    job = Job(DraftHeads.maker, {"profile": profile})
    subject.collect(folder, suite.prompts, InProcess(job, count=3), advance)
    assert len(counted) == PROMPTS
    assert counted[6] == 0 < counted[0]
