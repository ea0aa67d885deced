"""Drafting while the target verifies: its law, its tokens, its rounds, and what is left behind when it ends."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from law_table import (
    BY_BLOCK,
    DRAFT,
    ENDS,
    FEW,
    FEW_BY_BLOCK,
    LENGTH,
    PLAIN,
    PROMPT,
    SAMPLINGS,
    TARGET,
    enumerate_decode,
    error,
    expected_law,
    fit,
    sample,
)
from test_greedy_identity import FAMILIES, LONG, SHORT, drafts
from test_greedy_identity import LENGTH as WRITTEN
from test_kept_caches import ENGINES

from specctl.decoding import parallel
from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Draft
from specctl.decoding.logits.host import HostLogits
from specctl.decoding.logits.judging import logits_of
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.loop import decode
from specctl.decoding.parallel import ParallelDrafter
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.errors import ProfileError
from specctl.metrics import Metrics
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.policies.published import Constant
from specctl.profile.schema import SamplingTable
from specctl.records import ExtraToken, Round
from tests.support.checkpoints import tiny_tokenizer
from tests.support.recurrent_models import noisy_recurrent, recurrent_model
from tests.support.toys import Replays, TableRunner, ToyDraftHead, generated, noisy_copy, random_model, seeded

EXACT, BIASED = 3e-7, 1e-2
TOKENIZER = tiny_tokenizer()


def drafter(block: int = 2, runner: Slot | None = None) -> ParallelDrafter:
    return ParallelDrafter(runner or TableRunner(DRAFT), Constant(block))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("draft")]


# The law


@pytest.mark.parametrize(
    ("block", "sampling"),
    [(1, "T=1"), (2, "T=1"), (3, FEW), (1, BY_BLOCK), (2, BY_BLOCK), (3, FEW_BY_BLOCK), (4, FEW)],
)
@pytest.mark.representatives(
    "1-T=1]", "3-T=0.7 top_k=2 top_p=0.95]", slow=("3-T=0.7 top_k=2 top_p=0.95 by block", "2-T=1 by block")
)
def test_output_has_the_law_of_the_target(block: int, sampling: str) -> None:
    found = enumerate_decode(lambda: drafter(block), SAMPLINGS[sampling])
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(SAMPLINGS[sampling])) < EXACT
    assert found.extras == {None, ExtraToken.CORRECTION}, "there is never a bonus token"


@pytest.mark.parametrize("sampling", ["T=1", BY_BLOCK])
@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.representatives("2-T=1 by block", slow=("2-T=1]", "4-T=1 by block"))
def test_output_of_longer_blocks_has_the_law_of_the_target(length: int, sampling: str) -> None:
    found = enumerate_decode(lambda: drafter(3), SAMPLINGS[sampling], length)
    assert error(found, expected_law(SAMPLINGS[sampling], length)) < EXACT
    assert found.stops == {"max_draft", "budget", "eos"}


def test_two_sequences_of_one_drafter_are_independent() -> None:
    sequences = ((PROMPT, 1), (PROMPT[::-1], 1))
    found = enumerate_decode(drafter, PLAIN, limit=3, sequences=sequences)
    assert error(found, expected_law(PLAIN, sequences=sequences)) < EXACT


class OneCoin:
    """Unlawful on purpose, as the published code is: the coin that let the first token of a block pass, alone, is
    tossed no more for the second one. Known to have fallen below p/q of the first, it decides of both."""

    def __init__(self) -> None:
        self._below: float | None = None  # p/q of the token that passed alone in the round before
        self._afresh = True

    def judge(
        self, draft: Draft, forward: Forward, sampling: Sampling, _: torch.Generator | None
    ) -> tuple[Verdict, torch.Tensor | None]:
        coins = HostLogits.verdicts.coins  # type: ignore[attr-defined] # as `enumeration.doors` has put it there
        laws, tokens = logits_of(forward).distributions(sampling), draft.tokens  # (M, V), (M,)
        probs = torch.as_tensor(laws.numbers)
        assert draft.probs is not None
        ratio = float(probs[0, tokens[0]] / draft.probs[0, tokens[0]])
        if self._below is None:
            verdict = coins.verify(tokens, draft.probs, laws, "token")
        else:
            passes = min(1.0, ratio / self._below)
            if coins._chance.choose([1 - passes, passes]):
                verdict = Verdict(1, None, None)
                if len(tokens) > 1:
                    rest = coins.verify(tokens[1:], draft.probs[1:], laws.part(slice(1, None)), "token")
                    verdict = replace(rest, accepted=rest.accepted + 1)
            else:
                residual = (probs[0] - torch.as_tensor(draft.probs)[0]).clamp_min(0)
                row = residual if residual.any() else probs[0]
                verdict = Verdict(0, coins._chance.choose(row.tolist()), ExtraToken.CORRECTION)
        passed = verdict.extra is None
        self._below = min(1.0, ratio) if self._afresh and passed else None
        self._afresh = not passed
        return verdict, probs


def test_one_coin_for_two_tokens_is_caught() -> None:
    """Without this, the tests above might pass because they cannot see how the published code is biased."""
    coins: list[OneCoin] = []

    def fresh() -> ParallelDrafter:
        coins.append(OneCoin())
        return drafter(2)

    with patch.object(parallel, "judge", lambda *about: coins[-1].judge(*about)):
        found = enumerate_decode(fresh, PLAIN, 3, 3, frozenset())
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(PLAIN, 3, frozenset())) > BIASED


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.representatives(slow=("3",))
def test_sampled_output_follows_the_law_of_the_target(block: int) -> None:
    """The same through the program's own randomness."""
    found = fit(sample(drafter(block), PLAIN, 1000), PLAIN)
    assert found.p > 1e-3, found


