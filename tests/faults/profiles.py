"""Mutated profiles through everything that reads them: resolving, checking, showing, and their row in the list.

python -m tests.faults.profiles --count 10000
"""

import os
import random
import tempfile
from pathlib import Path

from specctl.commands.profiles import _row
from specctl.profile import resolve
from specctl.profile.profile_file import packaged_directory
from specctl.profile.writing import annotated
from tests.faults.mutations import Tally, main, mutated

WORDS = (
    '"embedded"', '"embedded:draft"', '"embedded:nope"', "true", "false", "-1", "0", "1e400", "nan", "inf", "9" * 30,
    "9" * 5000, "0x" + "f" * 5000, "[" * 3000, "{a=" * 3000, "a." * 3000, '"\\ud800"', '"\\u0000"', "1979-05-27",
    "07:32:00", "[]", "{}", "[[]]", '""', "''", '"""', "'''", "[target]", "[draft]", "[draft.policy]", "[[draft]]",
    "[draft.draft]", "[draft.draft.policy]", "[sampling]", "[prompt]", "[provenance]", "name", "model", "head",
    "extends", "schema_version", "trust_remote_code = true", 'device = {"" = "cpu"}', "max_memory = {0 = 1}",
    'stop = ["a", 1]', 'policy = "svip"', "draft = 5", 'extends = "fuzzed"', 'extends = "../../x"', "# ", "=", " = ",
)  # fmt: skip


def fuzz(count: int, seed: int) -> Tally:
    """Count what mutated profiles lead to. They are written to a folder of their own."""
    tally, draw = Tally(), random.Random(seed)
    texts = [path.read_text(encoding="utf-8") for path in sorted(packaged_directory().glob("*.toml"))]
    environ = {"XDG_CONFIG_HOME": os.devnull}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            path = Path("profiles", "fuzzed.toml")
            path.parent.mkdir()
            for number in range(count):
                text = mutated(draw, draw.choice(texts), WORDS, texts)
                path.write_bytes(text.encode("utf-8", "surrogatepass"))
                tally.case(f"case {number} of seed {seed}: {text[:500]!r}", lambda: _valid(path, environ))
        finally:
            os.chdir(here)
    return tally


def _valid(path: Path, environ: dict[str, str]) -> bool:
    row = _row(path.stem, path)
    if set(row) != {"name", "target", "draft", "policy", "description", "path"}:
        raise AssertionError(row)
    resolved = resolve(path.stem, environ=environ, trust_remote_code=True)
    annotated(resolved)
    if resolved.profile.draft is not None:
        for level in resolved.profile.draft.levels:
            level.policy.setting.build().reset()
    return True


if __name__ == "__main__":
    main(fuzz, "Mutated profiles.")
