"""Runners of loaded models, on the profile's engine."""

from dataclasses import replace
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.gguf import unpacking
from specctl.models.loading.model import LoadedModel, load_inspected
from specctl.models.loading.pair_members import PairMember
from specctl.models.onnx.store import PACKED
from specctl.models.passes.weights import Where
from specctl.models.placing.engine_table import chosen, engine_named
from specctl.models.placing.memory import device_memory
from specctl.models.placing.placement import inspected, named_devices
from specctl.models.running.engines import Choice, EngineSettings, checked
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import CheckedPasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.sharding import Sharding


def model_runner(
    one: PairMember, network: LoadedModel, vocabulary: int, settings: EngineSettings, *, keeps: bool = True
) -> tuple[LoadedModel, Slot]:
    """A model's runner, and the model as the runner uses it.

    Args:
        one: the member with its files.
        network: its model as it was loaded.
        vocabulary: the pair's shared vocabulary.
        settings: which engine, and whether to compile.
        keeps: whether to keep torch weights even if another library runs the model.

    Raises:
        ModelError: the engine cannot run it quantised, and torch cannot either.
    """
    if network.sharding is not None:
        return network, sharded_runner(network.model, network.sharding, vocabulary, network.name, settings)
    if network.weights is not None:
        assert one.checkpoint is not None, "its weights are in files"
        runner = packed_runner(one.checkpoint, network, vocabulary, settings, one.files_hash)
        if runner is not None:
            return network, runner
        network, settings = _whole(one), replace(settings, engine="auto")
    settings = replace(settings, rounding=one.rounding, keeps=keeps, files=lambda: one.files_hash)
    choice: Choice | None = chosen(settings.engine, network.model, Where.of(network.model), settings)
    while choice is not None:
        if settings.rounding is not None and settings.rounding not in choice.engine.forms:
            network, settings = _whole(one), replace(settings, engine="auto", rounding=None)
            choice = replace(chosen("auto", network.model, Where.of(network.model), settings), said=choice.said)
        runner = choice.build(network.model, vocabulary, network.name, settings)
        if runner is not None:
            return network, runner
        choice = choice.otherwise
    raise AssertionError("the last engine runs any model")


def _whole(one: PairMember) -> LoadedModel:
    """A member's model, loaded anew for torch."""
    assert one.checkpoint is not None, "it was loaded from files"
    how = inspected(one.checkpoint, one.table, device_memory(named_devices(one.table)))
    return load_inspected(one.checkpoint, one.table, how)


def packed_runner(
    checkpoint: Checkpoint, network: LoadedModel, vocabulary: int, settings: EngineSettings, files: str | None
) -> Slot | None:
    """The runner of a `packed_model`, by onnxruntime.

    Args:
        checkpoint: the model's files.
        network: the model.
        vocabulary: the pair's shared vocabulary.
        settings: the engine settings.
        files: a hash of its files; None if they changed meanwhile.

    Returns:
        None, after a notice with the reason, where torch has to run the model.

    Raises:
        ModelError: its files changed meanwhile, or neither onnxruntime nor torch can run it.
    """
    from specctl.models.onnx.engine import build_onnx_runner

    if files is None:
        raise ModelError(f"{checkpoint} was changed while it was read.", "Try again.")
    said: list[str] = []
    asked = replace(settings, notice=said.append if checkpoint.weights is not None else settings.notice)
    model, weights = network.model, network.weights
    runner = build_onnx_runner(
        model, vocabulary, network.name, asked, PACKED, keeps=False, files=files, weights=weights
    )
    if runner is None and checkpoint.weights is not None:
        why = said.pop().removeprefix(f"{network.name} runs on torch: ")
        raise ModelError(f"{checkpoint} cannot run as it is: {why}.", unpacking(checkpoint.weights, checkpoint.role))
    for line in said:
        settings.notice(line)
    return runner


def sharded_runner(
    model: "PreTrainedModel", sharding: "Sharding", vocabulary: int, name: str, settings: EngineSettings
) -> Slot:
    """The runner of a sharded model, on the profile's engine.

    Raises ModelError if the engine is onnx, or a rank cannot run it.
    """
    from specctl.models.sharding import leader

    if engine_named(settings.engine).tried:
        raise ModelError(f"{name} is in shards, which onnxruntime does not run.", 'Set engine = "auto".')
    choice = chosen(settings.engine, model, Where.of(model, sharding.kind), settings)
    for line in choice.said:
        settings.notice(f"{name} {line}")
    settings = replace(settings, engine=choice.engine.name, compile=choice.compiles, in_step=True)
    return leader().open(model, sharding, vocabulary, name, settings)


def checking_runner(model: "PreTrainedModel", sharding: "Sharding", vocabulary: int, name: str) -> Slot:
    """Another runner of a sharded model, with an empty cache and plain passes."""
    from specctl.models.sharding import leader

    return leader().open(model, sharding, vocabulary, name, EngineSettings("eager", compile=False, in_step=True))


def checked_runner(runner: Slot, bare: Slot, target: PairMember, vocabulary: int) -> Slot:
    """Wrap a target's runner to compare it once with a fresh read, by eager passes if torch has the same weights.

    ``bare`` is ``runner`` without wrappers, ``target`` the member as that runs it.
    """
    network = target.torch_model
    if network is None:
        return Slot(CheckedPasses(runner, bare.fresh, target.name))
    rounded = target.rounding is not None and getattr(network.model, "quantization_method", None) is None
    if rounded or network.weights is not None:
        from specctl.models.onnx.passes import OnnxPasses

        assert isinstance(bare.passes, OnnxPasses), "only onnxruntime quantises a model that torch has whole"
        return Slot(CheckedPasses(runner, bare.fresh, network.name))
    if (sharding := network.sharding) is not None:
        return Slot(
            CheckedPasses(
                runner, lambda: checking_runner(network.model, sharding, vocabulary, network.name), network.name
            )
        )
    return checked(runner, network.model, vocabulary, network.name)
