"""What each engine says of itself: rows of the table."""

from typing import TYPE_CHECKING

from specctl.models.onnx.store import MAKING
from specctl.models.running.engines import LONG_RUN, Engine, EngineSettings, Where, compiler_for, eager
from specctl.profile.schema import Engine as EngineName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.onnx.runner import OnnxRunner
    from specctl.models.running.slot import Slot


class EagerEngine(Engine):
    """Any model, with a cache that grows."""

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
    """A cache at fixed addresses, so that passes can be compiled."""

    name: EngineName = "static"
    does = "runs on the static engine"
    spare = 1.5

    def compiles(self, settings: EngineSettings) -> bool:
        return settings.compiles

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        from specctl.models.running.static import obstacle

        return obstacle(model, where)

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:
        """Where passes are compiled."""
        if not settings.compiles or where.no_compiler or self.why_not(model, where):
            return None
        return "compile = true" if settings.compile is True else f"auto; for {settings.expected_tokens:,} tokens"

    def build(self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings) -> "Slot":
        from specctl.models.running.rotating import rotating
        from specctl.models.running.static import StaticRunner

        return rotating(StaticRunner(model, vocabulary, compiler=compiler_for(name, settings)), model)


class GraphEngine(StaticEngine):
    """As `StaticEngine`, with passes captured as CUDA graphs."""

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
        from specctl.models.running.graph import GraphRunner
        from specctl.models.running.rotating import rotating

        runner = GraphRunner(
            model,
            vocabulary,
            CudaCapture(device_of(model)),
            name=name,
            compiler=compiler_for(name, settings),
            notice=settings.notice,
            progress=settings.progress,
        )
        return rotating(runner, model)


class OnnxEngine(Engine):
    """A model's graph, exported once and run by onnxruntime; torch runs what cannot be exported."""

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
        """For a model on the CPU that it can run, where all that is needed is installed."""
        from specctl.models.onnx.engine import LONG_RUN, may_be_faster

        if settings.compile is True or not may_be_faster(model, where):
            return None
        return f"auto: the faster here; onnx in runs of {LONG_RUN:,} tokens or more, or if its graph was made before"

    def build(
        self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings
    ) -> "OnnxRunner | None":
        from specctl.models.onnx.engine import automatic_runner, build_onnx_runner, release

        if settings.engine == "onnx":
            return build_onnx_runner(
                model, vocabulary, name, settings, settings.rounding, keeps=settings.keeps, files=settings.files()
            )
        runner = automatic_runner(model, vocabulary, name, settings, settings.files)
        if runner is not None and not settings.keeps:
            release(model)
        return runner
