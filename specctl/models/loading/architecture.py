"""Whether specctl can run a model of some architecture, told from its configuration."""

from typing import Any

from transformers import AutoModelForCausalLM

from specctl.errors import ModelError
from specctl.models.loading.checkpoint import Checkpoint
from specctl.models.loading.failures import explain
from specctl.models.running.cache import cannot_go_back


def require_runnable(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> None:
    """Raise a ModelError if a model is no causal language model, or cannot take back the tokens that are rejected.

    Args:
        checkpoint: names the model.
        config: its transformers configuration.
        trust_remote_code: whether code from its repository may run.
    """
    known: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if known is None and not (remote and trust_remote_code):
        text = "trust_remote_code" if remote else "Unrecognized configuration class"
        raise explain(ValueError(text), checkpoint.role, checkpoint.name)
    if why := cannot_go_back(config, known[0] if isinstance(known, tuple) else known):
        raise ModelError(
            f"{checkpoint} cannot take back rejected tokens: {why}.",
            f"Models of the family {config.model_type} cannot be used here, neither as target nor as draft.",
        )
