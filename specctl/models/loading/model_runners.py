"""Runners of loaded models, by the engine that a profile asks for."""

from dataclasses import replace

from specctl.models.loading.model import LoadedModel, load_inspected
from specctl.models.loading.profile_models import Found
from specctl.models.placing.memory import device_memory
from specctl.models.placing.placement import named_devices
from specctl.models.placing.requirements import inspected
from specctl.models.running.checked import CheckedRunner
from specctl.models.running.engines import EngineSettings, build_runner, checked
from specctl.models.running.runner import Runner


def model_runner(
    one: Found, network: LoadedModel, vocabulary: int, settings: EngineSettings, *, keeps: bool = True
) -> tuple[LoadedModel, Runner]:
    """A model's runner, and the model as that runs it.

    Args:
        one: as the profile wants it.
        network: as it was loaded.
        vocabulary: the pair's shared vocabulary.
        settings: which engine, and whether to compile.
        keeps: whether torch's weights are wanted where onnxruntime runs the model.

    Raises:
        ModelError: onnxruntime cannot run it quantised, and torch cannot either.
    """
    if network.sharding is not None:
        from specctl.models.loading.model_shards import sharded_runner

        return network, sharded_runner(network.model, network.sharding, vocabulary, network.name, settings)
    if settings.engine == "onnx":
        from specctl.models.onnx.onnx_engine import build_onnx_runner

        runner = build_onnx_runner(
            network.model, vocabulary, network.name, settings, one.rounding, keeps=keeps, files=one.files
        )
        if runner is not None:
            return network, runner
        if one.rounding is not None:
            how = inspected(one.checkpoint, one.table, device_memory(named_devices(one.table)))
            network = load_inspected(one.checkpoint, one.table, how)
        return network, build_runner(network.model, vocabulary, network.name, replace(settings, engine="auto"))
    if settings.engine == "auto" and settings.compile is not True and one.quantization is None:
        from specctl.models.onnx.automatic import automatic_runner
        from specctl.models.onnx.onnx_engine import release

        fast = automatic_runner(network.model, vocabulary, network.name, settings, lambda: one.files)
        if fast is not None:
            if not keeps:
                release(network.model)
            return network, fast
    return network, build_runner(network.model, vocabulary, network.name, settings)


def checked_runner(runner: Runner, bare: Runner, network: LoadedModel, one: Found, vocabulary: int) -> Runner:
    """A target that is compared once with a fresh read, by eager passes where torch has the same weights.

    Args:
        runner: the target's.
        bare: the same without runners around it.
        network: its model.
        one: as the profile wants it.
        vocabulary: the pair's shared vocabulary.
    """
    if one.rounding is not None and getattr(network.model, "quantization_method", None) is None:
        from specctl.models.onnx.onnx_runner import OnnxRunner

        assert isinstance(bare, OnnxRunner), "only onnxruntime quantises a model that torch has whole"
        return CheckedRunner(runner, bare.fresh, network.name)
    if (sharding := network.sharding) is not None:
        from specctl.models.loading.model_shards import checking_runner

        return CheckedRunner(
            runner, lambda: checking_runner(network.model, sharding, vocabulary, network.name), network.name
        )
    return checked(runner, network.model, vocabulary, network.name)
