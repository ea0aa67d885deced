"""``specctl generate --workers``: what one process would write, by several."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from specctl import __main__ as entry
from tests.support.checkpoints import llama_config, save_model

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")}
TOY = (
    "import sys, specctl.commands.generate as generate\n"
    "from specctl.__main__ import main\n"
    "generate.REPLICA = 'tests.text_engine.toy_jobs:records'\n"
    "main()\n"
)
"""The whole command, with replicas that load no models."""
RECORDS = [{"id": number, "prompt": f"the {number} moons"} for number in range(16)]
ROUNDS = 3


def command(*arguments, program=TOY):
    return [sys.executable, "-c", program, "generate", "--no-progress", *map(str, arguments)]


def toy(*arguments, stdin=""):
    return subprocess.run(
        command(*arguments), env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def write_records(path, records):
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path):
    """The lines of a file as they are, but for times."""
    return [json.dumps(_without_times(line)) for line in lines(path)]


def _without_times(value):
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_times(each) for key, each in value.items() if not key.endswith(("_ms", "per_second"))}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A profile of two tiny models."""
    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3))
    table = '[{0}]\nmodel = "{1}/{0}"\ndevice = "cpu"\n'
    (folder / "pair.toml").write_text(table.format("target", folder) + table.format("draft", folder))
    return folder / "pair.toml"


@pytest.mark.slow
def test_two_replicas_write_what_one_process_writes(pair, tmp_path, monkeypatch):
    """Greedy and drawn, chats and turns, bad records, equal ids, with their rounds."""
    records = [dict(record) for record in RECORDS]
    for number in range(0, 16, 3):
        records[number]["sampling"] = {"temperature": 0}
    records[1]["sampling"] = {"seed": 5, "top_k": 0}
    records[4] = {"id": 3, "prompt": "an id that another has"}
    records[5] = {"id": "bad"}
    records[7] = {"id": "a\u2028\x85\ud800", "turns": ["the first", "the second"]}
    records[8] = {"prompt": "no id"}
    records[10] = {"id": 10, "prompt": "x", "sampling": {"temperature": -1}}
    source = write_records(tmp_path / "in.jsonl", [*records, "not JSON"])
    shared = ["generate", "-p", pair, "-i", source, "-n", "24", "-t", "1", "--rounds", "--token-ids", "-q"]
    for name, more in (("one", []), ("two", ["--workers", "2"])):
        files = ["-o", tmp_path / f"{name}.jsonl", "--trace", tmp_path / f"{name}.trace"]
        monkeypatch.setattr(sys, "argv", ["specctl", *map(str, [*shared, *files, *more])])
        assert entry._run() == 1
    assert len(lines(tmp_path / "two.jsonl")) == 17
    assert untimed(tmp_path / "two.jsonl") == untimed(tmp_path / "one.jsonl")
    assert untimed(tmp_path / "two.trace") == untimed(tmp_path / "one.trace")


def test_bad_records_are_error_lines_in_their_place(tmp_path):
    source = write_records(tmp_path / "in.jsonl", [RECORDS[0], "not JSON", {"id": "bad"}, RECORDS[1]])
    ran = toy("-i", source, "--workers", "2", "-o", tmp_path / "out.jsonl", "-q")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "")
    found = lines(tmp_path / "out.jsonl")
    assert [line.get("error", {}).get("type") for line in found] == [None, "invalid_json", "invalid_record", None]
    assert found[0]["completion"] == "THE 0 MOONS"
    assert [line.get("line") for line in found] == [None, 2, 3, None]


@pytest.mark.slow
def test_a_record_that_no_replica_survives_is_an_error_line(tmp_path):
    records = [*RECORDS[:3], {"id": "poison", "prompt": "x", "act": {"dies": True}}, *RECORDS[3:6]]
    source = write_records(tmp_path / "in.jsonl", records)
    ran = toy("-i", source, "--workers", "2", "-o", tmp_path / "out.jsonl", "--trace", tmp_path / "trace.jsonl")
    assert ran.returncode == 1
    assert ran.stderr.count("was ended by signal 9; it is started again") == 2
    found = lines(tmp_path / "out.jsonl")
    assert [line["id"] for line in found] == [record["id"] for record in records]
    assert found[3]["error"]["type"] == "worker_died"
    assert "no replica survived this record; replica" in found[3]["error"]["message"]
    assert len(lines(tmp_path / "trace.jsonl")) == 6 * ROUNDS


@pytest.mark.slow
def test_records_from_a_pipe_are_answered_as_they_come():
    """Who writes the next line only after an answer is not kept waiting."""
    talking = subprocess.Popen(
        command("--workers", "2"), env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with talking:
        for record in RECORDS[:3]:
            print(json.dumps(record), file=talking.stdin, flush=True)
            assert json.loads(talking.stdout.readline())["id"] == record["id"]
        talking.stdin.close()
        assert talking.wait(30) == 0


def wait_for_lines(path, count):
    due = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < due, "no line came"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
@pytest.mark.representatives("SIGKILL", slow=("SIGINT",))
def test_a_run_that_was_ended_is_resumed(tmp_path, how):
    slow = [{**record, "act": {"seconds": 0.1 * (number % 4)}} for number, record in enumerate(RECORDS)]
    source = write_records(tmp_path / "in.jsonl", slow)
    files = ["-i", source, "-o", tmp_path / "out.jsonl", "--trace", tmp_path / "trace.jsonl", "--workers", "2"]
    with subprocess.Popen(command(*files), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as run:
        wait_for_lines(tmp_path / "out.jsonl", 4)
        run.send_signal(how)
        said = run.stderr.read()
    assert run.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[how]
    assert "Traceback" not in said
    if how is signal.SIGINT:
        assert "the same command with --resume continues" in said
    left = len(lines(tmp_path / "out.jsonl"))
    assert 4 <= left < 16
    ran = toy(*files, "--resume")
    counts, summary = ran.stderr.splitlines()
    assert (ran.returncode, counts) == (0, f"note: {left} of 16 records done before; {16 - left} left")
    assert summary.startswith(f"16 records, {left} of them kept, 0 errors, ")
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(16))
    assert [line["id"] for line in lines(tmp_path / "trace.jsonl")] == [n for n in range(16) for _ in range(ROUNDS)]


def test_a_pair_that_cannot_be_loaded_ends_the_command_as_ever(tmp_path):
    source = write_records(tmp_path / "in.jsonl", RECORDS)
    files = ["-i", source, "-o", tmp_path / "out.jsonl", "--target", tmp_path / "nothing", "--workers", "1"]
    ran = subprocess.run(
        command(*files, program="from specctl.__main__ import main; main()"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 3
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["a prompt", "--workers", "2"], "replicas answer only records, and a PROMPT needs one process"),
        (["-i", "in.jsonl", "--live", "--workers", "2"], "replicas answer only records, and --live"),
        (["-i", "in.jsonl", "--workers", "0"], "--workers needs a number or auto, not 0"),
        (["-i", "in.jsonl", "--workers", "many"], "--workers needs a number or auto, not many"),
        (["-i", "in.jsonl", "--workers", "2", "--keep-warm", "30m"], "--keep-warm needs a cluster"),
        (["-i", "in.jsonl", "--cluster", "auto", "--keep-warm", "soon"], "--keep-warm soon is not a duration"),
    ],
)
def test_flags_that_contradict_each_other(flags, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specctl", "generate", *flags])
    assert entry._run() == 2
    assert said in " ".join(capsys.readouterr().err.split())
