"""Greedy identity on a tiny random model of every causal language model in transformers, as a table.

python -m tests.faults.families [FAMILY ...]

Each model drafts for itself with noise on its weights, so that drafts are accepted and rejected. What it writes then is
compared with target-only decoding and with transformers' ``generate``.
"""

import argparse
import logging
import signal
import sys
from collections import Counter
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.passes.cache import cannot_go_back
from specctl.models.running.eager import EagerRunner
from specctl.policies.rules.constant import Constant
from specctl.records import Round
from tests.recurrent_models import FAMILIES

PROMPTS = ([1, 5, 9], torch.randint(1, 64, (19,), generator=torch.Generator().manual_seed(5)).tolist())
LENGTH = 20
LARGEST = 30_000_000
"""Weights of a model that is still tried: some configurations do not let all of their sizes be set."""
PATIENCE = 60
"""Seconds for a family."""
_WIDTHS = dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "attention_hidden_size"), 32)
_INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff"), 64)
_DEPTHS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers", "num_layers"), 2
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads", "num_heads"), 4
)
_LENGTHS = dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len"), 256)
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
_EXPERTS |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
_INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_REST = {"vocab_size": 64, "head_dim": 8, "rotary_dim": 4, "sliding_window": 8, "n_group": 1, "topk_group": 1}
_REST |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "initializer_range": 0.3, "init_std": 0.3}
SIZES: dict[str, Any] = {**_WIDTHS, **_INNER, **_DEPTHS, **_HEADS, **_LENGTHS, **_LATENT, **_EXPERTS, **_INDEXER}
SIZES |= {**_IDS, **_REST, "tie_word_embeddings": False, "is_decoder": True}

_GEMMA = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_GEMMA |= {"sliding_window": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "head_dim": 8}
_PLAIN = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_PLAIN |= {"vocab_size": 64, "max_position_embeddings": 256, "initializer_range": 0.3, "tie_word_embeddings": False}
_TWO = {**_PLAIN, "num_hidden_layers": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    **{family: {**settings, "vocab_size": 64} for family, settings in FAMILIES.items()},
    "cwm": {**_TWO, "head_dim": 8, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 0},
    "dots1": {**_TWO, **_EXPERTS, "head_dim": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "falcon": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"initializer_range": 0.3, "max_position_embeddings": 256},
    "gemma3n_text": {**_PLAIN, **_GEMMA, "laurel_rank": 4, "altup_num_inputs": 2}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_PLAIN, **_GEMMA, "global_head_dim": 16},
    "gpt_neo": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256, "initializer_range": 0.3},
    "modernbert-decoder": {**_TWO, "local_attention": 16, "bos_token_id": 1, "eos_token_id": 0}
    | {"cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0},
}
"""Configurations of families whose sizes depend on each other."""


def tiny_config(family: str, key_value_heads: int) -> Any:
    """A small configuration of a family, with at most two kinds of layers."""
    if family in SETTINGS:
        return CONFIG_MAPPING[family](**SETTINGS[family])
    text = CONFIG_MAPPING[family]().get_text_config(decoder=True)
    sizes = {**SIZES, "num_key_value_heads": key_value_heads}
    settings = {name: value for name, value in sizes.items() if hasattr(text, name)}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(text, name, None), list):
            settings[name] = [kinds[0], kinds[-1]]
    return type(text)(**settings)


def tiny_model(family: str) -> PreTrainedModel:
    """A random model of a family that can read a token; raises whatever transformers raises if there is none."""
    failure: Exception | None = None
    for key_value_heads in (2, 4):  # latent attention wants as many as there are heads
        try:
            torch.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, key_value_heads))
            if sum(weight.numel() for weight in model.parameters()) > LARGEST:
                raise ValueError("its sizes cannot all be set")
            model(input_ids=torch.tensor([[1, 2, 3]]))
        except TimeoutError:
            raise
        except Exception as error:
            failure = error
        else:
            return model.float().eval()
    assert failure is not None
    raise failure


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    copy, draws = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in copy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=draws))
    return copy


def written(model: PreTrainedModel, draft: PreTrainedModel | None, prompt: list[int]) -> tuple[list[int], list[Round]]:
    target = EagerRunner(model, 64)
    drafter = None if draft is None else ModelDrafter(EagerRunner(draft, 64), Constant())
    prefill(target, drafter, prompt)
    rounds = list(decode(target, drafter, prompt, LENGTH, Sampling()))
    return [token for round_ in rounds for token in round_.emitted], rounds


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def built(family: str) -> PreTrainedModel | tuple[str, str]:
    """A tiny model of a family; else ``not built`` or ``refused``, and why."""
    try:
        model = tiny_model(family)
    except TimeoutError:
        raise
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"
    if why := cannot_go_back(model.config, type(model)):
        return "refused", why
    return model


def tried(family: str) -> tuple[str, str]:
    """What became of a family: ``exact``, ``refused``, ``not built`` or ``WRONG``, and details."""
    model = built(family)
    if isinstance(model, tuple):
        return model
    draft, drafted, accepted, as_generate = noisy(model), 0, 0, 0
    with torch.inference_mode():
        for prompt in PROMPTS:
            alone, _ = written(model, None, prompt)
            tokens, rounds = written(model, draft, prompt)
            if tokens != alone:
                return "WRONG", "drafting changes the text"
            drafted += sum(round_.drafted for round_ in rounds)
            accepted += sum(round_.accepted for round_ in rounds)
            as_generate += generated(model, prompt) == alone
    return "exact", f"{accepted / drafted:.0%} accepted; {as_generate} of {len(PROMPTS)} texts are those of generate"


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"took more than {PATIENCE} s")


def main() -> None:
    """Print a line for each family; exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("family", nargs="*", help="only these, by model_type")
    families = parser.parse_args().family or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    signal.signal(signal.SIGALRM, _too_slow)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for family in families:
        signal.alarm(PATIENCE)
        try:
            outcome, details = tried(family)
        except Exception as error:
            outcome, details = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        finally:
            signal.alarm(0)
        counts[outcome] += 1
        print(f"{family:26} {outcome:10} {details}", flush=True)
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    sys.exit(bool(counts["WRONG"]))


if __name__ == "__main__":
    main()
