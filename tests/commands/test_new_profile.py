"""``specctl profiles new``."""

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import normalizers

from specctl import __main__ as entry
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.profile.schema import model_path
from tests.support.checkpoints import save_model
from tests.support.hostile import Terminal
from tests.support.other_tokenizers import byte_level


class Ran(NamedTuple):
    code: int
    stderr: str


Specctl = Callable[..., Ran]


@pytest.fixture
def specctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Specctl:
    for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name, model in (("big", "target"), ("mid", "mid"), ("small", "draft")):
        (tmp_path / name).symlink_to(model_path(model))

    def run(*arguments: str, typed: str | None = None) -> Ran:
        monkeypatch.setattr(sys, "argv", ["specctl", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", said := io.StringIO())
        return Ran(entry._run(), said.getvalue())

    return run


def own(tmp_path: Path, name: str = "big-small") -> Path:
    return tmp_path / "config" / "specctl" / "profiles" / f"{name}.toml"


PAIR = ("--target", "./big", "--draft", "./small")


def test_it_writes_a_profile_that_is_found_by_name_from_anywhere(
    specctl: Specctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = specctl("profiles", "new", *PAIR)
    assert ran.code == 0, ran.stderr
    assert "Verdict: ready." in ran.stderr
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert specctl("profiles", "check", "big-small").code == 0
    profile = resolve("big-small").profile
    assert profile.target.model == str(tmp_path / "big")
    assert profile.draft is not None
    assert (profile.draft.model, profile.draft.policy.name) == (str(tmp_path / "small"), "cost-optimal")
    assert "# " in own(tmp_path).read_text()
    commands = re.findall(r"^  specctl (.+)$", ran.stderr, re.M)
    assert [command.split()[:3] for command in commands] == [
        [name, "-p", "big-small"] for name in ("generate", "chat", "calibrate")
    ]
    assert specctl("generate", "-p", "big-small", "Once", "-n", "3").code == 0


def test_three_models_a_policy_and_a_file(specctl: Specctl) -> None:
    models = ("--target", "./big", "--draft", "./mid", "--draft", "./small")
    ran = specctl("profiles", "new", *models, "--policy", "adaedl:threshold=0.3", "--chat", "-o", "trio.toml")
    assert ran.code == 0, ran.stderr
    assert "-p trio.toml" in ran.stderr
    profile = resolve("trio.toml").profile
    assert profile.draft is not None
    assert [Path(level.model).name for level in profile.draft.levels] == ["mid", "small"]
    assert {level.policy.setting.label for level in profile.draft.levels} == {"adaedl:threshold=0.3"}
    assert profile.prompt.chat
    assert profile.description == "big drafted by mid drafted by small, adaedl"


def test_flags_use_the_chat_template_as_the_dialogue_does_by_default(specctl: Specctl) -> None:
    models = ("--target", "./big", "--draft", "./small")
    said = specctl("profiles", "new", *models, "-o", "asked.toml").stderr
    assert "Prompts go through the target's chat template; --raw" in said
    assert resolve("./asked.toml", environ={}).profile.prompt.chat is True
    assert "template" not in specctl("profiles", "new", *models, "--raw", "-o", "raw.toml").stderr
    assert resolve("./raw.toml", environ={}).profile.prompt.chat is False


def test_a_lookup_needs_no_model_and_gets_a_policy_that_fits(specctl: Specctl) -> None:
    code, said = specctl("profiles", "new", "--target", "./big", "--draft", "prompt:lookup", "-o", "copy.toml")
    assert code == 0, said
    assert "specctl bench -p copy.toml" in said
    assert "calibrate" not in said
    draft = resolve("./copy.toml", environ={}).profile.draft
    assert draft is not None
    assert (draft.kind, draft.policy.setting.label) == ("lookup", "cost-optimal:use_foresight=true")


def test_an_existing_file_is_replaced_only_with_force(specctl: Specctl, tmp_path: Path) -> None:
    own(tmp_path).parent.mkdir(parents=True)
    for arguments, path in (((), own(tmp_path)), (("-o", "file.toml"), tmp_path / "file.toml")):
        path.write_text("# mine\n")
        ran = specctl("profiles", "new", *PAIR, *arguments)
        assert ran.code == 2
        assert "exists already" in ran.stderr
        assert path.read_text() == "# mine\n"
        assert specctl("profiles", "new", *PAIR, *arguments, "--force").code == 0
        assert "[target]" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "--target is missing"),
        (("--target", "./big"), 2, "--draft is missing"),
        (("embedded", *PAIR), 2, "has the name embedded already"),
        (("a/b", *PAIR), 2, "is not a name for a profile"),
        (("name", "-o", "file.toml", *PAIR), 2, "use either"),
        ((*PAIR, "-o", "nowhere/file.toml"), 2, "there is no such folder"),
        ((*PAIR, "-o", "big/config.json", "--force"), 2, "model and profile are the same file"),
        ((*PAIR, "--policy", "svpi"), 2, "did you mean 'svip'"),
        ((*PAIR, "--policy", "specdec++"), 2, "draft.head: is required"),
        (("--target", "./big", "--draft", "./nothing"), 3, "there is no such folder"),
        (("--target", "embedded:tarjet", "--draft", "./small"), 2, "no embedded model 'tarjet'"),
    ],
)
def test_what_cannot_run_is_not_written(
    specctl: Specctl, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = specctl("profiles", "new", *arguments)
    assert ran.code == code
    assert message in ran.stderr
    assert not list(tmp_path.rglob("*.toml"))


def test_models_whose_tokenizers_have_no_common_text_are_not_written(specctl: Specctl, tmp_path: Path) -> None:
    save_model(tmp_path / "foreign")
    tokenizer = byte_level.__wrapped__(330)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "foreign")
    ran = specctl("profiles", "new", "--target", "./big", "--draft", "./foreign", "-o", "pair.toml")
    assert ran.code == 3
    assert "The tokenizers differ, and the draft's does not reproduce a text" in ran.stderr
    assert not (tmp_path / "pair.toml").exists()


