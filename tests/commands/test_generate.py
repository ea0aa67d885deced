"""``specctl generate`` in a pipe."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import MptConfig

from specctl import __main__ as entry
from specctl.profile.schema import model_path
from specctl.resuming import Finished
from tests.support.checkpoints import save_model

SPECCTL = Path(sysconfig.get_path("scripts")) / "specctl"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")}
PROMPT = "Once upon a time"


@dataclass
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def lines(self):
        return [json.loads(line) for line in self.stdout.splitlines()]


@pytest.fixture(scope="module")
def specctl():
    """Runs the whole command line in this process, where torch has to be imported only once."""

    def run(*arguments, stdin=b""):
        streams = {
            "stdin": io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"),
            "stdout": io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
            "stderr": io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["specctl", "generate", *map(str, arguments)])
            for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
                patch.delenv(name)
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = entry._run()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))
        return Ran(code, out, err)

    return run


def write_records(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def contents(path):
    """Output records without their times."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        for name in [name for name in record.get("metrics", ()) if name.endswith(("_ms", "per_second"))]:
            del record["metrics"][name]
    return records


@pytest.fixture(scope="module")
def document(specctl):
    """A prompt's result with rounds and token ids."""
    ran = specctl(PROMPT, "-n", "24", "--json", "--rounds", "--token-ids")
    assert (ran.code, ran.stderr) == (0, "")
    return ran.lines[0]


# One prompt


def test_the_document_of_a_prompt(document):
    assert list(document) == ["prompt", "id", "completion", "finish_reason", "metrics", "rounds", "completion_ids"]
    assert document["prompt"] == PROMPT
    assert document["metrics"]["generated_tokens"] == len(document["completion_ids"]) == 24


def test_the_rounds_add_up_to_the_metrics(document):
    metrics, rounds = document["metrics"], document["rounds"]
    assert metrics["rounds"] == len(rounds)
    for name in ("drafted", "accepted"):
        assert metrics[name] == sum(round_[name] for round_ in rounds)
    assert metrics["acceptance_rate"] == pytest.approx(metrics["accepted"] / metrics["drafted"], abs=1e-4)
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + metrics["accepted"] / len(rounds), abs=1e-4)
    assert metrics["verification_rate"] == pytest.approx(len(rounds) / 24, abs=1e-4)
    assert metrics["discard_rate"] == pytest.approx((metrics["drafted"] - metrics["accepted"]) / 24, abs=1e-4)
    for name in ("draft_ms", "verify_ms"):
        assert metrics[name] == pytest.approx(sum(round_[name] for round_ in rounds), abs=0.01)
    assert {round_["stop"] for round_ in rounds} <= {"policy", "max_draft", "budget", "eos"}


@pytest.mark.exhaustive
def test_a_prompt_in_a_pipe_writes_plain_text_only(document):
    done = subprocess.run(
        [SPECCTL, "generate", PROMPT, "-n", "24", "--no-progress"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, document["completion"] + "\n", "")


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=["none", "unix", "windows"])
@pytest.mark.representatives("none", "windows")
def test_a_prompt_from_standard_input(specctl, document, end):
    ran = specctl("-", "-n", "24", stdin=PROMPT.encode() + end)
    assert (ran.code, ran.stdout, ran.stderr) == (0, document["completion"] + "\n", "")


@pytest.mark.parametrize("end", ["", "\n"], ids=["none", "unix"])
@pytest.mark.representatives("unix")
def test_a_prompt_from_a_file(specctl, document, tmp_path, end):
    (tmp_path / "prompt.txt").write_text(f"{PROMPT}{end}")
    ran = specctl("-f", tmp_path / "prompt.txt", "--max-tokens", "24")
    assert (ran.code, ran.stdout, ran.stderr) == (0, document["completion"] + "\n", "")
    assert specctl("-f", "-", "-n", "24", stdin=PROMPT.encode()).stdout == ran.stdout


def test_a_target_without_a_draft_takes_the_policy_none(specctl, document):
    ran = specctl(PROMPT, "-n", "24", "--model", "embedded:target", "--policy", "none")
    assert (ran.code, ran.stdout) == (0, document["completion"] + "\n")


def test_a_target_with_a_template_is_asked_through_it_unless_raw(specctl, document):
    folder = str(model_path("target"))
    through, raw = (
        specctl(PROMPT, "-n", "24", "--target", folder),
        specctl(PROMPT, "-n", "24", "--target", folder, "--raw"),
    )
    assert through.stderr == "note: using the chat template (--raw turns it off)\n"
    assert (raw.stdout, raw.stderr) == (document["completion"] + "\n", "")
    (asked,) = specctl(PROMPT, "-n", "24", "--json", "--chat").lines
    assert through.stdout == asked["completion"] + "\n" != raw.stdout
    assert specctl(PROMPT, "-n", "24", "--target", folder, "-q").stderr == ""


