"""The shapes of the embedded models and every setting that decides their weights."""

from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM

from tools.embedded.corpus import VOCABULARY_SIZE

CONTEXT = 1024
SHAPES = {  # layers, width, feed-forward width, heads
    "target": (12, 192, 512, 6),
    "mid": (4, 128, 352, 4),
    "draft": (1, 128, 352, 4),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights. Lengths in tokens, learning rates per optimiser."""

    seed: int = 0
    target_steps: int = 2000
    mid_steps: int = 1600
    draft_steps: int = 9000
    tokens_per_step: int = 4096
    window: int = 256
    warmup_steps: int = 100
    decay_share: float = 0.25
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    story_prompts: int = 3600
    question_prompts: int = 5000
    own_questions: int = 2000
    greedy_share: float = 0.8
    corpus_share: float = 0.1
    accepted_tokens: int = 48
    argmax_weight: float = 1.0


def build_model(name: str) -> LlamaForCausalLM:
    layers, width, feed_forward, heads = SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def finished(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.train(False)
    return model
