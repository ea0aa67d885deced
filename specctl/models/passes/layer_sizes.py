"""Sizes of a model's decoder layers, from its configuration. In some models they differ from layer to layer.

All code that needs head counts, head sizes or cache sizes uses this module. Where such a size differs between layers,
reading it from transformers' configuration of the whole model raises an error. It is not an AttributeError, so
``getattr`` with a default raises it too. An example is Gemma 4: its layers with full attention have larger heads than
those with a window.
"""

from collections.abc import Sequence
from typing import Any


def layer_configs(config: Any) -> Sequence[Any]:
    """For each decoder layer of a model, a configuration with that layer's own sizes.

    Args:
        config: transformers' configuration of the model; for a wrapper, that of its text decoder.
    """
    layers: Sequence[Any] = config.get_text_config(decoder=True).per_layer_config
    return layers


def sizes(config: Any, *names: str) -> list[Any]:
    """For each layer, the value of the first of these names that its configuration has and sets; None without one."""
    return [_first(layer, names) for layer in layer_configs(config)]


def largest(config: Any, *names: str) -> int | None:
    """The largest of `sizes` that are numbers; None if no layer has one."""
    return max((size for size in sizes(config, *names) if isinstance(size, int)), default=None)


def query_heads(layer: Any) -> int:
    """The number of query heads of a layer, by its entry in `layer_configs`."""
    return int(layer.num_attention_heads)


def key_value_heads(layer: Any) -> int:
    """The number of key heads and value heads of a layer."""
    # Falcon and StarCoder (GPT-BigCode) have one for all queries, except for Falcon's newer models.
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1
    return int(getattr(layer, "num_key_value_heads", None) or query_heads(layer))


def head_size(layer: Any) -> int:
    """The head size of a layer's keys and values."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // query_heads(layer))


def attention_values(layer: Any, *, windowed: bool = False) -> int:
    """How many numbers a layer's attention caches for a token.

    Latent attention (DeepSeek-V2 and later) caches the latents that keys and values are computed from.

    Args:
        layer: its entry in `layer_configs`.
        windowed: whether it has a sliding window. Inkling has separate names for the sizes of such layers,
            MiMo-V2-Flash does not.
    """
    if windowed and (groups := getattr(layer, "swa_num_key_value_heads", None)):
        return 2 * int(groups) * int(layer.swa_head_dim)
    if latent := getattr(layer, "kv_lora_rank", None):
        return int(latent + layer.qk_rope_head_dim)
    heads = key_value_heads(layer)
    if windowed and layer.model_type == "mimo_v2_flash":
        heads *= 2
    return heads * (head_size(layer) + int(getattr(layer, "v_head_dim", None) or head_size(layer)))


def cached_values(config: Any) -> int:
    """How many numbers a model's layers cache for a token.

    Sliding windows count as if they stored all tokens. Recurrent states do not count, since they do not grow with the
    text; neither do layers that read another layer's keys and values. Dory's recurrent layers store those of each loop.

    Args:
        config: transformers' configuration of the model; for a wrapper, that of its text decoder.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

    values = 0
    text = config.get_text_config(decoder=True)
    first, looped = getattr(text, "n_input_layers", 0), getattr(text, "n_recurrent_layers", 0)
    indexers = getattr(text, "indexer_types", None) or ()
    layers: list[Any] = DynamicCache(config=config).layers
    # Caches of transformers 5.17 have no layers for the last ones, where these read others' keys.
    for index, (cached, layer) in enumerate(zip(layers, layer_configs(config), strict=False)):
        # DeepSeek-V4: one entry for several tokens, in addition to a window.
        if rate := getattr(cached, "compress_rate", None):
            indexed = _index_size(layer) if "indexer" in cached.compressed_kv else 0
            values += -(-(head_size(layer) + indexed) // rate)
        elif isinstance(cached, DynamicLayer):
            each = attention_values(layer, windowed=isinstance(cached, DynamicSlidingWindowLayer))
            values += each * (text.n_recurrent_loops if first <= index < first + looped else 1)
        if isinstance(cached, DynamicIndexedLayer) and "shared" not in indexers[index : index + 1]:
            values += _index_size(layer)  # one key for all heads of the indexer
    return values


def _index_size(layer: Any) -> int:
    size = int(_first(layer, ("index_head_dim", "indexer_head_dim")) or 0)
    return 2 * size + 1 if hasattr(layer, "index_kpool") else size  # GLM-5-Next stores a gate and a mark with the key


def _first(layer: Any, names: Sequence[str]) -> Any:
    return next((found for name in names if (found := getattr(layer, name, None)) is not None), None)
