"""Models read a text that is already there, and give what they predict at each of its tokens."""

from collections.abc import Iterator, Sequence

from specctl.models.passes.forward import Forward
from specctl.models.running.slot import Slot

CHUNK = 64
"""Tokens whose distributions are held at once."""


def read_along(
    runners: Sequence[Slot], prompt: Sequence[int], text: Sequence[int], *, hidden: bool = False, cached: bool = False
) -> Iterator[tuple[slice, list[Forward]]]:
    """Have models read what followed a prompt, at most `CHUNK` tokens at a time.

    Row i of a pass over ``text[part]`` is the prediction of ``text[part][i]``, made after everything before it. Run it
    in inference mode.

    Args:
        runners: the models.
        prompt: at least one id.
        text: T ids.
        hidden: whether the hidden states of the first model are wanted.
        cached: whether the caches hold a prefix of the prompt, whatever is behind it, of a text that was begun;
            otherwise the prompt is read anew.

    Yields:
        A part of the text, and the pass of each model over it: ``(C, V)`` logits for the C tokens of the part.
    """
    for runner in runners:
        if not cached:
            runner.begin(len(prompt))
        runner.rollback(len(prompt) - 1 if cached and not runner.whole_prompts else 0)
        if (pending := prompt[runner.length : -1]) and not runner.whole_prompts:
            runner.extend(pending, keep=0)
    read = [prompt[-1], *text]
    for start in range(0, len(text), CHUNK):
        part = slice(start, min(start + CHUNK, len(text)))
        chunk = read[part]
        before = () if start else prompt[:-1]
        yield (
            part,
            [
                runner.extend([*before[runner.length :], *chunk], keep=len(chunk), hidden=hidden and not n)
                for n, runner in enumerate(runners)
            ],
        )
