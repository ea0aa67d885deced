"""Random models that rotate positions by the length of the text."""

from functools import cache, wraps
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.toys import seeded

BORDER, VOCABULARY = 40, 64
TEXT: list[int] = torch.randint(1, VOCABULARY, (4 * BORDER,), generator=seeded(11)).tolist()
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "phi3": lambda border: Phi3Config(
        **extended(border),
        original_max_position_embeddings=border,
        rope_parameters=long(border, partial_rotary_factor=1.0),
    ),
    "phimoe": lambda border: PhimoeConfig(
        **extended(border), num_local_experts=2, rope_parameters=long(border, short_mscale=1.1, long_mscale=1.6)
    ),
    "llama": lambda border: LlamaConfig(**extended(border), rope_parameters=long(border)),
    "dynamic": lambda border: LlamaConfig(
        **SHAPE,
        max_position_embeddings=border,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}


def extended(border: int) -> dict[str, Any]:
    return {**SHAPE, "max_position_embeddings": 4 * border}


def long(border: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": border,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 3.0, 5.0, 8.0],
        **more,
    }


@cache
def weights(family: str, noise: float = 0.0, border: int = BORDER) -> PreTrainedModel:
    """A model of which no text was written: what one with dynamic rotation writes next would depend on that."""
    config = CONFIGS[family](border)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return model  # type: ignore[no-any-return]


def reading_anew(prepare: Any) -> Any:
    """The same, with all tokens for the pass after the cache is dropped, and not the newest one alone."""

    @wraps(prepare)
    def prepared(self: Any, input_ids: torch.Tensor, past_key_values: Any = None, **more: Any) -> Any:
        border = self.config.original_max_position_embeddings
        if past_key_values and past_key_values.get_seq_length() <= border < input_ids.shape[1]:
            more["next_sequence_length"] = None
        return prepare(self, input_ids, past_key_values=past_key_values, **more)

    return prepared


if Version(transformers.__version__) < Version("5.20"):  # whose `generate` forgets the text at the border
    for kind in (Phi3ForCausalLM, PhimoeForCausalLM):
        kind.prepare_inputs_for_generation = reading_anew(kind.prepare_inputs_for_generation)
