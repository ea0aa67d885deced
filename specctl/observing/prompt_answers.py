"""Answers prompts in turn. A prompt that cannot be answered is yielded with the reason."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from specctl.decoding.answers import Answerer
from specctl.errors import RecordError
from specctl.observing.findings import Skipped
from specctl.observing.progress import Advance, ignored
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.records import Completion


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with its completions, one for each turn.

    Attributes:
        number: the prompt's index in its suite, from 0.
        settings: the sampling table in force, with the changes of the prompt's own record.
    """

    number: int
    prompt: SuitePrompt
    settings: SamplingTable
    completions: tuple[Completion, ...]


def answer_each(
    answerer: Answerer | Callable[[], Answerer],
    prompts: Sequence[SuitePrompt],
    done: Container[str] = (),
    advance: Advance = ignored,
    *,
    first: int = 0,
) -> Iterator[Answered | Skipped]:
    """Answer every prompt that is not done; a prompt that cannot be answered is yielded as skipped.

    The random draws of an answer depend on the prompt's index in the suite and on the seed, not on earlier prompts.

    Args:
        answerer: answers all prompts; or a function that makes an answerer for each prompt, so that policies carry
            nothing over from one prompt to the next.
        prompts: in order.
        done: ids that need no answer.
        advance: called after each prompt, answered or not, with the number of tokens generated.
        first: index of the first prompt in its suite.
    """
    for number, prompt in enumerate(prompts, start=first):
        tokens = 0
        if prompt.id not in done:
            current = answerer if isinstance(answerer, Answerer) else answerer()
            record = prompt.record(number + 1)
            try:
                completions = tuple(current.answer(record))
            except RecordError as error:
                yield Skipped(prompt.id, error.message)
            else:
                tokens = sum(len(completion.tokens) for completion in completions)
                yield Answered(number, prompt, current.settings_of(record), completions)
        advance(tokens)
