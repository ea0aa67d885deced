"""A check of a model by its behaviour when it is first loaded, stored so that it is made once."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.loading.contents import model_hash
from specctl.models.onnx.store import cache_folder, key_of_files, write_small
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.model import LoadedModel
    from specctl.models.loading.pair_members import PairMember

SCHEMA_VERSION = 3  # Version of stored checks; other versions are ignored
ELSEWHERE = (
    "Choose a causal language model such as Llama, Qwen, Gemma, Mistral or Pythia, or the causal one of this family."
)
OTHER_WEIGHTS = "Choose another value of quantize or another checkpoint."


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of a model's check."""

    # why drafting would change a target's text, as the end of a sentence; None if it would not
    fault: str | None = None
    hint: str = ELSEWHERE  # what to use instead
    fails: bool = False  # whether its passes over a cache end in an error, so that it cannot draft either
    no_buffers: str | None = None  # why it cannot run over fixed buffers, with one or several texts; None if it can

    def require(self, name: str, *, drafts: bool = False) -> None:
        """Raise a ModelError if the model of this name cannot be a target, or cannot draft."""
        if drafts and self.fails:
            raise ModelError(f"{name} cannot draft: {self.fault}.", self.hint)
        if self.fault is not None and not drafts:
            raise ModelError(f"{name} cannot be a target: {self.fault}, so drafting would change its text.", self.hint)


def check_model(network: "LoadedModel", member: "PairMember | None", vocabulary: int, *, drafts: bool = False) -> None:
    """Make sure that a target computes one function of a text, whatever passes it is read in.

    A draft need not: the verdict knows the distribution that it draws from. But its passes have to end. A model that
    differs over fixed buffers alone is not rejected: `mask_obstacle` then says so, and engines ask it.

    Args:
        network: the model, in torch.
        member: of the pair; None for a model that came from elsewhere.
        vocabulary: V, ids are drawn from below it.
        drafts: whether it drafts, and does not decide.

    Raises:
        ModelError: it cannot be a target, and the message has the number; or it cannot draft.
    """
    from specctl.models.passes.masks import rule_out_masks

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
        quantize: how torch has them quantised; None where they are not.
    """
    return _read(_path(checkpoint, table, kind, dtype, quantize))


def _made(network: "LoadedModel", vocabulary: int) -> tuple[ModelCheck, bool]:
    """The result of a check, and whether it would be the same again: a pass may fail once."""
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
"""Checks of this process by transformers model, which may have come without files."""


def _is_quantised(network: "LoadedModel") -> bool:
    """Whether torch has quantised weights; onnxruntime rounds those of a model that torch has whole."""
    return getattr(network.model, "quantization_method", None) is not None


def _path(checkpoint: Checkpoint, table: ModelTable, kind: str, dtype: str, quantize: str | None) -> Path | None:
    """The file of a model's check; None where its files do not say what it computes."""
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
