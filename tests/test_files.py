"""Files of JSON lines: whole ones, those of another kind or version, and damaged ones."""

import io
import json
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.analysis.readings import read_traces as read_verdicts
from specctl.errors import UsageError
from specctl.files import write_line
from specctl.jsonl import read_records
from specctl.observing.results import RESULTS, Skipped, read_results
from specctl.outputs import Outputs
from specctl.replay.trace_files import TRACES, read_traces
from specctl.resuming import Finished, finished_rounds

DATA = Path(__file__).parent / "data"
READERS = {"results": read_results, "trace": read_traces, "rounds": lambda path: read_verdicts([path])}
ALL = ["results", "results-hierarchy", "trace-sampled", "trace-hierarchy", "rounds"]


def recorded(name: str) -> Path:
    return DATA / f"{name}.jsonl"


def read(name: str, path: Path) -> object:
    return READERS[name.partition("-")[0]](path)


def damaged(name: str, path: Path, line: int, *, key: str | None = None) -> Path:
    """A copy with a line that is cut short, or that lacks a key."""
    lines = recorded(name).read_bytes().split(b"\n")
    if key is None:
        lines[line - 1] = lines[line - 1][:-20]
    else:
        record = json.loads(lines[line - 1])
        del record[key]
        lines[line - 1] = json.dumps(record).encode()
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.parametrize("name", ALL[:-1])
def test_a_file_is_the_same_once_it_is_written_anew(name: str, tmp_path: Path) -> None:
    kind = RESULTS if name.startswith("results") else TRACES
    with (tmp_path / "new.jsonl").open("w", encoding="utf-8") as stream:
        for record in kind.read(recorded(name)):
            kind.append(stream, record)
    assert (tmp_path / "new.jsonl").read_bytes() == recorded(name).read_bytes()


@pytest.mark.parametrize("name", ALL)
def test_a_torn_tail_is_ignored_and_left_where_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    whole = recorded(name).read_bytes()
    path.write_bytes(whole + b'{"kind": "prompt", "prom')
    read(name, path)
    assert path.read_bytes() == whole + b'{"kind": "prompt", "prom'
    with Outputs() as outputs:
        assert not outputs.file("output", path, resumed=True).begin()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(("results", other) for other in ("trace-sampled", "rounds", "prompts", "text", "nothing")),
        *(("trace-sampled", other) for other in ("results", "rounds", "prompts", "text", "nothing")),
        *(("rounds", other) for other in ("results", "prompts", "text", "nothing")),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(name: str, other: str, tmp_path: Path) -> None:
    texts = {"prompts": '{"prompt": "x"}\n', "text": "nonsense\n", "nothing": "[1]\n"}
    path = recorded(other)
    if other in texts:
        path = tmp_path / "other.jsonl"
        path.write_text(texts[other])
    words = {
        "results": "holds results of specctl bench, not",
        "trace-sampled": "holds a trace of specctl calibrate, not",
        "rounds": "holds a trace of specctl generate, not",
        "prompts": "holds prompts, not",
    }
    with pytest.raises(UsageError, match=words.get(other, "holds nothing that specctl has written, not")):
        read(name, path)


@pytest.mark.parametrize("name", ["results", "trace-sampled"])
def test_an_empty_file_is_said_to_be_empty(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match="is empty"):
        read(name, tmp_path / "empty.jsonl")


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_line_is_named_by_its_number(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"copy\.jsonl:2: the line is not JSON"):
        read(name, damaged(name, tmp_path / "copy.jsonl", 2))


