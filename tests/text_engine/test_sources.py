"""Replicas load what the command means by its names, or say what is different."""

import os
import pickle
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.errors import ModelError
from specctl.models.loading.contents import Contents
from specctl.profile.schema import Profile
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import wait_until_ready
from specctl.text_engine.job import Job, ReplicaError, Sources
from specctl.text_engine.on_ray import STALE, Actor, fingerprint
from specctl.text_engine.processes import ProcessEngine
from tests.support.checkpoints import llama_config, save_model

ECHO = "tests.text_engine.toy_jobs:echo"
RELATIVE = Profile.model_validate({"target": {"model": "./big"}, "draft": {"model": "small"}})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders with models of the same names: the target differs, the draft is a copy."""
    folder = tmp_path_factory.mktemp("models")
    for name, spread in (("A/big", 0.1), ("B/big", 0.2), ("A/small", 0.3)):
        save_model(folder / name, llama_config(num_hidden_layers=1, initializer_range=spread))
    shutil.copytree(folder / "A" / "small", folder / "B" / "small")
    return folder


@pytest.fixture
def a(models, tmp_path, monkeypatch):
    """A folder of those, to change; the current one."""
    shutil.copytree(models, tmp_path / "models")
    monkeypatch.chdir(tmp_path / "models" / "A")
    return Path.cwd()


def test_relative_paths_count_from_the_commands_folder(a):
    job = pickle.loads(pickle.dumps(Job(ECHO, {}, sources=Sources.of(RELATIVE))))
    os.chdir(a.parent / "B")
    assert job.begin(0)({})["folder"] == str(a)
    assert job.sources.paths == {"The target model './big'": f"{a}/big", "The draft model 'small'": f"{a}/small"}


def test_a_folder_that_is_missing_is_told_with_its_path_and_the_machine(a):
    job = Job(ECHO, {}, sources=Sources.of(RELATIVE))
    os.chdir(a.parent / "B")
    shutil.rmtree(a / "big")
    with pytest.raises(ModelError) as caught:
        job.begin(0)
    assert f"{socket.gethostname()}, where a replica runs, has no {a}/big" in caught.value.message
    assert "The target model './big'" in caught.value.message
    assert "current directory" not in str(caught.value)
    assert "share" in caught.value.hint


def test_a_folder_that_cannot_be_entered_counts_only_where_a_path_is_relative(a, tmp_path):
    absolute = Profile.model_validate({"target": {"model": str(a / "big")}, "draft": {"model": "embedded:draft"}})
    nowhere = str(tmp_path / "nowhere")
    Job(ECHO, {}, sources=replace(Sources.of(absolute), folder=nowhere)).begin(0)
    with pytest.raises(ModelError, match=f"cannot enter {nowhere}"):
        Job(ECHO, {}, sources=replace(Sources.of(RELATIVE), folder=nowhere)).begin(0)


def test_what_does_not_exist_is_an_error_of_the_command(a):
    shutil.rmtree(a / "small")
    with pytest.raises(ModelError, match="small"):
        Sources.of(Profile.model_validate({"target": {"model": "./big"}, "draft": {"model": "./small"}}))


def test_other_files_under_the_same_path_are_an_error_that_names_the_model(a):
    job = Job(ECHO, {}, sources=Sources.of(RELATIVE))
    shutil.copytree(a.parent / "B" / "big", a / "big", dirs_exist_ok=True)
    with pytest.raises(ModelError, match=r"The target model './big': on .* hold something else") as caught:
        job.begin(0)
    assert f"{a}/big" in caught.value.message


def test_another_draft_or_head_of_the_job_is_compared_too(a):
    draft = RELATIVE.draft.model_copy(update={"model": "../B/big", "head": "embedded:draft-head"})
    job = Job(ECHO, {}, sources=Sources.of(RELATIVE, [draft]))
    job.begin(0)
    assert "The acceptance head 'embedded:draft-head'" in job.sources.identities
    config = a.parent / "B" / "big" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match=r"The draft model '../B/big'"):
        job.begin(0)


def test_another_commit_of_the_hub_is_an_error_that_names_both(a, monkeypatch):
    """Of the hub's, the commit counts, not what is downloaded: loading downloads more."""
    plain = Contents.of

    def found(profile, commit):
        contents = plain(profile)
        return Contents(contents.files, {"draft": commit})

    monkeypatch.setattr(Contents, "of", lambda profile: found(profile, "1a2b"))
    job = Job(ECHO, {}, sources=Sources.of(RELATIVE))
    (a / "small" / "vocab.txt").write_text("downloaded")
    job.begin(0)
    monkeypatch.setattr(Contents, "of", lambda profile: found(profile, "3c4d"))
    with pytest.raises(ModelError, match=r"The draft model 'small' is at commit 3c4d on .*at commit 1a2b") as caught:
        job.begin(0)
    assert "revision" in caught.value.hint


def test_files_that_are_written_while_they_are_loaded_are_an_error(a):
    setup = {"path": str(a / "big" / "config.json")}
    with pytest.raises(ModelError, match="written while a replica loaded them"):
        Job("tests.text_engine.toy_jobs:writer", setup, sources=Sources.of(RELATIVE)).begin(0)


def test_replicas_that_stay_are_known_by_their_files_too(a):
    def of():
        return fingerprint(Job(ECHO, {"profile": RELATIVE}, sources=Sources.of(RELATIVE)))

    first = of()
    assert first == of()
    os.chdir(a.parent / "B")
    there = of()
    os.chdir(a)
    os.utime(a / "big" / "model.safetensors")  # may hold anything now: of large files not all is hashed
    touched = of()
    shutil.copytree(a.parent / "B" / "big", a / "big", dirs_exist_ok=True)
    assert len({first, there, touched, of()}) == 4


def test_an_actor_whose_files_were_written_since_says_so(a):
    actor = Actor(Job(ECHO, {}, sources=Sources.of(RELATIVE)), 0, 0.0)
    _, life = actor.life()
    assert [actor.begin(life)[0], actor.begin(life)[0]] == ["done", "done"]
    os.utime(a / "big" / "model.safetensors")
    assert actor.begin(life) == (STALE, None)
    assert Actor(Job(ECHO, {}), 0, 0.0).begin("another")[0] == "gone"


def test_a_watch_comes_back_when_it_is_released():
    actor, back = Actor(Job(ECHO, {}), 0, 0.0), threading.Event()
    _, life = actor.life()
    watch = threading.Thread(target=lambda: (actor.watch(life), back.set()))
    watch.start()
    assert not back.wait(0.05)
    actor.release()
    assert back.wait(60)
    watch.join()
    assert actor.watch("another life")[0] == "gone"


def test_a_local_replica_that_is_started_again_after_the_weights_were_replaced_ends_the_mixture(a):
    """Otherwise records before and after its death would be those of two models."""
    said = []
    job = Job(ECHO, {}, sources=Sources.of(RELATIVE))
    with ProcessEngine(job, [{"OMP_NUM_THREADS": "1"}] * 1, said.append, said.append) as replicas:
        wait_until_ready(replicas)
        shutil.copytree(a.parent / "B" / "big", a / "big", dirs_exist_ok=True)
        with pytest.raises(ReplicaError, match=r"The target model './big': .* hold something else"):
            list(in_order(replicas, [(None, {"dies": True}), (None, {"said": 1})]))
