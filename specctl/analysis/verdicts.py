"""Traces that `specctl generate --trace` wrote, as verdicts on draft tokens."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specctl.analysis.readings import RISING, Judged
from specctl.errors import UsageError
from specctl.statistics.intervals import Floats

Probability = Annotated[float, Field(ge=0, le=1.001)]  # a float32 sum may pass 1


class TracedStep(BaseModel):
    """One drafted token."""

    model_config = ConfigDict(allow_inf_nan=False)

    entropy: Annotated[float, Field(ge=-0.001)] | None = None
    top_prob: Probability | None = None
    token_prob: Probability | None = None
    accept_prob: Probability | None = None


class TracedRound(BaseModel):
    """The fields of a trace line that the analysis needs."""

    id: Any
    accepted: Annotated[int, Field(ge=0)]
    steps: list[TracedStep]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.accepted > len(self.steps):
            raise ValueError(f"{self.accepted} of {len(self.steps)} drafted tokens cannot be accepted")
        return self


def read_traces(paths: Iterable[Path]) -> Judged:
    """The drafted tokens of all rounds; records of the same id are one prompt, whichever file they are in.

    Raises:
        UsageError: a file cannot be read, a line is no trace line (the message names it), or nothing was judged.
    """
    places: dict[str, int] = {}
    prompt: list[int] = []
    accepted: list[float] = []
    run: list[float] = []
    discarded: list[float] = []
    signals: dict[str, list[float]] = {name: [] for name in RISING}
    for path in paths:
        for round_ in _rounds(path):
            place = places.setdefault(repr(round_.id), len(places))
            for index, step in enumerate(round_.steps[: round_.accepted + 1]):
                prompt.append(place)
                accepted.append(float(index < round_.accepted))
                run.append(float(round_.accepted - index))
                # A head predicts for a token once the draft has read it: the prediction is part of the next step.
                after = round_.steps[index + 1] if index + 1 < len(round_.steps) else None
                for name, values in signals.items():
                    source = after if name == "accept_prob" else step
                    value = None if source is None else getattr(source, name)
                    values.append(np.nan if value is None else value)
            never = round_.steps[round_.accepted + 1 :]
            discarded += [max(0.0, step.entropy) for step in never if step.entropy is not None]
    if not accepted:
        raise UsageError("the traces contain no drafted token", "trace a run with a policy other than none")
    known = {name: np.array(values) for name, values in signals.items() if not np.isnan(values).all()}
    if not known:
        raise UsageError("the traces contain no signals", "write them with `specctl generate --trace FILE`")
    own = [values for name, values in known.items() if name != "accept_prob"] or list(known.values())
    whole = np.isfinite(np.stack(own)).all(axis=0)
    if not whole.any():
        raise UsageError("no drafted token has all the signals that others have", "analyse the traces one by one")
    return Judged(
        np.array(prompt)[whole],
        {name: _cleaned(name, values[whole]) for name, values in known.items()},
        np.array(accepted)[whole],
        np.array(run)[whole],
        np.array(discarded),
    )


def _cleaned(name: str, values: Floats) -> Floats:
    """The values without what rounding in float32 adds beyond the possible range."""
    return np.clip(values, 0, None if name == "entropy" else 1)


def _rounds(path: Path) -> Iterator[TracedRound]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    # What follows the last newline is an interrupted write.
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield TracedRound.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"{path}:{number}: {where}{': ' if where else ''}{first['msg']}",
                "--from takes files that `specctl generate --trace` wrote",
            ) from None
