"""Training of draft heads: the target's outputs for its answers, drafts from every position, and initial weights."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers import DynamicCache, PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head import DraftHead
from specctl.models.draft_heads.head_layers import FIXED_FREQUENCIES, LayerShape
from specctl.models.draft_heads.kinds import HEAD_KINDS, Recipe
from specctl.models.passes.layer_sizes import head_size, key_value_heads, largest, layer_configs, query_heads
from specctl.models.passes.watching import LayerWatch, States
from specctl.models.passes.weights import device_of
from specctl.models.running.context import context_length


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt with the target's answer, read by the target in one pass."""

    ids: torch.Tensor  # ``(N,)`` int64, the prompt and the answer x
    first: int  # the place of the answer's first token, at least 1
    states: States  # the target's, ``(N, D)`` float32 for each of the head's layers
    # ``(A, V)`` float32, the target's logits at the A = N - first positions before the answer's tokens: row i predicts
    # x_(first + i); ``(A, D)`` for a head that can draft D tokens only
    logits: torch.Tensor
    # ``(A,)`` bool, with D logits: whether the target's likeliest token is one of the D; None if D = V
    counted: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """A, the number of the answer's tokens."""
        return len(self.ids) - self.first


class Teacher:
    """A target that reads answers. Hooks catch the states of its layers.

    Args:
        target: a causal language model in eval mode.
        layers: indices of the layers to watch, in specctl's numbering.

    Raises:
        ModelError: the target has no list of decoder layers to watch.
    """

    def __init__(self, target: PreTrainedModel, layers: Iterable[int]) -> None:
        self._target = target
        self._watch = LayerWatch(target)
        try:
            self._watch.watch(layers)
        except IndexError as error:
            raise ModelError(f"The target's layers cannot be read: {error}.") from error
        self.device = device_of(target)

    def lesson(self, prompt: torch.Tensor, answer: torch.Tensor) -> Lesson:
        """Read an answer ``(A,)`` to a prompt ``(P,)``, int32 or int64, both with at least one token."""
        ids = torch.cat([prompt, answer]).long().to(self.device)
        with torch.no_grad():
            # The last token's logits predict the token after the answer, which has no reference.
            output = self._target(input_ids=ids[None], use_cache=False, logits_to_keep=len(answer) + 1)
        caught = self._watch.take()
        states = {layer: found.float().to(self.device) for layer, found in (caught or {}).items()}
        logits = output.logits[0, :-1].float().to(self.device)
        return Lesson(ids, len(prompt), states, logits)


STD = 0.02  # Of new weights

Head = TypeVar("Head", bound=DraftHead)


@dataclass(frozen=True, slots=True)
class Given:
    """The target's facts and weights from which a new head is built."""

    target: PreTrainedModel  # the model that it is to draft for
    embeddings: nn.Embedding  # of the target, a copy in float32 that is not trained
    output: nn.Linear  # the target's output layer, too
    shape: LayerShape  # of layers like the target's
    depth: int  # the number of the target's decoder layers
    tokens: torch.Tensor | None  # ids ``(D,)`` int64 of the head's draft vocabulary, rising; None for all
    mask_token: int  # the id in place of tokens that a block head drafts

    @classmethod
    def of(cls, target: PreTrainedModel, tokens: torch.Tensor | None, mask_token: int) -> "Given":
        """Collect these from a target, for a draft vocabulary and a mask token.

        Raises:
            ModelError: the target has no embeddings or output layer that can be copied.
        """
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        return cls(target, *_shared(target), _shape(target), depth, tokens, mask_token)

    @property
    def vocabulary(self) -> int:
        """V, the target's."""
        return self.embeddings.num_embeddings

    def existing(self, layers: Iterable[int]) -> tuple[int, ...]:
        """The layers for a head to read, ascending, clipped to the target's range; fewer for a small target."""
        return tuple(sorted({min(max(layer, 0), self.depth - 1) for layer in layers}))


def drawn(head: Head) -> Head:
    """The head with random weights from torch's default generator."""
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return head


