"""Mutated records through reading, answering by two models, and writing; a resumed run must find each again.

python -m tests.faults.records --count 10000
"""

import io
import json
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.jsonl import Record, read_records
from specctl.models.loading.assembly import load_pair
from specctl.observing.record_stream import RecordStream, record_writer
from specctl.outputs import Outputs
from specctl.profile.schema import DraftTable, ModelTable, Profile, SamplingTable
from specctl.resuming import Finished, distinct
from specctl.text_engine.here import HereEngine
from tests.faults.mutations import Tally, main, mutated
from tests.support.checkpoints import llama_config, save_model

CONTEXT = 48
"""Tokens that the models hold, so that no record takes long."""
BATCH = 100
"""Lines of one input file."""
RECORDS = (
    '{"id": "a", "prompt": "the moon", "category": "c", "extra": {"kept": [1, null]}}',
    '{"prompt": "a"}',
    '{"id": 7, "turns": ["the", "and"], "sampling": {"max_new_tokens": 2}}',
    '{"question_id": 81, "category": "x", "turns": ["one", "two"], "reference": []}',
    '{"task_id": "t/0", "messages": [{"role": "user", "content": "What?"}]}',
    '{"id": null, "prompt": "x", "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": 3}}',
    '{"id": {"a": [1]}, "prompt": "x", "sampling": {"stop": ["t"], "top_k": 3, "min_p": 0.1}}',
    '{"id": "a", "completion": "old", "error": {}, "prompt": "x", "metrics": 3, "line": 9}',
)
WORDS = (
    "null", "true", "NaN", "-Infinity", "1e400", "-0", "1E5", "9" * 25, "9" * 5000, '"\\ud800"', '"\\udc00\\ud800"',
    '"\\u0000"', '"\u2028\u2029\x85"', "\u2028", "\ud800", "{}", "[]", "[" * 200, "[" * 3000, '{"a":' * 150, "}", "]",
    '"id"', '"prompt"', '"turns"', '"messages"', '"sampling"', '"line"', '"completion"', '"error"', ": ", ", ",
    '"max_new_tokens": 1000000000000', '"max_new_tokens": 0', '"temperature": 1e-300', '"temperature": 1e300',
    '"top_k": -1', '"top_p": 0', '"seed": -1', '"seed": 99999999999999999999', '"stop": [""]', '"stop": "t"',
    '"role"', '"content"', "// ", "\ufeff",
)  # fmt: skip

KEYS = (
    "id", "prompt", "sampling", "max_new_tokens", "max_tokens", "temperature", "top_p", "stop", "seed", "line",
    "category", "body", "custom_id",
)  # fmt: skip
VALUES = (
    None, True, 0, -1, 1, 0.5, 1e300, 10**18, 10**400, "", "t", "\ud800", "\x00\x1b[31m", "\u2028\u2029\x85", [], {},
    ["t"], ["t", ""], [["a"]], {"a": {"b": []}}, [{"role": "user", "content": "x"}], {"max_new_tokens": 1},
    "the " * 100, [1] * 1000,
)  # fmt: skip


@cache
def answerer() -> Answerer:
    """Two tiny models of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        for name, layers in (("target", 2), ("draft", 1)):
            save_model(Path(folder, name), llama_config(num_hidden_layers=layers, max_position_embeddings=CONTEXT))
        tables = {name: f"{folder}/{name}" for name in ("target", "draft")}
        profile = Profile(
            target=ModelTable(model=tables["target"], device="cpu"),
            draft=DraftTable(model=tables["draft"], device="cpu"),
            sampling=SamplingTable(max_new_tokens=3),
        )
        pair = load_pair(profile)
    assert profile.draft is not None
    session = Session(pair, build_drafter(pair, profile.draft.setting))
    return Answerer(session, PromptFormat.of(pair.tokenizer, profile.prompt), profile.sampling)


def fuzz(count: int, seed: int) -> Tally:
    """Count what mutated lines lead to, in files of `BATCH` lines."""
    tally, draw = Tally(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, count, BATCH):
            lines = [_changed(draw, draw.choice(RECORDS)) for _ in range(min(BATCH, count - first))]
            # A changed line may hold line feeds, and so be several.
            source = "\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "surrogatepass")
            _answer(source, Path(folder, "out.jsonl"), tally, f"from case {first} of seed {seed}")
    return tally


def _changed(draw: random.Random, text: str) -> str:
    """A changed line: half of the time with another value somewhere, else with changes anywhere."""
    if draw.random() < 0.5:
        return mutated(draw, text, WORDS, RECORDS)
    record = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        inner = draw.choice([value for value in (record, record.get("sampling")) if isinstance(value, dict)])
        inner[draw.choice((*inner, *KEYS))] = draw.choice(VALUES)
    return json.dumps(record, ensure_ascii=draw.random() < 0.5)


def _answer(source: bytes, path: Path, tally: Tally, where: str) -> None:
    with Outputs(force=True) as outputs:
        output = outputs.file("output", path)
        output.begin()
        records = []
        for record in _read(source, tally, where):
            records.append(record)
            stream = RecordStream(HereEngine(record_writer(answerer)), output)
            size = path.stat().st_size
            tally.case(f"{where}, line {record.line}: {record}"[:500], lambda: stream.run([record]))  # noqa: B023
            with path.open("rb") as file:
                file.seek(size)
                _check_line(file.read(), tally, f"{where}, line {record.line}")
    finished = Finished(path)
    if lost := [record.line for record in records if not finished.take(record)]:
        tally.uncaught(f"{where}: --resume does not find lines {lost}")
    if len(finished) != len(records):
        tally.uncaught(f"{where}: {len(finished)} records were written, not {len(records)}")


def _read(source: bytes, tally: Tally, where: str) -> Iterator[Record]:
    try:
        yield from distinct(read_records(io.BytesIO(source)))
    except Exception as error:
        tally.uncaught(f"{where}: reading ended with {error!r}")


def _check_line(line: bytes, tally: Tally, where: str) -> None:
    try:
        if line.count(b"\n") != 1 or not line.endswith(b"\n"):
            raise ValueError("not one line")
        json.loads(line.decode("utf-8"), parse_constant=_refused)
    except ValueError as error:
        tally.uncaught(f"{where}: {error!r} for {line[:500]!r}")


def _refused(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


if __name__ == "__main__":
    main(fuzz, "Mutated records.")
