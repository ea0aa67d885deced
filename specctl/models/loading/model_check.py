"""A check of a model's behaviour on its first load; the result is stored."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specctl.errors import ModelError
from specctl.models.files.cache import write_small
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.loading.contents import model_hash
from specctl.models.onnx.store import cache_folder, key_of_files
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.model import LoadedModel
    from specctl.models.loading.pair_members import PairMember

SCHEMA_VERSION = 3  # Version of stored checks; others are ignored
ELSEWHERE = (
    "Choose a causal language model such as Llama, Qwen, Gemma, Mistral or Pythia, or the causal one of this family."
)
OTHER_WEIGHTS = "Choose another value of quantize or another checkpoint."


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of a model's check."""

    # why drafting would change this target's text, to end a sentence; None if it would not
    fault: str | None = None
    hint: str = ELSEWHERE  # what to use instead
    fails: bool = False  # whether its passes over a cache fail, so that it cannot draft either
    no_buffers: str | None = None  # why it cannot run over fixed buffers, with one or several texts; None if it can

    def require(self, name: str, *, drafts: bool = False) -> None:
        """Raise a ModelError if the model cannot be a target or, with ``drafts``, cannot draft."""
        if drafts and self.fails:
            raise ModelError(f"{name} cannot draft: {self.fault}.", self.hint)
        if self.fault is not None and not drafts:
            raise ModelError(f"{name} cannot be a target: {self.fault}, so drafting would change its text.", self.hint)


def check_model(network: "LoadedModel", member: "PairMember | None", vocabulary: int, *, drafts: bool = False) -> None:
    """Check that a target's results do not depend on how a text is split into passes.

    A draft need not be consistent, because verification uses the distribution it sampled from, but its passes must not
    fail. A model that differs only over fixed buffers is not rejected: `mask_obstacle` then reports it to engines.

    Args:
        network: the model, in torch.
        member: of the pair; None for another model.
        vocabulary: V, ids are drawn from below it.
        drafts: whether it is a draft rather than the target.

    Raises:
        ModelError: it cannot be a target (the message has the difference), or it cannot draft.
    """
    from specctl.models.passes.masks import rule_out_masks

    if network.weights is not None:  # torch never runs it, and its graph is checked when it is made
        return
    path = None
    if member is not None and member.checkpoint is not None:
        dtype = str(network.dtype).removeprefix("torch.")
        quantize = member.table.quantize if _is_quantised(network) else None
        path = _path(member.checkpoint, member.table, network.device.type, dtype, quantize)
    known = _MADE.get(network.model) or _read(path)
    if known is None:
        known, lasting = _made(network, vocabulary)
        if lasting and path is not None:
            write_small(path, json.dumps({"schema_version": SCHEMA_VERSION, **asdict(known)}))
    _MADE[network.model] = known
    known.require(network.name, drafts=drafts)
    if known.no_buffers is not None:
        rule_out_masks(network.model, known.no_buffers)


def stored_check(
    checkpoint: Checkpoint, table: ModelTable, kind: str, dtype: str, quantize: str | None
) -> ModelCheck | None:
    """The result of an earlier check of a model, without loading it; None if there was none.

    Args:
        checkpoint, table: the model's.
        kind: of its device, such as ``cpu``.
        dtype: of its loaded weights.
        quantize: their quantisation in torch, if any.
    """
    return _read(_path(checkpoint, table, kind, dtype, quantize))


def _made(network: "LoadedModel", vocabulary: int) -> tuple[ModelCheck, bool]:
    """Run a check; returns its result, and whether the result is reproducible: a pass may fail once."""
    from specctl.models.running.one_function import over_cache, over_rows, width_fault

    if (sharding := network.sharding) is not None:
        from specctl.models.loading.model_runners import checking_runner

        other = checking_runner(network.model, sharding, vocabulary, network.name)
        reading = over_cache(network.model, vocabulary, other)
        fails = reading.failure is not None
        return ModelCheck(reading.told() if reading.wrong else None, fails=fails), not fails
    if (reading := over_cache(network.model, vocabulary)).wrong:
        fails = reading.failure is not None
        return ModelCheck(reading.told(), fails=fails), not fails
    if _is_quantised(network) and (fault := width_fault(network.model, vocabulary)) is not None:
        return ModelCheck(fault, OTHER_WEIGHTS), True
    rows = over_rows(network.model, vocabulary, reading.most)
    why = None if rows is None or not rows.wrong else rows.told("buffers of fixed size")
    return ModelCheck(no_buffers=why), rows is None or rows.failure is None


_MADE: "WeakKeyDictionary[Any, ModelCheck]" = WeakKeyDictionary()
"""This process's checks by transformers model, which may have no files."""


def _is_quantised(network: "LoadedModel") -> bool:
    """Whether the torch weights are quantised; onnxruntime quantises a model whose torch weights are not."""
    return getattr(network.model, "quantization_method", None) is not None


def _path(checkpoint: Checkpoint, table: ModelTable, kind: str, dtype: str, quantize: str | None) -> Path | None:
    """The file of a model's check; None if its files do not determine what it computes."""
    if (files := model_hash(checkpoint, table.trust_remote_code, whole=False)) is None:
        return None
    key = hashlib.sha256(key_of_files(files, kind, dtype, quantize).encode()).hexdigest()[:32]
    return cache_folder().parent / "checks" / f"{key}.json"


def _read(path: Path | None) -> ModelCheck | None:
    if path is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("schema_version") == SCHEMA_VERSION and all(
            value is None or isinstance(value, str | bool) for value in found.values()
        ):
            return ModelCheck(**found)
    return None
