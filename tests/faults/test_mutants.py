"""The faults that are put into the code, and which tests are tried with them."""

import random
from pathlib import Path
from threading import Event

import pytest

from tests.faults import trials
from tests.faults.code_faults import faults_in, known_faults, some_of
from tests.faults.mutants import ROOMS, chosen_faults, near
from tests.faults.reached import Reached, ReachPlugin
from tests.faults.trials import PACKAGE, ROOT, in_fork

SOURCE = '''"""Über 1 < 2."""
LIMIT = 1


def worst(rows, limit: "1 < 2" = 1):
    """Not 1 < 2."""
    found = min(rows[1:]) if rows and not limit else 0
    rows.clear()
    if found < limit - 1:
        raise ValueError(f"ä {found + 1}", 1 + 1)
    return lambda row: "ä" in row


class Rows:
    width = 1

    def read(self):
        return all(self.rows)
'''


def test_every_kind_of_fault_is_found_where_it_is() -> None:
    found = {(fault.kind, fault.before, fault.after) for fault in faults_in("rows.py", SOURCE)}
    assert found == {
        ("call", "min", "max"),
        ("slice", "1", "(1) + 1"),
        ("number", "1", "(2)"),
        ("and or", "rows and not limit", "(rows or not limit)"),
        ("not", "not limit", "(limit)"),
        ("branches", "min(rows[1:]) if rows and not limit else 0", "(0 if rows and (not limit) else min(rows[1:]))"),
        ("number", "0", "(1)"),
        ("statement", "rows.clear()", "pass"),
        ("condition", "found < limit - 1", "(not (found < limit - 1))"),
        ("comparison", "found < limit - 1", "(found <= limit - 1)"),
        ("sum", "limit - 1", "(limit + 1)"),
        ("comparison", '"ä" in row', "('ä' not in row)"),
        ("call", "all", "any"),
    }


def test_each_fault_leaves_a_module_that_can_be_imported() -> None:
    for fault in faults_in("rows.py", SOURCE):
        text = fault.put_into(SOURCE)
        assert text != SOURCE
        compile(text, "rows.py", "exec")


def test_faults_are_spread_over_functions() -> None:
    chosen = some_of(faults_in("rows.py", SOURCE), 2, random.Random(0))
    assert {fault.function for fault in chosen} == {"worst", "Rows.read"}


@pytest.mark.slow
def test_there_are_faults_for_every_room_that_are_the_same_each_time() -> None:
    faults, _ = chosen_faults(1, 0, None)
    assert {room for room in ROOMS if any(fault.module.startswith(room) for fault in faults)} == set(ROOMS)
    assert chosen_faults(1, 0, "policies")[0] == [fault for fault in faults if fault.module.startswith("policies")]


@pytest.mark.slow
def test_every_module_has_tests_near_it() -> None:
    assert all(near(module, 0.0, {}) for module in ("api/speculative.py", "policies/published.py"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_tests_of_the_mirrored_folder_come_first(seconds: float) -> None:
    tests = near("text_engine/processes.py", seconds, {})
    assert tests[0] == "tests/text_engine/test_process_engine.py"
    assert (len(tests) == 1) == (not seconds)


def test_tests_that_are_not_known_to_call_a_function_are_left_out(tmp_path: Path) -> None:
    for name in ("test_near.py", "test_far.py", "test_new.py"):
        (tmp_path / name).write_text(f"# {name}")
    reached = Reached(tmp_path / "kept", tmp_path)
    reached.learn("test_near.py", {"slow": (0.3, ["rows.py worst"]), "fast": (0.1, ["rows.py worst"]), "no": (0.0, [])})
    reached.learn("test_far.py", {"other": (0.1, ["rows.py Rows.read"])})
    near = ["test_near.py", "test_new.py"]
    assert reached.plan("rows.py worst", near, 9.0, {}) == [["fast", "slow"], ["test_new.py"]]
    assert reached.plan("rows.py worst", near, 1.0, {}) == [["fast", "slow"]]
    assert reached.plan("rows.py Rows.read", near[:1], 9.0, {}) == [["other"]]
    assert reached.plan("rows.py best", near[:1], 9.0, {}) == [["test_near.py"]]
    (tmp_path / "test_near.py").write_text("# other tests")
    assert Reached(tmp_path / "kept", tmp_path).tests_of("test_near.py") is None


def test_what_is_called_is_told_once() -> None:
    plugin = ReachPlugin(Path(faults_in.__code__.co_filename).parent)
    plugin.start()
    try:
        faults_in("rows.py", "")
        shared = plugin.taken()
        some_of([], 1, random.Random(0))
        called = plugin.taken()
    finally:
        plugin.stop()
    assert "code_faults.py faults_in" in shared
    assert "code_faults.py some_of" in called
    assert "code_faults.py faults_in" not in called


def test_every_fault_that_was_found_once_still_fits_the_package() -> None:
    assert known_faults(ROOT / PACKAGE)[1] == []


def test_a_fork_that_waits_for_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_fork(lambda: [1, 2], tmp_path / "log") == [1, 2]
    monkeypatch.setattr(trials, "PATIENCE", 0.2)
    assert in_fork(Event().wait, tmp_path / "log") is None
