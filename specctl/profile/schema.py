"""What a profile may say: the typed tables of a profile file."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from specctl.errors import ProfileError
from specctl.models.embedded import model_path
from specctl.policies import POLICIES, StoppingPolicy

SCHEMA_VERSION = 1
DEFAULT_POLICY = "svip"

_EMBEDDED = "embedded:"
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu")


def _known_device(device: str) -> str:
    kind, _, index = device.partition(":")
    if device in _STRATEGIES or (kind in _DEVICES and (device == kind or index.isdecimal())):
        return device
    raise ValueError(f"must be {', '.join(_STRATEGIES)}, or a device such as {', '.join(_DEVICES)} or cuda:1")


def _known_model(model: str) -> str:
    if model.startswith(_EMBEDDED):
        try:
            model_path(model.removeprefix(_EMBEDDED))
        except ProfileError as error:
            raise ValueError(f"cannot be: {error.message}") from error
    return model


class Table(BaseModel):
    """A TOML table: unknown keys are mistakes, values are not coerced between types, results are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelTable(Table):
    """One checkpoint and where it runs.

    ``model`` is a hub id, a path, or ``embedded:NAME`` for a model that ships with the package.
    """

    model: Annotated[str, Field(min_length=1), AfterValidator(_known_model)]
    revision: str | None = None
    device: Annotated[str, AfterValidator(_known_device)] | dict[str, int | str] = "auto"
    """``auto``, a device such as ``cuda:1`` or ``cpu``, an accelerate strategy, or a device_map table."""
    max_memory: dict[str, str] | None = None
    """Memory cap per device for a device_map, e.g. ``{0 = "20GiB", cpu = "60GiB"}``."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    trust_remote_code: bool = False

    @property
    def checkpoint(self) -> str:
        """The hub id or path to load; absolute for a model that ships with the package."""
        if self.model.startswith(_EMBEDDED):
            return str(model_path(self.model.removeprefix(_EMBEDDED)).absolute())
        return self.model


class PolicyTable(Table):
    """A stopping policy by name, with its settings as further keys; they are checked by the policy's own dataclass."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = DEFAULT_POLICY

    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def build(self) -> StoppingPolicy:
        """A fresh policy object."""
        return POLICIES[self.name](**self.settings())


class DraftTable(ModelTable):
    """A draft model with the policy that stops it and, in a hierarchy, the faster model that drafts for it."""

    policy: PolicyTable = PolicyTable()
    draft: "DraftTable | None" = None


class SamplingTable(Table):
    """How tokens are drawn. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filter off."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    seed: Annotated[int, Field(ge=0)] = 0
    stop: list[Annotated[str, Field(min_length=1)]] = []


class PromptTable(Table):
    """How a prompt becomes tokens: raw text, or through the tokenizer's chat template."""

    chat: bool = False
    system: str | None = None


class Profile(Table):
    """A model pair, its policy and its settings."""

    schema_version: Literal[1] = 1
    description: str = ""
    engine: Literal["auto", "eager", "static", "graph"] = "auto"
    """How forward passes run: ``eager``, any model over a cache that grows; ``static``, over a cache at fixed
    addresses; ``graph``, that captured as CUDA graphs. ``auto`` is ``static`` where passes are compiled, else
    ``eager``. What a model or a machine cannot do falls back, with a line that says so."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch.compile makes the passes of the static engine faster, once and for minutes; ``auto`` for long runs
    alone."""
    deterministic: bool = False
    """Verify in passes of one shape, so that greedy output is the same bit for bit whatever the policy, in every dtype;
    slower."""
    target: ModelTable
    draft: DraftTable | None = None
    sampling: SamplingTable = SamplingTable()
    prompt: PromptTable = PromptTable()
    provenance: dict[str, Any] | None = None

    @field_validator("compile")
    @classmethod
    def _compiled_engine(cls, compile: bool | str, info: ValidationInfo) -> bool | str:  # noqa: A002 - the key's name
        if compile is True and info.data.get("engine") == "eager":
            raise ValueError('needs engine = "static", "graph" or "auto"; eager passes are not compiled')
        return compile