def test_the_target_alone_writes_the_same_text(specctl, document):
    (alone,) = specctl(PROMPT, "-n", "24", "--json", "--token-ids", "--policy", "none").lines
    assert alone["completion_ids"] == document["completion_ids"]
    assert alone["metrics"]["rounds"] == 24
    assert (alone["metrics"]["drafted"], alone["metrics"]["verification_rate"]) == (0, 1)


@pytest.mark.parametrize("length", [1, 4, 12])
@pytest.mark.representatives("1", "12")
def test_a_stop_string_leaves_the_text_before_it(specctl, document, length):
    """Streamed text ends at the same place: all text before the stop string, and none of it."""
    said = document["completion"]
    stop = said[6 : 6 + length]
    ran = specctl(PROMPT, "-n", "24", "--stop", stop)
    assert ran.stdout == said[: said.index(stop)] + "\n"
    (told,) = specctl(PROMPT, "-n", "24", "--stop", stop, "--json").lines
    assert (told["completion"], told["finish_reason"]) == (said[: said.index(stop)], "stop")
    assert told["metrics"]["generated_tokens"] < 24


def test_seeds(specctl):
    def say(seed):
        return specctl(PROMPT, "-n", "24", "-t", "1", "--seed", seed).stdout

    assert say(1) == say(1) != say(2)


@pytest.mark.slow
def test_both_ways_to_verify_write_a_text_and_only_greedy_decoding_writes_the_same(specctl):
    def text(*more):
        return specctl(PROMPT, "-n", "24", "--policy", "constant:draft_length=5", *more).stdout

    by_token, by_block = (text("-t", "1", "--seed", "4", "--verification", rule) for rule in ("token", "block"))
    assert by_token != by_block
    assert text("--verification", "token") == text("--verification", "block")


