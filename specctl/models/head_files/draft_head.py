"""Draft heads on disk: which kind a checkpoint is, and the tensors of its file."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.loading_failures import explained
from specctl.models.files.stored_weights import PICKLED
from specctl.models.head_files.mtp_tensors import mtp_in, read_mtp

if TYPE_CHECKING:
    import torch


class HeadKind(StrEnum):
    """The kinds of draft heads."""

    EAGLE1 = "eagle1"
    EAGLE3 = "eagle3"
    GLIDE = "glide"
    MTP = "mtp"
    DFLASH = "dflash"
    DSPARK = "dspark"


SPECULATORS = (HeadKind.EAGLE3, HeadKind.MTP, HeadKind.DFLASH, HeadKind.DSPARK)
"""Kinds that speculators names as specctl does; its ``eagle`` is a layout of its own for EAGLE-1."""

EAGLE3_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel", "Qwen3Eagle3Model"})

GLIDE_ARCHITECTURE, GLIDE_TENSOR = "smallLlamaForCausalLM", "model.layers.0.cross_attn.q_proj.weight"

BLOCK_ARCHITECTURE = re.compile("D(Flash|Spark)(Draft)?Model$")
"""Names of networks that draft blocks, some of which specctl does not run and refuses by name when it builds them."""


def recognise(config: Mapping[str, Any], tensors: Iterable[str]) -> HeadKind | None:
    """The kind of a draft head, from its configuration and its tensors, never from its name.

    Args:
        config: the contents of config.json.
        tensors: the names of the tensors in its file.

    Returns:
        None for what is no draft head, such as an ordinary language model.

    Raises:
        ModelError: a draft head of a kind that specctl does not run.
    """
    if (kind := config.get("speculators_model_type")) is not None:
        if str(kind) not in SPECULATORS:
            raise ModelError(
                f"specctl runs no draft heads of speculators' type {kind!r}.", f"It runs {', '.join(SPECULATORS)}."
            )
        return HeadKind(kind)
    if EAGLE3_ARCHITECTURES & {str(name) for name in config.get("architectures") or ()}:
        return HeadKind.EAGLE3
    names = set(tensors)
    if GLIDE_ARCHITECTURE in (config.get("architectures") or ()) or GLIDE_TENSOR in names:
        return HeadKind.GLIDE
    if (kind := _block_kind(config, names)) is not None:
        return kind
    if "midlayer.hidden_norm.weight" in names or {"fc.weight", "layers.0.hidden_norm.weight"} <= names:
        return HeadKind.EAGLE3
    # An ordinary model has names like model.layers.0 and an output norm; a DFlash head has a hidden_norm.
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and not {"norm.weight", "hidden_norm.weight"} & names:
        return HeadKind.EAGLE1
    return None


def _block_kind(config: Mapping[str, Any], names: Set[str]) -> HeadKind | None:
    """The kind of a head that drafts blocks; DeepSpec's class for DSpark is also its class for DFlash."""
    named = any(BLOCK_ARCHITECTURE.search(str(name)) for name in config.get("architectures") or ())
    if not named and not {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= names:
        return None
    nested = config.get("dflash_config")
    settings = {**(nested if isinstance(nested, dict) else {}), **config}
    sequential = settings.get("markov_rank") or settings.get("projector_type") == "dspark"
    return HeadKind.DSPARK if sequential or "markov_head.markov_w1.weight" in names else HeadKind.DFLASH


@dataclass(frozen=True, slots=True)
class DraftHeadCheckpoint:
    """The files of a draft head.

    Attributes:
        checkpoint: where they are.
        kind: what it is.
        config: the contents of config.json.
    """

    checkpoint: Checkpoint
    kind: HeadKind
    config: dict[str, Any]

    def __str__(self) -> str:
        return f"The draft head {self.name!r}"

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def verifier(self) -> str | None:
        """The model that the head was trained on, where its file says so: a hub id or a path."""
        speculators = self.config.get("speculators_config")
        verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
        named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        found = named or self.config.get("target_model_name_or_path")
        return found if isinstance(found, str) else None

    @property
    def in_target(self) -> bool:
        """Whether its tensors are among those of the target that it was trained with."""
        return self.kind is HeadKind.MTP and "speculators_model_type" not in self.config

    @property
    def foresees(self) -> bool:
        """Whether it predicts the acceptance of tokens that are not drawn yet, by its tensors."""
        names = tensor_names(self.checkpoint) if self.kind is HeadKind.DSPARK else []
        return any(name.removeprefix("decoder.").startswith("confidence") for name in names)

    @property
    def writes_blocks(self) -> bool:
        """Whether one pass drafts several tokens."""
        return self.kind in (HeadKind.DFLASH, HeadKind.DSPARK)

    @property
    def local(self) -> bool:
        """Whether its weights are here."""
        return self.checkpoint.has_weights() or (self.folder / PICKLED).exists()

    def fetch_weights(self) -> None:
        """Download weights that are missing."""
        if self.in_target or _pickle(self.checkpoint) is None:
            self.checkpoint.fetch_weights()

    def read(self) -> "dict[str, torch.Tensor]":
        """The head's tensors, downloaded if need be; a pickle is read as tensors only, so it runs no code.

        Raises:
            ModelError: the file is missing, damaged, or a pickle of more than tensors.
        """
        if self.in_target:
            return read_mtp(self.checkpoint)
        pickled = _pickle(self.checkpoint)
        if pickled is not None:
            return _unpickled(self.checkpoint, pickled)
        self.checkpoint.fetch_weights()
        return self.checkpoint.read(self.checkpoint.tensor_files())


def draft_head(checkpoint: Checkpoint) -> DraftHeadCheckpoint | None:
    """The draft head that a checkpoint is; None for an ordinary model.

    Where a repository's configuration does not say what it is, the names of its tensors do: from the headers of its
    files, which for a repository with a tokenizer, as ordinary models are, are only read if they are here.

    Raises:
        ModelError: the configuration or the weights cannot be read, or it is a head that specctl does not run.
    """
    config = checkpoint.settings()
    kind = recognise(config, ())
    if kind is None and (checkpoint.has_weights() or not checkpoint.has_tokenizer()):
        kind = recognise(config, tensor_names(checkpoint))
    return None if kind is None else DraftHeadCheckpoint(checkpoint, kind, config)


def head_in_target(target: Checkpoint, role: str) -> DraftHeadCheckpoint:
    """The MTP head in a target's own files.

    Args:
        target: the target's files.
        role: the draft's key in the profile.

    Raises:
        ModelError: there is none, or the files cannot be read.
    """
    mtp_in(target)
    return DraftHeadCheckpoint(replace(target, role=role), HeadKind.MTP, target.settings())


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """The names of a checkpoint's tensors: of its files' headers, on disk or on the hub.

    A repository that has only pickled weights is downloaded, because a pickle has no header.
    """
    pickled = None if checkpoint.has_weights() else _pickle(checkpoint)
    if pickled is not None:
        return list(_unpickled(checkpoint, pickled))
    return list(checkpoint.tensor_files()) if checkpoint.has_weights() or checkpoint.source == "hub" else []


def _pickle(checkpoint: Checkpoint) -> Path | None:
    """A checkpoint's pickled weights, downloaded if need be; None if it has safetensors, or no weights."""
    local = checkpoint.folder / PICKLED
    if local.exists():
        return None if checkpoint.has_weights() else local
    if checkpoint.source != "hub" or checkpoint.has_weights():
        return None
    import huggingface_hub

    with explained(checkpoint.role, checkpoint.name):
        files = huggingface_hub.HfApi().list_repo_files(checkpoint.name, revision=checkpoint.revision)
        if PICKLED not in files or any(name.endswith(".safetensors") for name in files):
            return None
        return Path(huggingface_hub.hf_hub_download(checkpoint.name, PICKLED, revision=checkpoint.revision))


def _unpickled(checkpoint: Checkpoint, path: Path) -> "dict[str, torch.Tensor]":
    import torch

    try:
        # Only the zip format can be mapped into memory.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{checkpoint}: {path} holds more than tensors, and reading that could run code.",
            "Choose a repository with safetensors, or convert it where you trust it.",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(f"{checkpoint}: {path} is damaged ({error}).", "Copy or download it again.") from error
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ModelError(f"{checkpoint}: {path} is not a table of tensors.", "Copy or download it again.")
    return {str(name): tensor for name, tensor in found.items()}
