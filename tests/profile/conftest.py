"""A working directory and a user's own folder to find profiles in."""

import pytest


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def write(tmp_path):
    def write(name, text, directory="profiles"):
        path = tmp_path / directory / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
