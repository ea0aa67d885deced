"""A model's configuration: transformers' own, and what is asked of it before a model is made."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import GENERATION, Checkpoint
from specctl.models.files.library_calls import explain, explained, hushed
from specctl.models.files.plain_config import FAMILIES, is_plain, is_plain_generation
from specctl.models.files.skeleton import is_wrapper, known_class, load_config, text_only_class
from specctl.models.passes.layer_sizes import cached_values
from specctl.models.running.rules.text_rules import unsupported_in

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is needed of a checkpoint's configuration before a model is made from it.

    Attributes:
        whole: transformers' configuration; None for a well-known family, where it was not needed.
        architecture: the class that it names, else its family.
        context: the most tokens of a sequence; None where there is no limit.
        vocabulary: rows of its embeddings.
        hidden_size: width of its states.
        ties: whether the output layer is the embeddings.
        eos: its ``eos_token_id``.
        dtype: of its weights; None where it names none.
        quantised: whether its weights are packed.
        wraps: whether it is a wrapper around a text decoder, which alone is loaded.
    """

    whole: Any
    architecture: str
    context: int | None
    vocabulary: int
    hidden_size: int
    ties: bool
    eos: int | list[int] | None
    dtype: str | None
    quantised: bool
    wraps: bool = False
    _cached_values: int | None = None

    @property
    def cached_values(self) -> int:
        """As of `cached_values`; only of a model that can run."""
        return cached_values(self.whole) if self._cached_values is None else self._cached_values

    @classmethod
    def read(cls, checkpoint: Checkpoint, trust_remote_code: bool = False) -> "ModelConfig":
        """That of a checkpoint, without transformers for well-known families.

        Raises ModelError where its config.json is damaged, or describes a model that transformers does not know.
        """
        settings = checkpoint.settings()
        if is_plain(settings):
            return cls._of_file(settings)
        config = load_config(checkpoint, trust_remote_code)
        with explained(
            checkpoint.role, checkpoint.name, by_config=True
        ):  # configurations of new families may lack what is asked
            return cls._of(config)

    @classmethod
    def _of_file(cls, settings: dict[str, Any]) -> "ModelConfig":
        """Of the contents of a plain config.json."""
        from specctl.models.running.context import extended

        heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
        rotation = settings.get("rope_scaling") or settings.get("rope_parameters")
        head_size = settings.get("head_dim", hidden // heads)
        return cls(
            whole=None,
            architecture=", ".join(settings["architectures"]),
            context=extended(settings["max_position_embeddings"], rotation, settings["model_type"]),
            vocabulary=settings["vocab_size"],
            hidden_size=hidden,
            ties=settings.get("tie_word_embeddings", FAMILIES[settings["model_type"]].ties),
            eos=settings["eos_token_id"],
            dtype=settings.get("dtype", settings.get("torch_dtype")),
            quantised=False,
            _cached_values=2 * settings["num_hidden_layers"] * settings.get("num_key_value_heads", heads) * head_size,
        )

    @classmethod
    def _of(cls, config: Any) -> "ModelConfig":
        """Of transformers' configuration."""
        from specctl.models.running.context import context_length

        text = config.get_text_config(decoder=True)
        if getattr(text, "vocab_size", None) is None:
            raise ValueError("Unrecognized configuration class")  # as transformers says of models that write no text
        ends = config if text_only_class(config) is not None else text
        return cls(
            whole=config,
            architecture=", ".join(getattr(config, "architectures", None) or []) or config.model_type,
            context=context_length(config),
            vocabulary=text.vocab_size,
            hidden_size=text.hidden_size,
            ties=bool(getattr(ends, "tie_word_embeddings", False)),
            eos=_either(config, text, "eos_token_id"),
            dtype=str(_either(config, text, "dtype") or "").removeprefix("torch.") or None,
            quantised=_either(config, text, "quantization_config") is not None,
            wraps=is_wrapper(config),
        )


def _either(config: Any, text: Any, name: str) -> Any:
    """A setting of a whole model, else of its text decoder."""
    found = getattr(config, name, None)
    return getattr(text, name, None) if found is None else found


NEEDS_MORE = {
    "idefics": "it needs a picture with every text",
    "kosmos-2": "it needs a picture with every text",
    "shieldgemma2": "it classifies pictures, and transformers reads its weights for nothing else",
    "voxtral_realtime": "it needs sound with every token",
}
"""Families whose class in transformers does not run on text alone, by ``model_type``, and why."""


def require_runnable(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Raise a ModelError if a model has no decoder that writes text, or cannot take back rejected tokens.

    Its weights are not needed. ``trust_remote_code`` is whether code from its repository may run.
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
    """The contents of a checkpoint's generation_config.json, without transformers for plain ones; None if there is no
    file.

    Raises ModelError where it is damaged: transformers would go on without it, and so without its end of sequence.
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
