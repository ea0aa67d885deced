"""From a profile's model table to a model and a tokenizer in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Adapter, Checkpoint, locate
from specctl.models.files.gguf import unpacking
from specctl.models.files.library_calls import explained, hushed
from specctl.models.files.skeleton import load_config, text_only_class
from specctl.models.placing.memory import device_memory, estimate
from specctl.models.placing.placement import Placement, inspected, named_devices, place, placed_here
from specctl.models.placing.quantization import Quantization
from specctl.models.placing.torch_gguf import packed_file, require_packed
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specctl.models.onnx.weights import Weights
    from specctl.models.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model ready to run."""

    name: str  # the model's name in the profile
    model: "PreTrainedModel"  # the transformers model, in eval mode, on its device or devices
    config: Any  # the configuration of its text decoder
    eos_ids: frozenset[int]  # the end-of-sequence ids of its generation settings; `eos_of` adds the tokenizer's
    vocabulary: int  # width of its logits, including padding
    device: "torch.device"  # of the input ids
    dtype: "torch.dtype"  # of the weights that are not quantised
    devices: tuple[str, ...]  # every device that holds weights
    # how the model is split over processes, of which this one has a share; None if it is whole
    sharding: "Sharding | None" = None
    weights: "Weights | None" = None  # has the numbers of a `packed_model`; None for a model that torch can run

    @classmethod
    def of(
        cls,
        model: "PreTrainedModel",
        name: str,
        devices: Sequence[str] | None = None,
        sharding: "Sharding | None" = None,
        weights: "Weights | None" = None,
    ) -> "LoadedModel":
        """Wrap a transformers model that is in memory, in eval mode. ``devices`` is None for a model on one device."""
        from specctl.models.passes.weights import device_of

        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        inputs: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        config = model.config.get_text_config(decoder=True)
        return cls(
            name=name,
            model=model,
            config=config,
            eos_ids=_eos_ids(model),
            # The output layer may be in another process.
            vocabulary=head.weight.shape[0] if hasattr(head, "weight") else config.vocab_size,
            device=device_of(model) if inputs.is_meta else inputs.device,
            dtype=model.dtype,
            devices=(str(model.device),) if devices is None else tuple(devices),
            sharding=sharding,
            weights=weights,
        )

    @property
    def parameters(self) -> int:
        """The number of weights; of a sharded model, the number in this process."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def untested(self) -> bool:
        """Whether no test covers its model family. Such a model is checked without being asked."""
        from specctl.models.passes.recurrent_state import untested

        return untested(self.model)


def loading_order(levels: Iterable[T]) -> list[T]:
    """Members listed from the target down, in the order in which they are loaded: the lowest draft first, the target
    last.

    A target that is spread over devices takes the remaining memory, so the smaller models are loaded first.
    """
    return list(levels)[::-1]


def load_model(table: ModelTable, *, role: str) -> LoadedModel:
    """Load a causal language model on the devices of its table, after checking that it fits.

    Args:
        table: the model's profile table.
        role: the table's key in the profile: ``target``, ``draft``, ``draft.draft``.

    Raises:
        ModelError: the model cannot be loaded; the hint says how to fix it.
    """
    checkpoint = locate(table, role)
    if checkpoint.weights is not None:
        raise ModelError(
            f"{checkpoint} is a GGUF file, and torch needs its weights unpacked here.",
            unpacking(checkpoint.weights, role),
        )
    return load_inspected(checkpoint, table, inspected(checkpoint, table, device_memory(named_devices(table))))


def load_packed(checkpoint: Checkpoint, table: ModelTable) -> LoadedModel:
    """A model that onnxruntime is to run with its files' own blocks, which stay there; see `packed_model`.

    Raises:
        ModelError, Unable: it cannot run so; see `packed_weights`.
    """
    from specctl.models.onnx.skeletons import packed_model

    need = estimate(checkpoint)
    place(table.model_copy(update={"device": "cpu"}), need, device_memory({"cpu"}), checkpoint.role)
    checkpoint.fetch_weights()
    model, weights = packed_model(checkpoint)
    return LoadedModel.of(model, table.model, weights=weights)


def load_inspected(checkpoint: Checkpoint, table: ModelTable, quantization: Quantization | None) -> LoadedModel:
    """Like `load_model`, for a model that was `inspected`; takes the quantisation that `inspected` returned."""
    role = checkpoint.role
    need = estimate(checkpoint, table.trust_remote_code, quantization)
    placement = placed_here(checkpoint, table, need)
    checkpoint.fetch_weights()
    prefer_own_attention(placement.devices)
    sharding = None
    with explained(role, table.model), hushed():
        if placement.sharded is None:
            model = _read(checkpoint, placement, quantization, table.trust_remote_code)
        else:
            model, sharding = _led(checkpoint, placement, table.trust_remote_code)
        if checkpoint.adapter is not None:
            model = adapted(model, checkpoint.adapter)
    _require_numbers(checkpoint, model)
    return LoadedModel.of(model, table.model, placement.devices, sharding)


def prefer_own_attention(devices: Iterable[str]) -> None:
    """Disable cuDNN's attention in this process if a model goes to a CUDA device.

    From torch 2.9 on it comes first on H100 and B200. It builds a plan for every new length and stride of the cache,
    which takes 20 to 40 ms on an H100 for each token that a text has grown by; and on a B200 its one-token passes are
    wrong for models with fewer than 8 key-value heads (pytorch #193893).
    """
    import torch

    if any(device.startswith("cuda") for device in devices):
        torch.backends.cuda.enable_cudnn_sdp(False)


def read_share(asked: dict[str, Any]) -> "PreTrainedModel":
    """This follower's share of a model; ``asked`` is the message that `_led` sent, with the leader's additions.

    Raises:
        ModelError: it cannot be loaded.
    """
    checkpoint = Checkpoint(**{**asked["checkpoint"], "path": Path(asked["checkpoint"]["path"])})
    placement = Placement({}, None, asked["dtype"], {}, sharded=asked["kind"], shards=asked["shards"])
    prefer_own_attention(placement.devices)
    with explained(checkpoint.role, checkpoint.name), hushed():
        model = _read(checkpoint, placement, None, asked["trust_remote_code"])
    _require_numbers(checkpoint, model)
    return model


def load_tokenizer(table: ModelTable, *, role: str = "target") -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's checkpoint; raises ModelError if there is none or it cannot be read."""
    from transformers import AutoTokenizer

    checkpoint = locate(table, role)
    absent = ModelError(
        f"{checkpoint} comes without a tokenizer.",
        f"Copy tokenizer.json and tokenizer_config.json of its family into {checkpoint.folder}.",
    )
    if not checkpoint.has_tokenizer():
        raise absent
    with explained(role, table.model), hushed():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=table.trust_remote_code
            )
        except ImportError:
            raise
        except Exception as error:
            load_config(checkpoint, table.trust_remote_code)  # the tokenizer reads it too, so report its faults first
            raise ModelError(
                f"{checkpoint}: its tokenizer cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}).",
                f"Copy or download the tokenizer files in {checkpoint.folder} again.",
            ) from error
    if not tokenizer.chat_template:  # older models that read pictures have it in a file that only their processor reads
        tokenizer.chat_template = checkpoint.processor_template()
    # Without its files transformers makes a tokenizer of an empty vocabulary; T5's then has only the space.
    if len(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *tokenizer.added_tokens_encoder}) < 2:
        raise absent
    return tokenizer


