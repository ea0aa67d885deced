"""The draft: a narrow Llama whose embedding starts as a low-rank form of the target's output layer, and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear
from transformers import LlamaConfig, LlamaForCausalLM

from tools.real_draft.answers import Answer

EMBEDDING_SCALE = 0.15  # root mean square of the embedding at the start


@dataclass(frozen=True, slots=True)
class Reduction:
    """A rank-W form of the output layer: logits = E h is about ``table @ (h @ states)``.

    The error is least in the mean over the target's states h and over tokens weighted by how often the target writes
    them: the singular value decomposition of D^(1/2) E C^(1/2), where C is the mean of h h^T and D the frequencies.
    Without these weights rank 192 of SmolLM2's 576 keeps 4% of its likeliest tokens, with them 70%.
    """

    table: torch.Tensor  # (V, W) float32, the draft's embedding
    states: torch.Tensor  # (H, W) float32, from the target's state to the draft's
    importance: torch.Tensor  # (W,) float32: weights of the states' squared errors; states of zeros have the error 1
    scale: torch.Tensor  # (W,) float32, root mean square of the draft's state
    frequent: torch.Tensor  # (V,) int64, tokens from the most to the least frequent


def frequencies(answers: Sequence[Answer], vocabulary: int) -> torch.Tensor:
    """(V,) float32: the mean probability that the target gives each token, among the likeliest."""
    ids = torch.cat([answer.top_ids for answer in answers]).flatten()
    shares = torch.cat([answer.top_log_probs for answer in answers]).float().exp().flatten()
    return torch.zeros(vocabulary).index_add_(0, ids, shares) / shares.sum()


def reduce_output(output: torch.Tensor, states: torch.Tensor, frequency: torch.Tensor, width: int) -> Reduction:
    """Reduce an output layer ``(V, H)`` to ``width`` for states ``(N, H)`` and token frequencies ``(V,)``."""
    weights, samples = output.double(), states.double()
    covariance = samples.T @ samples / len(samples)  # (H, H)
    values, vectors = torch.linalg.eigh(covariance)
    roots = values.clamp(min=float(values[-1]) * 1e-6).sqrt()
    whitened, inverse = vectors * roots @ vectors.T, vectors / roots @ vectors.T  # C^(1/2), C^(-1/2)
    weighted = (frequency.double() + 1e-7).sqrt()[:, None] * weights @ whitened
    squares, right = torch.linalg.eigh(weighted.T @ weighted)
    singular, right = squares.flip(0)[:width].clamp(min=1e-12).sqrt(), right.flip(1)[:, :width]
    # The singular values go to both factors alike, so that no value of the embedding dwarfs the others.
    table = weights @ (whitened @ right / singular.sqrt())  # (V, W)
    back = inverse @ right * singular.sqrt()  # (H, W)
    factor = EMBEDDING_SCALE / table.square().mean().sqrt()
    back = back / factor
    scale = (samples @ back).square().mean(0).sqrt()
    return Reduction(
        (table * factor).float(),
        back.float(),
        (singular / (singular * scale.square()).mean()).float(),
        scale.float(),
        frequency.argsort(descending=True, stable=True),
    )


def new_student(
    target: LlamaConfig, reduction: Reduction, layers: int, feed_forward: int, head: int
) -> LlamaForCausalLM:
    """A Llama with the target's tokens that is as wide as the reduction, its embedding tied to its output."""
    vocabulary, width = reduction.table.shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=width // head,
            num_key_value_heads=width // head,
            head_dim=head,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            tie_word_embeddings=True,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            pad_token_id=target.pad_token_id,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(reduction.table)
        model.model.norm.weight.copy_(reduction.scale)
    return model


