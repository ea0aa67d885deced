"""Rows wherever torch has them, without waiting for a device; `host_rows` has the same by numpy, in the same order."""

from collections.abc import Callable, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from specctl.decoding.beams import IMPOSSIBLE
from specctl.decoding.rows import device_verdict
from specctl.decoding.rows.device_laws import pick, processed, read_signals, read_top_probs
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers
from specctl.decoding.rows.draws import DrawGenerator, uniforms
from specctl.decoding.rows.reading import Reader
from specctl.decoding.rows.rows import Beams, Look, token_logprobs
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.token_reader import Foresee
from specctl.policies import DISTRIBUTION_SIGNALS, Signal
from specctl.profile.schema import Verification
from specctl.records import TokenLogprobs

if TYPE_CHECKING:
    from specctl.decoding.rows.tree_verification import DraftTree


class DeviceRows:
    """`Rows` of a tensor ``(R, V)``, on any device and of any dtype."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def part(self, rows: slice) -> "DeviceRows":
        return DeviceRows(self.numbers[rows])

    def best(self) -> tuple[list[int], list[float]]:
        best = self.numbers.max(-1)
        choices, values = torch.stack([best.indices.double(), best.values.double()]).tolist()
        return [int(choice) for choice in choices], values

    def laws(self, sampling: Sampling) -> "DeviceRows":
        return DeviceRows(processed(self.numbers, sampling))

    def read(
        self,
        reader: Reader,
        uniform: float | None,
        hidden: torch.Tensor | None = None,
        previous: Sequence[float] | torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        number = None if uniform is None else torch.tensor(uniform, dtype=torch.float64)  # of the host
        before = None if previous is None else self._here(previous, torch.float64)
        return read_on_device(reader, self.numbers[0], number, hidden, before, foresee)

    def read_tokens(
        self,
        reader: Reader,
        tokens: Sequence[int],
        hidden: torch.Tensor | None = None,
        previous: Sequence[float] | torch.Tensor | None = None,
    ) -> tuple[list[list[float]], torch.Tensor | None]:
        rows, chosen = self.part(slice(len(tokens))), self._here(tokens, torch.int64)
        signals = [*rows.signals(chosen, reader.wanted).values()]
        columns, last = [chosen, *signals], None
        if reader.predictor is not None and hidden is not None:
            before = None
            if reader.predictor.reads_signals:
                own = torch.stack(signals, dim=-1)  # (n, 3)
                # The hidden state in a row belongs to the token before it, and so must the signals.
                first = torch.zeros_like(own[0]) if previous is None else self._here(previous, own.dtype)
                before, last = torch.cat([first[None].to(own.dtype), own[:-1]]), own[-1]
            columns.append(reader.predictor.accept_prob(hidden[: len(tokens)], before))
        # float64 holds ids and probabilities alike
        together = [column.double()[:, None] for column in columns]
        if reader.tops:
            together.append(rows.top_probs().double())
        numbers: list[list[float]] = torch.cat(together, dim=-1).tolist()
        return numbers, last

    def signals(self, tokens: Sequence[int] | torch.Tensor, wanted: Set[Signal]) -> dict[Signal, torch.Tensor]:
        return read_signals(self.numbers, self._here(tokens, torch.int64), wanted)

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        logits = self.numbers[: len(tokens)].float()
        best = logits.topk(min(most, logits.shape[1]))  # (n, M)
        chosen = logits.gather(1, self._here(tokens, torch.int64)[:, None])
        logs = (torch.cat([chosen, best.values], 1) - logits.logsumexp(-1, keepdim=True)).double()  # (n, M + 1)
        logs = logs.nan_to_num(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE).clamp(IMPOSSIBLE, 0)
        # float64 holds ids and probabilities alike
        rows, count = torch.cat([logs, best.indices.double()], 1).tolist(), best.indices.shape[1]
        return tuple(
            token_logprobs(token, row[0], [*map(int, row[1 + count :])], row[1 : 1 + count])
            for token, row in zip(tokens, rows, strict=True)
        )

    def top_probs(self) -> torch.Tensor:
        return read_top_probs(self.numbers)

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        logits = self.numbers.float()
        best = logits.topk(min(most, logits.shape[1]))  # (R, k)
        logs = (best.values - logits.logsumexp(-1, keepdim=True)).double()  # (R, k)
        logs = logs.nan_to_num(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE).clamp(IMPOSSIBLE, 0)
        signals = read_signals(logits[asked], best.indices[asked, 0], wanted).values()
        # float64 holds ids and probabilities alike
        together = [best.indices.double(), logs, *(value.double() for value in signals)]
        if tops:
            together.append(read_top_probs(logits[:1]).double())
        numbers = iter(torch.cat([part.flatten() for part in together]).tolist())
        (rows, count), read = best.indices.shape, len(best.indices[asked])
        return Beams(
            [[int(number) for number in islice(numbers, count)] for _ in range(rows)],
            [[*islice(numbers, count)] for _ in range(rows)],
            {name: [*islice(numbers, read)] for name in DISTRIBUTION_SIGNALS if name in wanted},
            [*numbers],
        )

    def draws(self, count: int, generator: DrawGenerator | None) -> torch.Tensor:
        return uniforms((count,), self.numbers.device, generator)

    def verify(
        self,
        tokens: Sequence[int] | torch.Tensor,
        draft_probs: Numbers | None,
        generator: DrawGenerator | None,
        verification: Verification = "token",
        vocabulary: DraftVocabulary | None = None,
    ) -> Verdict:
        ids = self._here(tokens, torch.int64)
        drawn = 0 if draft_probs is None else len(draft_probs)
        if draft_probs is not None and drawn == len(ids):
            draft = self._here(draft_probs, torch.float32)
        else:
            draft = torch.zeros_like(self.numbers[: len(ids)]).scatter_(1, ids[:, None], 1.0)  # (K, V)
            if draft_probs is not None:  # a copied token may have no column in the draft's vocabulary
                some = self._here(draft_probs, torch.float32)
                draft[:drawn].copy_(torch.as_tensor(some if vocabulary is None else vocabulary.widened(some, 0.0)))
            vocabulary = None
        numbers = self.draws(len(ids) + 1, generator)
        return device_verdict.verified(ids, draft, self.numbers, numbers, verification, vocabulary)

    def look(self, tree: "DraftTree", sampling: Sampling, generator: DrawGenerator | None) -> Callable[[int], Look]:
        numbers = self.draws(max(tree.depths) + 1, generator)
        probs = processed(self.numbers, sampling)  # (N + 1, V)
        draws = pick(probs, numbers[self._here(tree.depths, torch.int64)])  # (N + 1,)
        rows, ids = (self._here(some, torch.int64) for some in (tree.parents, tree.tokens[1:]))
        # float64 holds ids and probabilities alike
        everything = torch.cat([probs.sum().double()[None], draws.double(), probs[rows, ids].double()]).tolist()
        total, found, reached = everything[0], everything[1 : 1 + len(draws)], everything[1 + len(draws) :]
        require_numbers(total)

        def look(number: int) -> Look:
            chance = sum(reached[below - 1] for below in tree.children[number].values())
            return Look(int(found[number]), min(chance, 1.0))

        return look

    def _here(self, numbers: Sequence[float] | Numbers, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of anywhere where the rows are, without waiting for it; the dtype is of those in no array."""
        if isinstance(numbers, torch.Tensor):
            return numbers.to(self.numbers.device)
        made = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
        return sent(made, self.numbers.device, dtype)


def read_on_device(
    reader: Reader,
    logits: torch.Tensor,
    uniform: torch.Tensor | None,
    hidden: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    foresee: Foresee | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`DeviceRows.read` of one row ``(V,)``, as tensors alone."""
    probs = None if uniform is None else processed(logits, reader.sampling)  # (V,)
    token = logits.argmax() if probs is None or uniform is None else pick(probs, uniform)
    known = probs if reader.sampling.plain else None
    signals = read_signals(logits, token, reader.wanted, known).values()
    if reader.vocabulary is not None:  # an index of one number would be waited for
        token = reader.vocabulary.ids_on(logits.device).index_select(0, token.reshape(1))[0]
    numbers = [token, *signals]
    if reader.predictor is not None and hidden is not None:
        numbers.append(reader.predictor.accept_prob(hidden, previous))
    if reader.foresees and foresee is not None:
        numbers.append(foresee(token))
    packed = torch.stack([number.double() for number in numbers])
    if reader.tops:
        packed = torch.cat([packed, read_top_probs(logits).double()])
    return packed, probs
