"""A model with the changes of its LoRA adapter, by peft, which is imported here only."""

from typing import TYPE_CHECKING, Any

from specctl.models.files.checkpoint import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def adapted(model: "PreTrainedModel", adapter: Adapter) -> "PreTrainedModel":
    """The same model, changed in place.

    Changes are added to the weights, in the weights' dtype, so that passes cost nothing more and every engine runs
    them. Weights that are quantised stay as they are: adding would round them anew, so their layers compute the change
    in every pass.

    Raises:
        ModelError: some of the adapter's tensors have no place in the model, or the model has some for which there
            are none.
        Exception: whatever peft raises of an adapter that does not fit.
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
    """Give the output layer weights of its own if they are the input's and an adapter changes either of them: what is
    added to one would be added to the other too, which is not what the adapter was trained with."""
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