def _eos_ids(model: "PreTrainedModel") -> frozenset[int]:
    found = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset({found} if isinstance(found, int) else found or ())


def _led(checkpoint: Checkpoint, placement: Placement, trust_remote_code: bool) -> "tuple[PreTrainedModel, Sharding]":
    from specctl.models.sharding import lead

    assert placement.sharded is not None, "whole models have no leader"
    asked = {
        "checkpoint": {**asdict(checkpoint), "path": str(checkpoint.path.absolute())},
        "dtype": placement.dtype,
        "trust_remote_code": trust_remote_code,
    }
    return lead(placement.shards).load(
        placement.sharded,
        asked,
        lambda: _read(checkpoint, placement, None, trust_remote_code),
    )


def _read(
    checkpoint: Checkpoint, placement: Placement, quantization: Quantization | None, trust_remote_code: bool
) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    if placement.sharded is None:
        single = isinstance(placement.device_map, str) and placement.device_map in placement.shares
        device_map = {"": placement.device_map} if single else placement.device_map
        where: dict[str, Any] = {"device_map": device_map, "max_memory": placement.max_memory}
    else:
        from transformers.distributed.configuration_utils import DistributedConfig

        size = placement.shards
        split = DistributedConfig(tp_size=size) if placement.sharded == "tensor" else DistributedConfig(pp_size=size)
        where = {"distributed_config": split}
    # None must not be passed for a checkpoint that is quantised already: it would replace its own settings.
    quantizing = {} if quantization is None else {"quantization_config": quantization.config(placement.dtype)}
    # AutoModelForCausalLM also loads code from repositories, and decoders from a wrapper's files.
    config = load_config(checkpoint, trust_remote_code)
    loader: Any = text_only_class(config) or AutoModelForCausalLM
    loaded: Any = loader.from_pretrained(
        checkpoint.folder,
        dtype=getattr(torch, placement.dtype),
        **where,
        **({"use_safetensors": True} if checkpoint.weights is None else packed_file(checkpoint, config)),
        **quantizing,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,  # to get a report with their names instead of an error without names
        output_loading_info=True,
    )
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    _require_complete(checkpoint, report)
    if checkpoint.weights is not None:
        require_packed(checkpoint, model)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _require_complete(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Raise a ModelError if transformers initialised weights that are missing or have a wrong shape."""
    missing = sorted(report["missing_keys"])
    shapes = sorted((name, tuple(stored), tuple(made)) for name, stored, made in report["mismatched_keys"])
    if not (missing or shapes):
        return
    if missing:
        what = f"lacks {len(missing)} weight(s), first {missing[0]}"
    else:
        what = "has a wrong shape: {} is {}, not {}".format(*shapes[0])
    raise ModelError(
        f"{checkpoint}: the checkpoint does not match its config.json; it {what}.",
        "Copy or download it again, and check that it is a language model with its output head.",
    )


def _require_numbers(checkpoint: Checkpoint, model: "PreTrainedModel") -> None:
    """Raise a ModelError if weights are NaN."""
    import torch

    for name, parameter in model.named_parameters():
        weight = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of a share, what is here
        # A quantised weight is a tensor subclass of codes and scales; its scales are NaN where it is.
        inner = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        parts = [part for name in inner if (part := getattr(weight, name)).dtype.itemsize > 1] if inner else [weight]
        # A sum is NaN if one of its terms is, and takes a single pass and no memory.
        if any(part.is_floating_point() and not part.is_meta and bool(torch.isnan(part.sum())) for part in parts):
            raise ModelError(
                f"{checkpoint} has weights that are not numbers (NaN), first in {name}.",
                "Copy or download it again, or choose another checkpoint.",
            )


def adapted(model: "PreTrainedModel", adapter: Adapter) -> "PreTrainedModel":
    """Merge a LoRA adapter into the model in place, and return the model.

    The low-rank updates are added to the weights in the weights' dtype, so passes cost nothing more and every engine
    can run them. Quantised weights stay unmerged, because merging would round them again: their layers compute the
    update in every pass.

    Raises ModelError if the adapter has tensors that the model does not know, or lacks some that the model needs.
    peft's errors about an adapter that does not fit are passed on.
    """
    from peft import PeftConfig, PeftModel

    settings: Any = PeftConfig.from_pretrained(str(adapter.folder))
    settings.inference_mode = True
    whole: Any = PeftModel(model, settings)
    read = whole.load_adapter(str(adapter.folder), "default")
    adapter.require_whole(read.missing_keys, read.unexpected_keys)
    if getattr(model, "hf_quantizer", None) is not None:
        apart: PreTrainedModel = whole.get_base_model()
        return apart
    _part_embeddings(whole.get_base_model())
    merged: PreTrainedModel = whole.merge_and_unload()
    if not _tied(merged):
        for config in (merged.config, merged.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
    return merged


def _part_embeddings(model: Any) -> None:
    """Untie the output layer if an adapter changes it or the input embeddings; else both would get the update."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.nn import Parameter

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(end, BaseTunerLayer) for end in ends) or not _tied(model):
        return
    output: Any = ends[1].get_base_layer() if isinstance(ends[1], BaseTunerLayer) else ends[1]
    output.weight = Parameter(output.weight.detach().clone(), requires_grad=False)


def _tied(model: Any) -> bool:
    """Whether the output layer's weights are the input embeddings."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    return output is not None and output is model.get_input_embeddings().weight
