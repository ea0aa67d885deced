"""A model with the changes of its LoRA adapter, by peft, which is imported here only."""

from typing import TYPE_CHECKING

from specctl.models.files.adapter import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def adapted(model: "PreTrainedModel", adapter: Adapter) -> "PreTrainedModel":
    """The same model, changed in place.

    Changes are added to the weights, in the weights' dtype, so that passes cost nothing more and every engine runs
    them. Weights that are quantised stay as they are: adding would round them anew, so their layers compute the change
    in every pass.

    Raises:
        Exception: whatever peft raises of an adapter that does not fit.
    """
    from peft import PeftModel

    whole = PeftModel.from_pretrained(model, str(adapter.folder))
    quantised = getattr(model, "hf_quantizer", None) is not None
    changed: PreTrainedModel = whole.get_base_model() if quantised else whole.merge_and_unload()
    return changed