@dataclass(frozen=True, slots=True)
class Batch:
    """B answers with their prompts, padded on the right to L tokens, and what the target says at N answer tokens."""

    ids: torch.Tensor  # (B, L) int64
    places: torch.Tensor  # (N,) int64 into B * L: where the N tokens are predicted
    top_ids: torch.Tensor  # (N, likeliest) int64
    top_log_probs: torch.Tensor  # (N, likeliest) float32
    states: torch.Tensor  # (N, W) float32, the target's states in the draft's space


def collate(answers: Sequence[Answer]) -> Batch:
    width = max(map(len, (a.ids for a in answers))) - 1
    ids = torch.zeros(len(answers), width, dtype=torch.int64)
    places = []
    for row, answer in enumerate(answers):
        ids[row, : len(answer.ids) - 1] = answer.ids[:-1]  # no token attends to the padding on its right
        places.append(row * width + torch.arange(answer.first - 1, len(answer.ids) - 1))
    return Batch(
        ids,
        torch.cat(places),
        torch.cat([a.top_ids for a in answers]),
        torch.cat([a.top_log_probs for a in answers]).float(),
        torch.cat([a.states for a in answers]).float(),
    )


def drafted_states(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:  # (N, W)
    base: Any = model.model
    states: torch.Tensor = base(batch.ids, use_cache=False).last_hidden_state  # (B, L, W)
    return states.flatten(0, 1)[batch.places]


def candidates(
    top_ids: torch.Tensor, frequent: torch.Tensor, always: int, drawn: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that a loss compares: the target's, the ``always`` most frequent, and ``drawn`` of the others.

    Returns ids ``(C,)`` int64 and the logarithm ``(C,)`` of how many tokens each stands for: a drawn one stands for its
    share of those left out, so that the sum over candidates estimates the sum over the vocabulary.
    """
    fixed = torch.zeros(len(frequent), dtype=torch.bool)
    fixed[frequent[:always]] = True
    fixed[top_ids.flatten()] = True
    others = (~fixed).nonzero()[:, 0]
    some = others[torch.randperm(len(others), generator=generator)[:drawn]]
    ids = torch.cat([fixed.nonzero()[:, 0], some])
    stands_for = torch.zeros(len(ids))
    if len(some):
        stands_for[-len(some) :] = torch.tensor(len(others) / len(some)).log()
    return ids, stands_for


def distillation_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    batch: Batch,
    chosen: tuple[torch.Tensor, torch.Tensor],
    argmax_weight: float,
    state_weight: float,
    importance: torch.Tensor,
) -> torch.Tensor:
    """Forward KL over the target's likeliest tokens, its likeliest as a label, and the distance to its states.

    Args:
        states: ``(N, W)``, the draft's.
        table: ``(V, W)``, the draft's embedding.
        batch: what the target says.
        chosen: `candidates`.
        argmax_weight: weight of the label; greedy verification accepts only that token.
        state_weight: weight of the mean squared distance of the states, each value by its ``importance`` ``(W,)``.
    """
    ids, stands_for = chosen
    index = torch.zeros(len(table), dtype=torch.int64)
    index[ids] = torch.arange(len(ids))
    logits = linear(states, embedding(ids, table)).float()  # (N, C)
    total = (logits + stands_for).logsumexp(-1, keepdim=True)
    found = logits.gather(-1, index[batch.top_ids]) - total  # (N, likeliest)
    wanted = batch.top_log_probs
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    distance = ((states.float() - batch.states).square() * importance).mean()
    return divergence - argmax_weight * found[:, 0].mean() + state_weight * distance


@torch.inference_mode()
def agreement(model: LlamaForCausalLM, batches: Sequence[Batch], frequent: torch.Tensor | None = None) -> float:
    """Share of answer tokens where the draft's likeliest token is the target's, among ``frequent`` ids if given."""
    right = count = 0
    table = model.model.embed_tokens.weight
    ids = torch.arange(len(table)) if frequent is None else frequent
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            found = linear(drafted_states(model, batch), table[ids]).argmax(-1)
        right += int((ids[found] == batch.top_ids[:, 0]).sum())
        count += len(found)
    return right / count
