"""Drafting and verifying at the same time, on two devices: PEARL (Liu et al., arXiv 2408.11850).

While the target reads M waiting draft tokens, the draft writes the next K, assuming that all waiting ones will be
accepted. The target pass gives the distribution at each waiting token and at the position after them, where the first
new draft token stands. So it verifies M + 1 tokens:

- If all are accepted, the other K - 1 new tokens wait for the next pass.
- If one is rejected, the target's correction replaces it, and everything drafted after it is discarded.

The paper's pre-verify mode is a pass without waiting tokens (M = 0), its post-verify mode any other pass (M = K - 1).
There is no bonus token: the draft has already written that position. Each token is verified once, with its own coin.
The published code uses one coin for two tokens, so its samples do not follow the target's distribution.
"""

from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

from specctl.decoding.draft import Draft
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import DrawGenerator, offspring
from specctl.decoding.logits.judging import judge
from specctl.decoding.round import NOTHING, share_of_round, with_logprobs
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError
from specctl.models.passes.forward import joined_numbers
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.records import Round, StopReason


class ParallelDrafter(ModelDrafter):
    """A draft model that `specctl.decoding.loop.decode` runs on its own thread while the verifier reads.

    It draws from its own generator even where verifier and draft share a device: the output for a seed must not depend
    on which of the two is faster.
    """

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:
        super().begin(sampling, eos, None if generator is None else offspring(generator, self.runner.device))

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:  # noqa: ARG002
        super().prefill(sequence, begins=begins, first=False)  # no pass runs in parallel with the reading of the prompt


