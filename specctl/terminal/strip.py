"""The last rounds as small bars that show accepted out of drafted tokens."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from rich.text import Text

from specctl.records import Round

ACCEPTED, DISCARDED = "█", "▒"
BARE, MANY = "·", "+"
"""In a round's tree, a place without tokens and one with more than nine."""
COLUMN_WIDTH = 64
"""Least width of a column of rounds, in cells, where there are several columns."""
_LABEL_WIDTH = len(" 40/40 max_draft")


def strip(rounds: Sequence[Round], rows: int, width: int) -> list[Text]:
    """Lines of ``width`` cells that show the last rounds, newest last; in several columns if they fit."""
    columns = max(1, width // COLUMN_WIDTH)
    column_width = width // columns
    shown = rounds[-rows * columns :] if rows > 0 else []
    index_width = len(str(shown[-1].index + 1)) if shown else 0
    scale = _common_scale(shown, max(4, column_width - index_width - 2 - _LABEL_WIDTH))
    cells = [_entry(round_, index_width, scale, column_width) for round_ in shown]
    height = min(rows, len(cells))
    return [_fitted(Text().join(cells[row::height]), width) for row in range(height)]


def bar(round_: Round, scale: float = 1.0) -> Text:
    """One cell per drafted token times ``scale``; in a hierarchy gaps separate the tokens of inner rounds.

    Behind another gap stand, in another colour, tokens that a lookup copied behind a model's.
    """
    length = max(1, round(round_.drafted * scale)) if round_.drafted else 0
    whole = round_.accepted == round_.drafted
    accepted = length if whole else min(round(round_.accepted * scale), length - 1)
    collected = accumulate(len(inner.emitted) for inner in round_.inner)
    cuts = {cut for tokens in collected if 0 < (cut := round(tokens * scale)) < length}
    copies = round((round_.drafted - round_.copied) * scale) if round_.copied else length
    cuts |= {copies} if 0 < copies < length else set()
    segments = [
        Text.assemble(
            (ACCEPTED * (min(end, accepted) - min(start, accepted)), "green" if start < copies else "blue"),
            (DISCARDED * (max(end, accepted) - max(start, accepted)), "dim"),
        )
        for start, end in pairwise(sorted({0, length} | cuts))
    ]
    return Text(" ").join(segments)


def tree(round_: Round) -> Text:
    """How many tokens a tree has at each level, one cell each; levels on the accepted path stand out."""
    marks = Text()
    for place, count in enumerate(round_.tree):
        mark = BARE if not count else str(count) if count < 10 else MANY
        marks.append(mark, "green" if place < round_.accepted else "dim")
    return marks


def _common_scale(rounds: Sequence[Round], room: int) -> float:
    def scale(round_: Round) -> float:
        gaps = max(0, len(round_.inner) - 1) + (0 < round_.copied < round_.drafted)
        bars = 2 if round_.tree else 1
        return max(room - gaps, (room + 1) // 2) / (bars * round_.drafted)

    return min((scale(round_) for round_ in rounds if round_.drafted), default=1.0, key=lambda value: min(value, 1.0))


def _entry(round_: Round, index_width: int, scale: float, width: int) -> Text:
    stop = round_.stop.value if round_.stop else "target only"
    entry = Text.assemble(
        (f"{round_.index + 1:>{index_width}} ", "dim"),
        bar(round_, min(scale, 1.0)),
        " " if round_.drafted else "",
        *((tree(round_), " ") if round_.tree and scale >= 1 else ()),
        f"{round_.accepted}/{round_.drafted} ",
        (stop, "dim"),
    )
    return _fitted(entry, width)


def _fitted(text: Text, width: int) -> Text:
    text.truncate(width, overflow="crop", pad=True)
    return text
