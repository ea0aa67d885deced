"""Pairs without a tokenizer, and traces of what their target wrote."""

from collections.abc import Iterable, Sequence

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Drafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.predictors.predictor_checkpoint import disco_predictors
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import NONE, Setting
from specctl.records import Round
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.replay.traces import Trace
from tests.support.toys import seeded, toy_disco


def live(
    pair: Pair, setting: Setting, prompt: Sequence[int], length: int, sampling: Sampling, seed: int = 0
) -> list[Round]:
    """`live_with` of a new drafter."""
    return live_with(pair, build_drafter(pair, setting), prompt, length, sampling, seed)


def live_with(
    pair: Pair, drafter: Drafter | None, prompt: Sequence[int], length: int, sampling: Sampling, seed: int = 0
) -> list[Round]:
    """The rounds in which a pair, its caches emptied, writes up to ``length`` tokens; a drafter keeps what it knows."""
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts):
            runner.begin(len(prompt))
            runner.rollback(0)
        if drafter is not None:
            drafter.rollback(0)
        prefill(pair.target, drafter, prompt)
        return list(decode(pair.target, drafter, prompt, length, sampling, pair.eos, seeded(seed)))


def pair_of(
    target: Slot,
    *drafts: Slot,
    eos: frozenset[int] = frozenset(),
    heads: Sequence[StatePredictor | None] | None = None,
) -> Pair:
    """A pair in which a draft with a head has a DISCO head too."""
    named = tuple(
        {} if head is None else {"head": head, "disco": toy_disco(level)}
        for level, head in enumerate(heads or [None] * len(drafts))
    )
    return Pair(target, drafts, None, eos, 1 << 20, (), named)  # type: ignore[arg-type]


def trace_of(
    pair: Pair, prompt: Sequence[int], tokens: Sequence[int], limit: int, depth: int, sampling: Sampling, seed: int = 0
) -> Trace:
    with torch.inference_mode():
        draft = read_sequence(pair, prompt, tokens, limit, depth, sampling, seeded(seed))
    trace = Trace(
        prompt="p",
        category="c",
        turn=0,
        prompt_tokens=len(prompt),
        limit=limit,
        tokens=list(tokens),
        draft=draft,
        prefill_ms=0.0,
        prompt_ids=list(prompt),
    )
    return trace.of_disco([next(iter(disco_predictors(named).values()), None) for named in pair.named_predictors])


def greedy_traces(pair: Pair, prompts: Iterable[Sequence[int]], length: int, depth: int) -> list[Trace]:
    """Of what the target alone writes after each prompt."""
    found = []
    for prompt in prompts:
        tokens = [token for played in live(pair, NONE, prompt, length, Sampling()) for token in played.emitted]
        found.append(trace_of(pair, prompt, tokens, length, depth, Sampling()))
    return found


def shape(played: Round) -> tuple[object, ...]:
    """All of a round but its signals and times, those of its inner rounds too."""
    inner = tuple(map(shape, played.inner))
    return played.drafted, played.accepted, played.stop, played.extra, played.extra_kind, inner, played.index
