"""Runners around a target that is in memory already, and the drafts that are loaded for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.vocabulary import check_vocabulary
from specctl.models.loading.fileless_drafts import runner_without_files
from specctl.models.loading.model import LoadedModel, load_tokenizer
from specctl.models.loading.profile_models import Found
from specctl.models.passes.cache import cannot_go_back
from specctl.models.passes.recurrent_state import untested
from specctl.models.placing.memory import device_memory
from specctl.models.predictors.disco_head import DiscoHead
from specctl.models.predictors.head_checkpoint import locate_head, mismatch, require_kind
from specctl.models.predictors.trained_heads import TrainedHead
from specctl.models.running.eager import EagerRunner
from specctl.models.running.engines import EngineSettings, checked
from specctl.models.running.padded_vocabulary import NarrowRunner
from specctl.models.running.rounding import require_one_function
from specctl.models.running.runner import Runner
from specctl.profile.schema import DraftTable, ModelTable

EAGER = EngineSettings(engine="eager")
NAMELESS = "the model"


@dataclass(frozen=True, slots=True)
class Level:
    """One draft of a target in memory.

    Attributes:
        runner: of the draft, its logits as wide as the target's.
        heads: its acceptance heads by name.
    """

    runner: Runner
    heads: Mapping[str, TrainedHead] = field(default_factory=dict)


def in_memory(model: PreTrainedModel, role: str) -> LoadedModel:
    """A model that its user has loaded.

    Args:
        model: a causal language model.
        role: ``target`` or ``draft``, for messages.

    Raises:
        ModelError: it is an encoder and decoder, or cannot take back rejected tokens.
    """
    name = model.name_or_path or NAMELESS
    if model.config.is_encoder_decoder:
        raise ModelError(f"The {role} {name!r} has an encoder.", "Speculative decoding here is for decoders alone.")
    if why := cannot_go_back(model.config, type(model)):
        raise ModelError(f"The {role} {name!r} cannot take back rejected tokens: {why}.")
    return LoadedModel.of(model, name)


def form_of(model: PreTrainedModel) -> list[Any]:
    """What runners of a model and its drafts are made for; where it differs from an earlier one they must be made anew.

    It is the model's configuration, the attention that it runs, and each weight's name, shape, dtype and device: so it
    changes where embeddings are resized or a model is moved, and not where weights get other values.
    """
    weights = [(name, weight.shape, weight.dtype, weight.device) for name, weight in model.named_parameters()]
    config = model.config
    return [model, config.to_dict(), getattr(config, "_attn_implementation", None), weights]


def target_runners(target: LoadedModel) -> tuple[EagerRunner, Runner]:
    """Eager passes of a target with all its output rows, and the same, checked once if its family is not known.

    Raises:
        ModelError: its weights are quantised, and what they compute depends on the width of a pass.
    """
    bare = EagerRunner(target.model, target.vocabulary)
    require_one_function(bare, target.model, target.vocabulary, target.name)
    unknown = untested(target.model)
    return bare, checked(bare, target.model, target.vocabulary, target.name) if unknown else bare


def draft_levels(draft: DraftTable, given: PreTrainedModel | None, target: LoadedModel, runner: Runner) -> list[Level]:
    """The drafts of a table, from the one that the target verifies down.

    Args:
        draft: the table.
        given: a model to use as the only draft; None to load what the table names.
        target: the model that they draft for.
        runner: the target's, which is told whose states a draft head reads.

    Raises:
        ModelError: a draft cannot be loaded, has another tokenizer than the target, or its head was trained on another.
    """
    if given is not None:
        loaded = in_memory(given, "draft")
        _require_one_tokenizer(target.name, loaded.name)
        return [Level(_runner(loaded, target), _heads(draft, None, loaded.hidden_size, loaded))]
    levels: list[Level] = []
    above, above_runner = target, runner
    upper: tuple[str, ModelTable] = ("target", ModelTable(model=target.name))
    devices = device_memory()
    for number, table in enumerate(draft.levels):
        role = ".".join(["draft"] * (number + 1))
        if not table.has_files:
            levels.append(Level(runner_without_files(table, target.vocabulary)))
            continue
        here = table if table.device != "auto" else table.model_copy(update={"device": str(target.device)})
        found = Found.of(role, here, upper, devices, "eager")
        loaded_draft = found.load()
        if loaded_draft is None:
            # Draft heads go where the output layer of their verifier is.
            head = Found(found.checkpoint, table, None, None, found.head).load_head(above)
            from specctl.models.loading.head_engines import build_head_runner

            own = build_head_runner(head.head, target.vocabulary, head.name, EAGER)
            above_runner.watch(own.layers)
            levels.append(Level(own, _heads(table, found.checkpoint, head.hidden_size, None)))
            continue
        _require_one_tokenizer(target.name, table.checkpoint)
        own = _runner(loaded_draft, target)
        levels.append(Level(own, _heads(table, found.checkpoint, loaded_draft.hidden_size, loaded_draft)))
        above, above_runner, upper = loaded_draft, own, (role, table)
    return levels


def _runner(draft: LoadedModel, target: LoadedModel) -> Runner:
    runner = EagerRunner(draft.model, target.vocabulary)
    return NarrowRunner(runner, draft.vocabulary, target.vocabulary) if draft.vocabulary < target.vocabulary else runner


def _heads(
    table: DraftTable, checkpoint: Checkpoint | None, width: int, draft: LoadedModel | None
) -> dict[str, TrainedHead]:
    """The acceptance head of a draft table, on the draft's device.

    Args:
        table: may name one.
        checkpoint: the draft's files; None for a model whose files are not known, which no hash can be compared with.
        width: of the hidden states that it reads.
        draft: the draft, unless it is a draft head.
    """
    if table.head is None:
        return {}
    found = locate_head(table.head)
    require_kind(found, table.policy)
    if checkpoint is not None and (reason := mismatch(found, checkpoint)):
        raise ModelError(f"{reason}.", "Train a head on this draft with `specctl train-head`.")
    head = found.load(width)
    return {table.head: head if isinstance(head, DiscoHead) or draft is None else head.to(draft.device)}


def _require_one_tokenizer(*names: str) -> None:
    """Compare two models' tokenizers, where both models' folders or repositories have one.

    Raises:
        ModelError: they differ, so that the draft would be read as another text.
    """
    found = []
    for name in names:
        try:
            found.append(load_tokenizer(ModelTable(model=name)))
        except ModelError:
            return  # nothing is known of it
    for target, draft in pairwise(found):
        rows = max(target.get_vocab().values()) + 1  # rows beyond the tokenizer's are padding
        check_vocabulary(target, draft, rows, rows)