def test_an_output_file(specctl, document, tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("what was there before\n")
    ran = specctl(PROMPT, "-o", path)
    assert (ran.code, ran.stdout) == (2, "")
    assert "out.txt exists already" in ran.stderr
    assert path.read_text() == "what was there before\n"
    ran = specctl(PROMPT, "-n", "24", "-o", path, "--live", "--force")
    assert (ran.code, ran.stdout, ran.stderr) == (0, "", "")
    assert path.read_text() == document["completion"] + "\n"


def test_a_trace_contains_every_step(specctl, document, tmp_path):
    path = tmp_path / "trace.jsonl"
    assert specctl(PROMPT, "-n", "24", "--trace", path).stdout == document["completion"] + "\n"
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    assert [round_["round"] for round_ in rounds] == list(range(document["metrics"]["rounds"]))
    emitted = []
    for round_ in rounds:
        steps = round_["steps"]
        assert (round_["id"], round_["turn"], round_["drafted"]) == (1, 0, len(steps))
        assert [step["accepted"] for step in steps] == [place < round_["accepted"] for place in range(len(steps))]
        for step in steps:
            assert list(step) == ["token", "accepted", "entropy", "top_prob", "token_prob", "accept_prob", "agreement"]
            assert 0 <= step["token_prob"] <= step["top_prob"] <= 1
            assert step["entropy"] >= 0
        emitted += [step["token"] for step in steps if step["accepted"]] + [round_["extra"]]
    assert emitted == document["completion_ids"]
    assert sum(round_["accepted"] for round_ in rounds) == document["metrics"]["accepted"]


def test_the_trace_may_take_standard_output(specctl, tmp_path):
    ran = specctl(PROMPT, "-n", "4", "-o", tmp_path / "out.txt", "--trace", "-")
    assert [round_["round"] for round_ in ran.lines] == list(range(len(ran.lines)))


def test_a_prompt_too_long_is_an_error(specctl):
    ran = specctl("word " * 2000)
    assert (ran.code, ran.stdout) == (1, "")
    assert "the prompt has" in ran.stderr


def test_a_prompt_that_is_no_text_is_an_error(specctl):
    ran = specctl("-", stdin=b"\xff")
    assert (ran.code, ran.stdout) == (2, "")
    assert "not UTF-8" in ran.stderr
    ran = specctl("a\udcff")  # what the shell's bytes become
    assert (ran.code, ran.stdout) == (1, "")
    assert "unpaired surrogate" in ran.stderr


# Mistakes that are found before a model is loaded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([PROMPT, "-i", "in.jsonl"], "use either"),
        ([PROMPT, "--resume", "-o", "out"], "--resume works only with records"),
        (["-i", "in.jsonl", "--resume"], "--output FILE"),
        (["-i", "in.jsonl", "-o", "new", "--anyway"], "--anyway needs --resume"),
        (["-i", "in.jsonl", "--json"], "leave it out"),
        ([PROMPT, "--rounds"], "add --json"),
        ([PROMPT, "--token-ids"], "add --json"),
        ([PROMPT, "-f", "in.jsonl"], "use either PROMPT or --file"),
        (["-f", "in.jsonl", "-i", "in.jsonl"], "use either --file or --input"),
        (["-f", "missing.txt"], "cannot read missing.txt"),
        (["-f", "."], "cannot read ."),
        ([PROMPT, "--system", "be"], "add --chat"),
        (["--input-format", "text", "--system", "be"], "add --chat"),
        ([PROMPT, "--stop", ""], "at least 1 character"),
        (["-i", "missing.jsonl"], "cannot read missing.jsonl"),
        (["-i", "."], "cannot read ."),
        ([PROMPT, "-o", "missing/out.txt"], "cannot write missing/out.txt"),
        ([PROMPT, "--trace", "missing/t.jsonl"], "cannot write missing/t.jsonl"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "input and output are the same file"),
        (["-i", "in.jsonl", "-o", "./in.jsonl", "--resume"], "input and output are the same file"),
        (["-i", "in.jsonl", "--trace", "link.jsonl"], "input and trace are the same file"),
        ([PROMPT, "-o", "new", "--trace", "./new"], "output and trace are the same file"),
        ([PROMPT, "--trace", "-"], "output and trace are the same file"),
        (["-i", "in.jsonl", "-o", "notes.txt", "--resume"], "notes.txt:1 was not written by this command"),
        ([PROMPT, "--policy", "svpi"], "did you mean 'svip'"),
        ([PROMPT, "--policy", "svip:treshold=1"], "did you mean 'threshold'"),
        ([PROMPT, "--set", "sampling.temprature=1"], "did you mean"),
        ([PROMPT, "--top-p", "2"], "sampling.top_p"),
        ([PROMPT, "-p", "embeded"], "did you mean"),
    ],
)
def test_usage_errors(specctl, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "in.jsonl", {"prompt": "x"})
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    (tmp_path / "notes.txt").write_text("notes")
    ran = specctl(*arguments)
    assert (ran.code, ran.stdout) == (2, "")
    assert words in ran.stderr
    assert contents(tmp_path / "in.jsonl") == [{"prompt": "x"}]
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_a_policy_that_never_stops_is_told_and_runs(specctl):
    ran = specctl("Once upon a time", "-n", "2", "--policy", "svip:threshold=3")
    assert ran.code == 0
    told = "warning: svip:threshold=3 never stops a draft before its limit: it is a slower constant:draft_length=40\n"
    assert told in ran.stderr
    assert "never stops" not in specctl("Once upon a time", "-n", "2", "--policy", "svip:threshold=0.5").stderr


def test_a_lookup_needs_no_target(specctl):
    ran = specctl("x", "-n", "3", "--draft", "prompt:lookup", "--json")
    assert (ran.code, json.loads(ran.stdout)["metrics"]["generated_tokens"]) == (0, 3)


