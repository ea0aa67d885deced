"""Sharding without other processes: messages, a leader and a follower in turn, plans, and followers' lives."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MistralConfig

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError, UsageError
from specctl.models.files.checkpoint import locate
from specctl.models.loading.pair_members import split
from specctl.models.passes.compilation import Compiler
from specctl.models.placing.memory import DeviceMemory, estimate
from specctl.models.placing.placement import place, sharded_placement, weights_by_rank
from specctl.models.running.engines import eager
from specctl.models.running.slot import Slot
from specctl.models.sharding import SIZE, Follower, LeadingPasses, Message, Order, Sharding, decoded
from specctl.profile.schema import DraftTable, ModelTable, Profile, require_whole
from tests.support.checkpoints import llama_config, save_model
from tests.support.rotating_models import BORDER, TEXT, weights

GIB = 1 << 30


def cards(count: int, free: float = 80) -> list[DeviceMemory]:
    gpus = [DeviceMemory(f"cuda:{index}", "card", int(free * GIB), int(free * GIB)) for index in range(count)]
    return [*gpus, DeviceMemory("cpu", "cores", 64 * GIB, 64 * GIB)]


def carried(message: Message) -> tuple[Message, int]:
    """A message as a follower gets it, and of how many parts."""
    parts = list(message.encoded())
    assert all(part.shape == (SIZE,) and part.dtype == torch.int64 for part in parts)
    found = iter(parts)
    return decoded(lambda: next(found)), len(parts)


@pytest.mark.parametrize(
    "message",
    [
        Message(Order.EXTEND, 3, 17, 12, (0, 2), 4, True, 0, (5, 6, 7, 8)),
        Message(Order.EXTEND_TREE, 0, 5, before=1, tokens=tuple(range(60)), parents=tuple(range(59))),
        Message(Order.CATCH_UP, 1, 9, 9),
    ],
)
def test_a_message_arrives_as_it_was_sent(message):
    assert carried(message) == (message, 1)


def test_what_is_long_takes_several_messages_of_one_size():
    for length, parts in ((SIZE - 10, 1), (SIZE - 9, 2), (2000, 8)):
        message = Message(Order.EXTEND, tokens=tuple(range(length)))
        assert carried(message) == (message, parts)


def test_names_and_values_arrive():
    values = {"model": "Grün/7B", "shards": 4, "threads": None}
    found, _ = carried(Message.of(Order.LOAD, values, runner=2))
    assert (found.values, found.runner) == (values, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), llama_config(258))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def ranks(model):
    return ranks_of(model)


def ranks_of(model):
    """A leader whose follower gets every message at once, and both runners."""
    follower = Follower(lambda _: model, lambda _: None)
    follower.obey(Message.of(Order.LOAD, {}))
    told = {"model": 0, "vocabulary": 258, "name": "m", "engine": "eager", "compile": False, "threads": 1}
    follower.obey(Message.of(Order.OPEN, told))
    sent = []

    def together(message, work):
        sent.append(carried(message)[0])
        found = work()
        follower.obey(sent[-1])
        return found

    leader = Slot(LeadingPasses(eager(model, 258), together, 0, Sharding(2, "tensor", 0)))
    return leader, follower._runners[0], sent


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_follower_rotates_by_the_length_of_the_text_too(family):
    """Shards that rotated in other ways would compute nonsense together; here each is the whole model."""
    leader, follower, sent = ranks_of(weights(family))
    single = eager(weights(family), 64)
    for prompt in (BORDER - 3, BORDER + 9):
        for runner in (leader, single):
            runner.begin(prompt)
            runner.rollback(0)
            runner.extend(TEXT[: prompt - 1], keep=0)
            for last in (BORDER + 12, BORDER - 2, BORDER + 12):
                runner.rollback(last - 5)
                runner.extend(TEXT[runner.length : last], keep=5)
        assert leader.length == follower.length == single.length
        for one, two in zip(leader.bare.passes._cache.layers, single.bare.passes._cache.layers, strict=True):
            length = single.length
            torch.testing.assert_close(one.keys[:, :, :length], two.keys[:, :, :length])
        for one, two in zip(leader.bare.passes._cache.layers, follower.bare.passes._cache.layers, strict=True):
            torch.testing.assert_close(one.keys[:, :, : leader.length], two.keys[:, :, : leader.length])
    assert [message.keep for message in sent if message.order is Order.BEGIN] == [BORDER - 3, BORDER + 9]


def test_a_follower_takes_back_what_the_leader_did_with_the_next_pass(ranks):
    leader, follower, sent = ranks
    leader.extend([1, 2, 3, 4, 5, 6], keep=1)
    leader.rollback(5)
    leader.rollback(4)
    leader.rollback(9)
    assert (leader.length, follower.length) == (4, 6), "a rollback needs no message of its own"
    leader.extend([7], keep=1)
    assert (leader.length, follower.length) == (5, 5)
    assert [(m.order, m.rollback, m.length) for m in sent] == [(Order.EXTEND, -1, 0), (Order.EXTEND, 4, 4)]


def test_a_path_and_a_rollback_reach_a_follower_in_their_order(ranks):
    leader, follower, sent = ranks
    leader.extend([1, 2, 3], keep=1)
    leader.extend_tree([4, 5, 6], [0, 0])
    leader.keep_path([0, 2])
    leader.rollback(4)
    leader.extend([8, 9], keep=1)
    assert (leader.length, follower.length) == (6, 6)
    assert (sent[-1].path, sent[-1].rollback) == ((0, 2), 4)
    leader.rollback(5)
    leader.extend_tree([4, 5], [0])
    leader.keep_path([0])
    leader.extend_tree([5, 6], [0])
    leader.rollback(6)
    leader.keep_path([])  # nothing of the tree: after a rollback it cannot go in the same message
    assert sent[-1].order is Order.CATCH_UP
    leader.extend([3], keep=1)
    assert leader.length == follower.length
    torch.testing.assert_close(leader.extend([2], keep=1).logits, _fresh(leader, [2]))


def _fresh(leader, last):
    """Logits of the last token by a runner that knows nothing of what was taken back."""
    keys = leader.bare.passes._cache.layers[0]
    assert keys.get_seq_length() == leader.length
    leader.rollback(leader.length - len(last))
    return leader.extend(last, keep=1).logits


def test_a_follower_out_of_step_says_so(ranks):
    leader, follower, _ = ranks
    leader.extend([1, 2, 3], keep=1)
    follower.rollback(2)
    with pytest.raises(ModelError, match="out of step: it has 2 tokens cached, the leader 3"):
        leader.extend([4], keep=1)


def test_a_pass_that_others_compile_must_be_compiled():
    compiler = Compiler("m", must=True)
    with pytest.raises(ModelError, match="m cannot be compiled"):
        compiler._give_up(RuntimeError("no"))


# Plans


def table(folder: Path, **settings: object) -> ModelTable:
    return ModelTable.model_validate({"model": str(folder), "shards": 2, **settings})


def placed(folder: Path, devices: list[DeviceMemory], **settings: object):
    given = table(folder, **settings)
    checkpoint = locate(given, "target")
    return sharded_placement(checkpoint, given, estimate(checkpoint), devices)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    return {
        "llama": save_model(folder / "llama", llama_config(258, num_hidden_layers=3, tie_word_embeddings=False)),
        "neox": save_model(folder / "neox", GPTNeoXConfig(vocab_size=258, hidden_size=16, intermediate_size=32,
                                                        num_hidden_layers=2, num_attention_heads=4)),
    }  # fmt: skip


def test_each_card_gets_its_share(folders):
    llama = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    norms = sum(w.numel() for name, w in llama.named_parameters() if "norm" in name)
    whole = sum(w.numel() for w in llama.parameters())
    placement = placed(folders["llama"], cards(3))
    # Earlier versions of transformers leave the embeddings whole.
    kept = norms + (0 if "model.embed_tokens" in llama.tp_plan else llama.model.embed_tokens.weight.numel())
    each = 4 * (kept + (whole - kept) // 2)
    assert placement.shares == {"cuda:0": each, "cuda:1": each}
    assert (placement.sharded, placement.shards) == ("tensor", 2)
    assert placed(folders["llama"], cards(0)).shares == {"cpu": 2 * each}
    stages = placed(folders["llama"], cards(2), placement="pipeline").shares
    assert sum(stages.values()) == 4 * whole
    layer = sum(w.numel() for w in llama.model.layers[0].parameters())
    assert stages["cuda:0"] == 4 * (layer + llama.model.embed_tokens.weight.numel())


@pytest.mark.parametrize(
    ("family", "settings", "devices", "message", "hint"),
    [
        ("llama", {"shards": 4}, cards(4), "4 attention heads and 2 key-value heads do not divide", "shards = 2, or"),
        ("llama", {}, cards(1), "shards = 2 needs as many accelerators; this machine has 1", "Leave shards out"),
        ("llama", {"device": "cpu"}, cards(2), "device = 'cpu' has no effect", "CUDA_VISIBLE_DEVICES"),
        ("llama", {"quantize": "int8"}, cards(2), "it is quantised", "spread"),
        ("llama", {"placement": "pipeline", "shards": 4}, cards(4), "has only 3 layers", "shards = 3"),
        ("neox", {"placement": "pipeline"}, cards(2), "gpt_neox, whose pipelines specctl has not tested", "tensor"),
        ("llama", {}, cards(2, free=1e-6), "on cuda:0 for its share", "more shards"),
    ],
)  # fmt: skip
def test_what_cannot_be_in_shards_is_refused_with_a_way_out(folders, family, settings, devices, message, hint):
    with pytest.raises(ModelError, match=message) as caught:
        placed(folders[family], devices, **settings)
    assert hint in caught.value.hint


def test_untested_families_and_windows_are_refused():
    with torch.device("meta"):
        window = AutoModelForCausalLM.from_config(
            MistralConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, vocab_size=64, sliding_window=8)
        )  # fmt: skip
    assert len(weights_by_rank(window, "tensor", 2, "target")) == 2
    with pytest.raises(ModelError, match="family mistral"):
        weights_by_rank(window, "pipeline", 2, "target")
    window.config.model_type = "qwen2"
    with pytest.raises(ModelError, match="layers with a sliding window"):
        weights_by_rank(window, "pipeline", 2, "target")
    window.config.model_type = "hrm_text"
    with pytest.raises(ModelError, match="hrm_text, whose plan specctl has not tested"):
        weights_by_rank(window, "tensor", 2, "target")


def test_spread_takes_the_first_cards_only(folders):
    given = table(folders["llama"], placement="spread")
    checkpoint = locate(given, "target")
    assert place(given, estimate(checkpoint), cards(4), "target").devices == ["cuda:0", "cuda:1"]
    with pytest.raises(ModelError, match="needs as many GPUs"):
        place(given, estimate(checkpoint), cards(1), "target")


def test_all_that_are_split_have_one_number_of_shards(folders):
    two, four = table(folders["llama"]), table(folders["llama"], shards=4)
    spread = table(folders["llama"], shards=4, placement="spread")
    assert split([two, spread]) == 2
    assert split([spread]) is None
    with pytest.raises(ModelError, match="in 2 and 4 shards"):
        split([two, four])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:1", "shards": 2}, "excludes device"),
        ({"max_memory": {"0": "1GiB"}, "shards": 2}, "excludes max_memory"),
        ({"placement": "tensor"}, "needs shards"),
        ({"shards": 1}, "greater than or equal to 2"),
        ({"shards": 2, "parallel": True, "policy": {"name": "constant"}}, "leave its shards out"),
    ],
)
def test_profiles_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DraftTable.model_validate({"model": "some/model", **settings})


def test_who_reads_a_model_itself_refuses_one_over_processes(folders):
    with pytest.raises(UsageError, match="train-draft reads the target model itself") as caught:
        require_whole(table(folders["llama"]), "target", "train-draft")
    assert 'target.placement = "spread"' in caught.value.hint
    require_whole(table(folders["llama"], placement="spread"), "target", "train-draft")
    require_whole(ModelTable(model="some/model"), "target", "train-draft")


def test_doctor_says_which_placement_fits_and_why(folders):
    profile = Profile.model_validate({"target": {"model": str(folders["llama"]), "shards": 4}})
    report = diagnose(profile)
    told = [line.partition(" over 4, ")[2] for line in report.advice if " over 4, " in line]
    assert [line.partition(":")[0] for line in told] == ["tensor", "pipeline", "spread"]
    assert "do not divide by 4" in told[0]
    assert "has only 3 layers" in told[1]
    assert "fits" in told[2]
    assert [problem.where for problem in report.problems] == ["target"]


# Followers' lives. All but one of these start processes that end before they have imported torch.

LEADER = """
import os, sys, time
from specctl.models import sharding
sharding.GRACE = 0.5
group = sharding.Followers(2)
{first}
print(group.pids[0], flush=True)
{then}
time.sleep(60)
"""


def leader(then: str = "", first: str = "") -> tuple["subprocess.Popen[str]", int]:
    """A process with a follower; its id."""
    program = LEADER.format(first=first, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stuck(process: "subprocess.Popen[str]") -> bool:
    """Whether a leader came to where it waits for ever: it slept each of ten times that somebody looked."""
    assert process.stdout is not None
    slept = 0 if process.stdout.readline() == "in it\n" else None
    for _ in range(1000):
        if slept is None or slept == 10:
            break
        slept = slept + 1 if state_of(process.pid) == "S" else 0
        sleep(0.02)
    return slept == 10


def gone(pid: int, within: float = 20.0) -> bool:
    until = monotonic() + within
    while monotonic() < until:
        try:
            state = state_of(pid)
        except OSError:
            return True
        if state == "Z":  # dead, and nobody has asked for its exit code yet
            return True
        sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_killed_leader_leaves_no_follower():
    process, follower = leader(first='group.wait_for("ready")')  # it now waits for the other ranks, for half an hour
    assert not gone(follower, within=0.2)
    process.kill()
    process.communicate()
    assert gone(follower)


def test_a_pass_that_no_exception_ends_is_ended_with_exit_code_3():
    """NCCL waits for a dead rank in native code without end; here the process sleeps."""
    process, follower = leader("group.began_pass()")
    os.kill(follower, signal.SIGKILL)
    _, said = process.communicate(timeout=50)
    assert process.returncode == 3
    assert said.count("error:") == 1
    assert "Process 2 of the 2 that hold the sharded models was killed (SIGKILL)." in said


STUCK = """
import ctypes, signal
sharding.PATIENCE = 0.5
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
group.began_pass()
lock, wait = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
wait(lock)
print("in it", flush=True)
while True:  # native code that no signal ends, as a collective is
    wait(lock)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's locks")