@pytest.mark.parametrize(
    ("name", "line", "key", "message"),
    [
        ("results", 3, "turns", r"copy\.jsonl:3: run\.turns: Field required"),
        ("results", 1, "suite", r"copy\.jsonl:1: header\.suite: Field required"),
        (
            "results",
            1,
            "schema_version",
            r"copy\.jsonl:1: schema_version None of results .*; this specctl reads 1",
        ),
        ("trace-sampled", 2, "record", r"copy\.jsonl:2: prompt\.record: Field required"),
        ("trace-sampled", 2, "turns", r"copy\.jsonl:2: prompt\.turns: Field required"),
        ("trace-sampled", 3, "kind", r"copy\.jsonl:3: this line is not part of a trace of specctl calibrate"),
        ("trace-hierarchy", 3, "draft_ms", r"copy\.jsonl:3: costs\.draft_ms: Field required"),
        ("rounds", 4, "steps", r"copy\.jsonl:4: steps: Field required"),
    ],
)
def test_a_line_that_lacks_a_key_is_named_with_the_key(
    name: str, line: int, key: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        read(name, damaged(name, tmp_path / "copy.jsonl", line, key=key))


@pytest.mark.parametrize("version", [0, 3, "1"])
@pytest.mark.parametrize(("name", "own"), [("results", 1), ("trace-sampled", 2)])
def test_another_version_is_not_guessed_at(name: str, own: int, version: object, tmp_path: Path) -> None:
    first, _, rest = recorded(name).read_text().partition("\n")
    header = {**json.loads(first), "schema_version": version}
    (tmp_path / "other.jsonl").write_text(f"{json.dumps(header)}\n{rest}")
    with pytest.raises(UsageError, match=rf"other\.jsonl:1: schema_version {version} of .*; this specctl reads {own}"):
        read(name, tmp_path / "other.jsonl")


ODD = [
    "a\u2028b\u2029c",
    "a\u0085b\x0bc\x1cd",
    "\x00\x1b[31m",
    "\ud800",
    "\udc80x\ud83d",
    "\r\n\t",
    "\ufeff\u202e",
    '"\\',
]
"""Texts that end a line, are no line, or are no text somewhere."""


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_results_keep_every_character(text: str, tmp_path: Path) -> None:
    results = read_results(recorded("results"))
    run = replace(results.runs[0], prompt=text, category=text, turns=(replace(results.runs[0].turns[0], text=text),))
    with Outputs() as outputs:
        write = RESULTS.writing(outputs.file("output", tmp_path / "r.jsonl"), replace(results.header, argv=[text]))
        write(run)
        write(Skipped(text, text))
        write(replace(run, prompt="other"))
    records = list(RESULTS.read(tmp_path / "r.jsonl"))
    assert records[0].argv == [text]
    assert records[1:] == [run, Skipped(text, text), replace(run, prompt="other")]


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_traces_keep_every_character(text: str, tmp_path: Path) -> None:
    header, prompt, *_ = TRACES.read(recorded("trace-sampled"))
    prompt = replace(
        prompt,
        prompt=text,
        record={"data": {"prompt": text}},
        turns=[replace(one, prompt=text) for one in prompt.turns],
    )
    with Outputs() as outputs:
        write = TRACES.writing(outputs.file("trace", tmp_path / "t.jsonl"), header)
        write(prompt)
    assert list(TRACES.read(tmp_path / "t.jsonl")) == [header, prompt]


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_results_and_rounds_of_generate_keep_every_character(text: str, tmp_path: Path) -> None:
    line = json.dumps({"id": text, "prompt": text}).encode() + b"\n"
    (record,) = read_records(io.BytesIO(line))
    round_ = json.loads(recorded("rounds").read_bytes().split(b"\n")[0])
    with Outputs() as outputs:
        out, trace = (outputs.file(name, tmp_path / name) for name in ("out", "trace"))
        write_line(trace, {**round_, "id": record.id, "turn": 0, "round": 0})
        write_line(out, {**record.data, "id": record.id, "completion": text})
        write_line(trace, {**round_, "id": "next", "turn": 0, "round": 0})
    finished = Finished(tmp_path / "out")
    whole = (tmp_path / "trace").read_bytes()
    assert finished_rounds(tmp_path / "trace", finished, known=False) == whole.index(b"\n") + 1
    assert json.loads((tmp_path / "out").read_bytes().split(b"\n")[0])["completion"] == text
    assert finished.take(record)
    assert read_verdicts([tmp_path / "trace"]).accepted.size


# Results and traces with a value of another type


def places(value: object, at: tuple = (), depth: int = 4) -> Iterator[tuple]:
    yield at
    if depth and isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(2, len(value))):
            yield from places(value[key], (*at, key), depth - 1)


