"""Rows in the processor's own memory, by numpy; `device_rows` has the same by torch, in the same order."""

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from specctl.decoding.rows import host_verdict
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers
from specctl.decoding.rows.draws import DrawGenerator, host_numbers, picked
from specctl.decoding.rows.host_laws import Floats, Softmax, likeliest, processed
from specctl.decoding.rows.reading import Reader
from specctl.decoding.rows.rows import Beams, Look, array, token_logprobs
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers, Signals
from specctl.models.passes.token_reader import Foresee
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal
from specctl.profile.schema import Verification
from specctl.records import TokenLogprobs

if TYPE_CHECKING:
    import torch

    from specctl.decoding.rows.tree_verification import DraftTree


class HostRows:
    """`Rows` of a float32 array ``(R, V)``. torch is needed for heads alone, whose networks are torch's.

    Args:
        numbers: the rows.
        device: of these networks; None for the host.
        signals: as of `Forward`.
    """

    __slots__ = ("_device", "_signals", "numbers")

    def __init__(self, numbers: Floats, device: "torch.device | None" = None, signals: Signals | None = None) -> None:
        self.numbers, self._device, self._signals = numbers, device, signals

    def part(self, rows: slice) -> "HostRows":
        return HostRows(self.numbers[rows], self._device)

    def best(self) -> tuple[list[int], list[float]]:
        indices = self.numbers.argmax(-1).tolist()
        return indices, [self.numbers.item(row, index) for row, index in enumerate(indices)]

    def laws(self, sampling: Sampling) -> "HostRows":
        return HostRows(processed(self.numbers, sampling))

    def read(
        self,
        reader: Reader,
        uniform: float | None,
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> tuple[list[float], Floats | None]:
        row, sampling, law = self.numbers[0], reader.sampling, None
        unfiltered = uniform is not None and not sampling.filters
        told = self._signals if reader.takes_told else None
        softmax = Softmax(row) if unfiltered or (reader.wanted and told is None) or reader.tops else None
        if uniform is None:
            token = int(row.argmax()) if softmax is None else softmax.best
        else:
            law = softmax.probs(sampling.temperature) if unfiltered and softmax else processed(row[None], sampling)[0]
            token = picked(law, uniform)
        if told is not None:
            signals = [
                told[place].item(0) for place, name in enumerate(DISTRIBUTION_SIGNALS[:2]) if name in reader.wanted
            ]
        else:
            signals = softmax.signals(token, reader.wanted) if softmax is not None and reader.wanted else []
        if reader.vocabulary is not None:
            token = reader.vocabulary.ids.item(token)
        numbers: list[float] = [token, *signals]
        if reader.predictor is not None and hidden is not None:
            before = None if previous is None else self._tensor(previous)
            numbers.append(reader.predictor.accept_prob(hidden, before).item())
        if reader.foresees and foresee is not None:
            numbers.append(foresee(self._tensor(token)).item())
        if reader.tops and softmax is not None:
            numbers += softmax.tops()
        return numbers, law

    def read_tokens(
        self,
        reader: Reader,
        tokens: Sequence[int],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
    ) -> tuple[list[list[float]], Sequence[float] | None]:
        rows = self.part(slice(len(tokens)))
        signals = list(rows.signals(tokens, reader.wanted).values())
        columns: list[Sequence[object]] = [tokens, *(values.tolist() for values in signals)]
        last = None
        if reader.predictor is not None and hidden is not None:
            before = None
            if reader.predictor.reads_signals:
                own = np.stack(signals, axis=1)  # (n, 3)
                # The hidden state in a row belongs to the token before it, and so must the signals.
                first = np.zeros(own.shape[1]) if previous is None else np.asarray(previous)
                before, last = (
                    self._tensor(np.concatenate([first[None].astype(np.float32), own[:-1]])),
                    own[-1].tolist(),
                )
            columns.append(reader.predictor.accept_prob(hidden[: len(tokens)], before).tolist())
        tops = rows.top_probs().tolist() if reader.tops else [()] * len(tokens)
        return [[*row, *more] for *row, more in zip(*columns, tops, strict=True)], last

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> dict[Signal, Floats]:
        if not wanted:
            return {}
        pairs = zip(self.numbers, _ids(tokens), strict=True)
        found = np.array([Softmax(row).signals(token, wanted) for row, token in pairs], dtype=np.float32)  # (R, F)
        return dict(zip((name for name in DISTRIBUTION_SIGNALS if name in wanted), found.T, strict=True))

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        found = []
        for row, token in zip(self.numbers, tokens, strict=False):
            ids = likeliest(row, most).tolist() if most else []
            log, *logs = Softmax(row).logs([token, *ids])
            found.append(token_logprobs(token, log, ids, logs))
        return tuple(found)

    def top_probs(self) -> Floats:
        return np.array([Softmax(row).tops() for row in self.numbers], dtype=np.float32).reshape(-1, TOP_PROBS)

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        ids = [likeliest(row, most).tolist() for row in self.numbers]
        laws = [Softmax(row) for row in self.numbers]  # signals are the very numbers of a chain's steps
        logs = [law.logs(some) for law, some in zip(laws, ids, strict=True)]
        values = [law.signals(some[0], wanted) for law, some in zip(laws[asked], ids[asked], strict=True)]
        names = [name for name in DISTRIBUTION_SIGNALS if name in wanted]
        signals = {name: [row[place] for row in values] for place, name in enumerate(names)}
        return Beams(ids, logs, signals, laws[0].tops() if tops else [])

    def draws(self, count: int, generator: DrawGenerator | None) -> Sequence[float]:
        return host_numbers(count, generator)

    def verify(
        self,
        tokens: "Sequence[int] | torch.Tensor",
        draft_probs: Numbers | None,
        generator: DrawGenerator | None,
        verification: Verification = "token",
        vocabulary: DraftVocabulary | None = None,
    ) -> Verdict:
        ids = _ids(tokens)
        drawn = 0 if draft_probs is None else len(draft_probs)
        if not ids:
            draft = self.numbers  # nobody reads it
        elif draft_probs is not None and drawn == len(ids):
            draft = array(draft_probs)
        else:
            draft = np.zeros((len(ids), self.numbers.shape[1]), dtype=np.float32)
            draft[np.arange(drawn, len(ids)), ids[drawn:]] = 1
            if draft_probs is not None:  # a copied token may have no column in the draft's vocabulary
                some = array(draft_probs)
                draft[:drawn] = some if vocabulary is None else vocabulary.widened(some, 0.0)
            vocabulary = None
        numbers = self.draws(len(ids) + 1, generator)
        return host_verdict.verified(ids, draft, self.numbers, numbers, verification, vocabulary)

    def look(self, tree: "DraftTree", sampling: Sampling, generator: DrawGenerator | None) -> Callable[[int], Look]:
        numbers = self.draws(max(tree.depths) + 1, generator)

        def look(number: int) -> Look:  # only the rows on the path are processed
            row = processed(self.numbers[number : number + 1], sampling)[0]  # (V,)
            require_numbers(float(row.sum()))
            chance = float(row[[*tree.children[number]]].sum())
            return Look(picked(row, numbers[tree.depths[number]]), min(chance, 1.0))

        return look

    def _tensor(self, numbers: "Sequence[float] | Floats | torch.Tensor | int") -> "torch.Tensor":
        """What a head reads."""
        import torch

        return torch.as_tensor(numbers).to(device=self._device)


def _ids(tokens: "Sequence[int] | torch.Tensor") -> Sequence[int]:
    return tokens if isinstance(tokens, Sequence) else tokens.tolist()
