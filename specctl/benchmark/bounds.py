"""The best result that any policy could reach on a benchmark's prompts, from the baseline's greedy outputs."""

from collections.abc import Iterable, Iterator

import torch

from specctl.benchmark.cost_model import bare_model, fit
from specctl.decoding.along import read_along
from specctl.models.loading.pair import Pair
from specctl.models.running.runner import StateReader
from specctl.observing.findings import OraclePasses
from specctl.observing.results import BASELINE, Run, RunSet
from specctl.observing.round_robin import Emit, RoundRobin
from specctl.prompts.suites import SuitePrompt
from specctl.replay.bound import LONGEST
from specctl.replay.oracle import oracle
from specctl.replay.signal_bound import Text, greedy_trace, signal_bound


def find_bounds(pair: Pair, runs: RoundRobin, prompts: Iterable[SuitePrompt], results: RunSet, emit: Emit) -> None:
    """Add the oracle of Theorem 4.1 and the signal bound of the first draft to finished results.

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
            if prompt.id not in results.oracle:
                found = OraclePasses(prompt.id, _oracle_passes(pair, runs.prompt_ids(prompt, run), run))
                results.add(found)
                emit(found)
    model = fit(results) or (bare_model(results.costs) if results.costs else None)
    if results.signal_bound is not None or model is None or not baselines:
        return
    texts = [
        Text(prompt.id, prompt.category, ids, list(turn.tokens), min(run.length, pair.room(ids)))
        for prompt, run in baselines
        for ids, turn in zip(runs.prompt_ids(prompt, run), run.turns, strict=True)
    ]
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


def _oracle_passes(pair: Pair, prompt_ids: list[list[int]], run: Run) -> int:
    """The fewest target passes for a run's text (SpecDec++, arXiv 2405.19715, Theorem 4.1).

    Of a draft model, in each turn one more than the number of positions at which draft and target disagree.
    """
    draft = pair.drafts[0]
    passes = 0
    if isinstance(draft, StateReader):  # what it drafts depends on where a round begins
        for ids, turn in zip(prompt_ids, run.turns, strict=True):
            text = Text(run.prompt, "", ids, list(turn.tokens), min(run.length, pair.room(ids)))
            passes += len(oracle(greedy_trace(pair, text)).starts)
        return passes
    for ids, turn in zip(prompt_ids, run.turns, strict=True):
        for part, (forward,) in read_along([draft], ids, turn.tokens):
            predicted = forward.logits.argmax(-1).tolist()
            passes += sum(guess != token for guess, token in zip(predicted, turn.tokens[part], strict=True))
        passes += 1
    return passes