def test_an_array_is_one_error_that_says_what_makes_lines_of_it(specctl, tmp_path):
    (tmp_path / "array.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=2))
    ran = specctl("-i", tmp_path / "array.json", "-n", "2")
    assert ran.code == 1
    (line,) = map(json.loads, ran.stdout.splitlines())
    assert line["error"]["message"].endswith("make a line of each record with: jq -c '.[]'")


def test_a_missing_model_deletes_no_results(specctl, tmp_path):
    kept = tmp_path / "out.txt"
    kept.write_text("from yesterday\n")
    ran = specctl(PROMPT, "--set", f"target.model={tmp_path}/none", "-o", kept, "--force")
    assert (ran.code, ran.stdout) == (3, "")
    assert f"{tmp_path}/none" in ran.stderr
    assert kept.read_text() == "from yesterday\n"


# Records

MIXED = [
    b'\xef\xbb\xbf{"id": "a", "prompt": "Once", "category": "story", "extra": {"kept": [1, null]}}',
    b"",
    b"not JSON",
    b'{"question_id": 81, "turns": ["Once upon", "And then"]}',
    b'{"task_id": "t/0", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}',
    b'{"id": "none"}',
    b'{"id": "two", "prompt": "x", "turns": ["y"]}',
    b'{"id": "long", "prompt": "' + b"word " * 2000 + b'"}',
    b'{"id": "half", "prompt": "\\ud800"}',
    b'{"id": "odd", "prompt": "x", "sampling": {"temperature": -1}}',
    b'{"id": "bytes", "prompt": "\xff"}',
    b'{"prompt": "", "sampling": {"max_new_tokens": 2}}',
]


@pytest.fixture(scope="module")
def mixed(specctl):
    return specctl("-n", "6", stdin=b"\n".join(MIXED))


def test_results_come_in_order_and_errors_set_the_exit_code(mixed):
    assert (mixed.code, mixed.stderr) == (1, "")
    assert [line["id"] for line in mixed.lines] == [
        *["a", None, 81, "t/0", "none", "two", "long", "half", "odd", None, 12]
    ]


def test_errors_are_in_the_stream_with_line_and_type(mixed):
    assert [(line["line"], line["error"]["type"]) for line in mixed.lines if "error" in line] == [
        (3, "invalid_json"),
        (6, "invalid_record"),
        (7, "invalid_record"),
        (8, "prompt_too_long"),
        (9, "invalid_text"),
        (10, "invalid_sampling"),
        (11, "invalid_utf8"),
    ]


def test_valid_records_between_errors_are_answered(mixed):
    first, turns, chat, empty = (line for line in mixed.lines if "error" not in line)
    assert first.items() >= {"category": "story", "extra": {"kept": [1, None]}, "prompt": "Once"}.items()
    assert [len(turns[name]) for name in ("completion", "finish_reason")] == [2, 2]
    assert (turns["question_id"], turns["metrics"]["generated_tokens"]) == (81, 12)
    assert chat["metrics"]["generated_tokens"] <= 6
    assert empty["metrics"]["generated_tokens"] <= 2


@pytest.fixture
def beyond(tmp_path, monkeypatch):
    """A model that is taken for one without a limit and fails at its 65th token."""
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=258, eos_token_id=0)
    monkeypatch.setattr("specctl.models.running.eager.context_length", lambda _: None)
    return save_model(tmp_path / "mpt", config)


def test_a_pass_that_fails_is_its_records_error_and_the_next_one_is_answered(specctl, beyond, tmp_path):
    arguments = ("--target", beyond, "--draft", beyond, "--engine", "eager", "-n", "40")
    lines = [json.dumps({"prompt": text}).encode() for text in ("hello", "0" * 50, "0" * 80, "hello")]
    ran = specctl(*arguments, "--trace", tmp_path / "rounds.jsonl", stdin=b"\n".join(lines))
    assert ran.code == 1
    assert [line for line in ran.stderr.splitlines() if "100% of the parameters" not in line] == []
    first, second, third, last = ran.lines
    for line, found in enumerate((second, third), start=2):
        assert (found["line"], found["error"]["type"]) == (line, "failed_pass")
        assert "RuntimeError: The size of tensor" in found["error"]["message"]
    assert first["completion"] == last["completion"] == specctl(*arguments, "hello").stdout.rstrip("\n")


def test_a_pass_that_fails_keeps_the_text_that_was_shown(specctl, beyond):
    arguments = ("--target", beyond, "--draft", beyond, "--engine", "eager")
    ran = specctl(*arguments, "-n", "90", "hello")
    assert ran.code == 1
    _, said = ran.stderr.splitlines()  # after a note about the draft's size
    assert said.startswith("error: a pass failed over this text: RuntimeError: The size of tensor")
    shown = ran.stdout.rstrip("\n")
    assert len(shown) > 20
    assert specctl(*arguments, "-n", len(shown), "hello").stdout.rstrip("\n") == shown


def test_lines_of_text(specctl, document):
    ran = specctl("--input-format", "text", "-n", "24", stdin=f"{PROMPT}\n\n{PROMPT}\r\n".encode())
    assert [(line["id"], line["prompt"]) for line in ran.lines] == [(1, PROMPT), (3, PROMPT)]
    assert {line["completion"] for line in ran.lines} == {document["completion"]}
    assert ran.code == 0


def test_plain_text_read_as_records_gives_a_hint(specctl):
    ran = specctl(stdin=b"Once upon a time\n")
    assert ran.code == 1
    assert "--input-format text" in ran.lines[0]["error"]["message"]


