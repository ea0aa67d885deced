"""Tokens of several texts read at once: what each is given is what it is given alone, to the last bit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specctl.decoding.rows.draws import blocks, picked
from specctl.decoding.rows.host_laws import Floats, Softmaxes, processed
from specctl.decoding.rows.rows import array
from specctl.decoding.rows.rows_of import on_host
from specctl.models.passes.forward import Numbers
from specctl.models.passes.synchronisation import sent

if TYPE_CHECKING:
    import torch

    from specctl.decoding.rows.reading import Reader

Reading = tuple[list[float], Numbers | None]
"""The `Reader.fields` of a token, and the law ``(N,)`` it was drawn from."""


def read_rows(reader: "Reader", logits: Numbers, uniforms: Sequence[float | None]) -> list[Reading]:
    """A token of each row ``(R, N)``, see `Rows.read`; nothing is predicted of it.

    The rows may be overwritten afterwards.
    """
    draws = [uniform for uniform in uniforms if uniform is not None]
    if not isinstance(logits, np.ndarray) and not on_host(logits):
        return _on_device(reader, logits, draws)
    rows = array(logits)
    unfiltered = bool(draws) and not reader.sampling.filters
    softmaxes = Softmaxes(rows) if unfiltered or reader.wanted or reader.tops else None
    laws: Floats | None
    if not draws:
        laws = None
        tokens = rows.argmax(-1).tolist() if softmaxes is None else softmaxes.best
    else:
        temperature = reader.sampling.temperature
        if unfiltered and softmaxes is not None:
            laws = softmaxes.probs(temperature)
        else:
            laws = processed(rows, reader.sampling)
        tokens = picked_each(laws, draws)
    found: list[Reading] = []
    for row, token in enumerate(tokens):
        id_ = token if reader.vocabulary is None else reader.vocabulary.ids.item(token)
        numbers: list[float] = [id_]
        if softmaxes is not None and (reader.wanted or reader.tops):
            softmax = softmaxes.row(row)
            numbers += softmax.signals(token, reader.wanted)
            if reader.tops:
                numbers += softmax.tops()
        found.append((numbers, None if laws is None else laws[row]))
    return found


def picked_each(laws: Floats, uniforms: Sequence[float]) -> list[int]:
    """`picked` of each row ``(R, V)`` with its own number."""
    count = laws.shape[1]
    width, starts = blocks(count)
    rows = np.arange(len(laws))
    ends = np.add.reduceat(laws, starts, axis=1, dtype=np.float64).cumsum(axis=1)  # (R, B)
    parts = np.asarray(uniforms) * ends[:, -1]
    passed = (ends <= parts[:, None]).sum(axis=1)  # as `searchsorted` on the right
    known = np.minimum(passed, len(starts) - 1)
    before = np.where(known > 0, ends[rows, known - 1], 0.0)
    places = known[:, None] * width + np.arange(width)  # (R, W)
    inside = laws[rows[:, None], np.minimum(places, count - 1)].cumsum(axis=1, dtype=np.float64)
    found = known * width + (inside <= (parts - before)[:, None]).sum(axis=1)
    # Where a sum rounds to the whole, or is none, one alone is asked.
    sure = (passed < len(starts)) & (found < np.minimum(places[:, 0] + width, count)) & np.isfinite(ends[:, -1])
    if sure.all():
        whole: list[int] = found.tolist()
        return whole
    return [
        token if certain else picked(law, uniform)
        for token, certain, law, uniform in zip(found.tolist(), sure.tolist(), laws, uniforms, strict=True)
    ]


def _on_device(reader: "Reader", logits: "torch.Tensor", draws: Sequence[float]) -> list[Reading]:
    """`read_rows` where the rows are: as many calls and a single transfer, whatever their number."""
    import torch

    from specctl.decoding.rows.device_laws import pick, processed, read_signals, read_top_probs

    laws = processed(logits, reader.sampling) if draws else None
    tokens = logits.argmax(-1) if laws is None else pick(laws, sent(draws, logits.device, torch.float64))
    known = laws if reader.sampling.plain else None
    signals = read_signals(logits, tokens, reader.wanted, known).values()
    if reader.vocabulary is not None:
        tokens = reader.vocabulary.ids_on(logits.device).index_select(0, tokens)
    # float64 holds ids and probabilities alike
    columns = [tokens.double()[:, None], *(signal.double()[:, None] for signal in signals)]
    if reader.tops:
        columns.append(read_top_probs(logits).double())
    numbers = torch.cat(columns, dim=1).tolist()
    return [(row, None if laws is None else laws[place]) for place, row in enumerate(numbers)]
