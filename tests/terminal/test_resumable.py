import io

import pytest
from rich.console import Console

from specctl.terminal.progress import resumable


@pytest.mark.parametrize(
    ("path", "said"), [("out.jsonl", "note: interrupted; what was finished is in out.jsonl; go on\n"), (None, "")]
)
def test_an_interrupt_says_where_finished_work_is_and_goes_on_up(path, said):
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), resumable(Console(file=stream), path, "go on"):
        raise KeyboardInterrupt
    assert stream.getvalue() == said


def test_nothing_is_said_without_an_interrupt():
    stream = io.StringIO()
    with pytest.raises(ValueError, match="other"), resumable(Console(file=stream), "out.jsonl", "go on"):
        raise ValueError("other")
    with resumable(Console(file=stream), "out.jsonl", "go on"):
        pass
    assert stream.getvalue() == ""
