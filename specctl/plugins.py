"""Stopping policies and drafters that other distributions register by entry points.

The entry points are ``[project.entry-points."specctl.policies"]`` and ``[project.entry-points."specctl.drafters"]``.
They are loaded when a name is looked up that does not ship with the program, or when all names are listed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Generic, TypeVar

from specctl.errors import SpecctlError, reason

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Item = TypeVar("Item")
DRAFTER = "drafter:"  # How the model name of a registered drafter begins, in profiles and flags
_NAME = re.compile(r"[a-z0-9][a-z0-9+._-]*", re.I)


class Registry(MutableMapping[str, Item], Generic[Item]):
    """Items by name: those shipped with the program, then those registered in this environment.

    Args:
        what: the kind of item, for messages.
        own: shipped items, whose names are reserved.
        group: the entry points of the others.
        check: makes an item of a loaded object, or raises ValueError with what is wrong.
        unlisted: items found by name but not listed.
    """

    def __init__(
        self,
        what: str,
        own: Mapping[str, Item],
        group: str,
        check: Callable[[object], Item],
        unlisted: Mapping[str, Item] | None = None,
    ) -> None:
        self._what, self._group, self._check = what, group, check
        self._own, self._unlisted = dict(own), unlisted or {}
        self._added: dict[str, Item] = {}
        self._broken: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        self._looked = False

    def __getitem__(self, name: str) -> Item:
        for known in (self._own, self._unlisted):
            if name in known:
                return known[name]
        return self._registered()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._registered()

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._registered()

    def __len__(self) -> int:
        return len(self._own) + len(self._registered())

    def __setitem__(self, name: str, item: Item) -> None:
        self._own[name] = item

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    @property
    def broken(self) -> Mapping[str, str]:
        """The reason for each unusable item, by name: a sentence without its full stop."""
        self._registered()
        return self._broken

    def origin(self, name: str) -> str | None:
        """The distribution of a registered name, with its version; None for shipped items."""
        if name in self._own or name in self._unlisted:
            return None
        self._registered()
        return self._origins.get(name)

    def refresh(self) -> None:
        """Reload at the next lookup, to find distributions installed meanwhile."""
        self._added, self._broken, self._origins, self._looked = {}, {}, {}, False

    def _registered(self) -> Mapping[str, Item]:
        if not self._looked:
            self._looked = True  # first, because a module that is loaded may look up names too
            from importlib.metadata import entry_points  # slow to import, and rarely needed

            for entry in sorted(entry_points(group=self._group), key=lambda entry: (entry.name, _origin(entry))):
                self._load(entry)
        return self._added

    def _load(self, entry: "EntryPoint") -> None:
        name, origin = entry.name, _origin(entry)
        try:
            if not _NAME.fullmatch(name) or name == "all":
                raise ValueError("its name must be letters, digits, +, ., _ and -, and not 'all'")
            if name in self._own or name in self._unlisted:
                raise ValueError("specctl has one of this name")
            if (first := self._origins.get(name)) is not None:
                raise ValueError(f"{first} has one of this name")
            self._added[name] = self._check(entry.load())
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {reason(error)}"
            self._broken[name] = f"the {self._what} {name} of {origin} cannot be used: {what.rstrip('.')}"
        else:
            self._origins[name] = origin


class PluginError(SpecctlError):
    """Code of another distribution failed."""

    def __init__(self, what: str, doing: str, error: Exception) -> None:
        said = reason(error)
        super().__init__(
            f"{what} failed in {doing}: {type(error).__name__}{f': {said}' if said else ''}",
            "Ask its authors, or use another one; SPECCTL_DEBUG=1 shows where it happened.",
        )


def _origin(entry: "EntryPoint") -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _factory(found: object) -> Callable[[int, str], object]:
    if not callable(found):
        raise ValueError(f"{found!r} is not a class or function that makes a drafter")
    return found


DRAFTERS: Registry[Callable[[int, str], object]] = Registry("drafter", {}, "specctl.drafters", _factory)
"""Every registered drafter: called with the vocabulary's size V and the text after its name, it makes an object with
the method ``logits`` (`specctl.models.running.registered.NextTokens`)."""