def test_what_looks_like_a_setting_and_is_none_is_warned_of_once(specctl):
    record = {"prompt": "x", "temprature": 1, "n": 2, "top_p": 0.5, "note": 1}
    ran = specctl("-n", "2", "-q", stdin=b"".join(json.dumps(record).encode() + b"\n" for _ in range(3)))
    assert (ran.code, len(ran.lines)) == (0, 3)
    assert ran.stderr.splitlines() == [
        "warning: line 1: `temprature` has no effect; did you mean `temperature`?",
        "warning: line 1: `n` is not a setting of specctl and has no effect",
    ]
    assert all(line.items() >= record.items() for line in ran.lines)


def test_the_name_of_a_file_as_a_prompt_gives_a_hint(specctl, tmp_path):
    source = write_records(tmp_path / "five.jsonl", {"prompt": "x"})
    ran = specctl(source, "-n", "2", "-q")
    assert ran.code == 0
    assert ran.stderr == f"warning: {source} is a file, and its name is the prompt; did you mean -i {source}?\n"


def test_no_records_are_no_results(specctl):
    ran = specctl("-i", "-")
    assert (ran.code, ran.stdout, ran.stderr) == (0, "", "")


def test_live_over_records_is_silent_without_a_terminal(specctl):
    records = b'{"prompt": ""}\n{"turns": ["a"]}\n{"messages": [{"role": "user", "content": "a"}]}\n{}\n'
    ran = specctl("--live", "-n", "2", stdin=records)
    assert (ran.code, len(ran.lines), ran.stderr) == (1, 4, "")


# Interrupted and resumed

SAMPLED = ("-n", "24", "-t", "1", "--seed", "5")
RECORDS = [{"id": f"r{n}", "prompt": f"{PROMPT} {n}"} for n in range(28)] + [{"id": "broken"}]


