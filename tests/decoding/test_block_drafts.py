"""Block draft heads in the loop: DFlash, and DSpark with its own prediction of acceptance."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch
from law_table import FEW, SAMPLINGS, Case, enumerate_decode, error, expected_law

from specctl.decoding.composition import Stage, compose
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError
from specctl.models.draft_heads.block import MARKOV, BlockHead, MarkovKind, SequentialKind
from specctl.models.draft_heads.block_runner import BlockPasses, GraphBlockPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies import StoppingPolicy
from specctl.policies.published import ConfidentPrefix, Constant, SelfVerify
from specctl.records import ExtraToken, Round, StopReason
from tests.support.toy_heads import random_block
from tests.support.toys import Replays, TableRunner, random_model, related_table, table

EXACT = 3e-7
BIASED = 1e-2
PROMPT = [5, 9, 2, 40, 33, 7, 12, 60]
SHAPE = LayerShape(hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
TOY = LayerShape(hidden_size=3, intermediate_size=6, heads=2, kv_heads=1, head_dim=4)
KINDS: list[MarkovKind | None] = [None, *MARKOV]
ENGINES: dict[str, Callable[[BlockHead], Slot]] = {
    "uncompiled": lambda head: Slot(BlockPasses(head, 64, capacity=4)),
    "graph": lambda head: Slot(GraphBlockPasses(head, 64, Replays())),
}


def drafter_of(
    kind: MarkovKind | None, engine: str = "uncompiled", policy: StoppingPolicy | None = None
) -> ModelDrafter:
    head = random_block(layers=(0, 1, -1), block_size=5, vocabulary=64, markov=kind, shape=SHAPE, spread=0.3)
    record = frozenset() if kind is None else frozenset({"next_accept_prob"})
    return ModelDrafter(ENGINES[engine](head), policy or Constant(draft_length=7), record)


def play(
    drafter: ModelDrafter, prompt: Sequence[int], limit: int, family: str = "llama", most: int | None = None
) -> list[Round]:
    """The rounds, at most ``most`` of them."""
    target = Slot(EagerPasses(random_model(family), 64))
    target.watch((0, 1, -1))
    with torch.inference_mode():
        prefill(target, drafter, prompt)
        return list(islice(decode(target, drafter, prompt, limit, Sampling()), most))


def text_of(rounds: Sequence[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.emitted]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.representatives("prompt-None-llama", "one token-gated-gemma2", "prompt-rnn-llama", "prompt-vanilla-llama")
def test_greedy_text_is_the_targets_own(prompt: list[int], kind: MarkovKind | None, family: str) -> None:
    alone = Slot(EagerPasses(random_model(family), 64))
    with torch.inference_mode():
        expected = [round_.emitted[0] for round_ in decode(alone, None, prompt, 40, Sampling())]
    rounds = play(drafter_of(kind), prompt, 40, family)
    assert text_of(rounds) == expected
    assert max(round_.drafted for round_ in rounds) == (4 if kind is None else 5), "the block is the longest draft"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives(slow=("gated-graph", "rnn-uncompiled", "None-graph"))
def test_what_a_block_drafts_does_not_depend_on_earlier_rounds(kind: MarkovKind | None, engine: str) -> None:
    rounds = play(drafter_of(kind, engine), PROMPT, 40)
    assert sum(round_.accepted < round_.drafted for round_ in rounds) > 3, "nothing was ever taken back"
    text = list(PROMPT)
    for round_ in rounds:
        (fresh,) = play(drafter_of(kind), text, round_.drafted + 1, most=1)
        assert [step.token for step in fresh.steps] == [step.token for step in round_.steps]
        if kind is not None:
            found = [step.next_accept_prob for step in round_.steps]
            assert found == pytest.approx([step.next_accept_prob for step in fresh.steps], abs=1e-4)
        text += round_.emitted


# One that looks at nothing, one that drops what it looked at, and the one that looks ahead.
PLAIN_CASES = [Case("constant", name, {"draft_length": 2}) for name in ("T=1", FEW)]
DFLASH_CASES = [*PLAIN_CASES, Case("svip", "T=1", {"c": 1.0, "threshold": 0.9, "keep_trigger": False})]
DSPARK_CASES = [PLAIN_CASES[0], *(Case("confidence", name, {"threshold": 0.5}) for name in ("T=1", FEW))]
LENGTHS = [(2, 3), (3, 4)]
"""Tokens of the text whose law is enumerated, and all of its tokens. Two have a round behind a rejection in them."""


def toy_drafter(case: Case, kind: SequentialKind | None) -> ModelDrafter:
    # Two tokens of three, one of which ends the sequence.
    few = [0, 2] if case.sampling == FEW and kind != "selector" else None
    head = random_block(vocabulary=3, tokens=few, markov=kind, shape=TOY, seed=6)
    return ModelDrafter(Slot(BlockPasses(head, 3, capacity=16)), case.policy())


Pair = tuple[Case, SequentialKind | None]
PAIRS: list[Pair] = [(case, None) for case in DFLASH_CASES]
PAIRS += [(case, kind) for case in DSPARK_CASES for kind in MARKOV]
PAIRS += [(case, "selector") for case in PLAIN_CASES]
SHORT: list[Pair] = [(PLAIN_CASES[0], "selector"), (PLAIN_CASES[0], None), (DFLASH_CASES[2], None)]
SHORT += [(DSPARK_CASES[0], "vanilla"), (DSPARK_CASES[1], "rnn")]


@pytest.mark.parametrize(
    ("case", "kind", "lengths"), [*((*pair, (3, 4)) for pair in PAIRS), *((*pair, (2, 3)) for pair in SHORT)], ids=str
)
@pytest.mark.representatives(
    "constant: draft_length=2; T=1-vanilla-(2, 3)",
    "constant: draft_length=2; T=1-selector-(2, 3)",
    "T=1-rnn-(2, 3)",
    "confidence: threshold=0.5; T=0.7 top_k=2 top_p=0.95-gated",
    slow=("constant: draft_length=2; T=1-gated-(3, 4)", "confidence: threshold=0.5; T=1-vanilla-(3, 4)"),
)
def test_output_has_the_law_of_the_target(case: Case, kind: SequentialKind | None, lengths: tuple[int, int]) -> None:
    sampling, (length, limit) = SAMPLINGS[case.sampling], lengths
    found = enumerate_decode(lambda: toy_drafter(case, kind), sampling, length, limit, layers=(0,))
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(sampling, length)) < EXACT
    assert found.extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}
    if case.name == "confidence":
        assert found.stops >= {StopReason.POLICY}


class CutsInHindsight(ModelDrafter):
    """Unlawful on purpose: it offers a single token of the block if the second one that was drawn is not probable."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        whole = super().draft(sequence, budget)
        if len(whole.tokens) < 2 or whole.probs is None or whole.probs[1, whole.tokens[1]] > 0.5:
            return whole
        return replace(whole, tokens=whole.tokens[:1], probs=whole.probs[:1], steps=whole.steps[:1])


