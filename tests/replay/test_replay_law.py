"""Rounds replayed from a sampled trace have the law of live rounds: both laws exactly, over all branches of chance.

Compared are the first two rounds together: their lengths and those of their inner rounds, why they stopped, and the
last token each wrote. Chance enters a trace where the target writes its text, where proposals along it are kept or
rejected, and where drafts go on after a rejected one.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from test_replay_hierarchy import Part, live, players, policies, said, shared_clock

from specctl.decoding.sampling import Sampling
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.translation import WrittenPasses
from specctl.policies import draft_account
from specctl.records import Round, StopReason
from specctl.replay.play import Player, play
from specctl.replay.recording import coupling, head_recording, sequence_recording
from specctl.replay.recording.coupling import AfterRejected, InBlocks
from specctl.replay.traces import Trace
from tests.support.enumeration import DRAFTING, VERIFYING, largest_difference, law_of, walk
from tests.support.other_tokenizers import toy_map
from tests.support.toys import EOS, StateTable, TableRunner, ToyDraftHead, related_table, table, toy_head
from tests.support.traced import pair_of, trace_of

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("drafts_at_will")]

EXACT = 3e-7
"""Probabilities are float32 in the program."""
PLAIN = Sampling(temperature=1.0)
BLOCK = replace(PLAIN, verification="block")
PROMPT = (1, 1)


@dataclass(frozen=True)
class Toy:
    """Models small enough for all their traces to be walked.

    Attributes:
        drafts: how many.
        limit: tokens to generate.
        depth: the longest draft that is recorded; None for the limit.
        ends: whether there is an end of sequence.
    """

    drafts: int
    vocabulary: int
    limit: int
    depth: int | None = None
    ends: bool = field(default=True, kw_only=True)

    @property
    def eos(self) -> frozenset[int]:
        return frozenset({EOS}) if self.ends else frozenset()

    def pair(self) -> Pair:
        target = table(8, eos_logit=-1.0, spread=1.0, vocabulary=self.vocabulary)
        middle = related_table(target, 9, noise=0.8)
        tables = [middle, related_table(middle, 5, noise=0.8)][: self.drafts]
        heads = [toy_head(logits, 5 + level) for level, logits in enumerate(tables)]
        return pair_of(TableRunner(target), *map(TableRunner, tables), eos=self.eos, heads=heads)


@dataclass(frozen=True)
class HeadToy(Toy):
    """The draft is a draft head, whose law depends on the target's states and on where the round began.

    Attributes:
        longest: the most tokens of a round.
    """

    longest: int | None = None

    def pair(self) -> Pair:
        target = table(8, eos_logit=-1.0, spread=1.0, vocabulary=self.vocabulary)
        draft = ToyDraftHead(related_table(target, 9, noise=0.5), 3, noise=0.8, longest=self.longest)
        runner = StateTable(target)
        runner.watch(draft.layers)
        return pair_of(runner, draft, eos=self.eos, heads=[toy_head(target, 5)])


@dataclass(frozen=True)
class TextToy(Toy):
    """The draft writes text of which the target's tokens are cut: each is certain."""

    def pair(self) -> Pair:
        tokens = toy_map(("<end>", "a", "ab")[: self.vocabulary], ("a", "b", "<stop>"))
        draft = TableRunner(table(4, spread=1.5, vocabulary=tokens.draft.whole))
        target = table(8, eos_logit=-1.0, spread=1.0, vocabulary=self.vocabulary)
        return pair_of(TableRunner(target), Slot(WrittenPasses(draft, tokens)), eos=self.eos)


@dataclass(frozen=True)
class ShortToy(Toy):
    """Drafts that hold fewer tokens than the target.

    Attributes:
        contexts: of each draft.
    """

    contexts: tuple[int, ...] = ()

    def pair(self) -> Pair:
        pair = super().pair()
        for draft, context in zip(pair.drafts, self.contexts, strict=True):
            draft.context = context
        return pair


# With three tokens a rejected proposal leaves a choice; with two, rounds can be longer.
ALONE = [Toy(1, 3, 3), Toy(1, 2, 6)]
STATES = [HeadToy(1, 3, 3), HeadToy(1, 2, 4), HeadToy(1, 2, 4, longest=2)]
ABOVE = [Toy(2, 3, 3), Toy(2, 2, 4)]
LONGER_ABOVE = Toy(2, 2, 5)
# Where rounds are verified as blocks, every round that may begin has tokens of its own behind those that are kept.
SHORT_BLOCKS = [Toy(1, 2, 3, ends=False), HeadToy(1, 2, 3, ends=False)]
IN_BLOCKS = [Toy(1, 2, 4, ends=False), *SHORT_BLOCKS[1:], HeadToy(1, 3, 3), HeadToy(1, 2, 4, longest=2)]
LONGER = [Toy(1, 3, 4), HeadToy(1, 2, 4, ends=False)]