def test_a_terminal_is_asked_for_what_is_missing(specctl: Specctl) -> None:
    answers = ["./big", "./small", "svpi", "svip:threshold=0.5", "y", "embedded", "mine"]
    ran = specctl("profiles", "new", typed="\n".join(answers) + "\n")
    assert ran.code == 0, ran.stderr
    assert "did you mean 'svip'" in ran.stderr
    assert "has the name embedded already" in ran.stderr
    profile = resolve("mine").profile
    assert profile.draft is not None
    assert profile.draft.policy.setting.label == "svip:threshold=0.5"
    assert profile.prompt.chat


def test_empty_answers_take_what_is_offered(specctl: Specctl) -> None:
    assert specctl("profiles", "new", "--target", "./big", typed="./small\n\n\n\n").code == 0
    assert resolve("big-small").profile.prompt.chat


def test_the_end_of_the_input_and_an_interrupt_write_nothing(
    specctl: Specctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = specctl("profiles", "new", typed="./big\n")
    assert ran.code == 2
    assert "nothing was written" in ran.stderr

    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Terminal, "readline", interrupt)
    ran = specctl("profiles", "new", typed="./big\n")
    assert ran.code == 130
    assert "nothing was written" in ran.stderr
    assert not list(tmp_path.rglob("*.toml"))


def test_values_are_written_where_they_belong(specctl: Specctl, tmp_path: Path) -> None:
    given = ("target.device=cpu", "policy.name=svip", "policy.threshold=0.4", "engine=eager", "sampling.top_k=7")
    ran = specctl("profiles", "new", *PAIR, *(text for one in given for text in ("--set", one)))
    assert ran.code == 0, ran.stderr
    profile = resolve("big-small").profile
    assert profile.draft is not None
    assert (profile.target.device, profile.engine, profile.sampling.top_k) == ("cpu", "eager", 7)
    assert profile.draft.setting == Setting.of({"name": "svip", "threshold": 0.4})
    text = own(tmp_path).read_text()
    assert text.count("[draft.policy]") == text.count("[target]") == 1
    assert 'device = "cpu"' in text
    assert "svip" in text.splitlines()[2], "the description"


@pytest.mark.parametrize(
    ("value", "why"),
    [("target.device", "expected KEY=VALUE"), ("target.devise=cpu", "devise"), ("sampling.top_k=x", "top_k")],
)
def test_a_wrong_value_writes_nothing(specctl: Specctl, tmp_path: Path, value: str, why: str) -> None:
    ran = specctl("profiles", "new", *PAIR, "--set", value)
    assert ran.code == 2
    assert why in ran.stderr
    assert not own(tmp_path).exists()


def test_a_template_is_asked_for_in_one_way(specctl: Specctl, tmp_path: Path) -> None:
    ran = specctl("profiles", "new", *PAIR, "--set", "prompt.chat=false", "--chat")
    assert (ran.code, own(tmp_path).exists()) == (2, False)
    assert "--chat and --set prompt.chat contradict each other" in ran.stderr
    assert specctl("profiles", "new", *PAIR, "--set", "prompt.chat=false").code == 0
    assert resolve("big-small").profile.prompt.chat is False


@pytest.mark.parametrize(("flags", "chat"), [((), None), (("--chat",), True), (("--raw",), False)])
def test_before_anything_is_downloaded_it_says_what_it_could_not_check(
    specctl: Specctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], chat: bool | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    pair = ("--target", "some/Big-8B", "--draft", "some/Small-1B")
    ran = specctl("profiles", "new", *pair, *flags, "--set", "target.device=cuda:0", "-o", "it.toml")
    assert ran.code == 0, ran.stderr
    told = " ".join(ran.stderr.split())
    assert "note: not checked, because files are not here: some/Small-1B, some/Big-8B." in told
    profile = resolve(str(tmp_path / "it.toml")).profile
    assert (profile.target.model, profile.target.device, profile.prompt.chat) == ("some/Big-8B", "cuda:0", chat)
    ran = specctl("profiles", "new", "--target", "./nowhere", "--draft", "some/Small-1B", "-o", "other.toml")
    assert ran.code == 3, "a folder that is not there will not be downloaded"
    assert not (tmp_path / "other.toml").exists()
