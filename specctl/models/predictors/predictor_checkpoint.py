"""Predictors on disk: finding one, checking that it belongs to a draft, reading and writing its files."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

from specctl.errors import ModelError, too_deep
from specctl.models.files.checkpoint import Checkpoint, weights_hash
from specctl.models.files.library_calls import explained, hushed_hub
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.outputs import naming, write_whole
from specctl.policies import Signal
from specctl.profile.schema import PolicyTable, predictor_path

if TYPE_CHECKING:
    import torch

    from specctl.models.predictors.state_predictor import StatePredictor

Kind = Literal["specdec++", "disco"]  # The policy that a predictor was trained for
KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_SIGNALS: Mapping[Kind, Literal["accept_prob", "own_accept_prob"]] = {
    "specdec++": "accept_prob",
    "disco": "own_accept_prob",
}
"""The signal that a predictor of each kind computes."""
KIND = "kind"
SCHEMA_VERSION = 1
WEIGHTS, CONFIG, CARD = "head.safetensors", "config.json", "README.md"
PUBLISHED_WEIGHTS = "model.safetensors"
_EMBEDDED = "embedded:"


@dataclass(frozen=True, slots=True)
class PredictorCheckpoint:
    """The files of a predictor: its name in the profile, its folder, and the contents of its config.json."""

    name: str
    folder: Path
    config: dict[str, Any]

    def __str__(self) -> str:
        return f"The acceptance head {self.name!r}"

    @property
    def published(self) -> bool:
        """Whether it has the layout of SpecDec++'s released predictors, without a hash of the draft's weights."""
        return "schema_version" not in self.config

    @property
    def kind(self) -> Kind:
        """The kind; published predictors are SpecDec++'s."""
        return "specdec++" if self.published else KINDS[KINDS.index(self.config[KIND])]

    @property
    def draft_sha256(self) -> str | None:
        """`weights_hash` of its draft in training; None for a published predictor."""
        return self.config.get("draft_sha256")

    @property
    def draft_model(self) -> str:
        return str(self.config.get("draft_model", "a draft that its config.json does not name"))

    @property
    def _weights_path(self) -> Path:
        return self.folder / (PUBLISHED_WEIGHTS if self.published else WEIGHTS)

    @contextmanager
    def _weights(self, framework: Literal["np", "pt"]) -> Iterator[Any]:
        """The open weight file; any fault of it within the context becomes a ModelError."""
        from safetensors import SafetensorError, safe_open

        path = self._weights_path
        try:
            with safe_open(path, framework=framework) as file:
                yield file
        except FileNotFoundError as error:
            other = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*"))
            why = "; weights in other formats can run code when they are read" if other else ""
            raise ModelError(f"{self}: there is no {path.name} in {self.folder}{why}.", _REMAKE) from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self}: {path} is damaged ({error}).", "Copy or train it again.") from error

    def require_weights(self) -> None:
        """Raise a ModelError if the weight file is missing or its header is damaged."""
        with self._weights("np"):
            pass

    def load(self, hidden_size: int) -> "TrainedPredictor":
        """Read the weights; ``hidden_size`` is the width of the draft's hidden states, which DISCO does not read.

        Raises:
            ModelError: a file is missing or damaged, or the predictor is for another hidden size.
        """
        from specctl.models.predictors.disco_predictor import disco_predictor_from
        from specctl.models.predictors.state_predictor import predictor_from, predictor_from_published

        with self._weights("pt") as file:
            weights: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        path = self._weights_path
        for name, weight in weights.items():
            if not weight.is_floating_point() or not bool(weight.isfinite().all()):
                kind = "not numbers (NaN) or infinite" if weight.is_floating_point() else f"of dtype {weight.dtype}"
                raise ModelError(f"{self}: weights in {path} are {kind}, first {name}.", "Copy or train it again.")
        try:
            if self.kind == "disco":
                return disco_predictor_from(weights)
            if self.published:
                predictor = predictor_from_published(weights, int(self.config.get("num_layers", 0)))
            else:
                predictor = predictor_from(weights, reads_signals=self.config.get("reads_signals") is True)
        except (ModelError, TypeError, ValueError) as error:
            raise ModelError(f"{self}: {error}.", "Copy or train it again.") from error
        if predictor.hidden_size != hidden_size:
            raise ModelError(
                f"{self} needs hidden states of {predictor.hidden_size} numbers; the draft's have {hidden_size}.",
                f"It was trained on {self.draft_model}. {_REMAKE}",
            )
        return predictor


_REMAKE = "Make one for this pair with `specctl train-head`."


