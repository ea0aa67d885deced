"""The rounds that a draft head would begin at every place of what the target wrote, as verdicts on its tokens."""

from collections.abc import Sequence

from specctl.analysis.readings import Judged
from specctl.analysis.verdicts import verdicts
from specctl.decoding.answers import Answerer
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.models.running.pair import Pair
from specctl.observing.findings import Skipped
from specctl.observing.progress import Advance, ignored
from specctl.observing.prompt_answers import answer_each
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.replay.bound import LONGEST
from specctl.replay.recording.collecting import trace_answers
from specctl.replay.traces import Trace


def read_rounds(
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    prompt_format: PromptFormat,
    advance: Advance = ignored,
) -> tuple[Judged | None, dict[str, str]]:
    """Answer every prompt with the target, and draft at most `LONGEST` tokens from every place of each answer.

    Args:
        pair: with a draft head.
        prompts: to answer.
        settings: the sampling table in force.
        prompt_format: how prompts become ids.
        advance: called after each prompt.

    Returns:
        The tokens that verification judges, None where there are none; and by id why a prompt could not be answered.
    """
    traces: list[Trace] = []
    failures: dict[str, str] = {}
    for found in answer_each(Answerer(Session(pair, None), prompt_format, settings), prompts, advance=advance):
        if isinstance(found, Skipped):
            failures[found.prompt] = found.reason
        else:
            traces += trace_answers(pair, found, LONGEST)
    return verdicts(traces), failures
