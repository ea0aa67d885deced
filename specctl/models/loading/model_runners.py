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
        assert one.checkpoint is not None, "its weights are in a file"
        return network, packed_runner(one.checkpoint, network, vocabulary, settings, one.files_hash)
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


def packed_runner(
    checkpoint: Checkpoint, network: LoadedModel, vocabulary: int, settings: EngineSettings, files: str | None
) -> Slot:
    """The runner of a model whose weights stay in its file, by onnxruntime.

    Args:
        checkpoint: the model's files.
        network: its `packed_model`.
        vocabulary: the pair's shared vocabulary.
        settings: the engine settings.
        files: a hash of its files; None if they changed meanwhile.

    Raises:
        ModelError: onnxruntime cannot run it.
    """
    from specctl.models.onnx.engine import build_onnx_runner

    assert checkpoint.weights is not None, "it has a GGUF file"
    if files is None:
        raise ModelError(f"{checkpoint.weights} was changed while it was read.", "Try again.")
    reasons: list[str] = []
    runner = build_onnx_runner(
        network.model,
        vocabulary,
        network.name,
        replace(settings, notice=reasons.append),
        PACKED,
        keeps=False,
        files=files,
        weights=network.weights,
    )
    if runner is None:
        why = reasons.pop().removeprefix(f"{network.name} runs on torch: ")
        raise ModelError(f"{checkpoint} cannot run as it is: {why}.", unpacking(checkpoint.weights, checkpoint.role))
    for line in reasons:
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
    assert network is not None, "stored graphs were checked when they were made"
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