@pytest.mark.parametrize("kind", [None, "gated"])
@pytest.mark.representatives("gated")
def test_a_block_cut_after_its_later_tokens_were_drawn_is_caught(kind: MarkovKind | None) -> None:
    """Its confidence head may be asked before a token is drawn, and not after."""

    def drafter() -> Drafter:
        head = random_block(vocabulary=3, markov=kind, shape=TOY, seed=6)
        return CutsInHindsight(Slot(BlockPasses(head, 3, capacity=16)), Constant(2))

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], 2, 3, frozenset(), layers=(0,))
    assert error(found, expected_law(SAMPLINGS["T=1"], 2, frozenset())) > BIASED


@pytest.mark.parametrize("lengths", LENGTHS, ids="{0[0]} of {0[1]}".format)
@pytest.mark.representatives(slow=("2 of 3",))
def test_output_of_a_hierarchy_over_a_block_has_the_law_of_the_target(lengths: tuple[int, int]) -> None:
    middle = related_table(table(8, eos_logit=-0.5, spread=1.0, vocabulary=3), seed=5, noise=0.6)

    def drafter() -> Drafter:
        runner = TableRunner(middle)
        runner.watch((0,))
        lowest = toy_drafter(Case("confidence", "T=1", {"threshold": 0.5}), "rnn")
        return PreVerifiedDrafter(lowest, runner, SelfVerify(max_draft=3))

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], *lengths)
    assert error(found, expected_law(SAMPLINGS["T=1"], lengths[0])) < EXACT


def test_a_draft_stops_by_its_own_prediction_before_the_token_is_drawn() -> None:
    free = play(drafter_of("gated"), PROMPT, 40)
    cut = play(drafter_of("gated", policy=ConfidentPrefix(threshold=0.4)), PROMPT, 40)
    assert text_of(cut) == text_of(free)
    stopped = [round_ for round_ in cut if round_.stop is StopReason.POLICY and round_.drafted < 5]
    assert len(stopped) > 3
    for round_ in stopped:
        product = torch.tensor([step.next_accept_prob for step in round_.steps]).cumprod(0)
        assert product[-1] < 0.4
        assert bool((product[:-1] >= 0.4).all())


@pytest.mark.parametrize(
    "runner", [TableRunner(table(1)), Slot(BlockPasses(random_block(), 5))], ids=["model", "DFlash"]
)
def test_a_draft_that_predicts_nothing_is_a_clear_error(runner: Slot | TableRunner) -> None:
    if isinstance(runner, TableRunner):
        runner.foresees = False
    with pytest.raises(ProfileError, match="predictions for the next token, and its draft makes none"):
        compose([Stage(runner, ConfidentPrefix())])
    with pytest.raises(ValueError, match="next_accept_prob"):
        ModelDrafter(runner, ConfidentPrefix())
    assert isinstance(compose([Stage(runner, Constant())], frozenset({"next_accept_prob"})), ModelDrafter)