class ParallelRounds:
    """The rounds of one sequence; each is one target pass with the drafting that ran in parallel.

    A round's ``steps`` are the draft tokens that it decided on: the verified ones and, after a rejection, all that were
    discarded unread. So every draft token counts once over the rounds of a sequence, unless the sequence was ended from
    outside.

    Args:
        target, drafter: with caches that hold any prefix of the prompt but its last token.
        prompt: at least one id.
        end: the most tokens of the text, prompt included.
        sampling: how tokens are drawn.
        eos: ids that end the sequence.
        generator: for the target's draws, on its device.
        unread: tokens of the prompt that the target reads in its first pass, see `share_of_round`.
        logprobs: see `specctl.decoding.round.verified_round`.
    """

    def __init__(
        self,
        target: Slot,
        drafter: ParallelDrafter,
        prompt: Sequence[int],
        end: int,
        sampling: Sampling,
        eos: Set[int],
        generator: DrawGenerator | None,
        unread: int = 0,
        logprobs: int | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._unread, self._logprobs = unread, logprobs
        self._sampling, self._eos, self._generator = sampling, eos, generator
        self._text, self._settled, self._end = list(prompt), len(prompt), end
        self._waiting = NOTHING  # the text's draft tokens that are not verified yet
        self._ended = False

    def __iter__(self) -> Iterator[Round]:
        index = 0
        try:
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft") as thread:
                while self._settled < self._end and not self._ended:
                    yield self._round(index, thread)
                    index += 1
        finally:
            # In any case the thread has ended, with its block or an error: nothing else uses the caches.
            self._target.rollback(self._settled)
            self._drafter.rollback(self._settled)

    def _round(self, index: int, thread: ThreadPoolExecutor) -> Round:
        waiting, room = len(self._waiting.tokens), self._end - len(self._text)
        idle = StopReason.EOS if waiting and self._text[-1] in self._eos else StopReason.BUDGET if not room else None
        # Without a new draft token the pass need not read the last waiting one.
        verified, last = (waiting + 1, None) if idle is None else (waiting, -1)
        began = working_seconds()
        drafting = None if idle else thread.submit(_timed_draft, self._drafter, self._text, room)
        forward = self._target.extend(self._text[self._target.length : last], keep=verified)
        wait(self._target.device)  # does not delay the round: the draft is needed next
        passed, clock = working_seconds(), perf_counter()
        block, started, busy = (NOTHING, clock, 0.0) if drafting is None else drafting.result()
        drafted = working_seconds()
        draft = _joined(self._waiting, block)
        verdict, _ = judge(_part(draft, slice(verified)), forward, self._sampling, self._generator)
        judging = working_seconds() - drafted
        passing = (passed - began) * share_of_round(self._unread, verified)
        self._unread = 0
        steps = draft.steps[:verified] if verdict.extra is None else draft.steps
        round_ = Round(
            index=index,
            steps=tuple(replace(step, index=number) for number, step in enumerate(steps, start=1)),
            accepted=verdict.accepted,
            extra=verdict.extra,
            extra_kind=verdict.kind,
            stop=idle or block.stop,
            threshold=block.threshold,
            draft_seconds=drafted - passed,
            verify_seconds=passing + judging,
            total_seconds=passing + drafted - passed + judging,
            chances=verdict.chances,
            # Clipped, since the other thread has a clock of its own.
            overlap_seconds=min(busy, max(0.0, clock - started)),
        )
        if self._logprobs is not None:
            round_ = with_logprobs(round_, forward, None, self._logprobs)
        self._text += block.tokens
        self._settled += verdict.accepted
        self._target.rollback(self._settled)
        if verdict.extra is None:
            self._waiting = _part(draft, slice(verified, None))
        else:
            self._drafter.rollback(self._settled)
            self._text[self._settled :] = [verdict.extra]
            self._settled += 1
            self._waiting = NOTHING
        self._ended = self._text[self._settled - 1] in self._eos
        return round_


def require_parallel(pair: Pair, setting: Setting, draft: int) -> None:
    """Raise ProfileError if a draft cannot write while the target reads.

    Args:
        pair: loaded models.
        setting: its policy, and whether the two may share a device.
        draft: its index.
    """
    if not setting.fixed_length:
        raise ProfileError(
            "[draft] parallel: while the target verifies all the time, there is nothing for "
            f"{setting.policy} to decide",
            "take constant, or leave out parallel",
        )
    if pair.drafts[draft].reads_states:
        raise ProfileError(
            "[draft] parallel: a draft head drafts from the target's states, so it has to wait for the target",
            "leave out parallel",
        )
    if pair.drafts[draft].longest is not None:
        raise ProfileError(
            "[draft] parallel: this draft writes a block in one pass, and has none to make while the target reads",
            "leave out parallel",
        )
    if pair.target.captures or pair.drafts[draft].captures:
        raise ProfileError(
            "[draft] parallel: CUDA captures no graph while another thread uses it",
            'set engine = "static" or "eager", or leave out parallel',
        )
    shared = pair.devices(None) & pair.devices(draft)
    if shared and setting.parallel != "force":
        raise ProfileError(
            f"[draft] parallel: target and draft share {min(shared)}, where they would slow each other down",
            'name another with device = "..." in [target] or [draft], leave out parallel, or set parallel = "force" to '
            "do it anyway",
        )


@in_inference_mode  # inference mode is per thread
def _timed_draft(drafter: ParallelDrafter, text: Sequence[int], room: int) -> tuple[Draft, float, float]:
    """A draft of at most ``room`` tokens after ``text``, its start time, and the seconds it took."""
    clock, began = perf_counter(), working_seconds()
    draft = drafter.draft(text, room)
    return draft, clock, working_seconds() - began


def _joined(first: Draft, second: Draft) -> Draft:
    """Two drafts concatenated."""
    if not first.tokens or not second.tokens:
        return first if first.tokens else second
    probs = None if first.probs is None or second.probs is None else joined_numbers([first.probs, second.probs])
    steps = *first.steps, *second.steps
    return Draft([*first.tokens, *second.tokens], probs, steps, second.stop, vocabulary=second.vocabulary)


def _part(draft: Draft, part: slice) -> Draft:
    """A slice of a draft."""
    probs = None if draft.probs is None else draft.probs[part]
    return Draft(draft.tokens[part], probs, draft.steps[part], draft.stop, vocabulary=draft.vocabulary)
