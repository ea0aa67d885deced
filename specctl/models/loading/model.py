"""From a profile's model table to a model and a tokenizer in memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from specctl.errors import ModelError
from specctl.models.loading.checkpoint import Checkpoint, locate
from specctl.models.loading.failures import explained
from specctl.models.loading.hushing import hushed
from specctl.models.loading.memory import device_memory, estimate, load_config
from specctl.models.loading.placement import Placement, named_devices
from specctl.models.loading.preparation import inspected, placed_here
from specctl.models.loading.quantization import Quantization
from specctl.models.loading.vocabulary import check_vocabulary
from specctl.profile.schema import ModelTable, Profile

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LoadedModel", "check_vocabulary", "eos_ids", "load_model", "load_tokenizer", "model_tables"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model ready to run.

    Attributes:
        name: the model's name in the profile.
        model: the transformers model, in eval mode, on its device or devices.
        config: the configuration of its text decoder.
        eos_ids: the end-of-sequence ids of its generation settings; `eos_ids` can add the tokenizer's id.
        vocabulary: width of its logits, including padding.
        device: device of the input ids.
        dtype: dtype of the weights, of those that are not quantised.
        devices: every device that holds weights.
    """

    name: str
    model: "PreTrainedModel"
    config: Any
    eos_ids: frozenset[int]
    vocabulary: int
    device: "torch.device"
    dtype: "torch.dtype"
    devices: tuple[str, ...]

    @property
    def hidden_size(self) -> int:
        """Width of its last hidden states."""
        return int(self.config.hidden_size)


def model_tables(profile: Profile) -> list[tuple[str, ModelTable]]:
    """Every model of a profile with its key, in loading order: the lowest draft first, the target last.

    A target that is spread over devices takes the remaining memory, so the small models must be loaded before it.
    """
    tables: list[tuple[str, ModelTable]] = [("target", profile.target)]
    key, draft = "draft", profile.draft
    while draft is not None:
        tables.append((key, draft))
        key, draft = f"{key}.draft", draft.draft
    return tables[::-1]


def load_model(table: ModelTable, *, role: str, verbose: bool = False) -> LoadedModel:
    """Load a causal language model on the devices of its table, after checking that it fits.

    Args:
        table: the model's profile table.
        role: the table's key in the profile: ``target``, ``draft``, ``draft.draft``.
        verbose: let transformers show its progress and warnings on stderr.

    Raises:
        ModelError: the model cannot be loaded, for any reason; the hint shows how to fix it.
    """
    checkpoint = locate(table, role)
    return load_inspected(
        checkpoint, table, inspected(checkpoint, table, device_memory(named_devices(table))), verbose=verbose
    )


def load_inspected(
    checkpoint: Checkpoint, table: ModelTable, quantization: Quantization | None, *, verbose: bool = False
) -> LoadedModel:
    """`load_model` for a model that was `inspected`, which told how it is quantised."""
    role = checkpoint.role
    need = estimate(checkpoint, table.trust_remote_code, quantization)
    placement = placed_here(checkpoint, table, need)
    checkpoint.fetch_weights()
    prefer_own_attention(placement.devices)
    with explained(role, table.model), hushed(verbose):
        model = _read(checkpoint, placement, quantization, table.trust_remote_code)
    _require_numbers(checkpoint, model)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    inputs: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    config = model.config.get_text_config(decoder=True)
    from specctl.models.running.weights import device_of

    return LoadedModel(
        name=table.model,
        model=model,
        config=config,
        eos_ids=eos_ids(model),
        vocabulary=config.vocab_size if head is None else head.weight.shape[0],
        device=device_of(model) if inputs.is_meta else inputs.device,
        dtype=model.dtype,
        devices=tuple(placement.devices),
    )


def prefer_own_attention(devices: Iterable[str]) -> None:
    """Do without cuDNN's attention in this process where a model goes to a CUDA device.

    From torch 2.9 on it comes first on H100 and B200. It builds a plan for every new length and stride of the cache,
    which takes 20 to 40 ms on an H100 each time that a text has grown by a token; and on a B200 its one-token passes
    are wrong for models with fewer than 8 key-value heads (pytorch #193893).
    """
    import torch

    if any(device.startswith("cuda") for device in devices):
        torch.backends.cuda.enable_cudnn_sdp(False)


def load_tokenizer(table: ModelTable, *, role: str = "target") -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's checkpoint.

    Raises:
        ModelError: the checkpoint has no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    checkpoint = locate(table, role)
    if not checkpoint.has_tokenizer():
        raise ModelError(
            f"{checkpoint} comes without a tokenizer.",
            f"Copy tokenizer.json and tokenizer_config.json of its family into {checkpoint.folder}.",
        )
    with explained(role, table.model), hushed():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=table.trust_remote_code
            )
        except ImportError:
            raise
        except Exception as error:
            load_config(checkpoint, table.trust_remote_code)  # which the tokenizer reads too: its faults are told first
            raise ModelError(
                f"{checkpoint}: its tokenizer cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}).",
                f"Copy or download the tokenizer files in {checkpoint.folder} again.",
            ) from error
    return tokenizer


def eos_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> frozenset[int]:
    """Every id that ends a sequence: the ids of the model's generation settings and the tokenizer's id."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    ids = {found} if isinstance(found, int) else set(found or ())
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _read(
    checkpoint: Checkpoint, placement: Placement, quantization: Quantization | None, trust_remote_code: bool
) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    single = isinstance(placement.device_map, str) and placement.device_map in placement.shares
    # Not even None may be passed for a checkpoint that is quantised already: it would replace that one's own settings.
    quantizing = {} if quantization is None else {"quantization_config": quantization.config(placement.dtype)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        dtype=getattr(torch, placement.dtype),
        device_map={"": placement.device_map} if single else placement.device_map,
        max_memory=placement.max_memory,
        use_safetensors=True,
        **quantizing,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,  # to get a report that names them, instead of an error without names
        output_loading_info=True,
    )
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    _require_complete(checkpoint, report)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _require_complete(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Raise a ModelError if transformers made up weights, because they are missing or have a wrong shape."""
    missing = sorted(report["missing_keys"])
    shapes = sorted(str(key) for key in report["mismatched_keys"])
    if not (missing or shapes):
        return
    what = f"lacks {len(missing)} weight(s), first {missing[0]}" if missing else f"has a wrong shape: {shapes[0]}"
    raise ModelError(
        f"{checkpoint}: the checkpoint does not match its config.json; it {what}.",
        "Copy or download it again, and check that it is a language model with its output head.",
    )


def _require_numbers(checkpoint: Checkpoint, model: "PreTrainedModel") -> None:
    """Raise a ModelError if weights are NaN."""
    import torch

    for name, weight in model.named_parameters():
        # A quantised weight is a tensor of a type of its own, made of codes and of scales that are NaN where it is.
        inner = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        parts = [part for name in inner if (part := getattr(weight, name)).dtype.itemsize > 1] if inner else [weight]
        # A sum is NaN if one of its terms is, and is found in a single pass without memory of its own.
        if any(part.is_floating_point() and not part.is_meta and bool(torch.isnan(part.sum())) for part in parts):
            raise ModelError(
                f"{checkpoint} has weights that are not numbers (NaN), first in {name}.",
                "Copy or download it again, or choose another checkpoint.",
            )
