"""The logits of a pass in numpy's or torch's form, and the verdicts on the drafts of any number of texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from specctl.decoding.draft import Draft, Drafted
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.logits.host import CertainLogits, HostLogits
from specctl.decoding.logits.logits import Logits, Verdict, array, not_a_number, verify_greedy
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Foresee, Forward, Numbers, joined_numbers
from specctl.models.passes.inference import draws
from specctl.profile.schema import Verification

if TYPE_CHECKING:
    import torch

    from specctl.decoding.logits.token_sampler import TokenSampler
    from specctl.decoding.sampling import Sampling

TOGETHER = 1 << 18
"""The most probabilities that one call computes on the host: more would leave the processor's cache before they are
read.
"""
Judged = tuple[Verdict, Numbers | None]
"""A verdict, and the verifier's distributions ``(K + 1, V)`` it was drawn from; None when greedy."""


def logits_of(forward: Forward) -> Logits:
    """The logits of a pass, over all V ids."""
    if forward.certain is not None:
        return CertainLogits(array(forward.rows), logits_over(forward.columns))
    return logits_over(forward.rows)


def draft_logits_of(forward: Forward) -> Logits:
    """The logits of a draft's pass, over the N ids that it can write."""
    if forward.certain is not None:
        return logits_of(forward)
    columns = forward.columns
    return HostLogits(columns, signals=forward.signals) if isinstance(columns, np.ndarray) else logits_over(columns)


def draft_logits(forwards: Sequence[Forward]) -> Iterator[tuple[Logits, slice]]:
    """The logits of a draft's passes, and which of all rows they are: one array, or, without a copy, that of each pass
    where there are many numbers.
    """
    columns = [forward.columns for forward in forwards]
    host = [each for each in columns if isinstance(each, np.ndarray)]
    if len(columns) == 1 or (len(host) == len(columns) and sum(each.size for each in host) > TOGETHER):
        start = 0
        for forward in forwards:
            stop = start + len(forward.columns)
            yield draft_logits_of(forward), slice(start, stop)
            start = stop
        return
    numbers = joined_numbers(columns)
    signals = [forward.signals for forward in forwards if forward.signals is not None]
    if isinstance(numbers, np.ndarray) and len(signals) == len(forwards):
        entropies, tops = (np.concatenate(each) for each in zip(*signals, strict=True))
        yield HostLogits(numbers, signals=(entropies, tops)), slice(len(numbers))
    else:
        yield logits_over(numbers), slice(len(numbers))


def logits_over(numbers: Numbers) -> Logits:
    """Wraps ``(R, V)`` numbers: in numpy where they are numpy's, in host memory, or on a device that cannot draw; else
    in torch.
    """
    if isinstance(numbers, np.ndarray):
        return HostLogits(numbers)
    if on_host(numbers):
        return HostLogits(array(numbers), numbers.device)
    from specctl.decoding.logits.device import DeviceLogits

    return DeviceLogits(numbers)


def on_host(tensor: "torch.Tensor") -> bool:
    """Whether numpy handles a tensor. Torch handles compiled passes and tensors on a device that can draw."""
    if not tensor.is_cpu and draws(tensor.device):
        return False
    from torch.compiler import is_compiling

    return not is_compiling()


