"""The engines by name, their descriptions, and the choice of a model's engine, for loading and doctor."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specctl.models.onnx.store import HEAD_CHAINS, MAKING
from specctl.models.passes.weights import Where
from specctl.models.running.engines import LONG_RUN, Choice, Engine, EngineSettings, compiler_for, eager
from specctl.profile.schema import Engine as EngineName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.running.slot import Slot


class EagerEngine(Engine):
    """Runs any model, with a growing cache."""

    name = "eager"
    does = "runs eagerly"
    compiles_heads = False

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:  # noqa: ARG002 - it runs any
        return None

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str:
        from specctl.models.running.static import obstacle

        if why := obstacle(model, where):
            return f"auto; {why}"
        if settings.compiles and (why := where.no_compiler):
            return f"auto; {why}"
        return f"auto; static and compiled in runs of {LONG_RUN:,} tokens or more"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":  # noqa: ARG002
        return eager(model, vocabulary)


class StaticEngine(Engine):
    """Runs over a cache at fixed addresses, so that passes can be compiled."""

    name: EngineName = "static"
    does = "runs on the static engine"
    spare = 1.5

    def compiles(self, settings: EngineSettings) -> bool:
        return settings.compiles

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        from specctl.models.running.static import obstacle

        return obstacle(model, where)

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:
        """Chosen automatically if passes are compiled."""
        if not settings.compiles or where.no_compiler or self.why_not(model, where):
            return None
        return "compile = true" if settings.compile is True else f"auto; for {settings.expected_tokens:,} tokens"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":
        from specctl.models.running.rotating import rotating
        from specctl.models.running.static import StaticPasses

        return rotating(StaticPasses(model, vocabulary, compiler=compiler_for(name, settings)), model)


class GraphEngine(StaticEngine):
    """Like `StaticEngine`, with passes captured as CUDA graphs."""

    name = "graph"
    does = "runs on the graph engine"
    instead = "static"
    captures = True
    kept = 256 * 1024**2

    def compiles(self, settings: EngineSettings) -> bool:
        return settings.compile is True

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        if (why := super().why_not(model, where)) is not None:
            return why
        if where.sharded is not None:
            return "passes of shards are not captured"
        return None if where.device.type == "cuda" else f"graphs need a CUDA device, and it is on {where.device.type}"

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:  # noqa: ARG002
        return "auto" if self.why_not(model, where) is None else None

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":
        from specctl.models.passes.cuda_capture import CudaCapture
        from specctl.models.passes.weights import device_of
        from specctl.models.running.graph import GraphPasses
        from specctl.models.running.rotating import rotating

        return rotating(
            GraphPasses(
                model,
                vocabulary,
                CudaCapture(device_of(model)),
                name=name,
                compiler=compiler_for(name, settings),
                notice=settings.notice,
                progress=settings.progress,
            ),
            model,
        )


class OnnxEngine(Engine):
    """Runs a model's graph, exported once, with onnxruntime; torch runs models that cannot be exported."""

    name = "onnx"
    does = "runs on onnxruntime"
    instead = "auto"
    tried = True
    making = MAKING
    forms = ("int8", "int4")

    def require(self) -> None:
        from specctl.models.onnx.engine import require_onnxruntime

        require_onnxruntime()

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        from specctl.models.onnx.engine import obstacle

        return obstacle(model, where)

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:
        """Chosen automatically for a supported model on the CPU, if all required packages are installed."""
        from specctl.models.onnx.engine import LONG_RUN, may_be_faster

        if settings.compile is True or not may_be_faster(model, where):
            return None
        return f"auto: the faster here; onnx in runs of {LONG_RUN:,} tokens or more, or if its graph was made before"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot | None":
        from specctl.models.onnx.engine import automatic_runner, build_onnx_runner, release

        if settings.engine == "onnx":
            return build_onnx_runner(
                model, vocabulary, name, settings, settings.rounding, keeps=settings.keeps, files=settings.files()
            )
        runner = automatic_runner(model, vocabulary, name, settings, settings.files)
        if runner is not None and not settings.keeps:
            release(model)
        return runner


class LlamaEngine(Engine):
    """Runs GGUF files with llama.cpp, without a torch model: see `GgufModel`. Other models run as with ``auto``."""

    name = "llama"
    does = "runs on llama.cpp"
    instead = "auto"

    def require(self) -> None:
        from specctl.models.llama.library import require_llama

        require_llama()

    def why_not(self, model: "PreTrainedModel", where: Where) -> str:  # noqa: ARG002 - none that torch has
        return NO_GGUF

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":  # noqa: ARG002
        raise AssertionError(NO_GGUF)


