"""Runs the models once and keeps what every policy could have seen."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specctl.decoding.along import read_along
from specctl.decoding.sampling import TINY, Sampling, draw, read_signals, sibling
from specctl.models.loading.pair import Pair
from specctl.models.running.acceptance_head import AcceptanceHead
from specctl.models.running.branches import continue_branches
from specctl.models.running.runner import Forward, Runner
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.traces import Line, Proposals


def read_sequence(
    pair: Pair,
    prompt: Sequence[int],
    output: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[Line, list[float] | None]:
    """What the draft would propose along an output of at least one token, whether that is kept, and what follows.

    In a hierarchy, the same of each further draft along all that the one above it would write. See
    `specctl.replay.play.play` for the joint law when sampling.

    Returns:
        The line of the first draft, and when sampling the probability of keeping each of its proposals.
    """
    for runner in pair.drafts:
        runner.rollback(0)  # one that was idle in the run holds another text
    reading = _Reading(pair, depth, sampling, generator)
    return reading.line(0, prompt, output, output, limit - 2)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads lines of a pair's drafts; each draft's verifier is the model above it."""

    pair: Pair
    depth: int
    sampling: Sampling
    generator: torch.Generator

    def line(
        self,
        level: int,
        prefix: Sequence[int],
        text: Sequence[int],
        wrote: Sequence[int],
        last: int,
        previous: Sequence[float] | None = None,
    ) -> tuple[Line, list[float] | None]:
        """One draft along a text, and all drafts below along what it would write.

        The caches of the draft, of those below and of its verifier may hold any prefix of ``prefix[:-1]``, with text
        behind it or not; afterwards they hold none that is not of ``prefix`` and ``text``.

        Args:
            level: which draft.
            prefix: at least one id.
            text: N ids that follow the prefix.
            wrote: N ids, what the verifier writes after each of the N beginnings of the text: the text itself, unless
                the verifier is a draft whose refused proposals are not in it.
            last: the last place whose refused proposal can be followed by another: a round must leave one place to the
                verifier.
            previous: `DISTRIBUTION_SIGNALS` of the step that drew the prefix's last token, for a head that reads them.
        """
        draft, heads, sampling = self.pair.drafts[level], self._heads(level), self.sampling
        path, kept, chances = self._path(level, prefix, text, wrote, previous)
        eos = self.pair.eos
        refused = [
            place
            for place, fine in enumerate(kept)
            if not fine and self.depth > 1 and place < last and path.tokens[place] not in eos
        ]
        length = min(self.depth - 1, max((last - place for place in refused), default=0))
        tokens: list[list[int]] = [[] for _ in refused]
        signals: list[list[list[float]]] = [[] for _ in refused]

        def choose(which: Sequence[int], forward: Forward) -> list[int]:
            logits = forward.logits  # (B, V)
            if sampling.greedy:
                chosen = logits.argmax(-1)  # (B,)
            else:
                chosen = draw(sampling.probs(logits), sibling(self.generator, logits.device))
            columns = list(read_signals(logits, chosen).values())
            if forward.hidden is not None:
                rows = [signals[branch][-1] if signals[branch] else path.signals(refused[branch]) for branch in which]
                of_previous = torch.tensor(
                    [row[: len(DISTRIBUTION_SIGNALS)] for row in rows], device=logits.device
                )  # (B, 3)
                columns += [head.accept_prob(forward.hidden, of_previous) for head in heads.values()]
            found = torch.stack(columns, dim=1).tolist()  # (B, 3 and one for each head)
            for branch, token, row in zip(which, chosen.tolist(), found, strict=True):
                tokens[branch].append(token)
                signals[branch].append(row)
            return chosen.tolist()

        if refused:
            first = [path.tokens[place] for place in refused]
            starts = [len(prefix) + place for place in refused]
            continue_branches(draft, [*prefix, *text], starts, first, length, choose, hidden=bool(heads))
        branches = {}
        for place, ids, rows in zip(refused, tokens, signals, strict=True):
            end = next((n for n, token in enumerate(ids, start=1) if token in eos), len(ids))
            branches[place] = _proposals(ids[:end], list(map(list, zip(*rows[:end], strict=True))), heads)
        found = Line(kept, path, branches)
        if level + 1 < len(self.pair.drafts):
            found = self._with_below(found, level, prefix, text, last)
        return found, chances

    def _with_below(self, line: Line, level: int, prefix: Sequence[int], text: Sequence[int], last: int) -> Line:
        """The line with the next draft along its path and along each of its branches."""
        # One place more is left to this draft, as the verifier of the next.
        below, _ = self.line(level + 1, prefix, text, line.path.tokens, last - 1)
        branches_below = {}
        for place, branch in line.branches.items():
            shared = [*prefix, *text[:place]]
            start = [*shared, line.path.tokens[place]]
            room = min(last - place, self.depth) - 2
            previous = below.path.signals(place)
            branches_below[place], _ = self.line(level + 1, start, branch.tokens, branch.tokens, room, previous)
            for runner in self.pair.drafts[level:]:
                runner.rollback(min(runner.length, len(shared)))
        return Line(line.kept, line.path, line.branches, below, branches_below)

    def _path(
        self,
        level: int,
        prefix: Sequence[int],
        text: Sequence[int],
        wrote: Sequence[int],
        previous: Sequence[float] | None,
    ) -> tuple[Proposals, list[bool], list[float] | None]:
        """Proposals at every place of the text, verdicts and chances, the models reading it in few passes."""
        draft, heads, sampling = self.pair.drafts[level], self._heads(level), self.sampling
        verifier = self.pair.drafts[level - 1] if level else self.pair.target
        readers: list[Runner] = [draft] if sampling.greedy else [draft, verifier]
        proposed: list[int] = []
        kept: list[bool] = []
        chances: list[float] = []
        signals: list[torch.Tensor] = []
        for part, (forward, *verifying) in read_along(readers, prefix, text, hidden=bool(heads), cached=True):
            logits = forward.logits  # (C, V)
            written = torch.tensor(wrote[part], device=logits.device)
            if sampling.greedy:
                proposals = logits.argmax(-1)
                verdicts = proposals == written
            else:
                above = sampling.probs(verifying[0].logits)
                chance = sibling(self.generator, above.device)
                proposals, verdicts, found = propose_given(
                    written.to(above.device), sampling.probs(logits).to(above.device), above, chance
                )
                proposals, verdicts = proposals.to(logits.device), verdicts.to(logits.device)
                chances += found.tolist()
            proposed += proposals.tolist()
            kept += verdicts.tolist()
            columns = list(read_signals(logits, proposals).values())
            if forward.hidden is not None:
                own = torch.stack(columns, dim=1)  # (C, 3)
                # A row's hidden state is of the token before its place, and so must the signals be.
                if signals:
                    last = signals[-1][: len(DISTRIBUTION_SIGNALS), -1]
                else:
                    last = torch.zeros_like(own[0]) if previous is None else own.new_tensor(previous)
                previous_of_each = torch.cat([last[None], own[:-1]])  # (C, 3)
                columns += [head.accept_prob(forward.hidden, previous_of_each) for head in heads.values()]
            signals.append(torch.stack(columns))  # (3 and one for each head, C)
        path = _proposals(proposed, torch.cat(signals, dim=1).tolist(), heads)
        return path, kept, None if sampling.greedy else chances

    def _heads(self, level: int) -> Mapping[str, AcceptanceHead]:
        """A draft's heads, the one that it usually has first."""
        return self.pair.named_heads[level]


