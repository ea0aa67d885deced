"""The exact law of what a program draws: every branch of its chance is walked, none is sampled.

Chance enters the program in few places, the *doors*. `walk` plays the program again and again; at each door it is told
what comes out there, so that together the plays take every way through, each with its exact probability. What the
program does with what it drew is the real code. `doors` is the one place that knows where the doors are.

The sums by which a token is drawn (`device.pick`, `host.picked`) are not played: the doors give index i with
probability w_i / sum(w), which is its law, and the tests of sampling tell whether it keeps to it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch

from specctl.decoding import drafters, hierarchy
from specctl.decoding import round as one_round
from specctl.decoding.draft import Draft, Drafted
from specctl.decoding.draws import HostGenerator
from specctl.decoding.logits import device, host
from specctl.decoding.logits.device import DeviceLogits
from specctl.decoding.logits.host import Floats, HostLogits
from specctl.decoding.logits.logits import Logits, Verdict, array
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.profile.schema import Verification
from specctl.records import Round
from specctl.replay.recording import coupling, head_recording, sequence_recording
from tests.support.toys import Ticks

Outcome = TypeVar("Outcome")
DRAFTING, VERIFYING = 1.0, 3.0
"""Seconds that each phase of a round takes, of the target's and of inner rounds."""
COINS = 1 << 24
"""How many values of a coin are told apart: the multiples of 1 / COINS below 1."""


class Chance:
    """Tells the program what it draws, and knows how probable that was.

    The first choices of a play follow a script; at every later one the first option is taken. The next play differs in
    the last choice that has an option left.

    Attributes:
        probability: of all that was drawn in this play.
    """

    def __init__(self) -> None:
        self.probability = 1.0
        self._made: list[tuple[int, int]] = []  # which option was taken, and of how many
        self._script: list[tuple[int, int]] = []

    def choose(self, weights: Sequence[float]) -> int:
        """An index, with probability proportional to its weight."""
        options = [index for index, weight in enumerate(weights) if weight > 0]
        turn = len(self._made)
        taken, count = self._script[turn] if turn < len(self._script) else (0, len(options))
        assert count == len(options), "what came before was drawn alike, and yet the program does something else"
        self._made.append((taken, count))
        index = options[taken]
        self.probability *= weights[index] / sum(weights)
        return index

    def next_play(self) -> bool:
        """Go back to the last choice with an option left; False where all have been taken."""
        script = self._made
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if script:
            taken, count = script.pop()
            script.append((taken + 1, count))
        self.probability, self._made, self._script = 1.0, [], script
        return bool(script)


def walk(
    play: Callable[[], Outcome], clocks: Callable[[], AbstractContextManager[None]] | None = None
) -> Iterator[tuple[Outcome, float]]:
    """Every outcome of a program with its probability, one for each branch of chance; they add up to 1.

    Args:
        play: runs the program once, from the same state every time.
        clocks: set time going for one play, for other times than those of `steady_clocks`.
    """
    chance = Chance()
    with torch.inference_mode(), doors(chance):
        more = True
        while more:
            with (clocks or steady_clocks)():
                outcome = play()
            yield outcome, chance.probability
            more = chance.next_play()


