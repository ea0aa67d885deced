"""A model's configuration: transformers' own, and what is asked of it before a model is made."""

from dataclasses import dataclass
from typing import Any

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.library_calls import explained
from specctl.models.files.plain_config import FAMILIES, is_plain
from specctl.models.files.skeleton import is_wrapper, text_only_class
from specctl.models.passes.layer_sizes import cached_values


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is asked of a checkpoint's configuration before a model is made from it.

    Attributes:
        whole: transformers' configuration; None where it was not needed, of a well-known family that can run.
        architecture: the class that it names, else its family.
        context: the most tokens of a sequence; None where there is no limit.
        vocabulary: rows of its embeddings.
        hidden_size: width of its states.
        ties: whether the output layer is the embeddings.
        eos: its ``eos_token_id``.
        dtype: of its weights; None where it names none.
        quantised: whether its weights are packed.
        wraps: whether it is a wrapper around a text decoder, of which only that is loaded.
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
        """That of a checkpoint, without transformers where that adds nothing.

        Raises:
            ModelError: its config.json is damaged, or describes no model that transformers knows.
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


def load_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """The checkpoint's transformers configuration."""
    from transformers import AutoConfig

    checkpoint.settings()
    with explained(checkpoint.role, checkpoint.name, by_config=True):
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