@cache
def traces(toy: Toy, sampling: Sampling = PLAIN) -> list[tuple[Trace, float]]:
    """Every trace there may be, with its probability."""
    pair = toy.pair()

    def trace() -> Trace:
        tokens = said(pair, PROMPT, toy.limit, sampling)
        return trace_of(pair, PROMPT, tokens, toy.limit, toy.depth or toy.limit, sampling)

    return list(walk(trace))


def first_two(rounds: Sequence[Round]) -> Hashable:
    return tuple(
        (r.drafted, r.accepted, r.stop, r.extra_kind, r.emitted[-1], tuple((i.drafted, i.accepted) for i in r.inner))
        for r in rounds[:2]
    )


def assert_same_law(toy: Toy, parts: Sequence[Part], sampling: Sampling = PLAIN) -> set[Hashable]:
    """Returns the reasons for which the first two rounds stop."""
    difference, stops = compared(toy, parts, sampling, sampling)
    assert difference < EXACT
    return stops


def compared(toy: Toy, parts: Sequence[Part], recorded: Sampling, running: Sampling) -> tuple[float, set[Hashable]]:
    """How far the laws are from each other, and the reasons for which the first two rounds stop."""
    pair = toy.pair()
    alone = len(parts) == 1

    def replayed(trace: Trace) -> Hashable:
        team = [Player(policies(parts)[0], clock=lambda *_: (DRAFTING, VERIFYING))] if alone else players(parts)
        return first_two(list(play(team, trace, pair.eos)))

    clocks = None if alone else shared_clock
    expected = law_of(walk(lambda: first_two(live(pair, parts, PROMPT, toy.limit, running)), clocks))
    found = law_of((replayed(trace), probability) for trace, probability in traces(toy, recorded))
    assert sum(found.values()) == pytest.approx(1)
    stops = {played[2] for outcome in expected for played in outcome}  # type: ignore[attr-defined]
    return largest_difference(found, expected), stops


SVIP = ("svip", {"c": 1.0, "threshold": 0.8})
# Each with the stops that must occur among the first two rounds, beside the budget's and the end of sequence.
POLICIES_ALONE = [
    ("constant", {"draft_length": 2}, "max_draft"),
    ("heuristic", {"draft_length": 1, "max_draft": 3}, "max_draft"),
    ("max-confidence", {"threshold": 0.6, "eps": 0.2}, "policy"),
    (*SVIP, "policy"),
    ("adaedl", {"threshold": 0.62}, "policy"),
    ("self-verify", {}, "policy"),
    ("specdec++", {"threshold": 0.6, "min_draft": 1}, "policy"),
    ("bandit", {"arms": ("svip:c=1.0,threshold=0.8", "constant:draft_length=1"), "carry_over": False}, "policy"),
    ("disco", {"threshold": 0.65}, "policy"),
    ("cost-optimal", {"cost_ratio": 0.5, "carry_over": False}, "policy"),
]


@pytest.mark.parametrize(("name", "settings", "stop"), POLICIES_ALONE, ids=str)
@pytest.mark.representatives("svip", slow=("cost-optimal",))
def test_replayed_rounds_have_the_law_of_live_ones(name: str, settings: dict[str, object], stop: str) -> None:
    stops = set()
    for toy in [
        *ALONE,
        *([] if name == "svip" else LONGER[:1]),
    ]:  # others do not stop for their own reason in short ones
        stops |= assert_same_law(toy, [(name, settings, False)])
    assert stops >= {StopReason.BUDGET, StopReason.EOS, StopReason(stop)}


@pytest.mark.parametrize(("name", "settings", "stop"), POLICIES_ALONE, ids=str)
@pytest.mark.representatives("constant")
def test_replayed_rounds_of_a_draft_head_have_the_law_of_live_ones(
    name: str, settings: dict[str, object], stop: str
) -> None:
    stops = set()
    for toy in STATES:
        stops |= assert_same_law(toy, [(name, settings, False)])
    assert stops >= {StopReason.BUDGET, StopReason.EOS, StopReason(stop)}


DROPPING = ("max-confidence", {"threshold": 0.6, "adapt": False, "keep_trigger": False}, "policy")


@pytest.mark.parametrize(("name", "settings", "stop"), [*POLICIES_ALONE, DROPPING], ids=str)
@pytest.mark.representatives("svip", slow=("cost-optimal",))
def test_so_have_replayed_rounds_that_are_verified_as_blocks(name: str, settings: dict[str, object], stop: str) -> None:
    stops = set()
    for toy in [*IN_BLOCKS, *([] if name == "svip" else LONGER[1:])]:
        stops |= assert_same_law(toy, [(name, settings, False)], BLOCK)
    assert stops >= {StopReason.BUDGET, StopReason.EOS, StopReason(stop)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [PLAIN, BLOCK], ids=["token", "block"])
