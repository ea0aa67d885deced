"""Small stand-ins that tests share: a tabular language model whose law can be enumerated, and random-weight models."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from functools import cache
from itertools import accumulate, cycle, pairwise
from math import exp
from typing import Any

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import (
    Gemma2Config,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Foresee, Forward, joined
from specctl.models.passes.tree_sight import path_to
from specctl.models.passes.watching import cut_states
from specctl.models.predictors.disco_predictor import FEATURES, DiscoPredictor
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.passes import Passes, Request
from specctl.policies import POLICIES, StoppingPolicy
from specctl.policies.base import Rule, Signal
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from tests.support.runner import Runner

VOCABULARY = 5
EOS = 0
WINDOWS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of each table, the logits ``(T, V)`` that runners made of its rows: thousands of runners of one law read the same."""


def table(seed: int, *, eos_logit: float = 0.0, spread: float = 1.5, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Logits ``(V + 1, V + 1, V)`` after each pair of last tokens; index V stands for "nothing before"."""
    logits = spread * torch.randn(vocabulary + 1, vocabulary + 1, vocabulary, generator=seeded(seed))
    logits[..., EOS] += eos_logit
    return logits


def related_table(base: torch.Tensor, seed: int, noise: float = 1.0) -> torch.Tensor:
    """A draft's table: correlated with the target's but different."""
    return base + noise * torch.randn(base.shape, generator=seeded(seed))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TableRunner(Runner):
    """A `Slot` whose next-token logits are looked up by the last two tokens; its states are these logits.

    ``sequence`` is the text so far as the test knows it (prompt and emitted tokens, kept up to date by the test):
    every call is then checked to continue a prefix of it.
    """

    def __init__(self, logits: torch.Tensor, sequence: list[int] | None = None) -> None:
        self.table = logits
        self.sequence = sequence
        self.tokens: list[int] = []
        self.no_trees: str | None = None
        self.tree: list[int] = []
        self.extended: list[int] = []  # how many tokens each forward pass was given
        self.context = 1 << 31
        self.device = torch.device("cpu")
        self._none = logits.shape[-1]
        self._seen: dict[tuple[int, ...], torch.Tensor] = WINDOWS.setdefault(logits, {})
        self._watched: set[int] = set()
        self.foresees = True

    @property
    def length(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        assert tokens, "an empty forward pass"
        assert 0 <= keep <= len(tokens), "logits of tokens that are not in this forward pass"
        self.tokens.extend(tokens)
        self.extended.append(len(tokens))
        if self.sequence is not None:
            shared = min(len(self.tokens), len(self.sequence))
            assert self.tokens[:shared] == self.sequence[:shared], "the cache holds something else than the sequence"
        window = (self._none, *self.tokens)[len(self.tokens) - keep :]
        logits = self._seen.get(window)
        if logits is None:
            rows = [self.table[pair] for pair in pairwise(window)]
            logits = self._seen[window] = torch.stack(rows) if rows else self.table[0, 0, :0].view(0, self._none)
        return Forward(logits, logits if hidden else None, self._states(len(tokens)))

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """Each token's path is read as a chain."""
        self.extended.append(len(tokens))
        if before < 2:
            self.tree, self.parents = self.tokens[len(self.tokens) - before :], []
        assert len(self.tree) == before, "the passes before this one read another tree"
        self.tree += tokens
        self.parents += parents
        start = len(self.tokens) - (before > 0)
        del self.tokens[start:]
        rows = []
        for token in range(before, len(self.tree)):
            rows.append(self.extend([self.tree[place] for place in path_to(self.parents, token)], 1, hidden=hidden))
            self.extended.pop()
            del self.tokens[start:]
        self.tokens.append(self.tree[0])
        return joined([Forward(row.logits, row.hidden, states=cut_states(row.states, slice(-1, None))) for row in rows])

    def keep_path(self, path: Sequence[int]) -> None:
        self.tokens += [self.tree[place] for place in path[1:]]

    def watch(self, layers: Iterable[int]) -> None:
        self._watched |= set(layers)

    def _states(self, count: int) -> dict[int, torch.Tensor] | None:
        if not self._watched:
            return None
        window = (self._none, *self.tokens)[len(self.tokens) - count :]
        rows = torch.stack([self.table[pair] for pair in pairwise(window)])  # (T, V)
        return {layer: rows + layer for layer in self._watched}

    @property
    def foresee(self) -> Foresee | None:
        return self.next_accept_prob if self.foresees else None

    def next_accept_prob(self, token: torch.Tensor) -> torch.Tensor:
        """A number that depends on the token and the one before it, and not on the one that is drafted next."""
        return self.table[self.tokens[-1], int(token)].softmax(-1).max()

    def rollback(self, length: int) -> None:
        assert length >= 0
        del self.tokens[length:]


class ToldPasses(Passes):
    """`Passes` over several sequences that do what a test says."""

    engine = "told"
    context = 1 << 31
    device = torch.device("cpu")

    def __init__(
        self,
        slots: int,
        forward: Callable[[Sequence[Request]], Sequence[Forward]],
        copy: Callable[[int, int, int, int], None] = lambda *_: None,
    ) -> None:
        self.slots, self._forward, self._copy = slots, forward, copy

    def forward(self, requests: Sequence[Request]) -> Sequence[Forward]:
        return self._forward(requests)

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        self._copy(source, slot, start, stop)


LAYER = 1
"""The layer whose states a `StateTable` shows."""
NUMBERS = 11
"""How many values such a state may have."""


class StateTable(TableRunner):
    """A `TableRunner` whose states are numbers that cannot be told from a few tokens: they depend on the whole text."""

    def _states(self, count: int) -> dict[int, torch.Tensor] | None:
        states = list(accumulate(self.tokens, lambda state, token: (5 * state + 3 * token + 1) % NUMBERS, initial=1))
        return {layer: torch.tensor(states[-count:])[:, None].float() for layer in self._watched} or None


class ToyDraftHead(Runner):
    """A draft head whose law depends on the verifier's states and, beyond them, on where the round began.

    It reads token x_p with the state of place p - 1, or with its own guess where that is not known. What it has read so
    far makes a number, and the number chooses the noise on its logits, which grows with the number of guesses.

    Args:
        logits: as a `TableRunner` has them, for a draft that is right often enough.
        seed: of the noise.
        noise: its size.
        longest: the most tokens of a round.
    """

    runs_model = False
    verifies = False
    layers = (LAYER,)
    state_size = 1
    no_trees: str | None = None

    def __init__(self, logits: torch.Tensor, seed: int, *, noise: float = 1.0, longest: int | None = None) -> None:
        self.vocabulary = logits.shape[-1]
        self.longest = longest
        self.context = 1 << 31
        self.device = torch.device("cpu")
        self.tokens: list[int] = []
        self._table = logits
        self._noise = noise * torch.randn(NUMBERS, self.vocabulary, generator=seeded(seed))
        self._states: list[int] = []
        self._read: list[int] = []  # the number that each token made of what was read before
        self._true = 0  # tokens that were read with states of the verifier's, or that have none before them

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def observed(self) -> int:
        return len(self._states)

    def watch(self, layers: Iterable[int]) -> None:
        assert not set(layers)

    def observe_states(self, start: int, states: Mapping[int, torch.Tensor]) -> None:
        assert start <= self.observed, "a place was left out"
        self._states += [int(state) for state in states[LAYER][self.observed - start :, 0]]

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """Each token's path is read as a chain, after what was read when the tree began."""
        assert before, "a draft head verifies nothing"
        if before == 1:
            self._branches: list[list[int]] = [[]]
        assert len(self._branches) == before, "the passes before this one read another tree"
        kept, rows = (self.length, len(self._read), self._true), []
        for token, parent in zip(tokens, parents, strict=True):
            self._branches.append([*self._branches[parent], token])
            rows.append(self.extend(self._branches[-1], 1, hidden=hidden))
            del self.tokens[kept[0] :]
            del self._read[kept[1] :]
            self._true = kept[2]
        return joined(rows)

    def keep_path(self, path: Sequence[int]) -> None:  # noqa: ARG002 - the signature of `Slot`
        self.rollback(self._true)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        assert tokens, "an empty forward pass"
        rows = []
        for token in tokens:
            place, before = self.length - 1, self._read[-1] if self._read else 0
            known = place < self.observed
            row = (self._states[place] if known else 7 * before + 2) if place >= 0 else 0
            self._true += known and self._true == self.length
            self._read.append((4 * before + row + 5 * token) % NUMBERS)
            last = self.tokens[-1] if self.tokens else self.vocabulary
            self.tokens.append(token)
            guesses = self.length - self._true
            rows.append(self._table[last, token] + (1 + guesses / 2) * self._noise[self._read[-1]])
        kept = torch.stack(rows)[len(rows) - keep :]
        return Forward(kept, kept if hidden else None)

    def rollback(self, length: int) -> None:
        del self._states[length:]
        self._true = min(length, self._true)
        del self.tokens[self._true :]
        del self._read[self._true :]


def toy_head(draft: torch.Tensor, seed: int, *, reads_signals: bool = True) -> StatePredictor:
    """A head on a `TableRunner`, whose hidden states are its logits: predictions depend on the last two tokens.

    With signals they depend on the one before too, through its chance to be drawn.
    """
    head = random_predictor(draft.shape[-1], seed=seed, reads_signals=reads_signals)
    with torch.no_grad():
        head.output.bias -= head(draft, torch.zeros(*draft.shape[:-1], 3)).median()
    return head


def random_predictor(
    hidden_size: int, depth: int = 1, seed: int = 0, *, reads_signals: bool = True, spread: float = 1.0
) -> StatePredictor:
    """A head whose every weight is drawn from a normal distribution of this spread."""
    head = StatePredictor(hidden_size, depth, reads_signals=reads_signals)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(spread * torch.randn(weight.shape, generator=seeded(seed)))
    return head


def toy_disco(seed: int = 0, bias: float = 0.6) -> DiscoPredictor:
    """A DISCO head that trusts likely tokens, and each less than the one before it."""
    tops = (0.5 + torch.rand(3, FEATURES - 2, generator=seeded(seed))).tolist()
    rows = zip(tops, (-0.1, 0.4, 0.0), (-0.05, 0.25, 0.1), strict=True)
    hidden = tuple((3 * first, second, *(0.1 * one for one in rest), *last) for (first, second, *rest), *last in rows)
    return DiscoPredictor(hidden, (-0.6, 0.1, -0.2), (1.1, -1.0, 0.3), bias)


def head_for(policy: StoppingPolicy, head: StatePredictor | None) -> StatePredictor | DiscoPredictor | None:
    """The head, or for a policy that reads a DISCO head's predictions such a head."""
    return toy_disco() if "own_accept_prob" in policy.signals else head


def law(
    logits: torch.Tensor, prompt: Sequence[int], length: int, sampling: Sampling, eos: Set[int]
) -> dict[tuple[int, ...], float]:
    """The exact probability of every completion of at most ``length`` tokens."""
    probs = sampling.probs(logits).double()
    probs = (probs / probs.sum(-1, keepdim=True)).tolist()
    nothing = logits.shape[-1]

    def grow(completion: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(completion) == length or (completion and completion[-1] in eos):
            yield completion, chance
            return
        before, last = (nothing, *prompt, *completion)[-2:]
        for token, share in enumerate(probs[before][last]):
            if share:
                yield from grow((*completion, token), chance * share)

    return dict(grow((), 1.0))


class Ticks:
    """A clock in the place of ``perf_counter``: each reading is later than the last by the next of some seconds."""

    def __init__(self, *seconds: float) -> None:
        self._readings = accumulate(cycle(seconds), initial=0.0)

    def __call__(self) -> float:
        return next(self._readings)


class Script(Rule):
    """A policy that drafts the lengths it is given, in turn and over again; it notes the rounds it observes."""

    signals: frozenset[Signal] = frozenset()

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.rounds: list[Round] = []

    def draft_limit(self) -> int:
        return self.lengths[len(self.rounds) % len(self.lengths)]

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)


class DropsWhatItSaw(Rule):
    """Unlawful on purpose: it looks at the drawn token and drops it."""

    signals: frozenset[Signal] = frozenset({"token_prob"})
    keep_trigger = False

    def draft_limit(self) -> int:
        return 4

    def should_stop(self, step: DraftStep) -> bool:
        assert step.token_prob is not None
        return step.token_prob < 0.4


def round_of(accepted: int, drafted: int, *, entropies: Sequence[float] | None = None) -> Round:
    """A round in which the first ``accepted`` of ``drafted`` tokens were kept."""
    steps = tuple(
        DraftStep(
            index + 1,
            token=index,
            entropy=entropies[index] if entropies else None,
            top_prob=exp(-entropies[index]) if entropies else None,
        )
        for index in range(drafted)
    )
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    return Round(0, steps, accepted, extra=99, extra_kind=kind, stop=StopReason.POLICY)


WINDOW = 8
_SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
# Wide weights, or the argmax of an untrained model hardly depends on its context.
_COMMON = {**_SHAPE, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "llama": lambda layers: LlamaConfig(num_hidden_layers=layers, **_HEADS, **_COMMON),
    "qwen3": lambda layers: Qwen3Config(num_hidden_layers=layers, **_HEADS, **_COMMON),
    "gpt-neox": lambda layers: GPTNeoXConfig(num_hidden_layers=layers, num_attention_heads=4, **_COMMON),
    "gemma2": lambda layers: Gemma2Config(
        num_hidden_layers=layers,
        sliding_window=WINDOW,
        attn_implementation="eager",
        tie_word_embeddings=False,  # tied and scaled up, an untrained one repeats its input for ever
        final_logit_softcapping=30.0,
        **_HEADS,
        **_COMMON,
    ),
    "mistral": lambda layers: MistralConfig(num_hidden_layers=layers, sliding_window=WINDOW, **_HEADS, **_COMMON),
}


@cache
def random_model(family: str, layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """An untrained float32 model of 64 tokens, the same for the same arguments."""
    config: PreTrainedConfig = FAMILIES[family](layers)
    # Kept for tests that need gradients, whichever asks first.
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return model.float().eval()


@cache
def noisy_copy(family: str, noise: float = 0.01, layers: int = 2) -> PreTrainedModel:
    """The same model with noise on its weights: agrees with it often, not always."""
    original, generator = random_model(family, layers), seeded(1)
    with torch.inference_mode(False), torch.no_grad():
        model = deepcopy(original)
        for weight in model.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model


@cache
def generated(model: PreTrainedModel, prompt: tuple[int, ...], length: int, **rules: Any) -> list[int]:
    """What transformers' ``generate`` says: ``length`` tokens, greedily, which no token ends."""
    config = GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=None, pad_token_id=0, **rules)
    ids = torch.tensor([prompt])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return said[0, len(prompt) :].tolist()


def fresh_policy(policy: type[StoppingPolicy], **settings: object) -> StoppingPolicy:
    return policy(**settings)  # type: ignore[call-arg]


# Those that any draft can be stopped by; the others read what only a draft head predicts.
WITHOUT_FORESIGHT = [name for name, policy in POLICIES.items() if "next_accept_prob" not in policy.reads]

# Untrained models stop no policy at its defaults in interesting places: these settings do, by name of the policy.
STOPPING: dict[str, dict[str, object]] = {
    "svip": {"c": 1.0, "threshold": 1.2},
    "max-confidence": {"threshold": 0.5, "eps": 0.3},
    "adaedl": {"threshold": 0.3, "eps": 0.3},
    "specdec++": {"threshold": 0.6},
    "bandit": {"arms": ("svip:c=1.0,threshold=1.2", "max-confidence:threshold=0.5,eps=0.3", "heuristic")},
    "disco": {"threshold": 0.5},
}


def assert_raw_signals(step: DraftStep, logits: torch.Tensor) -> None:
    """A step's signals are those of the softmax of these logits ``(V,)`` at temperature 1."""
    raw = logits.double().softmax(-1)
    assert step.entropy == pytest.approx(float(-(raw * raw.log()).sum()), abs=1e-5)
    assert step.top_prob == pytest.approx(float(raw.max()), abs=1e-6)
    assert step.token_prob == pytest.approx(float(raw[step.token]), abs=1e-6)


class Replays:
    """Captures nothing: a replay is the pass itself, on the same tensors, its results copied into the same places."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        results = step()

        def replay() -> Any:
            for place, value in zip(results, step(), strict=True):
                if isinstance(place, dict):
                    for name, tensor in place.items():
                        tensor.copy_(value[name])
                elif place is not None:
                    place.copy_(value)
            return results

        return replay