@pytest.fixture(scope="module")
def whole(specctl, tmp_path_factory):
    """Output and trace of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_records(folder / "in.jsonl", *RECORDS)
    ran = specctl("-i", source, "-o", folder / "out.jsonl", "--trace", folder / "trace.jsonl", *SAMPLED)
    assert (ran.code, ran.stdout) == (1, "")
    assert re.fullmatch(rf"29 records, 1 error, [\d.]+ s; results are in {folder}/out.jsonl\n", ran.stderr)
    return contents(folder / "out.jsonl"), trace_of(folder)


def trace_of(folder):
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [(line["id"], line["round"], [step["token"] for step in line["steps"]], line["extra"]) for line in lines]


def start(*arguments, **streams):
    return subprocess.Popen(
        [SPECCTL, "generate", "--no-progress", *map(str, arguments)], env=ENVIRONMENT, stderr=subprocess.PIPE, **streams
    )


def stop_after(process, path, lines, sent):
    """Send a signal as soon as the output file has this number of lines."""
    waiting = threading.Event()
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < lines):
        waiting.wait(0.005)
    process.send_signal(sent)
    _, said = process.communicate()
    return process.returncode, said.decode()


@pytest.mark.exhaustive
def test_a_run_interrupted_killed_and_resumed_gives_the_same_files(specctl, whole, tmp_path):
    source, out = write_records(tmp_path / "in.jsonl", *RECORDS), tmp_path / "out.jsonl"
    trace = tmp_path / "trace.jsonl"
    arguments = ("-i", source, "-o", out, "--trace", trace, *SAMPLED)

    code, said = stop_after(start(*arguments), out, 3, signal.SIGINT)
    assert code == 130
    kept = contents(out)
    summary, noted = said.splitlines()
    assert summary.startswith(f"{len(kept)} records, 0 errors, ")
    assert noted == f"note: interrupted; finished work is in {out}; the same command with --resume continues"
    assert 3 <= len(kept) < len(RECORDS), "each finished line is whole, and there was more to do"
    assert kept == whole[0][: len(kept)]

    code, _ = stop_after(start(*arguments, "--resume"), out, len(kept) + 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = len(Finished(out))
    assert len(kept) + 3 <= done < len(RECORDS)
    for path in (out, trace):
        with path.open("a") as file:
            file.write('{"id": "r27", "torn')

    ran = specctl(*arguments, "--resume")
    assert (ran.code, ran.stdout) == (1, "")
    torn, counts, summary = ran.stderr.splitlines()
    assert torn == f"note: the last line of {out} was cut short; its record is answered again"
    assert counts == f"note: {done} of 29 records done before; {29 - done} left"
    assert summary.startswith(f"29 records, {done} of them kept, 1 error, ")
    assert contents(out) == whole[0]
    assert trace_of(tmp_path) == whole[1]

    again = specctl(*arguments, "--resume")
    assert again.code == 1, "the broken record is still broken"
    assert again.stderr == "note: 29 of 29 records done before; nothing is left to do\n"
    assert contents(out) == whole[0]


GREEDY = ("-n", "6", "--engine", "eager")


@pytest.fixture(scope="module")
def five(specctl, tmp_path_factory):
    """The files of a run of five greedy records."""
    folder = tmp_path_factory.mktemp("five")
    write_records(folder / "in.jsonl", *RECORDS[:5])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "-q").code == 0
    return folder


@pytest.fixture
def left(five, tmp_path, monkeypatch):
    """What that run left when it was interrupted after three."""
    shutil.copytree(five, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "out.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:3]))
    return lines


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        (["-n", "7"], ["sampling.max_new_tokens was 6 and is 7"]),
        (["-t", "0.5"], ["sampling.temperature was 0.0 and is 0.5"]),
        (["--stop", "x", "--seed", "2"], ["sampling.seed was 0 and is 2", "sampling.stop was [] and is ['x']"]),
        (["--set", "target.model=embedded:draft"], ["target was embedded:target and is embedded:draft"]),
        (["--set", "target.dtype=bfloat16"], ["target.dtype was float32 and is bfloat16"]),
        (["--rounds"], ["--rounds was False and is True"]),
        (["--trace", "t.jsonl"], ["--trace was not set and is t.jsonl"]),
    ],
)
@pytest.mark.usefixtures("left")
@pytest.mark.representatives("changed0", "changed3")
def test_the_results_of_another_run_are_not_continued(specctl, monkeypatch, changed, differing):
    from specctl.commands import generate

    monkeypatch.setattr(generate, "load_answering", None)
    before = Path("out.jsonl").read_bytes(), Path("out.jsonl.run.json").read_bytes()
    ran = specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "--resume", *changed)
    assert ran.code == 2
    first, *said, hint = [line for line in ran.stderr.splitlines() if not line.startswith("warning: ")]
    assert first == "error: out.jsonl was made by another run:"
    assert said == [f"  {each}" for each in differing]
    assert "with --anyway" in hint
    assert (Path("out.jsonl").read_bytes(), Path("out.jsonl.run.json").read_bytes()) == before


@pytest.mark.usefixtures("left")
@pytest.mark.slow
def test_another_run_goes_on_anyway_and_is_then_the_one_that_made_the_results(specctl):
    ran = specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "-n", "7", "--resume", "--anyway")
    assert ran.code == 0
    assert "note: sampling.max_new_tokens was 6 and is 7\n" in ran.stderr
    assert [line["metrics"]["generated_tokens"] for line in contents(Path("out.jsonl"))] == [6, 6, 6, 7, 7]
    assert specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "-n", "7", "--resume").code == 0


@pytest.mark.exhaustive
def test_what_decides_no_text_may_change(specctl, left):
    """Greedy text does not depend on the draft, nor on how passes run, nor on where the models are."""
    policy = ["--policy", "constant", "--threads", "1", "--workers", "1"]
    ran = specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY[:2], "--resume", *policy)
    assert ran.code == 0
    assert "note: draft.policy was svip, threshold 0.54" in ran.stderr
    assert "and is constant, draft_length 5; the text is the same" in ran.stderr
    assert [json.loads(line)["completion"] for line in left] == [
        line["completion"] for line in contents(Path("out.jsonl"))
    ]


@pytest.mark.usefixtures("left")
@pytest.mark.slow
def test_a_sampled_text_depends_on_its_draft(specctl):
    drawn = ["-i", "in.jsonl", "-o", "drawn.jsonl", *GREEDY, "-t", "1"]
    assert specctl(*drawn, "-q").code == 0
    ran = specctl(*drawn, "--resume", "--policy", "constant")
    assert (ran.code, "draft.policy was svip" in ran.stderr) == (2, True)


@pytest.mark.usefixtures("left")
def test_a_model_whose_files_have_changed_is_another(specctl, tmp_path):
    from specctl.profile.schema import model_path

    shutil.copytree(model_path("target"), tmp_path / "copy")
    same = ["-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "--raw", "--resume", "--set", f"target.model={tmp_path}/copy"]
    assert specctl(*same).code == 0, "a copy elsewhere has the same content"
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text() + "\n")
    ran = specctl(*same)
    assert ran.code == 2
    assert f"target: the files of {tmp_path}/copy have changed" in ran.stderr


@pytest.mark.usefixtures("left")
def test_results_that_nothing_says_the_origin_of(specctl):
    again = ["-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "--resume"]
    for damage in ("", "torn", "[1]", '{"schema_version": 1}'):
        Path("out.jsonl.run.json").write_text(damage)
        ran = specctl(*again)
        assert ran.code == 2
        assert "out.jsonl.run.json is missing or damaged, so nothing says" in ran.stderr
        assert "add --anyway" in ran.stderr
    assert specctl(*again, "--anyway").code == 0
    assert specctl(*again).code == 0


@pytest.mark.usefixtures("left")
def test_a_record_with_another_prompt_is_refused_by_line(specctl, monkeypatch):
    from specctl.commands import generate

    monkeypatch.setattr(generate, "load_answering", None)
    write_records(Path("in.jsonl"), RECORDS[0], {**RECORDS[1], "prompt": "another"}, *RECORDS[2:5])
    ran = specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "--resume")
    assert ran.code == 2
    assert "out.jsonl:2: on line 2 of the input, the record with this id has another prompt" in ran.stderr


@pytest.mark.usefixtures("left")
@pytest.mark.slow
def test_what_is_left_beside_removed_results_is_replaced(specctl):
    Path("out.jsonl").unlink()
    assert specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "-n", "3", "-q").code == 0
    assert specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY, "-n", "3", "--resume", "-q").code == 0
    Path("out.jsonl").unlink()
    Path("out.jsonl.run.json").write_text("my own notes")
    ran = specctl("-i", "in.jsonl", "-o", "out.jsonl", *GREEDY)
    assert (ran.code, "out.jsonl.run.json was not written by this command" in ran.stderr) == (2, True)
    assert Path("out.jsonl.run.json").read_text() == "my own notes"


def test_the_same_id_twice_is_an_error_by_line(specctl, tmp_path):
    source = write_records(tmp_path / "in.jsonl", *RECORDS[:2], {**RECORDS[0], "prompt": "again"})
    arguments = ["-i", source, "-o", tmp_path / "out.jsonl", "-n", "2"]
    ran = specctl(*arguments)
    assert ran.code == 1
    assert ran.stderr.startswith("3 records, 1 error, ")
    found = contents(tmp_path / "out.jsonl")[2]
    assert (found["id"], found["line"], found["prompt"]) == ("r0", 3, "again")
    assert found["error"] == {"type": "duplicate_id", "message": "line 1 has the same id"}
    again = specctl(*arguments, "--resume")
    assert (again.code, again.stderr) == (1, "note: 3 of 3 records done before; nothing is left to do\n")


def untimed(path):
    """Lines without times and without what was computed with rounding of its own."""
    return [_untimed(json.loads(line)) for line in path.read_text().splitlines()]


def _untimed(value):
    if isinstance(value, list):
        return [_untimed(each) for each in value]
    if isinstance(value, dict):
        return {key: _untimed(each) for key, each in value.items() if not key.endswith(("_ms", "per_second"))}
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


TALK = ["Tom had a kite.", "And then?", "Who came?", "What did she say?", "And the end?"]


def interrupted_at(monkeypatch, turn):
    """Let the text after this many end with an interrupt in its first round; returns the prompts that were asked."""
    from specctl.decoding.session import Session

    play, asked = Session.play, []

    def counted(self, prompt, *arguments, **named):
        asked.append(list(prompt))
        playing = play(self, prompt, *arguments, **named)
        if len(asked) > turn:
            yield next(playing)
            raise KeyboardInterrupt
        return (yield from playing)

    monkeypatch.setattr(Session, "play", counted)
    return asked


@pytest.mark.parametrize(
    "sampling", [[], ["-t", "1", "--seed", "3", "--rounds", "--token-ids"]], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("first", [[], [RECORDS[0]]], ids=["first record", "second record"])
@pytest.mark.representatives("second record-drawn")
def test_finished_turns_survive_an_interrupt(specctl, tmp_path, monkeypatch, sampling, first):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "in.jsonl", *first, {"id": "talk", "turns": TALK}, RECORDS[1])
    arguments = ["-i", "in.jsonl", "--engine", "eager", "-n", "4", *sampling]
    assert specctl(*arguments, "-o", "whole.jsonl", "--trace", "whole.trace").code == 0
    assert not Path("whole.jsonl.turns.jsonl").exists()
    arguments += ["-o", "out.jsonl", "--trace", "out.trace"]
    with monkeypatch.context() as patch:
        asked = interrupted_at(patch, len(first) + 3)
        assert specctl(*arguments).code == 130
        assert len(asked) == len(first) + 4
    assert Path("out.jsonl").exists() == bool(first), "an interrupted run leaves no empty file"
    kept = Path("out.jsonl.turns.jsonl").read_text()
    assert kept.count("\n") == 3
    Path("out.jsonl.turns.jsonl").write_text(kept + '{"kind": "turn", "rec')
    with monkeypatch.context() as patch:
        asked = interrupted_at(patch, 99)
        ran = specctl(*arguments, "--resume")
    assert (ran.code, len(asked)) == (0, 3)
    assert "note: of the next one, 3 turns too\n" in ran.stderr
    assert not Path("out.jsonl.turns.jsonl").exists()
    assert untimed(Path("out.jsonl")) == untimed(Path("whole.jsonl"))
    assert untimed(Path("out.trace")) == untimed(Path("whole.trace"))


@pytest.mark.parametrize("changed", ["turns", "settings", "damaged", "torn", "run file"])
@pytest.mark.representatives("turns")
def test_turns_of_another_record_or_run_are_asked_again(specctl, tmp_path, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    turns, path = TALK, Path("out.jsonl.turns.jsonl")
    arguments = ["-i", "in.jsonl", "--engine", "eager", "-o", "out.jsonl"]
    write_records(tmp_path / "in.jsonl", {"id": "talk", "turns": turns})
    with monkeypatch.context() as patch:
        interrupted_at(patch, 2)
        assert specctl(*arguments, "-n", "4").code == 130
    match changed:
        case "turns":
            turns = ["Another.", *TALK[1:]]
            write_records(tmp_path / "in.jsonl", {"id": "talk", "turns": turns})
        case "damaged":
            path.write_text('{"kind": "turn", "record": 5}\n' + path.read_text())
        case "torn":
            path.write_text('{"kind": "tu')
        case "run file":
            Path("out.jsonl.run.json").unlink()
    with monkeypatch.context() as patch:
        asked = interrupted_at(patch, 99)
        assert specctl(*arguments, "-n", "5" if changed == "settings" else "4", "--resume").code == 0
    assert len(asked) == 5
    assert not path.exists()


def test_a_file_of_turns_of_someone_else_is_not_touched(specctl, tmp_path):
    source = write_records(tmp_path / "in.jsonl", {"turns": TALK})
    (tmp_path / "out.jsonl.turns.jsonl").write_text("my own")
    ran = specctl("-i", source, "-o", tmp_path / "out.jsonl")
    assert (ran.code, "out.jsonl.turns.jsonl was not written by this command" in ran.stderr) == (2, True)


@pytest.mark.slow
def test_each_result_is_written_before_the_next_record_is_read_and_a_closed_pipe_ends_the_run():
    process = start("-n", "2", "--trace", os.devnull, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        for number in range(3):
            process.stdin.write(b'{"id": %d, "prompt": "Once"}\n' % number)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdout.close()
        process.stdin.write(b'{"prompt": "Once"}\n' * 3)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_output_may_not_be_the_file_that_is_read_from_standard_input(tmp_path):
    path = write_records(tmp_path / "both.jsonl", {"prompt": "x"})
    with path.open("rb") as source:
        done = subprocess.run(
            [SPECCTL, "generate", "-o", path],
            env=ENVIRONMENT,
            stdin=source,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert "input and output are the same file" in done.stderr
    assert contents(path) == [{"prompt": "x"}]


TREES = ("-n", "40", "--engine", "eager", "--policy", "svip", "--set", "draft.tree=20", "--set", "draft.tree_beams=4")


def test_trees_change_the_rounds_and_not_the_text(specctl, tmp_path):
    trace = tmp_path / "trace.jsonl"
    plain = specctl("-n", "40", "--policy", "none", PROMPT, "--json")
    (record,) = specctl(*TREES, "--rounds", "--trace", trace, PROMPT, "--json").lines
    assert record["completion"] == plain.lines[0]["completion"]
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    assert record["metrics"]["nodes"] == sum(sum(one.get("tree", ())) for one in rounds) > record["metrics"]["drafted"]
    assert [one.get("tree") for one in record["rounds"]] == [one.get("tree") for one in rounds]
    assert all(len(one.get("path", ())) == one["accepted"] for one in rounds)


def test_where_a_model_reads_chains_drafts_are_chains_and_a_line_says_why(specctl):
    ran = specctl(*TREES, "--set", "deterministic=true", PROMPT, "--json")
    assert "nodes" not in ran.lines[0]["metrics"]
    assert "drafts are not trees: the target reads chains only, because deterministic passes" in ran.stderr