def put(value: object, at: tuple, new: object) -> object:
    if not at:
        return new
    value = copy(value)
    value[at[0]] = put(value[at[0]], at[1:], new)
    return value


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("new", [None, 5, "str", {}, [None]], ids=repr)
@pytest.mark.representatives(
    "None-rounds",
    "None-trace-hierarchy",
    "None-results-hierarchy",
    "[None]-trace-sampled",
    "5-results",
    "'str'-rounds",
    "{}-trace-sampled",
)
def test_a_value_of_another_type_is_read_or_told(name: str, new: object, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in recorded(name).read_bytes().splitlines()]
    kinds = {line.get("kind"): number for number, line in reversed(list(enumerate(lines)))}
    path, told = tmp_path / "copy.jsonl", set()
    for number in kinds.values():
        for at in places(lines[number]):
            changed = [*lines[:number], put(lines[number], at, new), *lines[number + 1 :]]
            path.write_text("".join(json.dumps(line) + "\n" for line in changed))
            try:
                read(name, path)
            except UsageError as error:
                told.add(error.message)
    assert told
    assert [message for message in told if str(path) not in message] in ([], ["the traces contain no draft tokens"])


@pytest.mark.parametrize("name", ["results", "trace-sampled", "rounds"])
@pytest.mark.parametrize(
    "line", ["5", "null", '"kind"', "[" * 3000, "9" * 5000, '{"kind": ' + '{"a":' * 200 + "1" + "}" * 201]
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_line_that_is_no_record_is_told(name: str, line: str, number: int, tmp_path: Path) -> None:
    lines = recorded(name).read_text().splitlines()
    lines[number - 1] = line
    path = tmp_path / "copy.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines))
    with pytest.raises(UsageError, match=r"copy\.jsonl( holds nothing that specctl has written|:2: )"):
        read(name, path)


@pytest.mark.parametrize(
    ("content", "continues"), [('{"kind": "header", "schema_ver', False), ("", False), (None, True)]
)
def test_a_header_that_was_cut_short_is_written_again(content: str | None, continues: bool, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(recorded("results").read_bytes() if content is None else content.encode())
    header = read_results(recorded("results")).header
    with Outputs() as outputs:
        output = outputs.file("output", path, resumed=True)
        assert RESULTS.continues(output) is continues
        RESULTS.writing(output, header)
    assert read_results(path).header == header


def test_both_kinds_of_trace_are_analysed() -> None:
    rounds = read_verdicts([recorded("rounds")])
    assert set(rounds.accepted) <= {0.0, 1.0}
    texts = read_verdicts([recorded("trace-sampled"), recorded("trace-hierarchy")])
    sampled, greedy = read_traces(recorded("trace-sampled")).traces, read_traces(recorded("trace-hierarchy")).traces
    (first,), (second,) = sampled, greedy
    assert len(texts.accepted) == len(first.tokens) + len(second.tokens)
    assert texts.accepted[: len(first.tokens)].tolist() == first.draft.chances.along
    assert texts.accepted[len(first.tokens) :].tolist() == list(map(float, second.draft.accepted))
    assert texts.signals["entropy"].tolist() == pytest.approx(first.draft.along.entropy + second.draft.along.entropy)
    assert texts.run[len(first.tokens) :].tolist() == second.draft.accepted_runs[:-1]
    assert len(set(texts.prompt)) == len({first.prompt, second.prompt})
