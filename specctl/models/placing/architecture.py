"""Whether specctl can run a model, told from its configuration files."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.models.files.checkpoint import GENERATION, Checkpoint
from specctl.models.files.library_calls import explain, hushed
from specctl.models.files.plain_config import is_plain_generation
from specctl.models.files.skeleton import is_wrapper, known_class
from specctl.models.placing.model_config import load_config
from specctl.models.running.rules.generation_rules import unsupported_in

if TYPE_CHECKING:
    from transformers import GenerationConfig

NEEDS_MORE = {
    "idefics": "it needs a picture with every text",
    "kosmos-2": "it needs a picture with every text",
    "shieldgemma2": "it classifies pictures, and transformers reads its weights for nothing else",
    "voxtral_realtime": "it needs sound with every token",
}
"""Families whose class in transformers does not run on text alone, by ``model_type``, and why."""


def require_runnable(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Raise a ModelError if a model has no decoder that writes text, or cannot take back the tokens that are rejected.

    Args:
        checkpoint: the model's files; its weights are not needed.
        trust_remote_code: whether code from its repository may run.
    """
    from specctl.models.passes.cache import cannot_go_back

    config = load_config(checkpoint, trust_remote_code)
    known = known_class(config)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if known is None and not (remote and trust_remote_code):
        text = "trust_remote_code" if remote else "Unrecognized configuration class"
        raise explain(ValueError(text), checkpoint.role, checkpoint.name)
    lacks, why = "write from text alone", NEEDS_MORE.get(config.model_type)
    if known is not None and is_wrapper(config) and config.is_encoder_decoder:
        why = "it is an encoder with a decoder, and what it writes depends on what the encoder is given"
    if why is None:
        lacks, why = "take back rejected tokens", cannot_go_back(config, known)
    if why is not None:
        raise ModelError(
            f"{checkpoint} cannot {lacks}: {why}.",
            f"Models of the family {config.model_type} can be neither target nor draft; take one of another family, "
            "such as Llama, Qwen, Gemma, Mistral, Pythia or LLaVA.",
        )


def generation_config(checkpoint: Checkpoint) -> "GenerationConfig | SimpleNamespace | None":
    """What a checkpoint's generation_config.json says, without transformers where that adds nothing; None if there is
    no such file.

    Raises:
        ModelError: it is damaged. transformers would go on without it, and so without its end of sequence.
    """
    settings = checkpoint.generation_settings()
    if settings is None:
        return None
    if is_plain_generation(settings):
        return SimpleNamespace(**settings)
    from transformers import GenerationConfig

    try:
        with hushed():
            return GenerationConfig.from_dict(settings)
    except Exception as error:
        raise ModelError(
            f"{checkpoint} has a damaged {GENERATION}: {' '.join(str(error).split()).rstrip('.')}.",
            f"Copy or download {checkpoint.folder / GENERATION} again.",
        ) from error


def require_supported_rules(checkpoint: Checkpoint) -> None:
    """Raise a ModelError if a target's generation_config.json changes its text in a way that cannot be verified."""
    config = generation_config(checkpoint)
    for setting, why in unsupported_in(config).items() if config is not None else ():
        raise ModelError(
            f"{checkpoint}: its generation_config.json sets {setting}, which cannot be followed: {why}.",
            "To leave out the rules in that file, set generation_config = false at the top of the profile.",
        )
