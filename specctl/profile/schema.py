"""The typed tables and keys of a profile file."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from specctl.profile.base_tables import DEFAULT_POLICY as DEFAULT_POLICY
from specctl.profile.base_tables import PolicyTable as PolicyTable
from specctl.profile.base_tables import PromptTable as PromptTable
from specctl.profile.base_tables import SamplingTable as SamplingTable
from specctl.profile.base_tables import Table as Table
from specctl.profile.base_tables import Verification as Verification
from specctl.profile.draft_table import LOOKUP_POLICY as LOOKUP_POLICY
from specctl.profile.draft_table import DraftTable as DraftTable
from specctl.profile.model_table import IN_TARGET as IN_TARGET
from specctl.profile.model_table import LOOKUP as LOOKUP
from specctl.profile.model_table import ModelTable as ModelTable

SCHEMA_VERSION = 1
Engine = Literal["auto", "eager", "static", "graph", "onnx"]
COMPILED = ("auto", "static", "graph")
"""The engines whose passes can be compiled."""


class Profile(Table):
    """A model pair, its policy and its settings."""

    schema_version: Literal[1] = 1
    description: str = ""
    engine: Engine = "auto"
    """How forward passes run: ``eager``, any model with a growing cache; ``static``, with a cache at fixed addresses;
    ``graph``, as ``static`` but captured as CUDA graphs; ``onnx``, by onnxruntime. ``auto`` is ``static`` if passes are
    compiled, else ``eager``. An engine that the model or the machine cannot run falls back to a simpler one, with a
    message."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch.compile compiles the passes of the static engine, which takes minutes at the start of a run;
    ``auto`` compiles in long runs only."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """With how many threads passes on the CPU run; ``auto`` measures it once the models are loaded, unless the
    environment or torch was told a number."""
    deterministic: bool = False
    """Verify in passes of one shape, so that greedy output is the same with every policy, in every dtype; slower."""
    check: bool = False
    """Compare the target once, after its first rejected token, with a fresh read of the same text; a difference that
    rounding does not explain is an error. For models of which nothing is known."""
    generation_config: bool = True
    """Whether the rules in the target's generation_config.json about which tokens may follow a text hold, such as its
    repetition penalty and suppressed tokens; for the drafts too. Its sampling settings never do: see ``sampling``."""
    target: ModelTable
    draft: DraftTable | None = None
    sampling: SamplingTable = SamplingTable()
    prompt: PromptTable = PromptTable()
    provenance: dict[str, Any] | None = None

    @field_validator("target")
    @classmethod
    def _a_model(cls, target: ModelTable) -> ModelTable:
        if target.model == IN_TARGET:
            raise ValueError(f"model {IN_TARGET!r} names a draft head in the target's files; give it in [draft]")
        if target.is_lookup:
            raise ValueError(f"model {LOOKUP!r} is a draft that copies from the text; give it in [draft]")
        if target.is_registered:
            raise ValueError(f"model {target.model!r} is a drafter; give it in [draft]")
        return target

    @field_validator("compile")
    @classmethod
    def _compiled_engine(cls, compile: bool | str, info: ValidationInfo) -> bool | str:  # noqa: A002 - the key's name
        engine = info.data.get("engine")
        if compile is True and engine not in COMPILED:
            raise ValueError(f'needs engine = "static", "graph" or "auto"; {engine} passes are not compiled')
        return compile
