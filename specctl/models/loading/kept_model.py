"""What is kept beside the graph of a model that was loaded from files, for `kept_pair`."""

from typing import TYPE_CHECKING

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.tokenizer import Spelling
from specctl.models.onnx.store import Kept
from specctl.models.passes.masks import attends_to_everything
from specctl.models.passes.recurrent_state import untested
from specctl.models.passes.weights import weight_bytes
from specctl.models.placing.architecture import generation_config
from specctl.models.running.rules.generation_rules import lone_repetition_penalty, unsupported_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specctl.models.loading.model import LoadedModel
    from specctl.models.running.slot import Slot


def keep_known(
    network: "LoadedModel", runner: "Slot", tokenizer: "PreTrainedTokenizerBase", checkpoint: Checkpoint
) -> None:
    """Keep what has to be known of a model, if its runner has a graph that stays and nothing is kept there yet.

    Args:
        network: the model; it may have shapes and no weights.
        runner: the model's own.
        tokenizer: the model's own.
        checkpoint: the model's files.
    """
    path = getattr(runner, "facts", None)
    if path is None or Kept.read(path) is not None:
        return
    configs = [each for each in (network.model.generation_config, generation_config(checkpoint)) if each is not None]
    penalties = {None if unsupported_in(each) else lone_repetition_penalty(each) for each in configs} or {1.0}
    Kept(
        rows=network.vocabulary,
        context=runner.context,
        eos=tuple(sorted(network.eos_ids)),
        repetition_penalty=penalties.pop() if len(penalties) == 1 else None,
        everything=attends_to_everything(network.model),
        checked=untested(network.model),
        parameters=sum(weight.numel() for weight in network.model.parameters()),
        weight_bytes=weight_bytes(network.model),
        spelling=Spelling.of(tokenizer),
    ).write(path)
