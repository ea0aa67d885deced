"""Draft steps that were started before they were known to be wanted change nothing but the time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import law_table
import pytest
import torch
from law_table import ENDS, Case, enumerate_decode, error, expected_law

from specctl.decoding.draft import Draft
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import Uniforms
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import ENOUGH, Lead, Reach, StartedStep, StepsAhead
from specctl.models.draft_heads.block_runner import GraphBlockPasses
from specctl.models.draft_heads.chain_runner import GraphChainPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.forward import Token, TokenReader
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import Capturing, GraphPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.policies import POLICIES, StoppingPolicy, never_stops
from specctl.policies.published import Constant, Svip
from specctl.records import Round, StopReason
from specctl.replay.recording.metering import Asked
from tests.support.enumeration import steady_clocks
from tests.support.toy_heads import random_block, random_eagle3
from tests.support.toys import (
    EOS,
    STOPPING,
    Replays,
    TableRunner,
    head_for,
    noisy_copy,
    random_model,
    random_predictor,
    related_table,
    seeded,
    table,
    toy_head,
)

pytestmark = pytest.mark.crossed

EXACT = 3e-7
TARGET = table(3, eos_logit=-1.5)
DRAFT = related_table(TARGET, seed=4, noise=0.6)
HEAD = toy_head(DRAFT, seed=5)
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(1.0),
    "filtered, by block": Sampling(0.8, top_k=4, top_p=0.95, verification="block"),
}
DRAFTING = [name for name, policy in POLICIES.items() if policy.drafts]
Pays = Callable[[Lead, int], bool]
WHEN: dict[str, Pays] = {"always": lambda _, __: True, "at every other place": lambda _, place: place % 2 == 0}


def ahead(pays: Pays) -> AbstractContextManager[object]:
    """Steps are started ahead where a test says so, not where it pays."""
    return patch.object(Lead, "pays", pays)


class AheadTable(TableRunner):
    """A `TableRunner` that reads a token within its pass, also one that is a tensor yet."""

    widest_sample = 1
    runs_ahead = True

    def __init__(self, logits: torch.Tensor, *, runs_ahead: bool = True) -> None:
        super().__init__(logits)
        self.vocabulary = logits.shape[-1]
        self.runs_ahead = runs_ahead

    def sample(
        self,
        tokens: Sequence[Token],
        reader: TokenReader,
        uniform: float | None,
        previous: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        forward = self.extend([int(token) for token in tokens], keep=1, hidden=reader.hidden)
        state = None if forward.hidden is None else forward.hidden[0]
        number = None if uniform is None else torch.tensor(uniform, dtype=torch.float64)
        return reader(forward.logits[0], number, state, previous, self.next_accept_prob)


class Noting(ModelDrafter):
    """Notes how many tokens its runner holds after each draft."""

    held: list[int]

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = super().draft(sequence, budget)
        self.held = [*getattr(self, "held", []), self.runner.length]
        return draft


@dataclass(frozen=True)
class Written:
    """What came of one sequence, but for times.

    Attributes:
        rounds: with every step and signal.
        held: tokens in the draft's cache after each draft.
        passes: how many the draft made.
    """

    rounds: tuple[Round, ...]
    held: tuple[int, ...]
    passes: int


def table_written(policy: StoppingPolicy, sampling: Sampling, seed: int, *, runs_ahead: bool) -> Written:
    runner = AheadTable(DRAFT, runs_ahead=runs_ahead)
    drafter = Noting(runner, policy, predictor=head_for(policy, HEAD))
    with torch.inference_mode(), steady_clocks():
        rounds = list(decode(TableRunner(TARGET), drafter, [1, 2], 60, sampling, {EOS}, seeded(seed)))
    return Written(tuple(rounds), tuple(drafter.held), len(runner.extended))


def settings_of(name: str) -> dict[str, object]:
    return {"arms": ("svip:c=1.0,threshold=1.1", "heuristic")} if name == "bandit" else STOPPING.get(name, {})


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.representatives("always")
def test_rounds_with_the_same_seed_are_the_same(name: str, sampling: str, when: str) -> None:
    """Their tokens, signals and stops, what is cached after each draft, and what is drawn behind it."""
    unwanted = 0
    for seed in range(4):
        policies = [POLICIES[name](**settings_of(name)) for _ in range(2)]
        usual = table_written(policies[0], SAMPLINGS[sampling], seed, runs_ahead=False)
        with ahead(WHEN[when]):
            found = table_written(policies[1], SAMPLINGS[sampling], seed, runs_ahead=True)
        assert found.rounds == usual.rounds
        assert found.held == usual.held
        early = sum(round_.stop in (StopReason.POLICY, StopReason.EOS) for round_ in usual.rounds)
        assert found.passes - usual.passes <= early or never_stops(policies[0])
        unwanted += found.passes - usual.passes
    assert unwanted or when != "always" or never_stops(POLICIES[name]()), "no step was for nothing: nothing was tested"


def test_a_step_whose_draw_stays_drawn_is_noticed() -> None:
    """Without this the texts above might be the same because nothing behind a step hangs on what it drew."""
    policy = Svip(c=1.0, threshold=1.1)
    usual = table_written(policy, Sampling(1.0), 0, runs_ahead=False)
    with ahead(WHEN["always"]), patch.object(Uniforms, "go_back", lambda *_: None):
        found = table_written(policy, Sampling(1.0), 0, runs_ahead=True)
    assert found.rounds != usual.rounds


def test_draws_go_back_to_a_mark_however_many_were_made() -> None:
    for before, behind in ((0, 1), (5, 3), (63, 2), (64, 1), (10, 130)):
        numbers, again = (Uniforms(seeded(2)) for _ in range(2))
        for each in (numbers, again):
            for _ in range(before):
                each.next()
        mark = numbers.mark()
        for _ in range(behind):
            numbers.next()
        numbers.go_back(mark)
        assert [numbers.next() for _ in range(70)] == [again.next() for _ in range(70)]


@pytest.mark.parametrize(
    ("when", "times", "host", "step"),
    [
        # In each round: a step and one ahead of it are started, numbers land; another is started, numbers land.
        ("always", [1, 2, 10, 20, 21, 40, 47, 100], [47 - 40], [100 - 40]),
        # Steps 1, 2 and 3 are started, after the numbers of 1 have landed; 3 is taken back, but in the second round.
        (
            "at every other place",
            [1, 5, 9, 10, 20, 30, 40, 46, 48, 60, 90],
            [9 - 5, 46 - 40],
            [20 - 9, 60 - 46, 90 - 60],
        ),
    ],
)
def test_only_the_times_of_wanted_steps_are_learned(
    monkeypatch: pytest.MonkeyPatch, when: str, times: list[int], host: list[int], step: list[int]
) -> None:
    clock = iter(times)
    monkeypatch.setattr("specctl.decoding.steps_ahead.working_seconds", lambda: next(clock))
    back: list[int] = []

    def start(_: object, number: int, __: bool) -> StartedStep:
        return StartedStep(TokenSampler(Sampling()), [float(number)], [number], None)

    steps = StepsAhead(start, lambda step, _: back.append(int(step.numbers[0])), torch.device("cpu"))
    wanted = (1, 2) if when == "always" else (2, 3)
    with ahead(WHEN[when]):
        for count in wanted:
            steps.begin([7], 3, Reach.ONE)
            for index in range(1, count + 1):
                steps.read(index)
            steps.end()
    assert next(clock, None) is None
    assert back[0] == wanted[0] + 1
    assert (list(steps.lead.host), list(steps.lead.step)) == (host, step)


def test_which_policies_never_stop_and_so_need_not_be_waited_for() -> None:
    assert {name for name, policy in POLICIES.items() if never_stops(policy())} == {"none", "constant", "heuristic"}
    assert not never_stops(Asked(draft_length=3)), "signals are priced as they are read"


LAW_CASES = [
    Case("constant", "T=1", {"draft_length": 3}),
    Case("svip", "T=1", {"c": 1.0, "threshold": 0.87, "keep_trigger": False}),
    Case("specdec++", "T=1 by block", {"threshold": 0.45}),
]


@pytest.mark.parametrize("case", LAW_CASES, ids=str)
def test_output_has_the_law_of_the_target(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every branch of chance, those of steps that nobody wants as well."""
    monkeypatch.setattr(law_table, "TableRunner", lambda logits: AheadTable(logits))
    with ahead(WHEN["always"]):
        found = enumerate_decode(case.drafter, law_table.SAMPLINGS[case.sampling], 3, 3, ENDS)
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(law_table.SAMPLINGS[case.sampling], 3, ENDS)) < EXACT


