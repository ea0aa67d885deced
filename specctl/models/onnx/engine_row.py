"""onnxruntime as an engine of the table."""

from typing import TYPE_CHECKING

from specctl.models.running.engines import Engine, EngineSettings, Where

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.onnx.onnx_runner import OnnxRunner


class OnnxEngine(Engine):
    """A model's graph, exported once and run by onnxruntime; torch runs what cannot be exported."""

    name = "onnx"
    does = "runs on onnxruntime"
    instead = "auto"
    tried = True
    making = 2.0  # rounded up: 1.4 for a Llama of 1.2 billion weights, 1.9 for one of 135 million
    forms = ("int8", "int4")

    def require(self) -> None:
        from specctl.models.onnx.onnx_engine import require_onnxruntime

        require_onnxruntime()

    def why_not(self, model: "PreTrainedModel", where: Where) -> str | None:
        from specctl.models.onnx.onnx_engine import obstacle

        return obstacle(model, where)

    def unasked(self, model: "PreTrainedModel", where: Where, settings: EngineSettings) -> str | None:
        """For a small model on the CPU, where all that is needed is installed."""
        from specctl.models.onnx.automatic import LONG_RUN, may_be_faster

        if settings.compile is True or not may_be_faster(model, where):
            return None
        return f"auto: the faster here; onnx in runs of {LONG_RUN:,} tokens or more, or if its graph was made before"

    def build(
        self, model: "PreTrainedModel", vocabulary: int, name: str, settings: EngineSettings
    ) -> "OnnxRunner | None":
        from specctl.models.onnx.automatic import automatic_runner
        from specctl.models.onnx.onnx_engine import build_onnx_runner, release

        if settings.engine == "onnx":
            return build_onnx_runner(
                model, vocabulary, name, settings, settings.rounding, keeps=settings.keeps, files=settings.files()
            )
        runner = automatic_runner(model, vocabulary, name, settings, settings.files)
        if runner is not None and not settings.keeps:
            release(model)
        return runner
