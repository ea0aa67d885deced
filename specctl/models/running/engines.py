"""The runner for a model and an engine setting."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from specctl.errors import ModelError
from specctl.models.passes.masks import attends_to_everything
from specctl.models.passes.weights import device_of
from specctl.models.running.checked import CheckedRunner
from specctl.models.running.fixed_width import FixedWidthRunner
from specctl.models.running.runner import Runner
from specctl.profile.schema import Engine, Profile

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.passes.compilation import Compiler
    from specctl.models.running.eager import EagerRunner

LONG_RUN = 50_000
"""Compiling pays from this many tokens to generate, even for small models."""

GRAPHS_MEASURED = False
"""Whether ``auto`` is the graph engine on CUDA. Until a run on a device has shown that it is right and faster there,
``auto`` stays eager, and `engine_report` says what it would have been."""

UNMEASURED = 'graph would be chosen; not yet measured on a device: set engine = "graph"'
"""Why ``auto`` is eager on CUDA."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine that a profile and a command ask for.

    Attributes:
        engine, compile, deterministic, check: as in the profile.
        trees: whether the target is to read trees, where its engine has to be made for it.
        draft_trees: whether draft models are to read them too.
        expected_tokens: how many will be generated in all, as far as is known.
        notice: called with one line when a setting cannot be honoured.
        progress: called with what is being prepared.
        most_threads: how many threads an engine of its own may try on the CPU; None where it takes torch's number.
        in_step: whether other processes run the same passes with other shares of the model, so that a pass that can
            only be run in another way than theirs is an error.
    """

    engine: Engine = "auto"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    check: bool = False
    expected_tokens: int = 0
    notice: Say = lambda _: None
    progress: Say = lambda _: None
    trees: bool = False
    most_threads: int | None = None
    draft_trees: bool = False
    in_step: bool = False

    @classmethod
    def of(
        cls, profile: Profile, expected_tokens: int = 0, notice: Say = lambda _: None, progress: Say = lambda _: None
    ) -> "EngineSettings":
        kinds = profile.engine, profile.compile, profile.deterministic, profile.check
        grows = profile.draft is not None and profile.draft.tree is not None
        trees = grows or (profile.draft is not None and profile.draft.leaves is not None)
        return cls(*kinds, expected_tokens, notice, progress, trees, draft_trees=grows)

    @property
    def compiles(self) -> bool:
        return self.compile is True or (self.compile == "auto" and self.expected_tokens >= LONG_RUN)


def build_runner(model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> Runner:
    """The fastest runner that the settings allow and the model supports.

    Args:
        model: in eval mode, on its device or devices.
        vocabulary: the pair's shared vocabulary.
        name: the model's, in messages.
        settings: which engine, and whether to compile.
    """
    device = device_of(model)
    asked, settings = settings.engine, replace(settings, engine=engine_on(device, settings.engine))
    if settings.engine == "eager" or (settings.engine == "auto" and not settings.compiles):
        return eager(model, vocabulary)
    # Imported here because a single prompt needs none of it.
    from specctl.models.running.static import StaticRunner, obstacle

    if why := obstacle(model):
        if asked != "auto" or settings.compile is True:
            settings.notice(f"{name} runs eagerly: {why}")
        return eager(model, vocabulary)
    compiler = compiler_for(device, name, settings)
    if settings.engine == "graph":
        if device.type == "cuda":
            from specctl.models.passes.cuda_capture import CudaCapture
            from specctl.models.running.graph import GraphRunner

            compiled = compiler if settings.compile is True else None
            return GraphRunner(
                model,
                vocabulary,
                CudaCapture(device),
                name=name,
                compiler=compiled,
                notice=settings.notice,
                progress=settings.progress,
            )
        settings.notice(f"{name} runs on the static engine: graphs need a CUDA device, and it is on {device}")
    if settings.engine == "auto" and compiler is None:
        return eager(model, vocabulary)
    return StaticRunner(model, vocabulary, compiler=compiler)


def eager(model: "PreTrainedModel", vocabulary: int) -> "EagerRunner":
    """The runner of the eager engine, which is imported here: other engines need nothing of transformers."""
    from specctl.models.running.eager import EagerRunner

    return EagerRunner(model, vocabulary)


def engine_on(device: "torch.device", engine: Engine) -> Engine:
    """The engine that is meant on a device: ``auto`` may be the graph engine on CUDA."""
    return "graph" if engine == "auto" and GRAPHS_MEASURED and device.type == "cuda" else engine


def fixed_width(runner: Runner, model: "PreTrainedModel") -> FixedWidthRunner:
    """A verifier whose logits do not depend on how many tokens it verifies at once.

    Raises:
        ModelError: the model has layers that cannot be rolled back to the start of a block.
    """
    if not attends_to_everything(model):
        raise ModelError(
            "The target cannot verify deterministically: it has layers with a sliding window or with a state of their "
            "own.",
            "Set deterministic = false.",
        )
    return FixedWidthRunner(runner)


def checked(runner: Runner, model: "PreTrainedModel", vocabulary: int, name: str) -> CheckedRunner:
    """A target that is compared once with a fresh read, by eager passes, after its first rejected token."""
    return CheckedRunner(runner, lambda: eager(model, vocabulary), name)


def eager_twin(runner: Runner, model: "PreTrainedModel", vocabulary: int) -> Runner:
    """A runner of the eager engine with a cache of its own, under the same rules and widths as another one.

    Args:
        runner: of the same model.
        model: with its weights.
        vocabulary: the pair's shared vocabulary.
    """
    return runner.same_around(eager(model, vocabulary))


def engine_report(runner: Runner, asked: Engine) -> str:
    """A runner's engine, and what ``auto`` would have been on CUDA if that had been measured.

    Args:
        runner: any.
        asked: the profile's engine.
    """
    name = runner.engine
    if asked != "auto" or GRAPHS_MEASURED or runner.device.type != "cuda" or runner.captures:
        return name
    return name if _captures_nothing(runner) else f"{name} ({UNMEASURED})"


def _captures_nothing(runner: Runner) -> bool:
    """Whether a runner's model could not run on the graph engine either."""
    from specctl.models.running.eager import EagerRunner
    from specctl.models.running.static import obstacle

    bare = runner.bare
    return isinstance(bare, EagerRunner) and bool(obstacle(bare.model))


def compiler_for(device: "torch.device", name: str, settings: EngineSettings) -> "Compiler | None":
    """The compiler for a model on a device; None where passes are not to be compiled, or cannot be."""
    if not settings.compiles:
        return None
    from specctl.models.passes.compilation import Compiler, missing_compiler

    if missing := missing_compiler(device):
        settings.notice(f"{name} runs uncompiled: {missing}")
        return None
    return Compiler(name, settings.notice, settings.progress, must=settings.in_step)