def _shared(target: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Frozen copies in float32 of a target's embeddings and output layer."""
    embedding = _weight(target.get_input_embeddings())
    unembedding: nn.Module | None = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = _weight(unembedding)
    if embedding is None or weight is None:
        raise ModelError(
            f"{target.config.name_or_path!r} has no embeddings or output layer in a floating-point format, which a "
            "draft head needs.",
            "Load it without quantisation.",
        )
    weight = weight.float()
    output = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False)
    bias = getattr(unembedding, "bias", None)
    if bias is not None:
        output.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    embeddings = nn.Embedding(embedding.shape[0], embedding.shape[1], device="meta")
    embeddings.weight = nn.Parameter(embedding.float(), requires_grad=False)
    return embeddings, output


def _weight(module: nn.Module | None) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def _shape(target: PreTrainedModel) -> LayerShape:
    """The shape of the target's first layer, if the configuration has Llama's keys."""
    config = layer_configs(target.config)[0]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some have one for each kind of layer
    if rope.get("rope_type", "default") not in FIXED_FREQUENCIES or "rope_theta" not in rope:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}  # whole heads are turned
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=largest(target.config, "intermediate_size") or 4 * config.hidden_size,
        heads=query_heads(config),
        kv_heads=key_value_heads(config),
        head_dim=head_size(config),
        norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope=rope,
        max_positions=context_length(target) or 2048,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """The j-th drafted token of each of R rounds."""

    index: int  # j, from 0
    answer_rows: torch.Tensor  # ``(R,)`` int64, rising: which of the answer's tokens each of them predicts
    logits: torch.Tensor  # ``(R, D)``, over the draft vocabulary
    features: torch.Tensor  # ``(R, F)``, the head's own


