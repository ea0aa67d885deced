"""`specctl calibrate --tokens`: how many tokens a draft should be able to write."""

import json
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from specctl.errors import UsageError
from specctl.models.files.token_counts import TokenCounts
from specctl.models.loading.assembly import load_pair
from specctl.profile import resolve
from specctl.replay.recording import metering as costs
from tests.support.invoked import invoke

PROMPTS = [
    {"id": name, "prompt": text} for name, text in (("kite", "Tom had a red kite."), ("dog", "Sam saw a big dog."))
]

calibrate = partial(invoke, "calibrate")


@pytest.fixture(scope="module", autouse=True)
def rough_costs() -> Iterator[None]:
    """Measure costs in a twentieth of the passes; no test reads their values."""
    with patch.multiple(costs, LENGTHS=(0, 1), IN_A_ROW=2, ALONE=2, WARMING=1, PASSES=costs.WARM_UPS + 1):
        yield


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return path


SMALL = ("-n", 8, "--samples", 1, "--policy", "constant", "--grid", "paper", "--no-verify", "--engine", "eager")


@pytest.mark.slow
def test_each_number_is_calibrated_and_the_tokens_are_counted(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "fast.toml"
    shown = calibrate("-i", prompts, *SMALL, "--tokens", "64, all", "-o", output, "--json")
    document = json.loads(shown.stdout)
    assert list(document["profiles"]) == ["embedded, 64 tokens", "embedded, all tokens"]
    counts = TokenCounts.read(tmp_path / "fast.counts.json")
    assert sum(counts.counts.values()) == 16, "two texts of eight tokens"
    best = document["side_by_side"][0]["profile"]
    table = tomllib.loads(output.read_text(encoding="utf-8"))["draft"]
    assert table.get("tokens") == (64 if best == "embedded, 64 tokens" else None)
    found = resolve(str(output)).profile
    assert found.draft is not None
    assert found.draft.token_counts == (str(tmp_path / "fast.counts.json") if table.get("tokens") else None)


@pytest.mark.slow
def test_a_profile_of_few_tokens_learns_which(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "fast.toml"
    calibrate("-i", prompts, *SMALL, "--set", "draft.tokens=40", "-o", output, "-q")
    found = resolve(str(output), overrides=["engine=eager"]).profile
    counts = TokenCounts.read(tmp_path / "fast.counts.json")
    vocabulary = load_pair(found).drafts[0].draft_vocabulary
    assert vocabulary is not None
    assert set(counts.counts) <= set(vocabulary.ids.tolist())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", "some"), "neither a number nor all"),
        (("--tokens", "all,-3"), "neither a number nor all"),
        (("--tokens", "all,all"), "named twice"),
        (("--tokens", "all", "--set", "draft.tokens=9"), "sets draft.tokens"),
        (("--tokens", "9", "--against", "embedded-svip"), "use either"),
        (("--tokens", "9", "--trace", "trace.jsonl"), "--tokens cannot be combined with"),
    ],
)
def test_what_makes_no_sense(flags: tuple[str, ...], message: str, prompts: Path) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate("-i", prompts, *SMALL, *flags)
