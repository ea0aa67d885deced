"""A profile's table of one checkpoint and where it runs."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from specctl.errors import UsageError
from specctl.plugins import DRAFTER
from specctl.profile.base_tables import Table
from specctl.profile.known_names import EMBEDDED, known_device, known_model, model_path

IN_TARGET = "target:mtp"
"""The model name of a draft head that is in the files of the model above it."""
LOOKUP = "prompt:lookup"
"""The model name of a draft that copies from the text so far."""


def sources(model: object) -> tuple[object, bool]:
    """The model of a draft, and whether it is in a chain with a lookup, as `prompt:lookup+MODEL` or a list of both say.

    Raises:
        ValueError: a list or such a text is not a lookup and one model.
    """
    names = _parts(model) if isinstance(model, str) else model
    if not isinstance(names, list) or names == [model]:
        return model, False
    form = f'a chain is two sources, a lookup and one model: ["{LOOKUP}", MODEL]'
    if not names or "" in names:
        raise ValueError(f"names no {'draft' if not names else 'model'}; {form}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice} twice; {form}")
    if names == [LOOKUP]:
        raise ValueError(f"names a lookup alone; without a model it is not a chain: model = '{LOOKUP}'")
    if (
        len(names) != 2
        or LOOKUP not in names
        or not all(isinstance(name, str) and _parts(name) == [name] for name in names)
    ):
        raise ValueError(f"is {names}; {form}; a model that drafts for another is in a [draft.draft] table")
    return next(name for name in names if name != LOOKUP), True


def _parts(name: str) -> list[str]:
    """What a text names that a lookup may stand before and behind: the model between, and each lookup."""
    behind = name.removeprefix(f"{LOOKUP}+")
    between = behind.removesuffix(f"+{LOOKUP}")
    return [*([LOOKUP] if behind != name else []), between, *([LOOKUP] if between != behind else [])]


def unchained(table: dict[str, Any]) -> dict[str, Any]:
    """A draft's table with the model of a chain and ``lookup`` apart; as it is where there is none, or a wrong one."""
    try:
        model, chained = sources(table.get("model"))
    except ValueError:
        return table
    return {**table, "model": model, "lookup": True} if chained else table


class ModelTable(Table):
    """One checkpoint and where it runs.

    ``model`` is a hub id, a path, or ``embedded:NAME`` for a model that ships with the package.
    """

    model: Annotated[str, Field(min_length=1), AfterValidator(known_model)]
    revision: str | None = None
    device: Annotated[str, AfterValidator(known_device)] | dict[str, int | str] = "auto"
    """``auto``, a device such as ``cuda:1`` or ``cpu``, an accelerate strategy, or a device_map table."""
    max_memory: dict[str, str] | None = None
    """Memory cap per device for a device_map, e.g. ``{0 = "20GiB", cpu = "60GiB"}``."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """A folder or hub id of a LoRA adapter, whose changes are added to the weights when the model is loaded."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantize: Literal["int8", "int4", "fp8", "nf4", "fp4"] | None = None
    """How the weights of linear layers are quantised while they are loaded; None to load them as they are."""
    shards: Annotated[int, Field(ge=2)] | None = None
    """Over how many cards the model is split, the first ones of the machine; None for where ``device`` says."""
    placement: Literal["tensor", "pipeline", "spread"] | None = None
    """How it is split: ``tensor`` (the default), a part of every layer on each card, which work at the same time;
    ``pipeline``, some of the layers on each, a process for each card; ``spread``, the same in one process."""
    trust_remote_code: bool = False

    @field_validator("shards")
    @classmethod
    def _on_the_first_cards(cls, shards: int | None, info: ValidationInfo) -> int | None:
        for key, plain in (("device", ("auto", "cpu")), ("max_memory", (None,))):
            if shards is not None and (value := info.data.get(key)) not in plain:
                raise ValueError(f"excludes {key} = {value!r}: shards go to the first cards, one each")
        return shards

    @field_validator("shards")
    @classmethod
    def _in_one_process(cls, shards: int | None, info: ValidationInfo) -> int | None:
        if shards is not None and info.data.get("adapter") is not None:
            raise ValueError(
                'excludes adapter: changes are added to a model in one process; device = "balanced" is one'
            )
        return shards

    @field_validator("adapter")
    @classmethod
    def _of_a_checkpoint(cls, adapter: str | None, info: ValidationInfo) -> str | None:
        model = str(info.data.get("model", ""))
        if adapter is not None and (model in (LOOKUP, IN_TARGET) or model.startswith(DRAFTER)):
            raise ValueError(f"is for a model with files of its own, and {model} has none")
        return adapter

    @field_validator("placement")
    @classmethod
    def _of_shards(cls, placement: str | None, info: ValidationInfo) -> str | None:
        if placement is not None and info.data.get("shards", True) is None:
            raise ValueError("needs shards, the number of cards")
        return placement

    @property
    def splits(self) -> bool:
        """Whether the model is split over processes, one for each card."""
        return self.shards is not None and self.placement != "spread"

    @property
    def full_name(self) -> str:
        """What names it in reports: its model, and what it is changed by."""
        return self.model if self.adapter is None else f"{self.model} with {self.adapter}"

    @property
    def is_lookup(self) -> bool:
        """Whether it copies from the text so far and has no checkpoint."""
        return self.model == LOOKUP

    @property
    def is_registered(self) -> bool:
        """Whether it is a drafter that another distribution registers, which has no checkpoint of its own."""
        return self.model.startswith(DRAFTER)

    @property
    def has_files(self) -> bool:
        """Whether it has a checkpoint."""
        return not (self.is_lookup or self.is_registered)

    @property
    def checkpoint(self) -> str:
        """The hub id or path to load; absolute for a model that ships with the package."""
        if self.model.startswith(EMBEDDED):
            return str(model_path(self.model.removeprefix(EMBEDDED)).absolute())
        return self.model


def require_whole(table: ModelTable, key: str, purpose: str) -> None:
    """Raise UsageError if a model is split over processes; ``purpose`` is what reads it without their help."""
    if table.splits:
        raise UsageError(
            f"{purpose} reads the {key} model itself, of which each process has a share",
            f'set {key}.placement = "spread", or leave its shards out',
        )