NO_GGUF = "llama.cpp runs GGUF files only"

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (LlamaEngine(), OnnxEngine(), GraphEngine(), StaticEngine(), EagerEngine())
}
"""In order of preference for an automatic choice; the last runs any model."""


def engine_named(name: EngineName) -> Engine:
    """The engine of this name; for ``auto`` the engine that runs any model."""
    return ENGINES["eager" if name == "auto" else name]


def chosen(asked: EngineName, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> Choice:
    """The engine that runs a model.

    Args:
        asked: the one that a person asked for.
        model: loaded, or its `skeleton` in the dtype of its placement.
        where: its weights are or will be.
        settings: as a command asks for them.
    """
    why: str | None = None
    while asked != "auto" and (reason := ENGINES[asked].why_not(model, where)) is not None:
        why, asked = reason, ENGINES[asked].instead
    if asked == "auto":
        choice = _unasked(model, where, settings, list(ENGINES.values()))
        return choice if why is None else replace(choice, said=(f"runs on torch: {why}", *choice.said))
    engine = ENGINES[asked]
    said = [] if why is None else [f"{engine.does}: {why}"]
    compiles = engine.compiles(settings)
    if compiles and (missing := where.no_compiler) is not None:
        compiles = False
        if settings.compile is True or where.sharded is None:
            said.append(f"runs uncompiled: {missing}")
    if not engine.tried:
        return Choice(engine, why or "as set", compiles, tuple(said), asked=True)
    others = [other for other in ENGINES.values() if other is not engine]
    why = "as set; torch runs what it cannot, with a note"
    return Choice(engine, why, compiles, tuple(said), _unasked(model, where, settings, others), asked=True)


def _unasked(model: "PreTrainedModel", where: Where, settings: EngineSettings, offers: Sequence[Engine]) -> Choice:
    """The automatic choice among some engines; the last takes any model."""
    engine, *others = offers
    why = engine.unasked(model, where, settings)
    if why is None:
        return _unasked(model, where, settings, others)
    otherwise = _unasked(model, where, settings, others) if engine.tried else None
    said: tuple[str, ...] = ()
    if settings.compile is True and not engine.compiles(settings):  # the user asked for compilation
        obstacle = ENGINES["static"].why_not(model, where)
        said = (f"runs uncompiled: {where.no_compiler}" if obstacle is None else f"{engine.does}: {obstacle}",)
    return Choice(engine, why, engine.compiles(settings), said, otherwise)


def chosen_for_head(
    asked: EngineName, where: Where, settings: EngineSettings, verifier: Engine | None = None, *, blocks: bool = False
) -> Choice:
    """A draft head's engine: onnxruntime if that runs its verifier on a CPU, else torch over fixed buffers.

    Args:
        asked: the one that a person asked for.
        where: the head's weights are or will be.
        settings: as a command asks for them.
        verifier: its verifier's engine, if known.
        blocks: whether it drafts a block per pass, and so needs no pass for a tree level.
    """
    graphs = ENGINES["onnx"]
    said: tuple[str, ...] = ()
    if verifier is graphs and where.device.type == "cpu":
        if blocks or not settings.trees:
            otherwise = _over_buffers(asked, where, settings)
            return Choice(graphs, "as its verifier", otherwise=otherwise, asked=asked == graphs.name)
        said = (f"runs on torch: {HEAD_CHAINS}",) if asked == graphs.name else ()
    choice = _over_buffers(asked, where, settings)
    return replace(choice, said=(*said, *choice.said))


def _over_buffers(asked: EngineName, where: Where, settings: EngineSettings) -> Choice:
    """The engine of a draft head's torch network; its passes always run over fixed buffers."""
    beside = ENGINES["graph"] if asked == "auto" else engine_named(asked)
    captured = ENGINES["graph"] if beside.captures and where.device.type == "cuda" else None
    engine = captured or ENGINES["static"]
    compiles = beside.compiles_heads and engine.compiles(settings)
    said: tuple[str, ...] = ()
    if compiles and (missing := where.no_compiler) is not None:
        compiles, said = False, (f"runs uncompiled: {missing}",)
    if captured is not None:
        return Choice(engine, "auto" if asked == "auto" else "as set", compiles, said)
    return Choice(engine, "compile = true" if compiles else "as for every draft head", compiles, said)


def build_runner(model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":
    """The runner of a model in eval mode, by the engine in the settings. Engines that must be tried are excluded.

    ``vocabulary`` is the pair's shared vocabulary, ``name`` the model's in messages.
    """
    choice: Choice | None = chosen(settings.engine, model, Where.of(model), settings)
    while choice is not None and choice.engine.tried:
        choice = choice.otherwise
    assert choice is not None, "the last engine is not tried"
    runner = choice.build(model, vocabulary, name, settings)
    assert runner is not None, "only an engine that is tried finds that it cannot"
    return runner