def drafted_steps(
    head: ChainHead,
    lesson: Lesson,
    steps: int,
    noise: Callable[[torch.Tensor], torch.Tensor] = lambda features: features,
    longer: torch.Tensor | None = None,
) -> Iterator[Step]:
    """Let a chain head draft from every position where a round could begin, with teacher forcing.

    EAGLE-3 calls this training-time test (arXiv 2503.01840, section 3.2). A round that begins after place p has read
    the tokens up to x_p with features of true states, and then j tokens with features of its own. So the j-th token of
    every round attends to the keys of all true places up to its p, which are those of one pass over the text, and to
    the keys of its own round, one for each earlier j: causal, plus a diagonal for each step.

    A prompt of one token leaves out the round that would draft the answer's first token: most heads have no features
    before a sequence's second token.

    Args:
        head: in any mode; gradients flow through every step.
        lesson: the text. The last rounds are shorter, because they end with it.
        steps: tokens of a round, at least 1.
        noise: changes the features ``(T, F)`` that come from true states.
        longer: ``(A,)`` bool on the lesson's device, by the answer token that a round drafts first: whether the round
            continues after it; None for all.

    Yields:
        One `Step` for each j, until no round has further tokens.
    """
    ids, device = lesson.ids, lesson.ids.device
    begin = 0 if head.sees_first else 1
    starts = torch.arange(max(lesson.first - 1, begin), len(ids) - 1, device=device)  # (R,) the last true token of each
    if not len(starts):
        return
    true = len(ids) - 2  # tokens x_1 to x_(N-2), read with features of true states
    features = noise(head.fuse({layer: states[:true] for layer, states in lesson.states.items()}))
    if head.sees_first:
        features = torch.cat([features.new_zeros(1, features.shape[1]), features])
    places = torch.arange(begin, true + 1, device=device)
    mask = head.causal(places, places)  # (T, T)
    cache = DynamicCache()
    found = head(ids[None, begin:-1], features[None], places, mask[None, None], cache, len(starts))
    yield Step(0, starts + 1 - lesson.first, found.logits, found.features)
    own = found.features
    if longer is not None:
        chosen = longer[starts + 1 - lesson.first]
        starts, own = starts[chosen], own[chosen]
    mask = places <= starts[:, None]  # (R, T): each round's true keys
    for index in range(1, steps):
        rounds = int((starts + index < len(ids) - 1).sum())  # those that the answer does not end
        if not rounds:
            return
        starts, mask = starts[:rounds], mask[:rounds]
        # This step's keys; those of the steps before are of more rounds.
        mask = torch.cat([mask, torch.eye(rounds, dtype=torch.bool, device=device)], 1)
        fed = starts + index
        found = head(ids[None, fed], own[None, :rounds], fed, mask[None, None], cache)
        own = found.features
        yield Step(index, fed + 1 - lesson.first, found.logits, own)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The K predicting rows of each of R blocks."""

    logits: torch.Tensor  # ``(R, K, V)``, of heads with a sequential part given the text before each token
    confidence: torch.Tensor | None  # ``(R, K)``, logits of the predicted acceptance; None of heads that predict none
    answer_rows: torch.Tensor  # ``(R, K)`` int64, which of the answer's tokens each row predicts
    within: torch.Tensor  # ``(R, K)`` bool, whether the answer has that token


def drafted_blocks(head: BlockHead, lesson: Lesson, anchors: torch.Tensor) -> Blocks:
    """Let a block head draft from R positions at once, as in DFlash's training (arXiv 2602.06036).

    Each position is a block's anchor; the block's other tokens are masks. A block attends to the states before its
    anchor and to all of itself.

    Args:
        head: in any mode.
        lesson: the text.
        anchors: ``(R,)`` int64 on the lesson's device, the places of the newest tokens: from ``first - 1`` to the
            answer's last but one.
    """
    ids, cache = lesson.ids, DynamicCache()
    known = torch.arange(len(ids) - 1, device=ids.device)
    context = head.context_rows({layer: states[:-1] for layer, states in lesson.states.items()})
    head.remember(context[None], known, cache)
    logits, hidden = head.from_anchors(ids[anchors], anchors, len(known), cache)
    used = slice(head.config.first_row, None)
    logits, hidden = logits[:, used], hidden[:, used]
    wanted = anchors[:, None] + torch.arange(1, head.longest + 1, device=ids.device)  # (R, K), the predicted places
    before = ids[(wanted - 1).clamp(max=len(ids) - 1)]
    memory = head.blank().expand(len(anchors), -1)
    found = []
    for index in range(head.longest):
        row, memory = head.row(logits[:, index], hidden[:, index], before[:, index], memory)
        found.append(head.widened(row))
    confidence = head.confidence_logit(hidden, before) if head.config.confidence else None
    return Blocks(torch.stack(found, 1), confidence, wanted - lesson.first, wanted < len(ids))


def law_loss(logits: torch.Tensor, target: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy ``(...)`` in nats of logits ``(..., D)`` with the target's distribution, of logits ``(..., D)``.

    Both distributions are over the draft vocabulary. The loss is 0 where ``counted`` ``(...)`` is False, which is where
    the target's likeliest token is outside it (EAGLE-3's code, ``cnets.py``).
    """
    loss = -(target.softmax(-1) * log_softmax(logits, -1)).sum(-1)
    return loss if counted is None else loss * counted


def text_loss(step: Step, lesson: Lesson) -> torch.Tensor:
    """GliDe's loss, a sum over the answer's tokens: cross-entropy with them (arXiv 2402.02082)."""
    return cross_entropy(step.logits, lesson.ids[lesson.first :][step.answer_rows], reduction="sum")


def new_head(
    recipe: Recipe, target: PreTrainedModel, tokens: torch.Tensor | None, mask_token: int, seed: int
) -> ChainHead | BlockHead:
    """A head to train, in float32 on the device of the target's embeddings; the same seed gives the same weights.

    Weights shared with the target are float32 copies, neither trained nor written.

    Args:
        recipe: its kind and size.
        target: the model that it is to draft for.
        tokens, mask_token: see `Given`.
        seed: of the weights.

    Raises:
        ModelError: the target has no output layer that can be copied, or no layer that an MTP head could be.
    """
    given = Given.of(target, tokens, mask_token)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"draft head/{seed}/{recipe.kind}").getrandbits(63))
        head: ChainHead | BlockHead = HEAD_KINDS[recipe.kind].module.new(recipe, given)
    return head.to(given.embeddings.weight.device)
