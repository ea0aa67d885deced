"""Loading a model's shards, each in its process."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.placing.engine_table import chosen, engine_named
from specctl.models.placing.placement import Placement
from specctl.models.running.engines import EngineSettings, Where
from specctl.models.sharding import LeadingRunner, Sharding, leader
from specctl.profile.schema import ModelTable


def split(tables: Iterable[ModelTable]) -> int | None:
    """Into how many shards a profile's models are split over processes; None where none is.

    Raises:
        ModelError: two of them into different numbers.
    """
    numbers = {table.shards for table in tables if table.shards is not None and table.splits}
    if len(numbers) > 1:
        raise ModelError(
            f"Models are in {' and '.join(map(str, sorted(numbers)))} shards; all that are split over processes need "
            "the same number.",
            'Set the same shards, or placement = "spread" for one of them.',
        )
    return next(iter(numbers), None)


def distributed(placement: Placement) -> dict[str, Any]:
    """The argument of ``from_pretrained`` that splits a model over the ranks of this process's group."""
    assert placement.sharded is not None, "the model is to be split"
    size = placement.shards
    config = DistributedConfig(tp_size=size) if placement.sharded == "tensor" else DistributedConfig(pp_size=size)
    return {"distributed_config": config}


def told(checkpoint: Checkpoint, placement: Placement, trust_remote_code: bool) -> dict[str, Any]:
    """What a follower needs to load its share, as JSON can hold it."""
    return {
        "checkpoint": {**asdict(checkpoint), "folder": str(checkpoint.folder.absolute())},
        "dtype": placement.dtype,
        "trust_remote_code": trust_remote_code,
    }


def understood(told: dict[str, Any]) -> tuple[Checkpoint, Placement, bool]:
    """What `told` was made of, with what the leader adds."""
    files = {**told["checkpoint"], "folder": Path(told["checkpoint"]["folder"])}
    placement = Placement({}, None, told["dtype"], {}, sharded=told["kind"], shards=told["shards"])
    return Checkpoint(**files), placement, told["trust_remote_code"]


def sharded_runner(
    model: PreTrainedModel, sharding: Sharding, vocabulary: int, name: str, settings: EngineSettings
) -> LeadingRunner:
    """The runner of a model in shards, by the engine that a profile asks for.

    Raises:
        ModelError: onnxruntime is to run it, or a rank cannot run it.
    """
    if engine_named(settings.engine).tried:
        raise ModelError(f"{name} is in shards, which onnxruntime does not run.", 'Set engine = "auto".')
    choice = chosen(settings.engine, model, Where.of(model, sharding.kind), settings)
    for line in choice.said:
        settings.notice(f"{name} {line}")
    settings = replace(settings, engine=choice.engine.name, compile=choice.compiles, in_step=True)
    return leader().open(model, sharding, vocabulary, name, settings)


def checking_runner(model: PreTrainedModel, sharding: Sharding, vocabulary: int, name: str) -> LeadingRunner:
    """Another runner of a model in shards, with an empty cache and plain passes."""
    return leader().open(model, sharding, vocabulary, name, EngineSettings("eager", compile=False, in_step=True))
