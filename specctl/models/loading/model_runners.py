"""Runners of loaded models, by the engine that a profile asks for."""

from dataclasses import replace

from specctl.models.loading.model import LoadedModel, load_inspected
from specctl.models.loading.pair_members import PairMember
from specctl.models.placing.engine_table import chosen
from specctl.models.placing.memory import device_memory
from specctl.models.placing.placement import named_devices
from specctl.models.placing.requirements import inspected
from specctl.models.running.checked import CheckedRunner
from specctl.models.running.engines import Choice, EngineSettings, Where, checked
from specctl.models.running.slot import Slot


def model_runner(
    one: PairMember, network: LoadedModel, vocabulary: int, settings: EngineSettings, *, keeps: bool = True
) -> tuple[LoadedModel, Slot]:
    """A model's runner, and the model as that runs it.

    Args:
        one: found; of a model in memory, only its table.
        network: as it was loaded.
        vocabulary: the pair's shared vocabulary.
        settings: which engine, and whether to compile.
        keeps: whether torch's weights are wanted where torch does not run the model.

    Raises:
        ModelError: the engine cannot run it quantised, and torch cannot either.
    """
    if network.sharding is not None:
        from specctl.models.loading.model_shards import sharded_runner

        return network, sharded_runner(network.model, network.sharding, vocabulary, network.name, settings)
    settings = replace(settings, rounding=one.rounding, keeps=keeps, files=lambda: one.files_hash)
    choice: Choice | None = chosen(settings.engine, network.model, Where.of(network.model), settings)
    while choice is not None:
        if settings.rounding is not None and settings.rounding not in choice.engine.forms:
            assert one.checkpoint is not None, "it was loaded from files"
            how = inspected(one.checkpoint, one.table, device_memory(named_devices(one.table)))
            network = load_inspected(one.checkpoint, one.table, how)
            settings = replace(settings, engine="auto", rounding=None)
            choice = replace(chosen("auto", network.model, Where.of(network.model), settings), said=choice.said)
        runner = choice.build(network.model, vocabulary, network.name, settings)
        if runner is not None:
            return network, runner
        choice = choice.otherwise
    raise AssertionError("the last engine runs any model")


def checked_runner(runner: Slot, bare: Slot, network: LoadedModel, one: PairMember, vocabulary: int) -> Slot:
    """A target that is compared once with a fresh read, by eager passes where torch has the same weights.

    Args:
        runner: the target's.
        bare: the same without runners around it.
        network: its model.
        one: as the profile wants it.
        vocabulary: the pair's shared vocabulary.
    """
    if one.rounding is not None and getattr(network.model, "quantization_method", None) is None:
        from specctl.models.onnx.runner import OnnxRunner

        assert isinstance(bare, OnnxRunner), "only onnxruntime quantises a model that torch has whole"
        return CheckedRunner(runner, bare.fresh, network.name)
    if (sharding := network.sharding) is not None:
        from specctl.models.loading.model_shards import checking_runner

        return CheckedRunner(
            runner, lambda: checking_runner(network.model, sharding, vocabulary, network.name), network.name
        )
    return checked(runner, network.model, vocabulary, network.name)