def law_of(branches: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """The probability of each outcome."""
    law: dict[Hashable, float] = {}
    for outcome, probability in branches:
        law[outcome] = law.get(outcome, 0.0) + probability
    return law


def largest_difference(one: dict[Hashable, float], other: dict[Hashable, float]) -> float:
    """Between the probabilities that two laws give to any outcome."""
    return max(abs(one.get(outcome, 0.0) - other.get(outcome, 0.0)) for outcome in one.keys() | other.keys())


@contextmanager
def doors(chance: Chance) -> Iterator[None]:
    """Let a `Chance` decide wherever the program draws. What knows the program's modules is here and in
    `steady_clocks`."""
    coins = Coins(chance)

    def pick(weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return drawn(chance, weights)

    def draw(weights: torch.Tensor, _: torch.Generator | None) -> torch.Tensor:
        return drawn(chance, weights)

    with patched(
        # A draft's token, one below a tree's, and a verifier's own.
        patch.object(device, "pick", pick),
        patch.object(host, "picked", coins.picked),
        # Whether a drafted token is kept, by the target or a draft.
        patch.object(HostLogits, "verdicts", judged_by(coins)),
        patch.object(DeviceLogits, "verdicts", judged_by(coins)),
        # The same of a trace: tokens of rejected drafts and of branches, and whether draft tokens are accepted.
        patch.object(coupling, "draw", draw),
        patch.object(sequence_recording, "draw", draw),
        patch.object(head_recording, "draw", draw),
        patch.object(sequence_recording, "draw", draw),
        patch.object(sequence_recording, "draw_draft_tokens", coins.draw_draft_tokens),
        patch.object(head_recording, "draw_draft_tokens", coins.draw_draft_tokens),
        patch.object(coupling, "draw_draft_tokens", coins.draw_draft_tokens),
    ):
        yield


def steady_clocks() -> AbstractContextManager[None]:
    """Time that passes alike in every play: policies that learn from it must do so too."""
    inner = Ticks(DRAFTING, VERIFYING, 0.0)

    def inner_round(*args: Any, **settings: Any) -> Round:
        with Replaced(one_round, "working_seconds", inner):
            return verified_round(*args, **settings)

    verified_round = hierarchy.verified_round
    return patched(
        Replaced(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0)),
        Replaced(hierarchy, "verified_round", inner_round),
        Replaced(drafters, "working_seconds", lambda: 0.0),  # a prompt takes no time
    )


@contextmanager
def patched(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def drawn(chance: Chance, weights: torch.Tensor) -> torch.Tensor:  # (V,) or (T, V) -> () or (T,)
    if weights.dim() == 1:
        return torch.tensor(chance.choose(weights.tolist()))
    # Where a row has no weight at all nobody looks at what is drawn.
    return torch.tensor([chance.choose(row) if any(row) else 0 for row in weights.tolist()], dtype=torch.int64)


class Ways(NamedTuple):
    """How one verdict comes about: with what probability, and coins that lead to it."""

    probability: float
    coins: Sequence[int]


class Asked(NamedTuple):
    """What the program answered to one verdict's coins.

    Attributes:
        verdict: with the token that it drew then.
        weights: from which it drew that token; None if it drew none.
    """

    verdict: Verdict
    weights: list[float] | None


class Coins:
    """The coins that the program tosses: what they decide is found out by asking the program itself.

    A coin falls well if it is below some value, and only that matters; bisection finds the value, and with it the
    probability to 24 bits. What follows from which of them fall well is up to the program.
    """

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._known: dict[Hashable, int] = {}
        self._verdicts: dict[Hashable, list[Ways]] = {}
        self._asked: dict[Hashable, Asked] = {}
        self._drawn: list[list[float]] = []  # the weights of each draw of the verdict that is being asked for
        self._verdicts_of = {form: form.verdicts for form in (HostLogits, DeviceLogits)}
        self._draw_draft_tokens = coupling.draw_draft_tokens

    def verify(
        self,
        tokens: Sequence[int] | torch.Tensor,
        draft_probs: Numbers | None,
        laws: Logits,
        rule: Verification,
        vocabulary: DraftVocabulary | None = None,
    ) -> Verdict:
        """The verdict on a draft, the number of accepted tokens and the token after them chosen.

        The program is asked once for each block and number: what it makes of the same again differs in that token only.
        """
        block = tokens, draft_probs, laws
        key = (
            rule,
            None if vocabulary is None else vocabulary.digest,
            tuple(map(int, tokens)),
            None if draft_probs is None else array(draft_probs).tobytes(),
            array(laws.numbers).tobytes(),
        )
        if key not in self._verdicts:
            self._verdicts[key] = self._ways(*block, rule, vocabulary)
        ways = self._verdicts[key]
        accepted = self._chance.choose([way.probability for way in ways])
        if (asked := self._asked.get((key, accepted))) is not None:
            if asked.weights is None:
                return asked.verdict
            return replace(asked.verdict, extra=self._chance.choose(asked.weights))
        self._drawn.clear()
        verdict = self._verify(laws, tokens, draft_probs, Tossed(ways[accepted].coins), rule, vocabulary)
        assert verdict.accepted == accepted
        if isinstance(laws, HostLogits):  # elsewhere it does not draw by `picked`
            weights = self._drawn[0] if self._drawn else None
            assert len(self._drawn) == (verdict.extra is not None), "a verdict draws its own token and nothing else"
            self._asked[key, accepted] = Asked(verdict, weights)
        return verdict

    def _verify(
        self,
        laws: Logits,
        tokens: Sequence[int] | torch.Tensor,
        draft_probs: Numbers | None,
        tossed: HostGenerator,
        rule: Verification,
        vocabulary: DraftVocabulary | None,
    ) -> Verdict:
        """What the program itself says."""
        draft = Draft([*map(int, tokens)], draft_probs, (), None, vocabulary=vocabulary)
        (verdict,) = self._verdicts_of[type(laws)](laws, [Drafted(draft, tossed)], [0, len(laws.numbers)], rule)
        assert isinstance(verdict, Verdict)
        return verdict

    def picked(self, weights: Floats, _: Sequence[float]) -> list[int]:
        """`host.picked`."""
        rows = weights.tolist()
        self._drawn += rows
        return [*map(self._chance.choose, rows)]

    def _ways(
        self,
        tokens: Sequence[int] | torch.Tensor,
        draft_probs: Numbers | None,
        laws: Logits,
        rule: Verification,
        vocabulary: DraftVocabulary | None,
    ) -> list[Ways]:
        """Of each number of accepted tokens, from 0."""

        def accepted(coins: Sequence[int]) -> int:
            with (
                Replaced(device, "pick", lambda weights, _: torch.zeros(len(weights), dtype=torch.int64)),
                Replaced(host, "picked", lambda weights, _: [0] * len(weights)),
            ):
                tossed = Tossed(coins)
                return self._verify(laws, tokens, draft_probs, tossed, rule, vocabulary).accepted

        count = len(tokens)
        # Seen with the best coins for the tokens before it and the worst for those behind it, where it decides alone.
        well = [
            bisected(lambda coin, n=n: accepted([*[0] * n, coin, *[COINS - 1] * (count - n - 1)]) > n)  # type: ignore[misc]
            for n in range(count)
        ]
        ways = [Ways(0.0, ())] * (count + 1)
        for fates in product((True, False), repeat=count):
            probability = prod(
                (coins if fine else COINS - coins) / COINS for coins, fine in zip(well, fates, strict=True)
            )
            if probability:
                coins = [coins - fine for coins, fine in zip(well, fates, strict=True)]
                kept = accepted(coins)
                extremes = [0 if fine else COINS - 1 for fine in fates]
                assert accepted(extremes) == kept, "a verdict hangs on more than which coins fall well"
                ways[kept] = Ways(ways[kept].probability + probability, coins)
        return ways

    def draw_draft_tokens(
        self,
        wrote: torch.Tensor,
        draft_probs: torch.Tensor,
        target_probs: torch.Tensor,
        generator: None,
        _: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`coupling.draw_draft_tokens`, its verdicts chosen."""
        tossed, verdicts = [], []
        for rows in zip(wrote.tolist(), draft_probs.tolist(), target_probs.tolist(), strict=True):
            coins = self._keeping(*rows)
            verdicts.append(bool(self._chance.choose([COINS - coins, coins])))
            tossed.append(coins - verdicts[-1])

        # A draft token that is accepted is the token that was written, whatever else was drawn for it.
        def draw(weights: torch.Tensor, _: object) -> torch.Tensor:
            rejected = torch.tensor(verdicts)[:, None].logical_not()
            return drawn(self._chance, weights * rejected)

        with tossing(tossed), Replaced(coupling, "draw", draw):
            found = self._draw_draft_tokens(wrote, draft_probs, target_probs, generator)
        assert found[1].tolist() == verdicts, "a token's fate hangs on more than its own coin and probabilities"
        return found

    def _keeping(self, token: int, draft: list[float], target: list[float]) -> int:
        """How many of the coins accept a draft token of a trace."""
        key = token, *draft, *target
        if key not in self._known:
            rows = torch.tensor([draft]), torch.tensor([target])
            self._known[key] = bisected(lambda coin: self._drafts(coin, token, *rows))
        return self._known[key]

    def _drafts(self, coin: int, token: int, draft: torch.Tensor, target: torch.Tensor) -> bool:
        with tossing([coin]), Replaced(coupling, "draw", lambda *_: torch.tensor([0])):
            return bool(self._draw_draft_tokens(torch.tensor([token]), draft, target, None)[1])


def judged_by(coins: Coins) -> Callable[..., list[Verdict]]:
    """`Logits.verdicts`, as `Coins` have it."""

    def verdicts(
        laws: Logits, drafted: Sequence[Drafted], bounds: Sequence[int], rule: Verification = "token"
    ) -> list[Verdict]:
        return [
            coins.verify(each.draft.tokens, each.draft.probs, laws.part(slice(start, end)), rule, each.draft.vocabulary)
            for each, (start, end) in zip(drafted, pairwise(bounds), strict=True)
        ]

    verdicts.coins = coins  # type: ignore[attr-defined] # for who tosses them in another way
    return verdicts


class Tossed(HostGenerator):
    """A generator that gives these coins, as multiples of 1 / COINS, and behind them a number nobody looks at."""

    def __init__(self, coins: Sequence[int]) -> None:
        self._values = [*(coin / COINS for coin in coins), 0.0]

    def random(self, count: int) -> list[float]:
        return self._values[:count]


def bisected(falls_well: Callable[[int], bool]) -> int:
    """How many coins fall well, all those below some value and none from there on."""
    least, most = 0, COINS
    while least < most:
        coin = (least + most) // 2
        if falls_well(coin):
            least = coin + 1
        else:
            most = coin
    return least


def tossing(coins: Sequence[int]) -> AbstractContextManager[object]:
    """`torch.rand` gives these coins, as multiples of 1 / COINS, and behind them a number that nobody looks at."""
    values = torch.tensor([*(coin / COINS for coin in coins), 0.0], dtype=torch.float64)

    def rand(size: int | tuple[int], **_: Any) -> torch.Tensor:
        (count,) = size if isinstance(size, tuple) else (size,)
        return values[:count]

    return Replaced(torch, "rand", rand)


class Replaced(AbstractContextManager[None]):
    """What `patch.object` does, in a tenth of its time: every verdict of every play needs it."""

    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._usual = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._usual)