def test_so_have_longer_texts_that_may_end(sampling: Sampling) -> None:
    for name, settings, _ in [*POLICIES_ALONE, DROPPING][: 10 + (sampling is BLOCK)]:
        for toy in LONGER:
            assert_same_law(toy, [(name, settings, False)], sampling)


@pytest.mark.parametrize("sampling", [PLAIN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("name", ["svip", "cost-optimal"])
@pytest.mark.representatives("svip-block", "cost-optimal-block")
def test_so_have_rounds_of_a_draft_that_writes_text(name: str, sampling: Sampling) -> None:
    settings = next(settings for known, settings, _ in POLICIES_ALONE if known == name)
    stops = assert_same_law(TextToy(1, 3, 3), [(name, settings, False)], sampling)
    assert stops >= {StopReason.BUDGET, StopReason.POLICY}


PAIRS: Part = ("constant", {"draft_length": 2}, False)


@pytest.mark.parametrize("sampling", [PLAIN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_so_have_rounds_of_drafts_whose_context_ends(context: int, sampling: Sampling) -> None:
    """The prompt fills that of 2, and goes beyond that of 1: then nothing is drafted at all."""
    toy = ShortToy(1, 2, 4, ends=False, contexts=(context,))
    for part in (PAIRS, ("svip", {"c": 1.0, "threshold": 0.8}, False)):
        assert StopReason.BUDGET in assert_same_law(toy, [part], sampling)
    assert all(trace.draft.reach == context - 1 for trace, _ in traces(toy, sampling))


@pytest.mark.parametrize("contexts", [(9, 3), (3, 9), (3, 2), (4, 4), (4, 1), (1, 9)], ids=str)
def test_so_have_those_of_hierarchies(contexts: tuple[int, int]) -> None:
    toy = ShortToy(2, 2, 4, contexts=contexts)
    for parts in (HIERARCHIES["full"][0], HIERARCHIES["blocks of fixed length"][0]):
        assert_same_law(toy, parts)


@pytest.mark.parametrize("toy", SHORT_BLOCKS, ids=str)
def test_a_trace_of_tokens_verified_one_by_one_is_none_of_blocks(toy: Toy) -> None:
    """Or the comparisons above might see nothing."""
    assert compared(toy, [PAIRS], PLAIN, BLOCK)[0] > 1000 * EXACT
    assert compared(toy, [PAIRS], BLOCK, PLAIN)[0] > 1000 * EXACT


def as_the_draft_goes_on(
    drafted: torch.Tensor, _: torch.Tensor, __: torch.Tensor, weight: float, ___: object
) -> AfterRejected:
    """Wrong: what is not kept is no longer a draw of the draft."""
    return AfterRejected(drafted.tolist(), [weight] * len(drafted), [weight] * len(drafted))


def without_weights(right: Callable[..., InBlocks], *args: Any) -> InBlocks:
    """Wrong: each token is judged as if its round began with it."""
    written, draft, target, weights, *rest = args
    return right(written, draft, target, [1.0] * len(weights), *rest)


LOOKING: list[Part] = [
    ("cost-optimal", {"cost_ratio": 0.5, "carry_over": False}, False),
    ("specdec++", {"threshold": 0.4, "min_draft": 1}, False),
    ("svip", {"c": 1.0, "threshold": 0.75}, False),
]


@pytest.mark.parametrize(
    ("toy", "wrong"), [(IN_BLOCKS[0], "tails"), (SHORT_BLOCKS[0], "weights"), (SHORT_BLOCKS[1], "weights")], ids=str
)
def test_blocks_drawn_wrongly_are_caught(toy: Toy, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_account, "FIRST_DRAFTS", 0)  # two tokens have no tail
    if wrong == "tails":
        monkeypatch.setattr(coupling, "draw_after_rejected", as_the_draft_goes_on)
    else:
        for module in (sequence_recording, head_recording):
            monkeypatch.setattr(module, "draw_in_blocks", partial(without_weights, coupling.draw_in_blocks))
    traces.cache_clear()
    try:
        assert max(compared(toy, [one], BLOCK, BLOCK)[0] for one in LOOKING) > 1000 * EXACT
    finally:
        traces.cache_clear()


CHANCE = [(HeadToy(1, 2, 4), PLAIN, 3000), (HeadToy(1, 3, 3), BLOCK, 1500), (Toy(1, 3, 4), BLOCK, 2000)]


@pytest.mark.parametrize(("toy", "sampling", "count"), CHANCE, ids=str)
@pytest.mark.exhaustive
def test_so_have_rounds_replayed_from_traces_as_chance_makes_them(toy: Toy, sampling: Sampling, count: int) -> None:
    """Above, a test draws for every start on its own; here the program does, with one coin for each position."""
    pair, parts = toy.pair(), [PAIRS]

    def play_one(seed: int) -> Hashable:
        tokens = said(pair, PROMPT, toy.limit, sampling, seed)
        trace = trace_of(pair, PROMPT, tokens, toy.limit, toy.limit, sampling, seed + (1 << 20))
        return first_two(list(play([Player(policies(parts)[0])], trace, pair.eos)))

    expected = law_of(walk(lambda: first_two(live(pair, parts, PROMPT, toy.limit, sampling))))
    found = Counter(play_one(seed) for seed in range(count))
    assert found.keys() <= expected.keys()
    likely = [outcome for outcome, probability in expected.items() if probability * count >= 5]
    rest = count - sum(found[outcome] for outcome in likely), 1 - sum(expected[outcome] for outcome in likely)
    counts = [*(found[outcome] for outcome in likely), rest[0]]
    shares = [*(expected[outcome] for outcome in likely), rest[1]]
    assert chisquare(counts, [count * share for share in shares], sum_check=False).pvalue > 0.01


SELF_VERIFY = ("self-verify", {"max_draft": 3}, False)
HIERARCHIES: dict[str, tuple[list[Part], str]] = {
    "pre-verify once": ([("constant", {"draft_length": 3}, True), ("constant", {"draft_length": 2}, False)], "policy"),
    "pre-verify and self-verify once": ([("constant", {"draft_length": 4}, True), SELF_VERIFY], "policy"),
    "full": ([("self-verify", {"max_draft": 4}, False), SELF_VERIFY], "policy"),
    "blocks of fixed length": (
        [("constant", {"draft_length": 2}, False), ("constant", {"draft_length": 1}, False)],
        "max_draft",
    ),
    "SVIP over SpecDec++": (
        [(*SVIP, False), ("specdec++", {"threshold": 0.6, "min_draft": 1, "max_draft": 3}, False)],
        "policy",
    ),
    "SpecDec++ over SVIP": (
        [
            ("specdec++", {"threshold": 0.6, "min_draft": 1, "max_draft": 4}, False),
            ("svip", {"c": 1.0, "threshold": 0.8, "keep_trigger": False}, False),
        ],
        "policy",
    ),
    "DISCO over DISCO": (
        [("disco", {"threshold": 0.65, "max_draft": 4}, False), ("disco", {"threshold": 0.55, "max_draft": 3}, False)],
        "policy",
    ),
    "AdaEDL over the heuristic": (
        [("adaedl", {"threshold": 0.62, "eps": 0.3}, False), ("heuristic", {"draft_length": 2}, False)],
        "policy",
    ),
    "cost-optimal twice": (
        [("cost-optimal", {"max_draft": 3}, False), ("cost-optimal", {"max_draft": 2}, False)],
        "max_draft",
    ),
    "nobody below": ([("self-verify", {"max_draft": 4}, False), ("none", {}, False)], "policy"),
}


SHORT = ("full", "SpecDec++ over SVIP", "cost-optimal twice")
"""Those that stop for their own reason in short texts too."""


@pytest.mark.parametrize("name", HIERARCHIES)
@pytest.mark.representatives(slow=("DISCO over DISCO", *SHORT))
def test_replayed_rounds_of_a_hierarchy_have_the_law_of_live_ones(name: str) -> None:
    parts, stop = HIERARCHIES[name]
    stops = set()
    for toy in [*ABOVE, *([] if name in SHORT else [LONGER_ABOVE])]:
        stops |= assert_same_law(toy, parts)
    assert stops >= {StopReason.EOS, StopReason(stop)}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.slow
def test_so_have_longer_ones_of_a_hierarchy(name: str) -> None:
    assert_same_law(LONGER_ABOVE, HIERARCHIES[name][0])


def test_a_trace_that_forgets_how_likely_proposals_were_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the comparisons above might see nothing."""
    from specctl.replay.recording import coupling

    right = coupling.draw_draft_tokens

    def wrong(wrote: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, generator: torch.Generator | None):  # type: ignore[no-untyped-def]
        return right(wrote, (draft + target) / 2, target, generator)

    monkeypatch.setattr(coupling, "draw_draft_tokens", wrong)
    traces.cache_clear()
    try:
        with pytest.raises(AssertionError):
            assert_same_law(ALONE[1], [("constant", {"draft_length": 2}, False)])
    finally:
        traces.cache_clear()
