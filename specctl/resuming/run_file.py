"""`RESULTS.run.json`, the file beside results that says what made them."""

import json
from pathlib import Path

from specctl.errors import UsageError, too_deep
from specctl.outputs import OutputFile, Outputs
from specctl.resuming.made_by import MadeBy

SUFFIX = ".run.json"
VERSION = 1


class RunFile:
    """What made a file of results, in a file beside it: a first line of the results themselves would be in the way of
    every program that takes one line for one record.

    Args:
        outputs: of the command; they hold and lock the file.
        results: the results, a regular file.

    Raises:
        UsageError: the file cannot be written, or is not a file of this kind and --force is not given.
    """

    def __init__(self, outputs: Outputs, results: OutputFile, *, force: bool = False) -> None:
        self._results = results
        path = results.path.resolve()
        self._file = outputs.file("run file", path.with_name(path.name + SUFFIX), resumed=True)
        self._found = _read(self._file.path) if self._file.continued else None
        if self._file.continued and self._found is None and not (force or results.continued):
            raise UsageError(f"{self._file.path} was not written by this command", "remove it, or choose another name")

    def compare(self, made: MadeBy, *, anyway: bool) -> list[str]:
        """Compare what made the results so far with what goes on with them.

        Args:
            made: what goes on.
            anyway: let it go on whatever differs.

        Returns:
            What differs nevertheless, to be told.

        Raises:
            UsageError: something differs that decides the text, or what made the results is not known.
        """
        if self._found is None:
            if anyway:
                return []
            raise UsageError(
                f"{self._file.path} is missing or damaged, so nothing says which models and settings made "
                f"{self._results.path}",
                "if they are those of this command, add --anyway; else name another file with --output",
            )
        differing = made.differing(self._found)
        if differing and not anyway:
            raise UsageError(
                "\n  ".join([f"{self._results.path} was made by another run:", *differing]),
                "repeat that command, name another file with --output, or mix both with --anyway",
            )
        return [*differing, *(f"{each}; the text is the same" for each in made.differing_otherwise(self._found))]

    def says(self, made: MadeBy) -> bool:
        """Whether the file names this as what made the results."""
        return self._found is not None and not made.differing(self._found)

    def write(self, made: MadeBy) -> None:
        """Say what makes the results from now on; the file is replaced whole."""
        document = {"schema_version": VERSION, "results": self._results.path.name, **made.as_dict()}
        self._file.replace(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def _read(path: Path) -> MadeBy | None:
    """What a file of this kind says; None for another file, or one that is damaged or of a later version."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.get("schema_version") == VERSION and not too_deep(found):
            return MadeBy.from_dict(found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None
