"""Answers prompts in turn. A prompt that cannot be answered is yielded with the reason."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from specctl.decoding.answers import Answerer
from specctl.errors import RecordError
from specctl.observing.progress import Advance, ignored
from specctl.observing.results import Skipped
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.records import Completion
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import TextEngine, Writer, whole


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt with its completions, one for each turn."""

    number: int  # the prompt's index in its suite, from 0
    prompt: SuitePrompt
    settings: SamplingTable  # the sampling table in force, with the changes of the prompt's own record
    completions: tuple[Completion, ...]


def answer_prompt(answerer: Answerer, prompt: SuitePrompt, number: int) -> AnsweredPrompt | Skipped:
    """Answer a prompt of this index in its suite, or return the reason for skipping it."""
    record = prompt.record(number + 1)
    try:
        completions = tuple(answerer.answer(record))
    except RecordError as error:
        return Skipped(prompt.id, error.message)
    return AnsweredPrompt(number, prompt, answerer.settings_of(record), completions)


def prompt_writer(answerer: Callable[[int], Answerer]) -> Writer:
    """The writer for `answer_each`. ``answerer`` makes an answerer for the prompt of an index, so that policies may
    start afresh with each prompt.
    """
    return whole(lambda asked: answer_prompt(answerer(asked[0]), asked[1], asked[0]))


def answer_each(
    engine: TextEngine,
    prompts: Sequence[SuitePrompt],
    done: Container[str] = (),
    advance: Advance = ignored,
    *,
    first: int = 0,
) -> Iterator[AnsweredPrompt | Skipped]:
    """Answer every prompt that is not done; a prompt that cannot be answered is yielded as skipped.

    The random draws of an answer depend on the prompt's index in the suite and on the seed, not on earlier prompts.

    Args:
        engine: an engine in this process, of a `prompt_writer`.
        prompts: in order.
        done: ids that need no answer.
        advance: called after each prompt, answered or not, with the number of tokens generated.
        first: index of the first prompt in its suite.
    """
    numbered = enumerate(prompts, start=first)
    tasks = ((prompt, None if prompt.id in done else (number, prompt)) for number, prompt in numbered)
    for _, found in in_order(engine, tasks):
        if found is not None:
            yield found
        completions = found.completions if isinstance(found, AnsweredPrompt) else ()
        advance(sum(len(completion.tokens) for completion in completions))
