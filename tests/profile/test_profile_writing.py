import tomllib

import pytest

from specctl.errors import UsageError
from specctl.profile import resolve, write_profile
from specctl.profile.wording import short_name
from specctl.profile.writing import annotated


def test_written_profiles_resolve(tmp_path):
    path = tmp_path / "deep" / "mine.toml"
    write_profile(path, {"extends": "embedded", "draft": {"policy": {"name": "constant", "draft_length": 3}}})
    assert resolve(str(path)).profile.draft.policy.setting.all_values == {"draft_length": 3}


def test_nothing_is_overwritten_unasked(tmp_path):
    path = tmp_path / "mine.toml"
    write_profile(path, {"description": "first"})
    with pytest.raises(UsageError, match="exists already"):
        write_profile(path, {"description": "second"})
    assert tomllib.loads(path.read_text()) == {"description": "first"}
    write_profile(path, {"description": "second"}, overwrite=True)
    assert tomllib.loads(path.read_text()) == {"description": "second"}


def test_annotated_text_is_the_same_profile(tmp_path):
    overrides = ['sampling.stop=["#", "a\\nb"]', "draft.draft.model=tiny", 'target.device={"a.b" = 0}']
    resolved = resolve(overrides=overrides, flags={"description": 'a "quoted" # text'})
    path = tmp_path / "again.toml"
    path.write_text(annotated(resolved))
    assert resolve(str(path)).profile == resolved.profile


def test_annotated_values_tell_their_origin():
    lines = annotated(resolve(overrides=["sampling.seed=3"])).splitlines()
    assert "seed = 3  # --set" in lines
    assert "top_k = 0  # default" in lines
    assert any(line.startswith('dtype = "float32"  # ') and line.endswith("embedded.toml:7") for line in lines)


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("maker/Model-8B", "Model-8B"),
        ("maker/Model-8B-GGUF:Q4_K_M", "Model-8B-GGUF:Q4_K_M"),
        ("qwen3:8b", "qwen3:8b"),
        ("embedded:mid", "mid"),
        ("prompt:lookup", "lookup"),
        ("folder/model.gguf", "model.gguf"),
    ],
)
def test_short_names_keep_tags(model: str, short: str) -> None:
    assert short_name(model) == short
