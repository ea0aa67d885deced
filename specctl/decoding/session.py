"""A loaded pair with one drafter, ready to complete prompts."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from weakref import WeakValueDictionary

from specctl.decoding.draft import Drafter
from specctl.decoding.draws import generator_on
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import decode_after, find_stop, special_ids
from specctl.errors import UsageError
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.preparation_time import waited_seconds, working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.running.context import common_beginning
from specctl.models.running.pair import Pair
from specctl.models.running.text_rules import text_rules
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, FinishReason, Round

ONE_TEXT = "Take all of one text, or close it, before the next one."


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to generate."""

    prompt: tuple[int, ...]  # ids, at least one
    settings: SamplingTable  # the sampling table to use
    seed_offset: int = 0  # added to the seed, so that each text of a stream has its own random numbers
    policy: str | None = None  # a policy instead of the profile's, as ``--policy`` writes it; None for the profile's
    draft: bool = True  # whether to use drafts


class Turn:
    """One text generated with a target's cache.

    Attributes:
        latest: whether no other turn has begun since.
    """

    latest = True


TURNS: WeakValueDictionary[int, Turn] = WeakValueDictionary()
"""The latest text by the `id` of the target's runner: several sessions may share a pair, and so its caches."""


class Session:
    """Generates with one pair and one drafter. A policy's state carries over between prompts if its settings allow it.

    Args:
        pair: loaded models.
        drafter: from `build_drafter`, or None for target-only decoding. It may be replaced between prompts.
        keep_caches: whether to reuse the caches for the prefix that a prompt shares with the last prompt and its
            completion, for example in the next turn of a conversation. Otherwise every prompt is read from its
            beginning, so that neither its times nor the rounding of its logits depend on earlier prompts.

    Attributes:
        kept: tokens of the last prompt that the target had in its cache.
    """

    def __init__(self, pair: Pair, drafter: Drafter | None, *, keep_caches: bool = False) -> None:
        self.pair = pair
        self.drafter = drafter
        self._keeps = keep_caches
        self.kept = 0
        self._cached: tuple[int, ...] = ()  # every runner of the pair has cached a prefix of it
        self._ahead = (0, 0.0)  # how many tokens of the next prompt were `read`, and the seconds of that
        self._turn = Turn()
        self._drafted = drafter  # the drafter of the previous text

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        return self.pair.eos

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Completion:
        """Complete one prompt; a token limit beyond the context is lowered to it.

        Args:
            prompt: ids, at least one.
            settings: the sampling table in force.
            seed_offset: added to the seed, so that each record of a stream has its own random numbers, independent of
                earlier records.
            on_round: called with each round as it ends; the time of the call is not counted.
            enough: called after each round; True ends the completion there.

        Raises:
            RecordError: the prompt fills the context.
        """
        stops: bool | None = None
        with closing(self.play(prompt, settings, seed_offset=seed_offset)) as playing:
            while True:
                try:
                    round_ = playing.send(stops)
                except StopIteration as end:
                    completion: Completion = end.value
                    return completion
                if on_round is not None:
                    on_round(round_)
                stops = enough()

    @in_inference_mode
    def read(self, prompt: Sequence[int]) -> Generator[None, None, None]:
        """Read most of a prompt before `play` does, and yield after each piece, so that a caller can stop in between.

        Nothing is read where pieces may have other logits than the whole prompt, or where a draft head needs states.
        """
        target, drafter = self.pair.target, self.drafter
        self._ahead = begin, seconds = 0, 0.0
        if not (self._keeps and target.even) or (drafter is not None and drafter.observed is not None):
            return
        self._take_turn()
        self._roll_back(prompt)
        begin = target.length
        while (start := target.length) < len(prompt) - target.piece:
            began = working_seconds()
            target.extend(prompt[start : start + target.piece], keep=0)
            self._cached = tuple(prompt[: target.length])
            seconds += working_seconds() - began
            self._ahead = target.length - begin, seconds
            yield

    # Decorates the generator, so that inference mode is off while it waits for its caller.
    @in_inference_mode
    def play(
        self, prompt: Sequence[int], settings: SamplingTable, *, seed_offset: int = 0
    ) -> Generator[Round, bool | None, Completion]:
        """`generate` round by round: yields each as it ends, and returns the completion.

        Sending True ends the text. The time until the next round is asked for is not counted.

        Raises:
            UsageError: another text was begun with the pair before this one ended.
        """
        pair, drafter = self.pair, self.drafter
        limit = min(settings.max_new_tokens, pair.room(prompt))
        # torch takes seeds of 64 bits; a profile or record may have a longer one.
        seed = (settings.seed + seed_offset) % (1 << 64)
        generator = generator_on(pair.target.device, seed)
        eos = pair.eos | special_ids(pair.tokenizer, settings.stop)
        rules = text_rules(settings, pair.tokenizer, pair.eos, prompt, pair.vocabulary, pair.prompt_rules)
        rounds: list[Round] = []
        tokens: list[int] = []
        text: str | None = None
        arrivals: list[float] = []
        interrupted = False
        watching = worked_first = 0.0  # seconds spent by the caller, and by the first round's own work
        turn = self._take_turn()
        self._roll_back(prompt)
        (ahead, reading), self._ahead = self._ahead, (0, 0.0)
        self.kept = pair.target.length - ahead
        began, waited = working_seconds() - reading, waited_seconds()
        read_prompt(pair.target, drafter, prompt)
        # Otherwise the first round would pay for pending work.
        wait(*(runner.device for runner in (pair.target, *pair.drafts)))
        sampling = Sampling.of(settings, rules)
        decoding = decode(pair.target, drafter, prompt, limit, sampling, eos, generator, settings.logprobs)
        with closing(decoding):
            for round_ in decoding:
                rounds.append(round_)
                tokens.extend(round_.emitted)
                # The verdict is on the host, so the round's tokens are here.
                paused = working_seconds()
                worked = paused - began - watching
                if len(rounds) == 1:
                    worked_first = worked
                arrivals.append(worked + waited_seconds() - waited)
                enough = yield round_
                watching += working_seconds() - paused
                if not turn.latest:
                    raise UsageError("another text began with these models before this one ended", ONE_TEXT)
                if settings.stop and (found := find_stop(pair.tokenizer, prompt, tokens, settings.stop, pair.eos)):
                    count, text = found
                    del tokens[count:]
                    break
                if interrupted := bool(enough):
                    break
            ended = working_seconds()
        if self._keeps:
            self._cached = (*prompt, *tokens[:-1])  # the last token may not be cached yet
        first = arrivals[0] if arrivals else ended - began
        prefilled = worked_first - rounds[0].total_seconds if rounds else first
        stopped = text is not None or (bool(tokens) and tokens[-1] in eos)
        cut = text is not None
        if text is None:
            text = decode_after(pair.tokenizer, prompt, tokens, pair.eos)
        if stopped and rules is not None:
            rules.require_fit(text, cut=cut)
        unfinished = FinishReason.INTERRUPTED if interrupted and len(tokens) < limit else FinishReason.LENGTH
        return Completion(
            prompt=tuple(prompt),
            seed=seed,
            tokens=tuple(tokens),
            text=text,
            finish_reason=FinishReason.STOP if stopped else unfinished,
            rounds=tuple(rounds),
            prefill_seconds=prefilled,
            total_seconds=ended - began - watching,
            first_token_seconds=first,
            arrivals=tuple(arrivals),
        )

    def _take_turn(self) -> Turn:
        """Begin a text with the pair's caches."""
        before = TURNS.get(id(self.pair.target))
        if before is not self._turn:
            self._cached = ()  # another session has used the caches
        if before is not None:
            before.latest = False
        self._turn = TURNS[id(self.pair.target)] = turn = Turn()
        return turn

    def _roll_back(self, prompt: Sequence[int]) -> None:
        """Roll all caches back to what they share with a prompt."""
        length = 0 if self.pair.target.whole_prompts else common_beginning(self._cached, prompt)
        self._cached = ()  # so that the cache is not trusted if this prompt raises
        # Roll back models that do not draft now, too: they will not see how the text goes on.
        for runner in (self.pair.target, *self.pair.drafts):
            runner.begin(len(prompt))
            runner.rollback(length)
        if self.drafter is not None:
            # This drafter does not know what another one has left in the models' caches.
            self.drafter.rollback(length if self.drafter is self._drafted else 0)
        self._drafted = self.drafter
