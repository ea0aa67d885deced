"""Commands of specctl, run in this process."""

from typing import Any

from typer.testing import CliRunner

from specctl.commands.app import app


def invoke(*arguments: object, code: int = 0) -> Any:
    """What a command showed; it ends with this exit code, or its error is raised."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result
