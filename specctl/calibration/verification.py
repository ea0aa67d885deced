"""Runs the chosen settings live, to hold the prediction against the clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specctl.benchmark.cost_model import decode_ms
from specctl.benchmark.entrants import policy_entrant
from specctl.benchmark.results import BASELINE, Header, RunSet
from specctl.benchmark.running import Benchmark
from specctl.benchmark.statistics import Interval, evened, speedup
from specctl.benchmark.suites import SuitePrompt
from specctl.calibration.grids import Candidate
from specctl.calibration.search import Score
from specctl.decoding.prompts import PromptFormat
from specctl.models.pair import Pair
from specctl.profile.schema import SamplingTable


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate's predicted and measured tokens/s after the prompt, and its measured speedup with the prompt."""

    candidate: Candidate
    predicted: float
    measured: float
    speedup: Interval | None


def verify(
    pair: Pair,
    header: Header,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    prompt_format: PromptFormat,
    predicted: Iterable[Score],
    advance: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Benchmark each predicted candidate on the prompts, interleaved; ``header`` names them as entrants.

    Stop strings are left out, as the traces leave them out.
    """
    results = RunSet(header)
    unstopped = settings.model_copy(update={"stop": []})
    for _ in Benchmark(pair, results, prompts, unstopped, prompt_format, lambda _: None).run():
        advance()
    found = []
    for score in predicted:
        runs = evened(results.of(policy_entrant(score.candidate.table).label))
        if not runs:
            continue
        speed = speedup(runs, results.of(BASELINE))
        found.append(
            Measured(
                score.candidate,
                score.tokens_per_second,
                1e3 * sum(run.tokens for run in runs) / sum(map(decode_ms, runs)),
                speed and speed.of_totals,
            )
        )
    return found
