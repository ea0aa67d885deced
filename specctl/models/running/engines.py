"""What an engine is, and how a person asks for one."""

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
    """The engine that a profile and a command ask for."""

    # engine, compile, deterministic, check: as in the profile
    engine: EngineName = "auto"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    check: bool = False
    expected_tokens: int = 0  # how many will be generated in all, as far as is known
    notice: Say = lambda _: None  # called with one line when a setting cannot be honoured
    progress: Say = lambda _: None  # called with what is being prepared
    trees: bool = False  # whether models are to read trees, where their engine has to be made for it
    # how many threads an engine of its own may try on the CPU; None where it takes torch's number
    most_threads: int | None = None
    # whether other processes run the same passes with other shares of the model, so that a pass that can only be run in
    # another way than theirs is an error
    in_step: bool = False
    rounding: str | None = None  # of one model, how the engine itself is to quantise it; None where it is not
    keeps: bool = True  # of one model, whether torch's weights stay where torch does not run it
    # of one model, gives its `model_hash`, which may take reading all of them; None where nothing does
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
    """A way to run models, as a profile's ``engine`` names it.

    What it says of a model it says before the model's weights are loaded, too: of a skeleton.
    """

    name: EngineName  # in profiles and reports
    does: str  # what happens to a model that another engine hands over to this one, to follow the model's name
    instead: EngineName = "eager"  # the engine that runs what this one cannot; ``auto`` for the choice without a wish
    tried: bool = False  # whether its `build` may find that the model has to run by `instead`
    captures: bool = False  # whether it captures passes, those of draft heads next to it too
    compiles_heads: bool = True  # whether those may be compiled
    spare: float = 1.25  # how many times as many tokens as they hold its buffers have room for right after they grew
    kept: int = 0  # bytes that it keeps on a CUDA device for one model, besides weights and cache
    making: float = 0.0  # memory that it takes once to make what it runs, as a multiple of the weights next to them
    # values of ``quantize`` that it has forms of its own for, so that the model is loaded whole
    forms: tuple[str, ...] = ()

    def require(self) -> None:  # noqa: B027 - most have what they need
        """Raise a ModelError if a package is missing without which it runs nothing."""

    def compiles(self, settings: EngineSettings) -> bool:  # noqa: ARG002 - for those that do
        """Whether its passes are to be compiled."""
        return False

    @abstractmethod
    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        """Why it cannot run a model, as the end of a sentence; None if it can."""

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:  # noqa: ARG002
        """Why it is taken where no engine is asked for, in a few words; None where it is not."""
        return None

    @abstractmethod
    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> Slot | None:
        """The runner of a model that it can run.

        Args:
            model: in eval mode, on its device or devices.
            vocabulary: the pair's shared vocabulary.
            name: the model's, in messages.
            settings: as a command asks for them.

        Returns:
            None where it is `tried` and has found that it cannot or should not run the model.
        """


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that runs a model."""

    engine: Engine  # it
    why: str  # in a few words
    compiles: bool = False  # whether its passes are compiled
    said: tuple[str, ...] = ()  # the settings that cannot be honoured, each to follow the model's name
    # what runs the model where the engine, once tried, cannot or should not; None for one that is not
    otherwise: "Choice | None" = None
    asked: bool = False  # whether a person asked for the engine

    @property
    def name(self) -> str:
        """Its engine as reports name it; two where they are tried against each other."""
        name = f"{self.engine.name}, compiled" if self.compiles else self.engine.name
        return name if self.otherwise is None or self.asked else f"{name} or {self.otherwise.name}"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> Slot | None:
        """As of `Engine`, after a notice of what cannot be honoured."""
        for line in self.said:
            settings.notice(f"{name} {line}")
        return self.engine.build(model, vocabulary, name, replace(settings, compile=self.compiles))


def eager(model: "PreTrainedModel", vocabulary: int) -> Slot:
    """The runner of the eager engine, which is imported here: other engines need nothing of transformers."""
    from specctl.models.running.eager import EagerPasses
    from specctl.models.running.rotating import rotating

    return rotating(EagerPasses(model, vocabulary), model)


def require_fixed_width(model: "PreTrainedModel") -> None:
    """Raise a ModelError if a target's logits cannot be made independent of how many tokens it verifies at once.

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
    """A verifier whose logits do not depend on how many tokens it verifies at once.

    Raises:
        ModelError: see `require_fixed_width`.
    """
    require_fixed_width(model)
    return Slot(FixedWidthPasses(runner))


def checked(runner: Slot, model: "PreTrainedModel", vocabulary: int, name: str) -> Slot:
    """A target that is compared once with a fresh read, by eager passes, after its first rejected token."""
    return Slot(CheckedPasses(runner, lambda: eager(model, vocabulary), name))


def engine_report(runner: Slot) -> str:
    """A runner's engine, and which tokens a draft with another tokenizer drafts."""
    return runner.engine if runner.translates is None else f"{runner.engine} ({runner.translates})"


def compiler_for(name: str, settings: EngineSettings) -> "Compiler | None":
    """The compiler for a model that can be compiled; None where its passes are not to be."""
    if not settings.compiles:
        return None
    from specctl.models.passes.compilation import Compiler

    return Compiler(name, settings.notice, settings.progress, must=settings.in_step)
