"""The files of a draft head: their kind, their tensors, and the network they describe."""

import pickle
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.draft_heads.kinds import HEAD_KINDS, MTP, recognise
from specctl.models.draft_heads.mtp_tensors import mtp_in, read_mtp
from specctl.models.files.checkpoint import PICKLED, Checkpoint
from specctl.models.files.gguf_header import read_header
from specctl.models.files.library_calls import explained

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead


@dataclass(frozen=True, slots=True)
class DraftHeadCheckpoint:
    """The files of a draft head: their location, its kind, and the contents of its config.json."""

    checkpoint: Checkpoint
    kind: str
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
        """Whether its tensors are in the files of the target that it was trained with."""
        return self.kind == MTP.kind and "speculators_model_type" not in self.config

    @property
    def foresees(self) -> bool:
        """Whether it predicts the acceptance of tokens before they are sampled, judged by its tensors."""
        names = tensor_names(self.checkpoint) if self.writes_blocks else []
        return any(name.removeprefix("decoder.").startswith("confidence") for name in names)

    @property
    def writes_blocks(self) -> bool:
        """Whether one pass drafts several tokens."""
        return HEAD_KINDS[self.kind].blocks

    @property
    def local(self) -> bool:
        """Whether its weights are on this machine."""
        return self.checkpoint.has_weights() or (self.folder / PICKLED).exists()

    def fetch_weights(self) -> None:
        """Download missing weights."""
        if self.in_target or _pickle(self.checkpoint) is None:
            self.checkpoint.fetch_weights()

    def read(self) -> "dict[str, torch.Tensor]":
        """The head's tensors, downloaded if needed. A pickle is restricted to tensors, so it runs no code.

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

    def network(self, target: "PreTrainedModel") -> "ChainHead | BlockHead":
        """The head with its file's weights, in eval mode, next to its verifier.

        Raises:
            ModelError: as for `read`, or it is of a layout that specctl does not know, or made for another model.
        """
        from specctl.models.draft_heads.file_layout import read_head

        return read_head(self.kind, self.config, self.read(), target, str(self))


def draft_head(checkpoint: Checkpoint) -> DraftHeadCheckpoint | None:
    """A checkpoint as a draft head; None for an ordinary model.

    If the configuration does not name the kind, the tensor names in the files' headers decide. The headers are not
    downloaded for a repository with a tokenizer, because that is an ordinary model.

    Raises:
        ModelError: the configuration or the weights cannot be read, or it is a head that specctl does not run.
    """
    if checkpoint.weights is not None:  # a GGUF file has a model
        return None
    config = checkpoint.settings()
    kind = recognise(config, ())
    if kind is None and (checkpoint.has_weights() or not checkpoint.has_tokenizer()):
        kind = recognise(config, tensor_names(checkpoint))
    return None if kind is None else DraftHeadCheckpoint(checkpoint, kind, config)


def head_in_target(target: Checkpoint, role: str) -> DraftHeadCheckpoint:
    """The MTP head in a target's own files; ``role`` is the draft's key in the profile.

    Raises:
        ModelError: there is none, or the files cannot be read.
    """
    if target.weights is None:
        mtp_in(target)
        return DraftHeadCheckpoint(replace(target, role=role), MTP.kind, target.settings())
    if not read_header(target.weights).ahead:
        raise ModelError(f"{target} has no MTP layers.", f"Draft with a model or with prompt:lookup in [{role}].")
    return DraftHeadCheckpoint(replace(target, role=role), MTP.kind, {})


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """The names of a checkpoint's tensors, from its files' headers on disk or on the hub.

    A repository that has only pickled weights is downloaded, because a pickle has no header.
    """
    pickled = None if checkpoint.has_weights() else _pickle(checkpoint)
    if pickled is not None:
        return list(_unpickled(checkpoint, pickled))
    return list(checkpoint.tensor_files()) if checkpoint.has_weights() or checkpoint.source == "hub" else []


def _pickle(checkpoint: Checkpoint) -> Path | None:
    """A checkpoint's pickled weights, downloaded if needed; None if it has safetensors, or no weights."""
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
