"""Runs the chosen settings live, to hold the prediction against the clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specctl.decoding.prompt_format import PromptFormat
from specctl.models.loading.pair import Pair
from specctl.observing.results import BASELINE, Header, RunSet
from specctl.observing.round_robin import RoundRobin
from specctl.observing.speedup import evened, speedup
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.statistics.intervals import Interval


@dataclass(frozen=True, slots=True)
class Measured:
    """A setting's predicted and measured tokens/s after the prompt, and its measured speedup with the prompt.

    ``predicted`` is None for one that cannot be replayed.
    """

    setting: Setting
    predicted: float | None
    measured: float
    speedup: Interval | None


def verify(
    pair: Pair,
    header: Header,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    prompt_format: PromptFormat,
    predicted: Mapping[Setting, float | None],
    labels: Mapping[Setting, str],
    advance: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Benchmark each predicted setting on the prompts, interleaved.

    Stop strings are left out, as the traces leave them out.

    Args:
        pair: loaded models.
        header: names the settings as entrants.
        prompts: to run.
        settings: the sampling table in force.
        prompt_format: how prompts become ids.
        predicted: tokens/s of each setting.
        labels: what the header calls them.
        advance: called after each run.
    """
    results = RunSet(header)
    unstopped = settings.model_copy(update={"stop": []})
    for _ in RoundRobin(pair, results, prompts, unstopped, prompt_format, lambda _: None).run():
        advance()
    found = []
    for one, tokens_per_second in predicted.items():
        runs = evened(results.of(labels[one]))
        if not runs:
            continue
        speed = speedup(runs, results.of(BASELINE))
        measured = 1e3 * sum(run.tokens for run in runs) / sum(run.decode_ms for run in runs)
        found.append(Measured(one, tokens_per_second, measured, speed and speed.of_totals))
    return found
