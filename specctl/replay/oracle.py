"""The rounds with the fewest target passes that there can be: a bound that no policy passes. No torch here."""

from collections.abc import Sequence

from specctl.replay.recorded import Recorded
from specctl.replay.replayed import Level, Replay
from specctl.replay.traces import Trace


def oracle(trace: Trace, levels: int = 1) -> Replay:
    """The rounds of a policy that knows where the target will disagree (SpecDec++, arXiv 2405.19715, Theorem 4.1).

    No draft token is rejected, and the number of target passes is the smallest possible. Without a draft head it drafts
    exactly up to each disagreement. With one, where a round begins changes what is drafted in it, and to stop earlier
    may save a pass later; of the rounds with the fewest passes these are the longest at the beginning. In a hierarchy
    of ``levels`` drafts, every draft knows where its verifier will disagree.
    """
    top, *inner = (Level() for _ in range(levels))
    lengths = _fewest_passes(trace.draft, 0, len(trace.tokens), trace.limit)
    start = 0
    while start < len(trace.tokens):
        length = lengths[start]
        top.starts.append(start)
        top.drafted.append(length)
        _add_inner(trace.draft, start, length, inner)
        start += length + 1
    for level in (top, *inner):
        level.accepted.extend(level.drafted)
    return Replay(trace, top.starts, top.drafted, top.accepted, tuple(inner))


def _fewest_passes(draft: Recorded, first: int, end: int, limit: int) -> dict[int, int]:
    """How many tokens to draft at each position of a text, so that no more passes than needed reach its end.

    Args:
        draft: says from each position how many draft tokens in a row are accepted.
        first, end: the positions at which rounds begin.
        limit: the text's token limit.
    """
    lengths: dict[int, int] = {}
    passes = {end: 0}  # from each position on
    for start in reversed(range(first, end)):
        # The last position is left to the verifier, unless the draft token there ends the sequence.
        longest = draft.room(start, min(draft.run(start), max(0, limit - start - 1)))
        after = [passes[min(end, start + length + 1)] for length in range(longest + 1)]
        fewest = min(after)
        passes[start] = 1 + fewest
        lengths[start] = max(length for length in range(longest + 1) if after[length] == fewest)
    return lengths


def _add_inner(draft: Recorded, start: int, length: int, inner: Sequence[Level]) -> None:
    """Add the inner rounds that collect a block of a given length without any rejection."""
    if not inner:
        return
    text, position, end = draft.under(start), start, start + length
    lengths = _fewest_passes(text, start, end, end)
    while position < end:
        inner[0].starts.append(position)
        inner[0].drafted.append(lengths[position])
        _add_inner(text, position, lengths[position], inner[1:])
        position += lengths[position] + 1
