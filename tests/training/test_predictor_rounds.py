"""What a draft head's acceptance heads are trained on is what they read in live rounds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block import MarkovKind
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import Transform
from specctl.policies import NONE, Setting
from specctl.records import Round
from specctl.training import predictor_rounds as module
from specctl.training.predictor_rounds import RoundTokens, read_rounds
from tests.support.toy_heads import random_block, random_eagle3
from tests.support.toys import StateTable, TableRunner, ToyDraftHead, related_table, seeded, table
from tests.support.traced import pair_of

PROMPT = (3, 1, 4, 1, 5)
LENGTH, LONGEST = 150, 6
NO_EOS: frozenset[int] = frozenset()
GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)


class Spy(StatePredictor):
    """Accepts everything and keeps the states that it was shown."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self.seen: list[torch.Tensor] = []

    def accept_prob(self, hidden: torch.Tensor, signals: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        self.seen.append(hidden.clone())
        return torch.ones(hidden.shape[:-1])


def toy_pair(eos: frozenset[int] = NO_EOS, longest: int | None = None) -> Pair:
    target = table(8, spread=2.0, vocabulary=12)
    draft = ToyDraftHead(related_table(target, 9, noise=0.5), 10, noise=0.6, longest=longest)
    return pair_of(StateTable(target), draft, eos=eos, heads=[Spy()])


def chain_pair(eos: frozenset[int] = NO_EOS) -> Pair:
    head = random_eagle3(layers=(0, 1), states=6, vocabulary=6, tokens=[0, 2, 3, 5], seed=5)
    return pair_of(TableRunner(table(21, spread=1.0, vocabulary=6)), Slot(ChainPasses(head, 6)), eos=eos, heads=[Spy()])


def block_pair(markov: MarkovKind | None = None) -> Pair:
    shape = LayerShape(hidden_size=6, intermediate_size=8, heads=1, kv_heads=1, head_dim=4)
    head = random_block(block_size=5, vocabulary=6, tokens=[0, 2, 3, 5], markov=markov, shape=shape, seed=2)
    target = TableRunner(table(21, spread=1.0, vocabulary=6))
    return pair_of(target, Slot(BlockPasses(head, 6, capacity=16)), heads=[Spy()])


PAIRS: dict[str, Callable[[], Pair]] = {
    "toy": toy_pair,
    "short": lambda: toy_pair(longest=3),
    "chain": chain_pair,
    "block": block_pair,
    "foreseeing": lambda: block_pair("gated"),
}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", LONGEST)


def reader_of(pair: Pair) -> Slot:
    draft = pair.drafts[0]
    assert draft.reads_states
    return draft


def live(pair: Pair, setting: Setting, sampling: Sampling, length: int = LENGTH, seed: int = 0) -> list[Round]:
    drafter = build_drafter(pair, setting)
    pair.target.watch(reader_of(pair).layers)
    with torch.inference_mode():
        pair.target.rollback(0)
        pair.drafts[0].rollback(0)
        prefill(pair.target, drafter, PROMPT)
        return list(decode(pair.target, drafter, PROMPT, length, sampling, pair.eos, seeded(seed)))


def said(pair: Pair, sampling: Sampling, length: int = LENGTH, seed: int = 0) -> list[int]:
    return [token for played in live(pair, NONE, sampling, length, seed) for token in played.emitted]


def read(pair: Pair, answer: list[int], sampling: Sampling = GREEDY, seed: int = 0) -> RoundTokens:
    found = read_rounds(pair.target, reader_of(pair), PROMPT, answer, sampling, seeded(seed), pair.eos)
    assert found is not None
    return found


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.representatives("toy", "block-False")
def test_examples_are_what_a_live_run_shows_an_acceptance_head(kind: str, one_by_one: bool) -> None:
    """Token for token with their verdicts; the states bit for bit, or to rounding where passes join other tokens."""
    many = PAIRS[kind]()
    # Around it, for passes that are read within them show a head more than it is asked about.
    pair = replace(many, drafts=(Slot(Transform(many.drafts[0])),))
    setting = Setting.of({"name": "specdec++", "threshold": 1.0, "max_draft": LONGEST})
    played = live(pair, setting, GREEDY)
    spy = pair.predictors[0]
    assert isinstance(spy, Spy)
    tokens: list[int] = []
    labels: list[float] = []
    states: list[torch.Tensor] = []
    shown = iter(spy.seen)
    answer = [token for one in played for token in one.emitted]
    for one in played:
        seen = [next(shown) for _ in one.steps[1:]]
        judged = min(one.accepted + 1, len(seen))
        tokens += [step.token for step in one.steps[:judged]]
        labels += [float(place < one.accepted) for place in range(judged)]
        states += seen[:judged]
    assert next(shown, None) is None
    found = read(pair if one_by_one else many, answer)
    whole = len(tokens) - 2 * LONGEST  # the last live rounds are cut short by the token limit
    assert whole > 60
    assert found.drawn.tokens[:whole].tolist() == tokens[:whole]
    assert found.drawn.acceptance[:whole].tolist() == labels[:whole]
    assert 0 < sum(labels[:whole]) < whole
    shown_live = torch.stack(states[:whole])
    if kind in ("toy", "short"):
        assert torch.equal(found.hidden[:whole], shown_live)
    torch.testing.assert_close(found.hidden[:whole], shown_live, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [toy_pair, chain_pair])
def test_a_position_has_one_token(
    make: Callable[[], Pair], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the data of a draft model; here no round is as long as it may be."""
    monkeypatch.setattr(module, "LONGEST", 50)
    pair = make()
    answer = torch.tensor(said(pair, sampling))
    found = read(pair, answer.tolist(), sampling)
    assert len(found.drawn.tokens) == len(found.hidden) == len(answer) == LENGTH
    accepted = found.drawn.tokens == answer
    assert 0 < accepted.float().mean() < 1
    if sampling.greedy:
        assert torch.equal(found.drawn.acceptance, accepted.float())
    else:
        assert found.drawn.acceptance[~accepted].max() < 1
        assert found.drawn.acceptance[accepted].mean() > found.drawn.acceptance[~accepted].mean()
    entropy, top_prob, token_prob = found.drawn.signals.unbind(1)
    assert bool((token_prob <= top_prob).all() and (entropy >= 0).all())


def test_acceptance_is_as_likely_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 50)
    pair = chain_pair()
    likely: list[float] = []
    accepted: list[bool] = []
    for seed in range(12):
        answer = said(pair, PLAIN, 200, seed)
        found = read(pair, answer, PLAIN, seed).drawn
        assert len(found.tokens) == len(answer)
        likely += found.acceptance.tolist()
        accepted += [token == written for token, written in zip(found.tokens.tolist(), answer, strict=True)]
    spread = sum(chance * (1 - chance) for chance in likely) ** 0.5
    assert abs(sum(likely) - sum(accepted)) < 4 * spread


def test_nothing_follows_the_end_of_a_sequence() -> None:
    pair = toy_pair()
    answer = said(pair, GREEDY)
    end = read(pair, answer).drawn.tokens.tolist()[5]
    found = read(toy_pair(frozenset({end})), answer)
    assert end not in found.drawn.tokens.tolist()
    assert len(found.hidden) == len(found.drawn.tokens)


def test_an_answer_that_is_over_at_once_has_no_token() -> None:
    pair = toy_pair()
    (token,) = read(pair, said(pair, GREEDY)[:1]).drawn.tokens.tolist()
    pair = toy_pair(frozenset({token}))
    assert read_rounds(pair.target, reader_of(pair), PROMPT, [token], GREEDY, seeded(0), pair.eos) is None
