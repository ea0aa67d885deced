"""Profiles that were found in the working directory, which may be anyone's."""

import pytest

from specctl.errors import ProfileError
from specctl.profile import resolve
from specctl.profile.profile_file import available, packaged_directory

EVIL = '[target]\nmodel = "./m"\ntrust_remote_code = true\n'
MEEK = '[target]\nmodel = "big"\n'
OWN = "config/specctl/profiles"


def test_the_default_is_the_packaged_profile_whatever_the_folder_holds(write, environ):
    write("embedded", EVIL)
    resolved = resolve(environ=environ)
    assert resolved.source == packaged_directory() / "embedded.toml"
    assert resolved.profile.target.model == "embedded:target"
    assert resolved.notes == ()


def test_a_profile_found_here_by_name_needs_trust(write, environ):
    write("x", EVIL)
    with pytest.raises(
        ProfileError, match=r"profiles/x\.toml:3: target\.trust_remote_code = true .* by its name"
    ) as no:
        resolve("x", environ=environ)
    assert "--trust-remote-code" in no.value.hint
    assert resolve("x", environ=environ, trust_remote_code=True).profile.target.trust_remote_code
    with pytest.raises(ProfileError):
        resolve(environ=environ | {"SPECCTL_PROFILE": "x"})


@pytest.mark.parametrize("name", ["profiles/x.toml", "./profiles/x.toml", "{tmp}/profiles/x.toml"])
def test_a_path_given_by_hand_is_the_users_decision(write, environ, tmp_path, name):
    write("x", EVIL)
    assert resolve(name.format(tmp=tmp_path), environ=environ).profile.target.trust_remote_code


@pytest.mark.parametrize("directory", [OWN, "elsewhere"])
def test_own_profiles_and_those_given_by_path_are_trusted(write, environ, directory):
    path = write("x", EVIL, directory)
    name = "x" if directory == OWN else str(path)
    assert resolve(name, environ=environ).profile.target.trust_remote_code


def test_trust_given_by_hand_is_enough(write, environ):
    write("x", MEEK)
    resolved = resolve("x", overrides=["target.trust_remote_code=true"], environ=environ)
    assert resolved.profile.target.trust_remote_code
    assert not resolve("x", environ=environ).profile.target.trust_remote_code
    write("x", EVIL)
    assert not resolve(
        "x", overrides=["target.trust_remote_code=false"], environ=environ
    ).profile.target.trust_remote_code


@pytest.mark.parametrize("draft", ["draft", "draft.draft"])
def test_every_model_counts(write, environ, draft):
    write(
        "x",
        f'{MEEK}[draft]\nmodel = "a"\n[{draft}]\ntrust_remote_code = true\nmodel = "b"\n'.replace(
            '[draft]\nmodel = "a"\n[draft]', "[draft]"
        ),
    )
    with pytest.raises(ProfileError, match=rf"{draft}\.trust_remote_code = true would run code that comes with .b"):
        resolve("x", environ=environ)


def test_what_extends_a_profile_found_here_needs_trust(write, environ):
    write("embedded", EVIL)
    write("mine", 'extends = "embedded"\n', OWN)
    with pytest.raises(ProfileError, match=r"profiles/embedded\.toml:3: target"):
        resolve("mine", environ=environ)
    given = write("given", 'extends = "embedded"\n', "elsewhere")
    with pytest.raises(ProfileError, match=r"profiles/embedded\.toml:3: target"):
        resolve(str(given), environ=environ)


def test_what_a_profile_found_here_extends_needs_trust_wherever_it_is(write, environ):
    write("environment NAME", EVIL, ".")
    write("x", 'extends = "../environment NAME.toml"\n')
    with pytest.raises(ProfileError, match="trust_remote_code = true"):
        resolve("x", environ=environ)


def test_trust_in_an_own_profile_is_not_lent_to_another_model(write, environ):
    write("mine", EVIL, OWN)
    write("x", 'extends = "mine"\n[target]\nmodel = "./other"\n')
    target = resolve("x", environ=environ).profile.target
    assert (target.model, target.trust_remote_code) == ("./other", False)
    write("x", 'extends = "mine"\n[target]\nmodel = "./other"\ntrust_remote_code = true\n')
    with pytest.raises(ProfileError, match=r'comes with "./other", and profiles/x\.toml was found'):
        resolve("x", environ=environ)


def test_a_profile_that_hides_another_is_told(write, environ):
    write("embedded-svip", MEEK)
    write("qwen14b-svip", MEEK)
    write("alone", MEEK)
    (note,) = resolve("qwen14b-svip", environ=environ).notes
    assert note == f"profiles/qwen14b-svip.toml is used instead of {packaged_directory() / 'qwen14b-svip.toml'}"
    assert resolve("alone", environ=environ).notes == ()
    assert resolve("profiles/qwen14b-svip.toml", environ=environ).notes == ()
    write("leaf", 'extends = "qwen14b-svip"\n', OWN)
    assert resolve("leaf", environ=environ).notes == (note,)


def test_the_programs_own_folder_is_no_strangers(environ, monkeypatch):
    monkeypatch.chdir(packaged_directory().parent)
    assert resolve("embedded-constant", environ=environ).notes == ()


# Odd files

ODD = {
    "brackets": b"a = " + b"[" * 3000,
    "tables": b"[" + b"a." * 3000 + b"a]",
    "dotted": b"a." * 3000 + b"a = 1",
    "inline": b"a = " + b"{b=" * 3000,
    "number": b"a = " + b"9" * 5000,
    "hex": b"schema_version = 0x" + b"f" * 5000,
    "float": b"[sampling]\ntemperature = 1e400",
    "bytes": b"\xff\xfe",
    "nul": b"a = '\x00'",
    "key": b'"' + b"x" * 5000 + b'" = 1',
    "extends": b'extends = "' + b"x" * 5000 + b'"',
    "far": b'extends = "' + b"x/" * 5000 + b'x.toml"',
    "model": b'target.model = "' + b"x" * 5000 + b'"',
    "list": b"target = [1]",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_an_odd_file_is_named_in_the_message(environ, tmp_path, content):
    (tmp_path / "profiles").mkdir()
    path = tmp_path / "profiles" / "odd.toml"
    path.write_bytes(content)
    assert available(environ)["odd"].samefile(path)
    if content.startswith(b"target.model"):
        assert resolve("odd", environ=environ).profile.draft is None
        return
    with pytest.raises(ProfileError, match="odd") as found:
        resolve("odd", environ=environ)
    assert len(found.value.message) < 12_000


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 2500, "x" * 5000 + ".toml", "a\0b", "~nobody/x.toml"])
def test_an_odd_name_is_no_profile(environ, name):
    with pytest.raises(ProfileError, match="there is no profile") as found:
        resolve(name, environ=environ)
    assert len(found.value.message) < 1000


def test_odd_entries_of_a_folder_do_not_break_a_listing(environ, tmp_path):
    import os

    folder = tmp_path / "profiles"
    (folder / "folder.toml").mkdir(parents=True)
    os.mkfifo(folder / "pipe.toml")
    (folder / "gone.toml").symlink_to("nowhere")
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "good.toml").write_text(MEEK)
    found = available(environ)
    assert {"folder", "pipe", "gone", "loop", "good"} <= set(found)
    for name in ("folder", "pipe", "gone", "loop"):
        with pytest.raises(ProfileError, match=name):
            resolve(str(found[name].absolute()), environ=environ)