def sampled_within(
    sampler: "TokenSampler",
    logits: "torch.Tensor",
    uniform: "torch.Tensor | None",
    hidden: "torch.Tensor | None",
    previous: "torch.Tensor | None",
    foresee: Foresee | None,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """`Logits.sample` for one row within a pass, from tensors to tensors, so that it can be compiled or captured."""
    if not on_host(logits):
        from specctl.decoding.logits.device import sampled

        packed, probs = sampled(sampler, logits[None], uniform, hidden, previous, foresee)
        return packed[0], None if probs is None else probs[0]
    import torch

    number = None if uniform is None else float(uniform)
    (numbers,), row = HostLogits(array(logits)[None], logits.device).sample(
        sampler, [number], hidden, previous, foresee
    )
    return torch.tensor(numbers, dtype=torch.float64), None if row is None else torch.from_numpy(row[0])


def stacked(rows: Sequence[Numbers]) -> Numbers:  # K times (V,) -> (K, V)
    """Distributions stacked into rows; numpy's if all of them are."""
    return joined_numbers([row[None] for row in rows])


def verify(
    tokens: "Sequence[int] | torch.Tensor",
    draft_probs: Numbers | None,
    target_probs: Numbers,
    generator: DrawGenerator | None,
    verification: Verification = "token",
    vocabulary: DraftVocabulary | None = None,
) -> Verdict:
    """`Logits.verdicts` for one text.

    Args:
        tokens: K ids.
        draft_probs, vocabulary: see `Draft`.
        target_probs: ``(K + 1, V)`` or ``(K, V)``.
        generator: for the coins.
        verification: which of the two rules.

    Raises:
        RecordError: ``target_probs`` holds NaN.
    """
    ids = [*tokens] if isinstance(tokens, Sequence) else tokens.tolist()
    asked = Drafted(Draft(ids, draft_probs, (), None, vocabulary=vocabulary), generator)
    (found,) = logits_over(target_probs).verdicts([asked], [0, len(target_probs)], verification)
    if isinstance(found, RecordError):
        raise found
    return found


def numbers_on(device: "torch.device", numbers: "Sequence[float] | torch.Tensor") -> "torch.Tensor":
    """Numbers on a device, without waiting for it; float64 if they come from the host and the device supports it."""
    import torch

    from specctl.models.passes.synchronisation import sent

    dtype = torch.float64 if draws(device) else torch.float32
    return numbers if isinstance(numbers, torch.Tensor) else sent(numbers, device, dtype)


def judge(draft: Draft, forward: Forward, sampling: "Sampling", generator: DrawGenerator | None) -> Judged:
    """The verdict on the K draft tokens of one text.

    Args:
        draft: the K tokens with their distributions.
        forward: the verifier's, with logits ``(K + 1, V)``; or ``(K, V)``, K > 0, where no token is to follow a fully
            accepted draft.
        sampling: how tokens are drawn.
        generator: for the logits' device.

    Raises:
        RecordError: the logits hold NaN.
    """
    (found,) = judged(sampling, [forward], [Drafted(draft, generator)])
    if isinstance(found, RecordError):
        raise found
    return found


def judged(sampling: "Sampling", forwards: Sequence[Forward], drafted: Sequence[Drafted]) -> list[Judged | RecordError]:
    """The verdict on each text's draft, or an error where its logits hold NaN.

    Args:
        sampling: of the texts.
        forwards: the verifier's passes, see `judge`.
        drafted: the draft that each of them has read.
    """
    rows = [forward.rows for forward in forwards]
    together = len(rows) == 1 or not (isinstance(rows[0], np.ndarray) or on_host(rows[0]))
    if sampling.greedy:
        choices = _choices(rows) if together else (logits_over(each).best() for each in rows)
        return [
            not_a_number(*values) or (verify_greedy(each.draft.tokens, best), None)
            for each, (best, values) in zip(drafted, choices, strict=True)
        ]
    count, found = len(rows), list[Judged | RecordError]()
    if not together:
        count = max(1, TOGETHER // max(len(each) * each.shape[1] for each in rows))
    for first in range(0, len(rows), count):
        logits, parts = _joined(rows[first : first + count])
        probs = logits.distributions(sampling)
        bounds = [0, *(part.stop for part in parts)]
        verdicts = probs.verdicts(drafted[first : first + count], bounds, sampling.verification)
        found += [
            verdict if isinstance(verdict, RecordError) else (verdict, probs.numbers[part])
            for verdict, part in zip(verdicts, parts, strict=True)
        ]
    return found


def _joined(rows: Sequence[Numbers]) -> tuple[Logits, list[slice]]:
    """The logits of all texts stacked into rows, and each text's slice of them."""
    if len(rows) == 1:
        return logits_over(rows[0]), [slice(0, len(rows[0]))]
    ends = [*accumulate(map(len, rows))]
    parts = [slice(end - len(each), end) for each, end in zip(rows, ends, strict=True)]
    return logits_over(joined_numbers(rows)), parts


def _choices(rows: Sequence[Numbers]) -> list[tuple[list[int], list[float]]]:
    """`Logits.best` for each text, found by one call."""
    if len(rows) == 1:
        return [logits_over(rows[0]).best()]
    logits, parts = _joined(rows)
    choices, values = logits.best()
    return [(choices[part], values[part]) for part in parts]


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the drafts of several texts within the pass that reads them; `Request.reader` of a verification.

    Each text gets the verdict that it would get alone, on the host bit for bit. On a device all texts together take as
    many calls as one, and one wait.
    """

    sampling: "Sampling"  # shared by the texts
    takes_pass_signals: ClassVar[bool] = False

    def read_rows(
        self, forwards: Sequence[Forward], about: Sequence[Drafted]
    ) -> Sequence[tuple[Forward, Judged] | RecordError]:
        """The passes with the verdicts, and an error where the logits of a text hold NaN; see `PassReader`."""
        return [
            one if isinstance(one, RecordError) else (forward, one)
            for forward, one in zip(forwards, judged(self.sampling, forwards, about), strict=True)
        ]


judge_of = lru_cache(256)(Judge)  # One cached `Judge` per sampling
