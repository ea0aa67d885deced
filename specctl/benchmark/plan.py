"""The plan of a benchmark. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import UsageError
from specctl.observing.candidates import Candidates
from specctl.observing.results import Header, of_request
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite
from specctl.text_engine.row_count import Batch


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a benchmark: candidates, prompts, lengths and repeats."""

    profile: Profile  # source of the sampling and prompt tables
    candidates: Candidates  # peers included
    suite: Suite  # the prompts
    lengths: Sequence[int]  # token limits; every prompt is run to each of them
    repeats: int = 1  # runs per prompt and length
    oracle: bool = False  # whether to compute the bounds of greedy decoding
    # where the papers' policies are compared, which of them the pair cannot run, and why
    papers: Mapping[str, str] | None = None
    batch: Batch = 1  # batch size: prompts that each candidate runs at once

    def runs(self, candidates: int) -> int:
        """The number of runs for a number of candidates."""
        return len(self.suite.prompts) * candidates * len(self.lengths) * self.repeats

    @property
    def tokens(self) -> int:
        """The most tokens that all runs can generate."""
        return len(self.suite.prompts) * len(self.candidates.all) * sum(self.lengths) * self.repeats


def require_same(old: Header, plan: Plan, path: Path) -> None:
    """Raise UsageError if a results file belongs to another benchmark."""
    wanted = {
        **of_request(plan.profile, plan.suite),
        "candidates": [one for one in plan.candidates.all if one.engine is None],
        "lengths": list(plan.lengths),
        "repeats": plan.repeats,
        # A file continues with its own batch size, because the requested one may not have been possible.
        **({} if old.batch == 1 or plan.batch == "auto" else {"batch": min(plan.batch, len(plan.suite.prompts))}),
    }
    # Eager candidates are chosen when the models are loaded, so the plan lacks them; those in the file continue.
    found = {name: getattr(old, name) for name in wanted}
    found["candidates"] = [one for one in old.candidates if one.engine is None]
    for name, value in wanted.items():
        if found[name] != value:
            raise UsageError(
                f"{path} holds another benchmark: not the same {name}",
                "resume with the same options, or start a new file",
            )
