"""The interface of engines, and the settings that select one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from specctl.errors import ModelError
from specctl.models.passes.weights import Where
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import CheckedPasses, FixedWidthPasses
from specctl.profile.schema import Engine as EngineName
from specctl.profile.schema import Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.passes.compilation import Compiler

LONG_RUN = 50_000  # Compiling pays from this many tokens to generate, even for small models

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine settings of a profile and a command."""

    # engine, compile, deterministic, check: as in the profile
    engine: EngineName = "auto"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    check: bool = False
    expected_tokens: int = 0  # expected number of tokens to generate, 0 if unknown
    notice: Say = lambda _: None  # called with one line for a setting that cannot be used
    progress: Say = lambda _: None  # called with the name of what is being prepared
    trees: bool = False  # whether models should read trees, for engines that must be built for that
    # up to how many threads an engine with its own threads may try on the CPU; None for torch's number
    most_threads: int | None = None
    # whether other processes run the same passes with other shards of the model; a pass that cannot run like theirs is
    # then an error
    in_step: bool = False
    # For one model, how the engine itself should quantise it; None for no quantisation by the engine.
    rounding: str | None = None
    keeps: bool = True  # for one model, whether torch's weights stay where torch does not run it
    # for one model, returns its `model_hash`, which may read all files; None without files
    files: Callable[[], str | None] = lambda: None

    @classmethod
    def of(
        cls, profile: Profile, expected_tokens: int = 0, notice: Say = lambda _: None, progress: Say = lambda _: None
    ) -> "EngineSettings":
        kinds = profile.engine, profile.compile, profile.deterministic, profile.check
        trees = profile.draft is not None and profile.draft.tree is not None
        return cls(*kinds, expected_tokens, notice, progress, trees)

    @property
    def compiles(self) -> bool:
        return self.compile is True or (self.compile == "auto" and self.expected_tokens >= LONG_RUN)


class Engine(ABC):
    """A way to run models; profiles select one by ``engine``.

    Its methods about a model also accept a skeleton, before the weights are loaded.
    """

    name: EngineName  # the name in profiles and reports
    does: str  # the effect on a model that another engine hands over, to follow the model's name
    instead: EngineName = "eager"  # the engine for models that this one cannot run; ``auto`` for the default choice
    tried: bool = False  # whether `build` may find that the model must run on `instead`
    captures: bool = False  # whether it captures passes, also those of its draft heads
    compiles_heads: bool = True  # whether those may be compiled
    spare: float = 1.25  # ratio of buffer size to cached tokens right after the buffers grew
    kept: int = 0  # bytes that it holds on a CUDA device for one model, besides weights and cache
    making: float = 0.0  # memory needed once for preparation, as a multiple of the weights, in addition to them
    # values of ``quantize`` that it implements itself, so that the model is loaded whole
    forms: tuple[str, ...] = ()

    def require(self) -> None:  # noqa: B027 - most have what they need
        """Raise a ModelError if a required package is missing."""

    def compiles(self, settings: EngineSettings) -> bool:  # noqa: ARG002 - for those that do
        """Whether its passes will be compiled."""
        return False

    @abstractmethod
    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        """Why it cannot run a model, as the end of a sentence; None if it can."""

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:  # noqa: ARG002
        """Why it is the default for a model, in a few words; None if it is not."""
        return None

    @abstractmethod
    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> Slot | None:
        """The runner of a model that this engine can run.

        Args:
            model: in eval mode, on its device or devices.
            vocabulary: the pair's shared vocabulary.
            name: the model's name for messages.
            settings: the command's settings.

        Returns:
            None if the engine is `tried` and found that it cannot or should not run the model.
        """


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that runs a model."""

    engine: Engine  # the engine
    why: str  # the reason, in a few words
    compiles: bool = False  # whether its passes are compiled
    said: tuple[str, ...] = ()  # notices about settings that cannot be used, each to follow the model's name
    # the choice if the engine, once tried, cannot or should not run the model; None for an engine that is not `tried`
    otherwise: "Choice | None" = None
    asked: bool = False  # whether the user asked for the engine

    @property
    def name(self) -> str:
        """The engine's name for reports; two names where they are compared."""
        name = f"{self.engine.name}, compiled" if self.compiles else self.engine.name
        return name if self.otherwise is None or self.asked else f"{name} or {self.otherwise.name}"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> Slot | None:
        """See `Engine.build`; first issues the notices."""
        for line in self.said:
            settings.notice(f"{name} {line}")
        return self.engine.build(model, vocabulary, name, replace(settings, compile=self.compiles))


def eager(model: "PreTrainedModel", vocabulary: int) -> Slot:
    """The runner of the eager engine, imported lazily: other engines do not need transformers."""
    from specctl.models.running.eager import EagerPasses
    from specctl.models.running.rotating import rotating

    return rotating(EagerPasses(model, vocabulary), model)


def require_fixed_width(model: "PreTrainedModel") -> None:
    """Raise a ModelError if a target's logits must depend on the number of tokens in a verification.

    Args:
        model: loaded, or its skeleton.
    """
    from specctl.models.passes.masks import attends_to_everything
    from specctl.models.passes.rotation import rotation_of

    if rotation_of(model) is not None:
        why = "it rotates positions by the length of the text"
    elif not attends_to_everything(model):
        why = "it has layers with a sliding window or with a state of their own"
    else:
        return
    raise ModelError(f"The target cannot verify deterministically: {why}.", "Set deterministic = false.")


def fixed_width(runner: Slot, model: "PreTrainedModel") -> Slot:
    """A verifier with logits that do not depend on the number of tokens in a verification.

    Raises:
        ModelError: see `require_fixed_width`.
    """
    require_fixed_width(model)
    return Slot(FixedWidthPasses(runner))


def checked(runner: Slot, model: "PreTrainedModel", vocabulary: int, name: str) -> Slot:
    """A target that is compared once with a fresh read by eager passes, after its first rejected token."""
    return Slot(CheckedPasses(runner, lambda: eager(model, vocabulary), name))


def engine_report(runner: Slot) -> str:
    """A runner's engine for reports, and the tokens of a draft with another tokenizer."""
    return runner.engine if runner.translates is None else f"{runner.engine} ({runner.translates})"


def compiler_for(name: str, settings: EngineSettings) -> "Compiler | None":
    """The compiler for a model; None if its passes should not be compiled."""
    if not settings.compiles:
        return None
    from specctl.models.passes.compilation import Compiler

    return Compiler(name, settings.notice, settings.progress, must=settings.in_step)