def _proposals(tokens: list[int], columns: list[list[float]], heads: Iterable[str]) -> Proposals:
    """Of the columns of `DISTRIBUTION_SIGNALS` and of each head."""
    entropy, top_prob, token_prob, *words = columns
    _, *others = heads or ("",)
    further = dict(zip(others, words[1:], strict=True)) or None
    return Proposals(tokens, entropy, top_prob, token_prob, words[0] if words else None, further)


def propose_given(
    wrote: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The draft's proposals and their verdicts, given what the target wrote.

    Speculative sampling draws a proposal y from q, keeps it with probability min(1, p(y) / q(y)) and else writes x from
    max(p - q, 0). So x is a kept proposal with probability min(p(x), q(x)) of p(x); and after a refusal y and x are
    independent, y having the law max(q - p, 0), normalised.

    Args:
        wrote: ``(T,)`` int64, drawn from ``target_probs``.
        draft_probs, target_probs: ``(T, V)`` float32, processed.
        generator: of their device.

    Returns:
        Proposals y ``(T,)`` int64, verdicts ``(T,)`` bool, and min(1, p(y) / q(y)) ``(T,)`` float32.
    """
    target_of = target_probs.gather(1, wrote[:, None])[:, 0]
    draft_of = draft_probs.gather(1, wrote[:, None])[:, 0]
    coins = torch.rand(len(wrote), generator=generator, device=wrote.device)
    surplus = (draft_probs - target_probs).clamp_min(0)  # (T, V)
    # Where q is p but for rounding there is nothing to refuse.
    verdicts = (coins * target_of < draft_of) | (surplus.sum(-1) <= 0)
    proposals = torch.where(verdicts, wrote, draw(surplus, generator))
    proposed = proposals[:, None]
    chances = target_probs.gather(1, proposed) / draft_probs.gather(1, proposed).clamp_min(TINY)  # (T, 1)
    return proposals, verdicts, chances[:, 0].clamp_max(1)
