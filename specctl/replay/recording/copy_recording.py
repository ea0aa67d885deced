"""Records how much of what a lookup copies is accepted along a finished text."""

from collections.abc import Sequence, Set

import torch

from specctl.decoding.draft_tokens import read_along
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.sampling import Sampling
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant
from specctl.replay.traces import Recorded, recorded_copies


def read_copies(
    target: Slot,
    prompt: Sequence[int],
    text: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    eos: Set[int],
) -> Recorded:
    """Copy at every position of a text, and compare with the text.

    A copied token x is accepted with its probability p(x), and after a rejection the target draws from the rest of p:
    it is accepted where it is the text's own. So only acceptance probabilities need the target.

    Args:
        target: wrote the text; read again only when sampling.
        prompt, text: ids, at least one each.
        limit: the token limit under which the text was generated.
        depth: the longest copy.
        sampling: as the text was generated.
        eos: ids that end the sequence.
    """
    lookup = LookupDrafter(Slot(LookupPasses(1)), Constant(draft_length=depth))
    lookup.begin(sampling, eos, None)
    sequence, runs, judged = [*prompt], list[int](), list[list[int]]()
    for start, written in enumerate(text):
        copied = lookup.draft(sequence, limit - start - 1).tokens
        pairs = zip(copied, text[start : start + len(copied)], strict=False)
        run = next((count for count, (one, own) in enumerate(pairs) if one != own), len(copied))
        runs.append(run)
        judged.append(copied[: run + 1])
        sequence.append(written)
    return recorded_copies(runs, None if sampling.greedy else _chances(target, prompt, text, judged, sampling))


def _chances(
    target: Slot, prompt: Sequence[int], text: Sequence[int], judged: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[float]]:
    """The target's probability of each judged token, by the position at which its copy begins."""
    chances: list[list[float]] = [[] for _ in judged]
    reaching: list[int] = []  # starts of the copies with a judged token at the current position
    for part, (forward,) in read_along([target], prompt, text, cached=True):
        probs = sampling.probs(forward.logits)  # (C, V)
        rows, tokens, starts = list[int](), list[int](), list[int]()
        for row, position in enumerate(range(part.start, part.stop)):
            reaching = [start for start in [*reaching, position] if position - start < len(judged[start])]
            rows += [row] * len(reaching)
            tokens += [judged[start][position - start] for start in reaching]
            starts += reaching
        found = probs[torch.tensor(rows, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)]
        for start, chance in zip(starts, found.tolist(), strict=True):
            chances[start].append(chance)
    return chances
