"""Which settings a calibration compares: the profile's own, those that may be chosen, and those beside them."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from specctl.calibration.ascent import Space
from specctl.calibration.grids import Grid, grid, level_grids, with_heads
from specctl.errors import UsageError
from specctl.models.loading.head_checkpoint import CONFIG
from specctl.policies import NONE, Setting
from specctl.profile.schema import DraftTable


@dataclass(frozen=True, slots=True)
class Contest:
    """Settings of one draft, or of all drafts of a hierarchy.

    Attributes:
        old: the profile's own.
        candidates: that may be chosen, one by one.
        rivals: that are ranked beside them.
        space: of a hierarchy, whose combinations are too many to go through.
    """

    old: Setting
    candidates: list[Setting]
    rivals: list[Setting]
    space: Space | None

    @property
    def depth(self) -> int:
        """The longest draft at any level."""
        levels = (one for some in (self.space.fine if self.space is not None else ()) for one in some)
        return max(one.longest_draft for one in (self.old, *self.candidates, *self.rivals, *levels))

    def most(self, old: Setting | None) -> int:
        """No fewer settings than a search replays.

        Args:
            old: the profile's own; None where it cannot be replayed.
        """
        certain = len(contestants(self.candidates, old, self.rivals))
        return certain + (self.space.most if self.space is not None else 0)


def contest(draft: DraftTable, policy: str | None, kind: Grid, heads: Sequence[str], recorded: Set[str]) -> Contest:
    """The contest that a profile and the options of a calibration ask for.

    Args:
        draft: the profile's, its head the first of ``heads`` where these are given.
        policy: whose settings are wanted, or ``all``; with commas for each level; without it the profile's own, or
            where there are heads to choose among ``specdec++``.
        kind: how fine.
        heads: of a single draft, to choose among.
        recorded: the signals that a trace has, or can have.

    Raises:
        UsageError: there is no such policy, there are not so many drafts, or a policy needs a head where there is none.
    """
    names = _policies(policy or ("specdec++" if heads else None), draft)
    known = [recorded if level.head is not None else recorded - {"accept_prob"} for level in draft.levels]
    choices: list[str | None] = [*heads] or [None]
    (old,) = with_heads([draft.setting], choices[:1])
    _require_known([[one] for one in old.levels], known)
    rivals = [] if names == ["all"] else grid("constant", kind, known[0])
    if len(names) == 1 or names[0] == "none":
        candidates = grid(names[0], kind, known[0])
        _require_known([candidates], known)
        return Contest(old, with_heads(candidates, choices), rivals, None)
    fine = level_grids(names, kind, known)
    _require_known(fine, known)
    # All policies' combinations would be too many at once.
    coarse = level_grids(names, "paper", known) if "all" in names and kind == "dense" else fine
    return Contest(old, [], rivals, Space(coarse, fine))


def contestants(candidates: Iterable[Setting], old: Setting | None, rivals: Iterable[Setting] = ()) -> list[Setting]:
    """All that `search` replays in any case, each once."""
    return list(dict.fromkeys([NONE, *candidates, *([old] if old is not None else []), *rivals]))


def heads_in(given: Iterable[str]) -> list[str]:
    """Heads, given one by one or as folders of heads as a sweep leaves one; each once.

    Raises:
        UsageError: a folder holds no head.
    """
    found: list[str] = []
    for name in (name.rstrip("/") or name for name in given):
        inside = sorted(str(config.parent) for config in Path(name).glob(f"*/{CONFIG}"))
        if Path(name).is_dir() and not (Path(name) / CONFIG).exists():
            if not inside:
                raise UsageError(f"{name} holds no head", "name a folder that specctl train-head has written")
            found += inside
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def heads_among(given: Sequence[str], draft: DraftTable) -> list[str]:
    """The heads to choose among, the profile's own first; empty where none was given.

    Raises:
        UsageError: there is more than one draft.
    """
    if given and draft.draft is not None:
        raise UsageError("--head is for one draft, and the profile has several", "name each one's head in the profile")
    own = [draft.head] if given and draft.head is not None else []
    return list(dict.fromkeys([*own, *given]))


def _policies(policy: str | None, draft: DraftTable) -> list[str]:
    """The name of the policy whose settings are wanted, for each level."""
    levels = draft.levels
    if policy is None:
        return [level.policy.name for level in levels]
    names = [name.strip() for name in policy.split(",")]
    if len(names) not in (1, len(levels)):
        drafts = "1 draft" if len(levels) == 1 else f"{len(levels)} drafts"
        raise UsageError(f"--policy names {len(names)} policies for {drafts}", "give one for all, or one for each")
    return names * (len(levels) // len(names))


def _require_known(options: Sequence[Sequence[Setting]], known: Sequence[Set[str]]) -> None:
    """A head's word cannot be had where there is no head; candidates and known signals are those of each level."""
    levels = zip(options, known, strict=False)
    blind = next((one.policy for some, signals in levels for one in some if not one.signals <= signals), None)
    if blind is not None:
        raise UsageError(
            f"{blind} needs a head that foretells acceptance",
            "name it with --set draft.head=PATH; a trace that was recorded without it has to be recorded anew",
        )
