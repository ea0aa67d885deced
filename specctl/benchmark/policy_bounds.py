"""The best result that any policy could reach on a benchmark's prompts, from the baseline's greedy outputs."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from specctl.benchmark.cost_model import bare_model, fit
from specctl.decoding.along import read_along
from specctl.models.running.pair import Pair
from specctl.models.running.runner import Runner
from specctl.observing.findings import OraclePasses, Stretches
from specctl.observing.results import BASELINE, Run, RunSet
from specctl.observing.round_robin import Emit, RoundRobin
from specctl.prompts.suites import SuitePrompt
from specctl.replay.bound import LONGEST
from specctl.replay.oracle import oracle
from specctl.replay.parallel_replay import cut
from specctl.replay.recording.signal_bound import Text, greedy_trace, signal_bound


def find_bounds(pair: Pair, runs: RoundRobin, prompts: Iterable[SuitePrompt], results: RunSet, emit: Emit) -> None:
    """Add the oracle of Theorem 4.1, the first draft's stretches and the signal bound to finished results.

    Bounds that the results already contain are kept.

    Args:
        pair: without a draft, nothing is added.
        runs: produced the results.
        prompts: of the suite.
        results: the runs; the bounds are added here.
        emit: receives each line for the results file.
    """
    if not pair.drafts:
        return
    baselines = list(_baselines(prompts, results))
    with torch.inference_mode():
        for prompt, run in baselines:
            for found in _oracle(pair, runs.prompt_ids(prompt, run), run, results):
                results.add(found)
                emit(found)
    model = fit(results) or (bare_model(results.costs) if results.costs else None)
    if results.signal_bound is not None or model is None or not baselines:
        return
    texts = [
        Text(prompt.id, prompt.category, ids, list(turn.tokens), min(run.length, pair.room(ids)))
        for prompt, run in baselines
        for ids, turn in zip(runs.prompt_ids(prompt, run), run.turns, strict=True)
        if pair.drafts[0].room(len(ids))
    ]
    if not texts:  # no prompt fits the draft's context
        return
    bound = signal_bound(pair, texts, model.table(LONGEST))
    results.add(bound)
    emit(bound)


def _baselines(prompts: Iterable[SuitePrompt], results: RunSet) -> Iterator[tuple[SuitePrompt, Run]]:
    """Each prompt with the baseline's run at the first length limit; prompts without such a run are left out."""
    first = results.header.lengths[0]
    runs: dict[str, Run] = {}
    for run in results.of(BASELINE):
        if run.length == first:
            runs.setdefault(run.prompt, run)
    return ((prompt, runs[prompt.id]) for prompt in prompts if prompt.id in runs)


def _oracle(pair: Pair, prompt_ids: list[list[int]], run: Run, results: RunSet) -> Iterator[OraclePasses | Stretches]:
    """What is known of a run's text as soon as the first draft has read it, as far as the results lack it.

    The fewest target passes (SpecDec++, arXiv 2405.19715, Theorem 4.1) are, of a draft model, in each turn one more
    than the number of positions at which draft and target disagree. A draft head, whose tokens depend on where a round
    begins, has no stretches.
    """
    draft, known = pair.drafts[0], run.prompt in results.oracle
    texts = list(zip(prompt_ids, run.turns, strict=True))
    if draft.drafts_by_round:
        if not known:
            limits = [min(run.length, pair.room(ids)) for ids in prompt_ids]
            traces = (
                greedy_trace(pair, Text(run.prompt, "", ids, list(turn.tokens), limit))
                for (ids, turn), limit in zip(texts, limits, strict=True)
            )
            yield OraclePasses(run.prompt, sum(len(oracle(trace).starts) for trace in traces))
        return
    if known and run.prompt in results.stretches:
        return
    wrong = [_disagreements(draft, ids, turn.tokens) for ids, turn in texts]
    if not known:
        yield OraclePasses(run.prompt, sum(len(places) + 1 for places in wrong))
    if run.prompt not in results.stretches:
        yield Stretches(
            run.prompt, [cut(places, len(turn.tokens)) for places, (_, turn) in zip(wrong, texts, strict=True)]
        )


def _disagreements(draft: Runner, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The positions of a text at which the draft's likeliest token is another, or its context has no room for one."""
    guesses: list[int] = []
    within = tokens[: draft.room(len(prompt))]
    for _, (forward,) in read_along([draft], prompt, within) if within else ():
        guesses += forward.logits.argmax(-1).tolist()
    wrong = [place for place, (guess, token) in enumerate(zip(guesses, within, strict=True)) if guess != token]
    return [*wrong, *range(len(within), len(tokens))]
