"""Drafts of several texts judged at once where their rows are: as many operations as for one, and one transfer.

`device_verdict` has the same for one text. Texts have drafts of different lengths: what is a number of each token is
padded to the longest, what is a row over the vocabulary lies below the other texts'.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from specctl.decoding.rows.device_laws import pick, processed
from specctl.decoding.rows.device_verdict import by_block, by_token, less
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers, verdict_of, verify_greedy
from specctl.decoding.rows.draws import uniforms
from specctl.decoding.rows.judging import Drafted, Judged
from specctl.decoding.sampling import Sampling
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.models.passes.synchronisation import sent
from specctl.records import ExtraToken


def judged_together(
    sampling: Sampling, drafted: Sequence[Drafted], logits: Sequence[torch.Tensor]
) -> list[Judged | RecordError]:
    """What `judge` says of each of B texts, or raises; on a device other than the host.

    Args:
        sampling: of all.
        drafted: of each text K tokens with their distributions.
        logits: of each ``(K + 1, V)``.
    """
    together = torch.cat([*logits])
    ends = [*accumulate(map(len, logits), initial=0)]
    if sampling.greedy:
        best = together.max(-1)
        choices, values = torch.stack([best.indices.double(), best.values.double()]).tolist()
        return [
            _checked(values[start:end]) or (verify_greedy(each.draft.tokens, [*map(int, choices[start:end])]), None)
            for each, (start, end) in zip(drafted, pairwise(ends), strict=True)
        ]
    device = together.device
    for each in drafted:
        if each.numbers is None:
            each.numbers = uniforms((len(each.draft.tokens) + 1,), device, each.generator)
    laws = processed(together, sampling)
    found = _verdicts(drafted, laws, ends[:-1], sampling)
    return [
        verdict if isinstance(verdict, RecordError) else (verdict, laws[start:end])
        for verdict, (start, end) in zip(found, pairwise(ends), strict=True)
    ]


def _checked(values: Sequence[float]) -> RecordError | None:
    try:
        require_numbers(*values)
    except RecordError as error:
        return error
    return None


def _verdicts(
    drafted: Sequence[Drafted], laws: torch.Tensor, starts: Sequence[int], sampling: Sampling
) -> list[Verdict | RecordError]:
    """The verdict on each draft.

    Args:
        drafted: B texts, whose numbers are drawn.
        laws: ``(R, V)``, the verifier's, of one text below those of another.
        starts: the first row of each text.
        sampling: of all.
    """
    tokens = [each.draft.tokens for each in drafted]
    counts = [*map(len, tokens)]
    longest, device = max(counts), laws.device
    numbers = torch.cat([*(each.numbers for each in drafted if each.numbers is not None), laws.new_ones(1).double()])
    # Where each text's tokens and its numbers begin; behind all numbers is one with which no token is kept.
    first, drawn = ([*accumulate(sizes, initial=0)] for sizes in (counts, [count + 1 for count in counts]))

    def padded(beginnings: Sequence[int], fill: int | None = None) -> list[int]:
        """``(B, K)`` places in a row, those of a text's tokens from its beginning on."""
        return [
            begin + number if number < count else begin if fill is None else fill
            for begin, count in zip(beginnings, counts, strict=True)
            for number in range(longest)
        ]

    ids = [token for each in tokens for token in (*each, *[0] * (longest - len(each)))]
    ends = [begin + count for begin, count in zip(drawn[:-1], counts, strict=True)]
    everything = [*counts, *starts, *first[:-1], *ends, *ids]
    everything += [*padded(starts), *padded(first[:-1], 0), *padded(drawn[:-1], drawn[-1])]
    places = sent(everything, device)
    count, start, begin, end = places[: 4 * len(counts)].view(4, -1, 1)  # (B, 1) each
    token, row, one, coin = places[4 * len(counts) :].view(4, len(counts), longest)  # (B, K) each
    total = laws.sum(-1).double()  # (R,), NaN if a single number is
    accepted, chances = count, numbers.new_zeros(len(counts), 0)
    extra_rows = laws.index_select(0, start[:, 0])  # (B, V)
    if longest:
        draft, vocabulary = _draft_laws(drafted, laws)
        place = torch.arange(longest, device=device)
        behind = place >= count  # (B, K)
        column = token if vocabulary is None else vocabulary.columns_of(token)
        target_of = laws[row, token].masked_fill(behind, 0.0)
        draft_of = draft[one, column].masked_fill(behind, 1.0)

        def surplus(weights: torch.Tensor) -> torch.Tensor:  # (B, K - 1)
            above = laws.index_select(0, row[:, 1:].flatten()) * weights.flatten()[:, None]
            return _residual(above, draft.index_select(0, one[:, 1:].flatten()), vocabulary).sum(-1).view_as(weights)

        if sampling.verification == "block":
            kept = by_block(target_of, draft_of, numbers[coin], surplus, place == count - 1)
        else:
            kept = by_token(target_of, draft_of, numbers[coin])
        accepted, chances = kept.accepted, kept.chances
        target_rows = laws.index_select(0, (start + accepted)[:, 0])  # (B, V)
        draft_rows = draft.index_select(0, (begin + accepted.minimum(count - 1)).clamp_min(0)[:, 0])
        residual = _residual(target_rows * kept.weight, draft_rows, vocabulary)
        use_residual = (accepted < count) & (residual.sum(-1, keepdim=True) > 0)
        extra_rows = torch.where(use_residual, residual, target_rows)
    extra = pick(extra_rows, numbers[end[:, 0]])  # (B,)
    # float64 holds ids and probabilities alike
    together = torch.cat([extra.double(), accepted[:, 0].double(), total, chances.double().flatten()]).tolist()
    extras, keeps = ([*map(int, together[part * len(counts) :][: len(counts)])] for part in range(2))
    sums, found = together[2 * len(counts) :][: len(laws)], together[2 * len(counts) + len(laws) :]
    bounds = [*starts, len(laws)]
    return [
        _checked(sums[bounds[text] : bounds[text + 1]])
        or (
            verdict_of(keeps[text], extras[text], found[text * longest :][: counts[text]])
            if counts[text]
            else Verdict(0, extras[text], ExtraToken.BONUS, ())
        )
        for text in range(len(counts))
    ]