class Slow(TableRunner):
    """Takes its time."""

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        sleep(0.003)
        return super().extend(tokens, keep, hidden=hidden)


def test_what_a_seed_gives_does_not_depend_on_who_is_quicker() -> None:
    written = set()
    for target, draft in ((TableRunner, TableRunner), (Slow, TableRunner), (TableRunner, Slow)):
        generator, tokens = seeded(3), []
        with torch.inference_mode():
            for _ in range(5):
                rounds = decode(target(TARGET), drafter(3, draft(DRAFT)), PROMPT, 20, PLAIN, frozenset(), generator)
                tokens += [token for round_ in rounds for token in round_.emitted]
        written.add(tuple(tokens))
    assert len(written) == 1


# Greedy tokens


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("draft", ["smaller", "noisy copy"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives(
    "llama-smaller-8", "llama-noisy copy-1", "gemma2-noisy copy-3", slow=("noisy copy-8", "smaller-3")
)
def test_tokens_are_those_of_generate(family: str, draft: str, block: int) -> None:
    target, drafting = (
        Slot(EagerPasses(random_model(family), 64)),
        drafter(block, Slot(EagerPasses(drafts(family)[draft], 64))),
    )
    with torch.inference_mode():
        for prompt in (SHORT, LONG):
            target.rollback(0)
            drafting.rollback(0)
            prefill(target, drafting, prompt)
            rounds = list(decode(target, drafting, prompt, WRITTEN, Sampling()))
            expected = generated(random_model(family), prompt, WRITTEN)
            assert [token for round_ in rounds for token in round_.emitted] == expected
            assert draft == "smaller" or {round_.fully_accepted for round_ in rounds} == {True, False}


@pytest.mark.parametrize("engine", ["static", "fixed width"])
def test_tokens_are_the_same_on_other_engines(engine: str) -> None:
    target, draft = (ENGINES[engine](model) for model in (random_model("llama"), noisy_copy("llama")))
    with torch.inference_mode():
        rounds = list(decode(target, drafter(3, draft), LONG, WRITTEN, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == generated(random_model("llama"), LONG, WRITTEN)
    assert {round_.fully_accepted for round_ in rounds} == {True, False}


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
@pytest.mark.representatives("mamba2")
def test_recurrent_states_go_back_on_both_sides(family: str) -> None:
    alone, target = (Slot(EagerPasses(recurrent_model(family), 64)) for _ in range(2))
    drafting = drafter(4, Slot(EagerPasses(noisy_recurrent(family), 64)))
    with torch.inference_mode():
        plain = [token for round_ in decode(alone, None, LONG, WRITTEN, Sampling()) for token in round_.emitted]
        rounds = list(decode(target, drafting, LONG, WRITTEN, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == plain
    assert {round_.fully_accepted for round_ in rounds} == {True, False}


def test_a_model_drafting_for_itself_is_never_rejected() -> None:
    target, drafting = TableRunner(TARGET), drafter(3, TableRunner(TARGET))
    with torch.inference_mode():
        rounds = list(decode(target, drafting, PROMPT, 31, Sampling(), frozenset()))
    assert [round_.accepted for round_ in rounds] == [1, *[3] * 10]
    assert all(round_.fully_accepted and round_.extra is None for round_ in rounds)


# How it goes


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("eos", [ENDS, frozenset[int]()])
@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_rounds_account_for_every_token(block: int, eos: frozenset[int], limit: int) -> None:
    for seed in range(10):
        target, draft = TableRunner(TARGET), Counted(DRAFT)
        with torch.inference_mode():
            rounds = list(decode(target, drafter(block, draft), PROMPT, limit, PLAIN, eos, seeded(seed)))
        tokens = [token for round_ in rounds for token in round_.emitted]
        assert len(tokens) == limit or (len(tokens) < limit and tokens[-1] in eos)
        assert not set(tokens[:-1]) & eos
        assert sum(round_.drafted for round_ in rounds) == draft.drafted, "each draft token counts once"
        assert [round_.index for round_ in rounds] == [*range(len(rounds))]
        for round_ in rounds:
            assert [step.index for step in round_.steps] == [*range(1, round_.drafted + 1)]
            assert round_.fully_accepted is (round_.extra is None)
            assert round_.chances is not None
            assert len(round_.chances) == len(round_.emitted)
        for runner in (target, draft):
            assert runner.tokens == [*PROMPT, *tokens][: runner.length], "a rejected token is still cached"


class Counted(TableRunner):
    """Counts the tokens that are drawn from it: one for each pass with logits."""

    drafted = 0

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self.drafted += keep
        return super().extend(tokens, keep, hidden=hidden)


class Meets(TableRunner):
    """Its pass ends only once the other model's has begun."""

    def __init__(self, logits: torch.Tensor, mine: threading.Event, other: threading.Event) -> None:
        super().__init__(logits)
        self._mine, self._other = mine, other

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._mine.set()
        assert self._other.wait(60), "the two do not run at the same time"
        return super().extend(tokens, keep, hidden=hidden)


def test_target_and_draft_run_at_the_same_time_and_the_times_add_up() -> None:
    reads, drafts_ = threading.Event(), threading.Event()
    target, draft = Meets(TARGET, reads, drafts_), Meets(DRAFT, drafts_, reads)
    rounds = []
    with torch.inference_mode():
        for round_ in decode(target, drafter(2, draft), PROMPT, 6, Sampling(), frozenset()):
            rounds.append(round_)
            reads.clear()
            drafts_.clear()
            if len(rounds) == 2:
                break
    for round_ in rounds:
        assert round_.draft_seconds + round_.verify_seconds == pytest.approx(round_.total_seconds)
        assert round_.overlap_seconds is not None
        assert round_.overlap_seconds > 0


def test_metrics_are_those_of_what_was_emitted() -> None:
    completion = session().generate(PROMPT, SamplingTable(max_new_tokens=40, temperature=1.0))
    assert {round_.fully_accepted for round_ in completion.rounds} == {True, False}
    record = Metrics.of([completion]).as_record()
    assert record["mean_acceptance_length"] == pytest.approx(40 / len(completion.rounds), abs=1e-4)
    assert record["verification_rate"] == pytest.approx(len(completion.rounds) / 40, abs=1e-4)
    assert record["overlap_ms"] > 0
    assert record["draft_ms"] + record["verify_ms"] <= record["total_ms"] - record["prefill_ms"]


# How it ends


def session(target: Slot | None = None, draft: Slot | None = None, **changes: Any) -> Session:
    runners = target or TableRunner(TARGET), draft or TableRunner(DRAFT)
    pair = Pair(runners[0], (runners[1],), TOKENIZER, frozenset(), 1 << 31, (), ({},))
    return Session(pair, build_drafter(pair, Setting("constant", parallel="force")), **changes)


def stop_early(rounds: Iterator[Round]) -> None:
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [list, stop_early])
def test_no_thread_is_left_behind(end: Callable[[Iterator[Round]], object]) -> None:
    target, draft = TableRunner(TARGET), TableRunner(DRAFT)
    with torch.inference_mode():
        end(decode(target, drafter(3, draft), PROMPT, LENGTH, PLAIN, frozenset(), seeded(0)))
    assert threads() == []
    text = max(target.tokens, draft.tokens, key=len)
    assert all(runner.tokens == text[: runner.length] for runner in (target, draft))


class Breaks(TableRunner):
    """Fails in some pass with logits, once."""

    def __init__(self, logits: torch.Tensor, at: int, error: BaseException) -> None:
        super().__init__(logits)
        self._left, self._error = at, error

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._left -= keep > 0
        if keep and self._left == 0:
            raise self._error
        return super().extend(tokens, keep, hidden=hidden)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_after_an_error_the_same_session_goes_on(which: str, error: BaseException) -> None:
    settings = SamplingTable(max_new_tokens=20)
    expected = session().generate(PROMPT, settings).tokens
    target, draft = TableRunner(TARGET), TableRunner(DRAFT)
    broken = session(Breaks(TARGET, 3, error), draft) if which == "target" else session(target, Breaks(DRAFT, 7, error))
    with pytest.raises(type(error)):
        broken.generate(PROMPT, settings)
    assert threads() == []
    assert broken.generate(PROMPT, settings).tokens == expected


def test_what_watches_the_rounds_may_fail_and_the_thread_ends() -> None:
    def fail(_: Round) -> None:
        raise BrokenPipeError

    one = session()
    with pytest.raises(BrokenPipeError):
        one.generate(PROMPT, SamplingTable(max_new_tokens=20), on_round=fail)
    assert threads() == []


def test_kept_caches_hold_only_what_was_written() -> None:
    settings = SamplingTable(max_new_tokens=9)
    keeping = session(keep_caches=True)
    first = keeping.generate(PROMPT, settings, enough=iter([False, True]).__next__)
    again = [*PROMPT, *first.tokens, 1]
    assert keeping.generate(again, settings).tokens == session().generate(again, settings).tokens


# Who may


def pair_on(target: str, draft: str) -> Pair:
    runners = TableRunner(TARGET), TableRunner(DRAFT)
    for runner, device in zip(runners, (target, draft), strict=True):
        runner.device = torch.device(device)
    return Pair(runners[0], (runners[1],), TOKENIZER, frozenset(), 1 << 31, (), ({},))


def test_target_and_draft_need_a_device_each() -> None:
    apart = Setting("constant", parallel=True)
    assert isinstance(build_drafter(pair_on("cuda:0", "cpu"), apart), ParallelDrafter)
    assert isinstance(build_drafter(pair_on("cuda:0", "cuda:1"), apart), ParallelDrafter)
    with pytest.raises(ProfileError, match=r"\[draft\] parallel: target and draft share cuda:0") as caught:
        build_drafter(pair_on("cuda:0", "cuda:0"), apart)
    assert 'parallel = "force"' in (caught.value.hint or "")
    forced = replace(apart, parallel="force")
    assert isinstance(build_drafter(pair_on("cuda:0", "cuda:0"), forced), ParallelDrafter)


def test_a_target_on_several_devices_has_all_of_them() -> None:
    model = random_model("llama")
    pair = replace(pair_on("cuda:0", "cpu"), models=(model, random_model("llama", layers=1)))
    assert pair.devices(None) == {"cuda:0", "cpu"}, "its first layers on one, its weights here"
    with pytest.raises(ProfileError, match="share cpu"):
        build_drafter(pair, Setting("constant", parallel=True))


def test_a_policy_that_stops_drafts_cannot() -> None:
    """Profiles say so themselves; a chat may change its policy later."""
    with pytest.raises(ProfileError, match="there is nothing for svip to decide"):
        build_drafter(pair_on("cuda:0", "cpu"), Setting("svip", parallel=True))


@pytest.mark.parametrize("place", ["target", "draft"])
def test_graphs_cannot_be_captured_meanwhile(place: str) -> None:
    pair, graph = pair_on("cuda:0", "cpu"), Slot(GraphPasses(random_model("llama"), 64, Replays()))
    changed = replace(pair, target=graph) if place == "target" else replace(pair, drafts=(graph,))
    with pytest.raises(ProfileError, match="CUDA captures no graph"):
        build_drafter(changed, Setting("constant", parallel="force"))


def test_a_draft_head_cannot() -> None:
    head = ToyDraftHead(DRAFT, seed=1)
    pair = Pair(TableRunner(TARGET), (head,), TOKENIZER, frozenset(), 1 << 31, (), ({},))
    with pytest.raises(ProfileError, match="a draft head drafts from the target's states"):
        build_drafter(pair, Setting("constant", parallel="force"))