@pytest.mark.parametrize(
    ("signals", "code"), [([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 143)], ids=["interrupts", "SIGTERM"]
)
@pytest.mark.representatives("interrupts", slow=("SIGTERM",))
def test_signals_end_a_pass_that_waits_for_a_stopped_follower(signals, code):
    process, follower = leader(STUCK)
    os.kill(follower, signal.SIGSTOP)
    try:
        assert stuck(process)
        for each in signals:
            sleep(0.3)
            assert process.poll() is None
            process.send_signal(each)
        _, said = process.communicate(timeout=50)
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.kill(follower, signal.SIGCONT)
        process.communicate()
    assert process.returncode == code
    assert not said
    assert gone(follower)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's locks")
def test_one_interrupt_leaves_a_pass_that_waits_for_a_follower_to_it():
    process, follower = leader(STUCK)
    try:
        assert stuck(process)
        process.send_signal(signal.SIGINT)
        sleep(2)
        assert process.poll() is None
        assert not gone(follower, within=0.2)
    finally:
        process.kill()
        process.communicate()
    assert gone(follower)


def test_folders_of_killed_leaders_are_removed_by_age_and_owner(tmp_path, monkeypatch):
    from specctl.models.sharding import MeetingFolder
    from specctl.outputs import ABANDONED

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    used = MeetingFolder()  # of this process, as of any that lives
    old = time() - ABANDONED - 60
    for name in ("specctl-shards-dead", "specctl-shards-young", "another-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store").touch()
        (tmp_path / name / "lock").touch()
        if not name.endswith("young"):
            for each in (*(tmp_path / name).iterdir(), tmp_path / name):
                os.utime(each, (old, old))
    (tmp_path / "specctl-shards-link").symlink_to(tmp_path / "another-dead")
    for each in (*used.path.iterdir(), used.path):
        os.utime(each, (old, old))
    mine = MeetingFolder()
    left = {path.name for path in tmp_path.iterdir()}
    assert "specctl-shards-dead" not in left
    assert {"specctl-shards-young", "another-dead", "specctl-shards-link", used.path.name, mine.path.name} <= left
    used.remove()
    mine.remove()
    assert not mine.path.exists()


def test_folders_of_other_users_are_left_alone(tmp_path, monkeypatch):
    from specctl.models.sharding import MeetingFolder

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / "specctl-shards-theirs"
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    MeetingFolder().remove()
    assert theirs.exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    MeetingFolder().remove()
    assert not theirs.exists()


@pytest.mark.slow
def test_a_leader_that_waits_for_a_person_is_left_alone():
    process, follower = leader("time.sleep(0.1)")
    os.kill(follower, signal.SIGKILL)
    sleep(2)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_what_a_follower_says_last_is_told(tmp_path, monkeypatch):
    from specctl.models import sharding

    (tmp_path / "unable.py").write_text(
        "import json, os, sys\n"
        "os.write(int(sys.argv[4]), (json.dumps({'message': 'no room', 'hint': 'make some'}) + '\\n').encode())\n"
        "sys.exit(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sharding, "PROGRAM", "unable")
    group = sharding.Followers(3)
    with pytest.raises(ModelError, match=r"Process [23] of the 3 .* failed: no room") as caught:
        group.wait_for("ready")
    assert caught.value.hint == "make some"
    group.stop()