def _residual(rows: torch.Tensor, draft: torch.Tensor, vocabulary: DraftVocabulary | None) -> torch.Tensor:
    return less(rows, draft, vocabulary).clamp_min(0)


def _draft_laws(drafted: Sequence[Drafted], laws: torch.Tensor) -> tuple[torch.Tensor, DraftVocabulary | None]:
    """The distributions of all drafts' tokens ``(D, N)``, and the ids of their columns where these are not all ids."""
    drafts = [each.draft for each in drafted if each.draft.tokens]
    vocabulary = drafts[0].vocabulary
    probs = [draft.probs for draft in drafts if draft.probs is not None and len(draft.probs) == len(draft.tokens)]
    if len(probs) == len(drafts) and all(draft.vocabulary is vocabulary for draft in drafts):
        return torch.cat([_here(each, laws) for each in probs]), vocabulary
    certain = sent([token for draft in drafts for token in draft.tokens], laws.device)
    found = laws.new_zeros(len(certain), laws.shape[1]).scatter_(1, certain[:, None], 1.0)
    start = 0
    for draft in drafts:  # a copied token may have no column in the draft's vocabulary
        if draft.probs is not None:
            some = _here(draft.probs, laws)
            wide = some if draft.vocabulary is None else torch.as_tensor(draft.vocabulary.widened(some, 0.0))
            found[start : start + len(some)].copy_(wide)
        start += len(draft.tokens)
    return found, None


def _here(probs: Numbers, laws: torch.Tensor) -> torch.Tensor:
    made = torch.from_numpy(probs) if isinstance(probs, np.ndarray) else probs
    return sent(made, laws.device) if made.is_cpu else made.to(laws.device)
