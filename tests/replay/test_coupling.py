"""The coupling by which block verification is recorded token by token, in fractions, against the paper's algorithm.

import torch

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.replay.recording.coupling import Detours
from tests.support.toys import random_model

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.replay.recording.coupling import Detours
from tests.support.toys import random_model
Models here look at all tokens before. The draft's tokens, how many are kept and the token behind them have jointly the
law of the paper, whatever decides how long the draft is.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from random import Random

import pytest
import torch

from specctl.decoding.logits.host import passing
from specctl.decoding.logits.logits import kept_in_turn
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.replay.recording import coupling
from specctl.replay.recording.coupling import Detours
from specctl.replay.traces import BlockChances
from tests.support.block_in_fractions import in_fractions
from tests.support.enumeration import law_of, walk
from tests.support.toys import random_model

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[Fraction]]
Stops = Callable[[Tokens], bool]
LONGEST, VOCABULARY = 3, 3
ONE = Fraction(1)


def model(seed: int) -> Model:
    @cache
    def row(before: Tokens) -> list[Fraction]:
        random = Random(f"{seed} {before}")
        parts = [random.randint(0, 4) for _ in range(VOCABULARY - 1)] + [random.randint(1, 4)]
        return [Fraction(part, sum(parts)) for part in parts]

    return row


def of_length(length: int) -> Stops:
    return lambda tokens: len(tokens) >= length


def looking_at(seed: int) -> Stops:
    """Whether to go on is decided by the tokens so far."""
    return lambda tokens: len(tokens) >= LONGEST or Random(f"{seed} stops {tokens}").random() < 0.4


STOPS: list[Stops] = [of_length(1), of_length(2), of_length(LONGEST), looking_at(0), looking_at(1)]
Law = dict[tuple[Tokens, int, int], Fraction]


def drafts(draft: Model, stops: Stops) -> Iterator[tuple[Tokens, Fraction]]:
    """Every draft with its probability."""
    for tokens in product(range(VOCABULARY), repeat=LONGEST):
        for length in range(1, LONGEST + 1):
            if stops(tokens[:length]):
                break
        if tokens[length:] == (0,) * (LONGEST - length):  # each draft once
            probability = ONE
            for place in range(length):
                probability *= draft(tokens[:place])[tokens[place]]
            if probability:
                yield tokens[:length], probability


def live(draft: Model, target: Model, stops: Stops) -> Law:
    """Of the draft, how many of its tokens are kept, and the token behind them."""
    law: Law = {}
    for tokens, probability in drafts(draft, stops):
        rows = [draft(tokens[:place]) for place in range(len(tokens))]
        above = [target(tokens[:place]) for place in range(len(tokens) + 1)]
        for (kept, extra), chance in in_fractions(tokens, rows, above).items():
            law[tokens, kept, extra] = law.get((tokens, kept, extra), Fraction(0)) + probability * chance
    return {outcome: probability for outcome, probability in law.items() if probability}


def recorded(draft: Model, target: Model, stops: Stops) -> Law:
    """The same of what `specctl.replay.recording.coupling` says, the text drawn from the target first."""
    law: Law = {}

    def unkept(tokens: Tokens, kept: int, extra: int, weight: Fraction, probability: Fraction) -> None:
        if not probability:
            return
        if len(tokens) > kept and stops(tokens):
            law[tokens, kept, extra] = law.get((tokens, kept, extra), Fraction(0)) + probability
            return
        p, q = target(tokens), draft(tokens)
        wanted = [max(own - weight * above, Fraction(0)) for own, above in zip(q, p, strict=True)]
        for token, share in enumerate(wanted):
            if share:
                after = min(weight * p[token] / q[token], ONE)
                unkept((*tokens, token), kept, extra, after, probability * share / sum(wanted))

    def in_text(tokens: Tokens, weight: Fraction, probability: Fraction) -> None:
        p, q = target(tokens), draft(tokens)
        for token, written in enumerate(p):
            if not written:
                continue
            if tokens and stops(tokens):  # the whole draft is kept
                key = tokens, len(tokens), token
                law[key] = law.get(key, Fraction(0)) + probability * written
                continue
            stays = min(weight * written, q[token]) / (weight * written)
            if stays:
                after = min(weight * written / q[token], ONE)
                in_text((*tokens, token), after, probability * written * stays)
            unkept(tokens, len(tokens), token, weight, probability * written * (1 - stays))

    in_text((), ONE, ONE)
    return law


@pytest.mark.parametrize("seed", range(12))
def test_the_coupling_has_the_law_of_the_paper_whenever_the_draft_stops(seed: int) -> None:
    draft, target = model(seed), model(seed + 100)
    for stops in STOPS:
        expected = live(draft, target, stops)
        assert sum(expected.values()) == 1
        assert recorded(draft, target, stops) == expected


def rows(random: Random, count: int) -> torch.Tensor:
    weights = torch.tensor([[random.randint(1, 5) for _ in range(VOCABULARY)] for _ in range(count)]).float()
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("weight", [0.25, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_of_given_rows_the_next_token_has_this_law(seed: int, weight: float) -> None:
    random = Random(seed)
    draft, target = rows(random, 1), rows(random, 1)
    q, p = draft[0].tolist(), target[0].tolist()

    def play(written: int) -> tuple[int, bool]:
        found = coupling.draw_in_blocks(torch.tensor([written]), draft, target, [weight], None, torch.tensor([0.5]))
        assert found.weights[0] == pytest.approx(min(weight * p[found.tokens[0]] / q[found.tokens[0]], 1), abs=1e-6)
        surplus = sum(max(weight * above - own, 0) for above, own in zip(p, q, strict=True))
        assert found.passing[0] == pytest.approx(surplus / (surplus + 1 - weight) if weight < 1 else 1, abs=1e-6)
        return found.tokens[0], found.accepted[0]

    wanted = [max(own - weight * above, 0) for own, above in zip(q, p, strict=True)]
    for written in range(VOCABULARY):
        law = law_of(walk(lambda written=written: play(written)))  # type: ignore[misc]
        stays = min(1.0, q[written] / (weight * p[written]))
        assert law.get((written, True), 0.0) == pytest.approx(stays, abs=3e-7)
        for token, share in enumerate(wanted):
            expected = (1 - stays) * share / sum(wanted) if stays < 1 else 0.0
            assert law.get((token, False), 0.0) == pytest.approx(expected, abs=3e-7)


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.7, 0.999])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_behind_one_that_is_not_kept_have_the_law_that_is_wanted(seed: int, weight: float) -> None:
    """Two of them: what comes behind a token that does not stand is dropped, and drawn anew."""
    random = Random(seed)
    draft, target = rows(random, 1 + VOCABULARY), rows(random, 1 + VOCABULARY)  # the first, and those behind each token

    def play() -> tuple[int, int]:
        tokens: list[int] = []
        after = weight
        while len(tokens) < 2:
            # The draft goes on to the end from what stands.
            drafted = list(tokens)
            while len(drafted) < 2:
                drafted.append(int(coupling.verify(*nothing(draft[place_of(drafted)])).extra))
            fresh = drafted[len(tokens) :]
            places = [place_of(drafted[: len(tokens) + number]) for number in range(len(fresh))]
            found = coupling.draw_after_rejected(torch.tensor(fresh), draft[places], target[places], after, None)
            tokens += found.tokens
            after = found.weights[-1]
            assert len(found.weights) == len(found.passing) == len(found.tokens)
        return tokens[0], tokens[1]

    law = law_of(walk(play))
    expected: dict[tuple[int, int], float] = {}
    for first, chance in wanted_law(draft[0], target[0], weight):
        after = min(weight * float(target[0, first] / draft[0, first]), 1.0)
        for second, other in wanted_law(draft[1 + first], target[1 + first], after):
            expected[first, second] = chance * other
    for outcome in law.keys() | expected.keys():
        assert law.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=3e-7)  # type: ignore[call-overload]


def place_of(tokens: list[int]) -> int:
    return 1 + tokens[-1] if tokens else 0


def nothing(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """A verification of no token draws one from its row."""
    return torch.zeros(0, dtype=torch.int64), row[None][:0], row[None], None


def wanted_law(draft: torch.Tensor, target: torch.Tensor, weight: float) -> list[tuple[int, float]]:
    shares = (draft - weight * target).clamp_min(0)
    return [(token, float(share / shares.sum())) for token, share in enumerate(shares) if share]


@pytest.mark.parametrize("seed", range(20))
def test_recorded_chances_are_those_of_a_live_verdict(seed: int) -> None:
    """Of every length that the draft may have."""
    random = Random(seed)
    count = 4
    draft, target = rows(random, count), rows(random, count + 1)
    tokens = torch.tensor([random.randrange(VOCABULARY) for _ in range(count)])
    of_tokens = [part[:count].gather(1, tokens[:, None])[:, 0].numpy() for part in (target, draft)]
    weights, _ = passing(*of_tokens, draft.numpy(), target.numpy())
    surplus = [(weights[place] * target[place] - draft[place]).clamp_min(0).sum().item() for place in range(count)]
    known = BlockChances(weights[1:], coupling._passing(weights[:count], surplus))
    for length in range(count + 1):
        _, chances = passing(
            *(part[:length] for part in of_tokens), draft[:length].numpy(), target[: length + 1].numpy()
        )
        live_chances = kept_in_turn(chances)
        assert known.of_round(length) == pytest.approx(live_chances, abs=1e-6)
        if length:
            assert known.as_last(length)[-1] == pytest.approx(live_chances[-1], abs=1e-6)
    cut = BlockChances(known.weights[:2], known.passing[:2]) + BlockChances(known.weights[2:], known.passing[2:])
    assert cut == known


TEXT = (7, 3, 12, 5, 9, 22, 31, 4, 18, 2)


def alone(*tokens: int, keep: int) -> torch.Tensor:
    return Slot(EagerPasses(random_model("llama"), 64)).extend(tokens, keep=keep).logits


@torch.inference_mode()
def test_detours_from_a_text_and_back() -> None:
    runner = Slot(EagerPasses(random_model("llama"), 64))
    runner.extend(TEXT[:8], keep=0)
    detours = Detours(runner, TEXT)
    for length, tokens in ((5, (40, 41)), (7, (42,)), (6, (43, 44, 45)), (9, (46,))):
        found = detours.after(length, tokens, len(tokens))
        torch.testing.assert_close(found, alone(*TEXT[:length], *tokens, keep=len(tokens)))
    for length in (8, 8):
        detours.come_back(length)
        assert runner.length == 8
    torch.testing.assert_close(runner.extend(TEXT[8:9], keep=1).logits, alone(*TEXT[:9], keep=1))