SHAPE = LayerShape(hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
PREDICTS = random_predictor(hidden_size=32, spread=0.15)
PROMPT = torch.randint(1, 64, (30,), generator=seeded(5)).tolist()
CAPTURED: dict[str, Callable[[], Slot]] = {
    "a draft model": lambda: Slot(GraphPasses(noisy_copy("llama"), 64, Replays())),
    "a chain head": lambda: Slot(
        GraphChainPasses(
            random_eagle3(layers=(0, 1, -1), states=32, vocabulary=64, shape=SHAPE, spread=0.5), 64, Replays()
        )
    ),
    "a block head": lambda: Slot(
        GraphBlockPasses(
            random_block(layers=(0, 1, -1), block_size=5, vocabulary=64, markov="gated", shape=SHAPE, spread=0.3),
            64,
            Replays(),
        )
    ),
}


# Neither always after the first token nor never.
STOPS_HERE: dict[str, dict[str, object]] = {
    "svip": {"c": 1.0, "threshold": 1.75},
    "specdec++": {"threshold": 0.6},
    "disco": {"threshold": 0.1},
    "confidence": {"threshold": 0.4},
}


@cache
def target() -> Slot:
    runner = Slot(EagerPasses(random_model("llama"), 64))
    runner.watch((0, 1, -1))
    return runner


def model_written(draft: Slot, policy: StoppingPolicy, sampling: Sampling) -> Written:
    drafter = Noting(draft, policy, predictor=head_for(policy, PREDICTS))
    with torch.inference_mode():
        target().rollback(0)
        prefill(target(), drafter, PROMPT)
        rounds = list(decode(target(), drafter, PROMPT, 32, sampling, {17}, seeded(1)))
    untimed = (
        replace(round_, draft_seconds=0.0, verify_seconds=0.0, total_seconds=0.0, overlap_seconds=0.0)
        for round_ in rounds
    )
    return Written(tuple(untimed), tuple(drafter.held), 0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize(
    ("draft", "name"),
    [
        *(("a draft model", name) for name in ("constant", "svip", "specdec++", "disco")),
        *(("a chain head", name) for name in ("constant", "svip")),
        *(("a block head", name) for name in ("constant", "confidence")),
    ],
)
@pytest.mark.representatives("a draft model-svip-T=1", "a chain head-constant-greedy", "a block head-constant-T=1")
def test_captured_steps_draft_the_same(draft: str, name: str, sampling: Sampling) -> None:
    with patch.object(Capturing, "runs_ahead", False):
        usual = model_written(CAPTURED[draft](), POLICIES[name](**STOPS_HERE.get(name, {})), sampling)
    with ahead(WHEN["always"]):
        found = model_written(CAPTURED[draft](), POLICIES[name](**STOPS_HERE.get(name, {})), sampling)
    assert found.rounds == usual.rounds
    if draft == "a draft model":  # a head goes back to what it was shown by itself
        assert found.held == usual.held
    assert len({round_.drafted for round_ in found.rounds}) > 1 or name == "constant"


def test_a_failed_capture_leaves_steps_that_go_on_as_they_are() -> None:
    """The pass behind the one that failed has its token on the device already."""

    def refuse(_: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    usual = model_written(Slot(StaticPasses(noisy_copy("llama"), 64)), Constant(4), Sampling(1.0))
    uncaptured = Slot(GraphPasses(noisy_copy("llama"), 64, refuse))
    assert model_written(uncaptured, Constant(4), Sampling(1.0)).rounds == usual.rounds
    assert not uncaptured.runs_ahead


def timed(host: float, step: float) -> Lead:
    """One that has seen the host take this many microseconds, and a step."""
    lead = Lead()
    lead.host.append(host * 1e-6)
    lead.step.append(step * 1e-6)
    return lead


def told(lead: Lead, place: int, stops: int, of: int) -> Lead:
    for turn in range(of):
        lead.decided(place, stopped=turn < stops)
    return lead


def test_nothing_is_started_ahead_before_anything_was_timed() -> None:
    lead = Lead()
    assert not lead.pays(1)
    lead.step.append(1e-4)
    assert not told(lead, 1, 0, 50).pays(1)
    lead.host.append(1e-4)
    assert lead.pays(1)


@pytest.mark.parametrize(
    ("host", "step", "stops", "pays"),
    [
        (80, 1000, 0, True),
        (80, 1000, 2, True),  # 2 to 3 of 40: below 80 / 1000
        (80, 1000, 6, False),  # 6 to 7 of 40: above
        (80, 200, 6, True),  # a smaller draft has less to lose
        (80, 200, 24, False),
        (300, 200, 38, True),  # what is over before the host is done costs nothing
    ],
)
def test_it_pays_where_stops_are_rarer_than_the_hosts_share_of_a_step(
    host: float, step: float, stops: int, pays: bool
) -> None:
    assert told(timed(host, step), 3, stops, 40).pays(3) is pays


def test_places_are_counted_apart() -> None:
    lead = told(told(timed(80, 400), 1, 0, 30), 4, 25, 30)
    assert lead.pays(1)
    assert not lead.pays(4)
    assert not timed(80, 400).pays(9), "nothing is known of this place, and stops are taken to be as likely as 1 in 4"


def test_the_quickest_of_late_counts() -> None:
    lead = told(timed(80, 1000), 1, 8, 40)
    lead.host.append(0.3)  # something was captured
    assert not lead.pays(1)
    for _ in range(20):
        lead.host.append(400e-6)  # the host has become slower for good
    assert lead.pays(1)


def test_what_was_seen_long_ago_counts_less() -> None:
    lead = told(timed(80, 400), 1, 60, 60)
    assert not lead.pays(1)
    rounds = next(count for count in range(1000) if told(lead, 1, 0, 1).pays(1))
    assert rounds < 5 * ENOUGH
