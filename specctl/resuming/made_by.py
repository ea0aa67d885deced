"""What decides the lines of a file of results: models by their content, settings, and how prompts are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from specctl import __version__
from specctl.errors import ModelError
from specctl.models.loading.contents import Contents
from specctl.profile.schema import DraftTable, Profile

FILES = "files"
_SPEED = {
    "device",
    "max_memory",
    "shards",
    "placement",
    "trust_remote_code",
    "revision",
    "model",
    "adapter",
    "head",
    "draft",
}
"""Keys of a model's table that decide no text, or stand for files that are compared themselves."""


@dataclass(frozen=True, slots=True)
class MadeBy:
    """What a run's results come from. Values are JSON values, by the dotted keys of a profile or the names of flags.

    Attributes:
        decides: what decides the text and the fields of a line.
        drafting: the draft's settings, its policy included, which decide draws and no greedy text.
        names: of models and heads, by key.
        hashes: of their files' content, by key; a key is missing where the files are not on this machine.
        drawn: whether tokens are drawn.
    """

    decides: Mapping[str, Any]
    drafting: Mapping[str, Any]
    names: Mapping[str, str]
    hashes: Mapping[str, str]
    drawn: bool

    @classmethod
    def of(cls, profile: Profile, **flags: Any) -> Self:
        """What a profile and flags about lines make."""
        sampling = profile.sampling.model_dump(mode="json", exclude={"verification"})
        decides = {
            "specctl": __version__,
            "generation_config": profile.generation_config,
            **{f"target.{key}": value for key, value in _settings(profile.target.model_dump(mode="json")).items()},
            **{f"sampling.{key}": value for key, value in sampling.items()},
            **{f"prompt.{key}": value for key, value in profile.prompt.model_dump(mode="json").items()},
            **flags,
        }
        drafting = {"sampling.verification": profile.sampling.verification}
        names = {"target": profile.target.full_name}
        at_work = profile.draft.at_work() if profile.draft is not None else None
        levels: tuple[DraftTable, ...] = at_work.levels if at_work is not None else ()
        for depth, level in enumerate(levels, start=1):
            key = ".".join(["draft"] * depth)
            names[key] = level.full_name
            if level.head is not None:
                names[f"{key}.head"] = level.head
            drafting |= {f"{key}.{name}": each for name, each in _settings(level.model_dump(mode="json")).items()}
        try:
            hashes = Contents.of(profile.model_copy(update={"draft": at_work})).hashes()
        except (ModelError, OSError):  # whoever loads the models says why, or has them on another machine
            hashes = {}
        return cls(decides, drafting, names, hashes, profile.sampling.temperature > 0)

    def differing(self, earlier: "MadeBy") -> list[str]:
        """What decides the text and differs from an earlier run, a sentence each."""
        found = list(_differing(earlier.decides, self.decides))
        found += self._model_differing(earlier, "target")
        return [*found, *self._drafting_differing(earlier)] if self.drawn and earlier.drawn else found

    def differing_otherwise(self, earlier: "MadeBy") -> list[str]:
        """What differs from an earlier run without consequences for the text."""
        return [] if self.drawn or earlier.drawn else list(self._drafting_differing(earlier))

    def _drafting_differing(self, earlier: "MadeBy") -> Iterator[str]:
        yield from _differing(earlier.drafting, self.drafting)
        for key in {**earlier.names, **self.names}:
            if key != "target":
                yield from self._model_differing(earlier, key)

    def _model_differing(self, earlier: "MadeBy", key: str) -> Iterator[str]:
        old, new = earlier.names.get(key), self.names.get(key)
        hashes = earlier.hashes.get(key), self.hashes.get(key)
        if None not in hashes and hashes[0] == hashes[1]:
            return  # the same files, wherever they are
        if old != new:
            yield f"{key} was {_shown(old)} and is {_shown(new)}"
        elif None not in hashes:
            yield f"{key}: the files of {new} have changed"

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        models = {
            key: {"name": name} | ({FILES: self.hashes[key]} if key in self.hashes else {})
            for key, name in self.names.items()
        }
        return {"models": models, "drawn": self.drawn, "decides": dict(self.decides), "drafting": dict(self.drafting)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """What `as_dict` made; raises TypeError, KeyError or AttributeError for anything else."""
        models = found["models"]
        names = {key: model["name"] for key, model in models.items()}
        hashes = {key: model[FILES] for key, model in models.items() if FILES in model}
        return cls({**found["decides"]}, {**found["drafting"]}, names, hashes, bool(found["drawn"]))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}"


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _SPEED}


def _shown(value: Any) -> str:
    if isinstance(value, dict):  # a policy
        return ", ".join([str(value.get("name")), *(f"{key} {each}" for key, each in value.items() if key != "name")])
    return "not set" if value is None else value if isinstance(value, str) and value else repr(value)