def locate_predictor(name: str) -> PredictorCheckpoint:
    """Find a predictor by ``embedded:NAME``, folder, or hub id; from the hub, its files are downloaded.

    Raises:
        ModelError: there is no such predictor, or its config.json cannot be read.
    """
    folder = _folder(name)
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if too_deep(config):
            raise RecursionError
    except FileNotFoundError as error:
        raise ModelError(f"The acceptance head {name!r}: there is no {CONFIG} in {folder}.", _REMAKE) from error
    except RecursionError as error:
        raise _damaged(name, path, "it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise _damaged(name, path, str(error)) from error
    if not isinstance(config, dict):
        raise _damaged(name, path, "it is not an object")
    if (version := config.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise ModelError(
            f"The acceptance head {name!r} has schema_version {version}; this specctl reads {SCHEMA_VERSION}.",
            "Train the head again, or read it with the specctl that wrote it.",
        )
    if "schema_version" in config and (kind := config.get(KIND)) not in KINDS:
        raise ModelError(
            f"The acceptance head {name!r} is of the kind {kind!r}; this specctl knows {' and '.join(KINDS)}.",
            "Update specctl, or train the head again.",
        )
    return PredictorCheckpoint(name, folder, config)


def require_kind(predictor: PredictorCheckpoint, policy: PolicyTable) -> None:
    """Raise ModelError if a policy reads the predictions of the other kind of predictor."""
    needed = [kind for kind, signal in KIND_SIGNALS.items() if signal in policy.setting.signals]
    if needed and predictor.kind not in needed:
        raise ModelError(
            f"{predictor} is of the kind {predictor.kind}, and the policy {policy.name} reads one of the kind "
            f"{needed[0]}.",
            f"Train one with `specctl train-head --kind {needed[0]}`, or draft with the policy {predictor.kind}.",
        )


def _damaged(name: str, path: Path, reason: str) -> ModelError:
    return ModelError(f"The acceptance head {name!r} has a damaged {path.name}: {reason}.", f"Copy {path} again.")


def on_hub(name: str) -> bool:
    """Whether a predictor's name is a hub id: it has one slash and is not a folder."""
    looks_local = name.startswith(("/", "./", "../", "~", _EMBEDDED)) or name.count("/") != 1
    return not looks_local and not Path(name).is_dir()


def _folder(name: str) -> Path:
    if name.startswith(_EMBEDDED):
        return predictor_path(name.removeprefix(_EMBEDDED))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not on_hub(name):
        hint = f"Paths are relative to the current directory, {Path.cwd()}. {_REMAKE}"
        raise ModelError(f"The acceptance head {name!r}: there is no such folder.", hint)
    import huggingface_hub

    with explained("acceptance head of the draft", name), hushed_hub():
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[WEIGHTS, PUBLISHED_WEIGHTS, CONFIG, CARD]))


def mismatch(predictor: PredictorCheckpoint, draft: Checkpoint) -> str | None:
    """Why a predictor does not belong to a draft, or None. Without a hash of its draft's weights it always passes."""
    if predictor.draft_sha256 is None or predictor.draft_sha256 == weights_hash(draft):
        return None
    return f"{predictor} was trained on other weights ({predictor.draft_model}) than the draft has ({draft.name!r})"


def save_predictor(folder: Path, predictor: "StatePredictor", config: dict[str, Any], card: str) -> None:
    """Write the files of a predictor on hidden states; see `save_weights`."""
    shape = {
        KIND: "specdec++",
        "hidden_size": predictor.hidden_size,
        "depth": predictor.depth,
        "reads_signals": predictor.reads_signals,
    }
    save_weights(folder, predictor.state_dict(), {**shape, **config}, card)


def save_weights(folder: Path, weights: "Mapping[str, torch.Tensor]", config: dict[str, Any], card: str) -> None:
    """Write head.safetensors, the card, and config.json last, each file completely or not at all."""
    from safetensors.torch import save

    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS, save({name: weight.contiguous().cpu() for name, weight in weights.items()}))
    write_whole(folder / CARD, card)
    write_whole(folder / CONFIG, json.dumps({"schema_version": SCHEMA_VERSION, **config}, indent=1) + "\n")


TrainedPredictor = Union["StatePredictor", DiscoPredictor]


def signal_of(predictor: TrainedPredictor) -> Signal:
    """The signal that a predictor computes."""
    return "own_accept_prob" if isinstance(predictor, DiscoPredictor) else "accept_prob"


def first_for(signals: Iterable[Signal], predictors: Iterable[TrainedPredictor]) -> TrainedPredictor | None:
    """The first predictor that computes one of the signals."""
    wanted = set(signals)
    return next((predictor for predictor in predictors if signal_of(predictor) in wanted), None)


def state_predictors(named: Mapping[str, TrainedPredictor]) -> "dict[str, StatePredictor]":
    """The predictors that read hidden states."""
    return {name: predictor for name, predictor in named.items() if not isinstance(predictor, DiscoPredictor)}


def disco_predictors(named: Mapping[str, TrainedPredictor]) -> dict[str, DiscoPredictor]:
    """The predictors that read distributions."""
    return {name: predictor for name, predictor in named.items() if isinstance(predictor, DiscoPredictor)}
