"""Runs the models once and keeps what every policy could have seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from specctl.benchmark.suites import SuitePrompt
from specctl.calibration.traces import Proposals, Trace
from specctl.decoding.answers import Answerer
from specctl.decoding.prompts import PromptFormat
from specctl.decoding.sampling import TINY, Sampling, draw
from specctl.decoding.session import Session
from specctl.decoding.signals import read_signals
from specctl.jsonl import Record
from specctl.models.acceptance_head import SIGNALS
from specctl.models.branches import continue_branches
from specctl.models.pair import Pair
from specctl.models.runner import Forward, Runner
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round

CHUNK = 64
"""Places whose distributions are held at once."""


@dataclass(slots=True)
class TracingSession:
    """Generates as `Session` does and records a trace of each sequence.

    Stop strings are left out of account: whether a policy ends a round on one or drafts past it is nothing that a
    threshold should be chosen by.

    Attributes:
        depth: the longest draft that the traces shall replay.
        traces: those recorded so far, without a prompt's name.
    """

    pair: Pair
    session: Session
    depth: int
    traces: list[Trace] = field(default_factory=list)

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> Completion:
        settings = settings.model_copy(update={"stop": []})
        completion = self.session.generate(prompt, settings, seed_offset=seed_offset, on_round=on_round)
        limit = min(settings.max_new_tokens, self.pair.room(prompt))
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        generator = torch.Generator(self.pair.target.device).manual_seed((settings.seed + seed_offset) % (1 << 64))
        with torch.inference_mode():
            kept, path, branches, chances = read_sequence(
                self.pair, prompt, completion.tokens, limit, self.depth, sampling, generator
            )
        self.traces.append(
            Trace(
                prompt="",
                category="",
                turn=len(self.traces),
                prompt_tokens=len(prompt),
                limit=limit,
                tokens=list(completion.tokens),
                kept=kept,
                path=path,
                branches=branches,
                prefill_ms=completion.prefill_seconds * 1e3,
                chances=chances,
            )
        )
        return completion


class Collection:
    """Traces of a suite's prompts, one prompt after the other.

    Args:
        pair: with a draft.
        session: generates the outputs; they do not depend on its policy (in law, when sampling).
        settings: the sampling table in force.
        prompt_format: how prompts become ids.
        depth: the longest draft that the traces shall replay.
    """

    def __init__(
        self,
        pair: Pair,
        session: Session,
        settings: SamplingTable,
        prompt_format: PromptFormat,
        depth: int,
    ) -> None:
        self._tracing = TracingSession(pair, session, depth)
        self._plain = Answerer(self._tracing, prompt_format, settings)
        chat = PromptFormat(pair.tokenizer, chat=bool(pair.tokenizer.chat_template))
        self._chatting = Answerer(self._tracing, chat, settings)

    def record(self, prompt: SuitePrompt, record: Record) -> tuple[list[Trace], list[float]]:
        """The traces of one prompt, a turn each, and what each of its rounds took beside its two phases, in ms.

        Raises:
            RecordError: the prompt cannot be answered.
        """
        self._tracing.traces.clear()
        answered = (self._chatting if prompt.chat else self._plain).answer(record)
        rests = []
        for completion in answered:
            phases = sum(round_.draft_seconds + round_.verify_seconds for round_ in completion.rounds)
            between = completion.total_seconds - completion.prefill_seconds - phases
            rests.append(1e3 * between / len(completion.rounds))
        return [replace(trace, prompt=prompt.id, category=prompt.category) for trace in self._tracing.traces], rests


def read_sequence(
    pair: Pair,
    prompt: Sequence[int],
    output: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[list[bool], Proposals, dict[int, Proposals], list[float] | None]:
    """What the draft would propose along an output of at least one token, whether that is kept, and what follows.

    See `specctl.calibration.replay.rounds` for the joint law when sampling.

    Returns:
        Flags and proposals of every place, the branches of places whose proposal is not kept, and when sampling the
        probability of keeping each proposal.
    """
    draft, head = pair.drafts[0], pair.head
    proposed, kept, columns, chances = _read_path(pair, prompt, output, sampling, generator)
    path = Proposals(proposed, *columns)
    # A round must leave one place to the verifier, so a refusal at the last place or the one before has no branch.
    refused = [
        place
        for place, fine in enumerate(kept)
        if not fine and depth > 1 and place < limit - 2 and proposed[place] not in pair.eos
    ]
    length = min(depth - 1, max((limit - 2 - place for place in refused), default=0))
    tokens: list[list[int]] = [[] for _ in refused]
    signals: list[list[list[float]]] = [[] for _ in refused]

    def choose(which: Sequence[int], forward: Forward) -> list[int]:
        logits = forward.logits  # (B, V)
        chosen = draw(sampling.probs(logits), generator) if not sampling.greedy else logits.argmax(-1)  # (B,)
        columns = list(read_signals(logits, chosen).values())
        if head is not None and forward.hidden is not None:
            before = [signals[branch][-1] if signals[branch] else path.signals(refused[branch]) for branch in which]
            drawn_with = torch.tensor([row[: len(SIGNALS)] for row in before], device=logits.device)  # (B, 3)
            columns.append(head.accept_prob(forward.hidden, drawn_with))
        found = torch.stack(columns, dim=1).tolist()  # (B, 3 or 4)
        for branch, token, row in zip(which, chosen.tolist(), found, strict=True):
            tokens[branch].append(token)
            signals[branch].append(row)
        return chosen.tolist()

    if refused:
        first = [proposed[place] for place in refused]
        starts = [len(prompt) + place for place in refused]
        continue_branches(draft, [*prompt, *output], starts, first, length, choose, hidden=head is not None)
    branches = {}
    for place, ids, rows in zip(refused, tokens, signals, strict=True):
        end = next((n for n, token in enumerate(ids, start=1) if token in pair.eos), len(ids))
        branches[place] = Proposals(ids[:end], *map(list, zip(*rows[:end], strict=True)))
    return kept, path, branches, chances


def _read_path(
    pair: Pair, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], list[bool], list[list[float]], list[float] | None]:
    """Proposals, verdicts, signals and chances at every place of the output, both models reading it in few passes."""
    draft, target, head = pair.drafts[0], pair.target, pair.head
    readers: list[Runner] = [draft] if sampling.greedy else [draft, target]
    for runner in readers:
        runner.rollback(len(prompt) - 1)
        if pending := prompt[runner.length : -1]:
            runner.extend(pending, keep=0)
    fed = [prompt[-1], *output[:-1]]
    proposed: list[int] = []
    kept: list[bool] = []
    chances: list[float] = []
    signals: list[torch.Tensor] = []
    for start in range(0, len(fed), CHUNK):
        chunk = fed[start : start + CHUNK]
        forward = draft.extend(chunk, keep=len(chunk), hidden=head is not None)
        logits = forward.logits  # (C, V)
        wrote = torch.tensor(output[start : start + CHUNK], device=logits.device)
        if sampling.greedy:
            proposals = logits.argmax(-1)
            verdicts = proposals == wrote
        else:
            target_probs = sampling.probs(target.extend(chunk, keep=len(chunk)).logits)
            proposals, verdicts, found = propose_given(
                wrote.to(target_probs.device), sampling.probs(logits).to(target_probs.device), target_probs, generator
            )
            proposals, verdicts = proposals.to(logits.device), verdicts.to(logits.device)
            chances += found.tolist()
        proposed += proposals.tolist()
        kept += verdicts.tolist()
        columns = list(read_signals(logits, proposals).values())
        if head is not None and forward.hidden is not None:
            own = torch.stack(columns, dim=1)  # (C, 3)
            # A row's hidden state is of the token before its place, and so must the signals be.
            before = signals[-1][: len(SIGNALS), -1] if signals else torch.zeros_like(own[0])
            columns.append(head.accept_prob(forward.hidden, torch.cat([before[None], own[:-1]])))
        signals.append(torch.stack(columns))  # (3 or 4, C)
    return proposed, kept, torch.cat(signals, dim=1).tolist(), None if sampling.greedy else chances


def propose_given(
    wrote: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator
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
