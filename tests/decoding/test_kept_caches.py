"""A session that keeps its caches reads only what is new in a prompt, and writes what a fresh session writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.jsonl import Record
from specctl.models.loading.assembly import load_pair
from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import decoder_layers
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses, Transform
from specctl.policies import POLICIES, Setting
from specctl.policies.published import Constant
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, FinishReason
from specctl.text_engine.row_count import worthwhile
from tests.support.checkpoints import tiny_tokenizer
from tests.support.recurrent_models import FAMILIES, noisy_recurrent, recurrent_model
from tests.support.toys import STOPPING, Replays, noisy_copy, random_model, seeded

TOKENIZER = tiny_tokenizer()
OPENING = torch.randint(1, 64, (70,), generator=seeded(5)).tolist()
NEXT = [7, 3, 11, 20, 2]
ENGINES: dict[str, Callable[[PreTrainedModel], Slot]] = {
    "eager": lambda model: Slot(EagerPasses(model, 64)),
    "static": lambda model: Slot(StaticPasses(model, 64)),
    "graph": lambda model: Slot(GraphPasses(model, 64, Replays())),
    "fixed width": lambda model: Slot(FixedWidthPasses(Slot(StaticPasses(model, 64)))),
}


class Counting(Transform):
    """Notes how many tokens of a prompt passes read, those without logits.

    After a draft that was kept as a whole its model reads one such token more.
    """

    def __init__(self, inner: Slot) -> None:
        super().__init__(inner)
        self.read_ahead: list[int] = []

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        if (ahead := len(tokens) - keep) > 1:
            self.read_ahead.append(ahead)
        return self.inner.extend(tokens, keep, hidden=hidden)

    def taken(self) -> list[int]:
        found, self.read_ahead = self.read_ahead, []
        return found


class Chat:
    """A session with counted runners, and a fresh one at each prompt to compare with."""

    def __init__(self, engine: str = "eager", family: str = "llama", policy: str = "svip") -> None:
        exact, noisy = (recurrent_model, noisy_recurrent) if family in FAMILIES else (random_model, noisy_copy)
        models = exact(family), noisy(family)
        make = ENGINES[engine]
        self.target, self.draft = (Slot(Counting(make(model))) for model in models)
        self.pair = Pair(self.target, (self.draft,), TOKENIZER, frozenset(), 1 << 31, (), ({},))
        self.drafter = ModelDrafter(self.draft, POLICIES[policy](**STOPPING.get(policy, {})))
        self.session = Session(self.pair, self.drafter, keep_caches=True)
        self._plain = Session(Pair(make(models[0]), (), TOKENIZER, frozenset(), 1 << 31, (), ()), None)

    def say(self, prompt: Sequence[int], **settings: object) -> list[int]:
        """The completion, after comparing it with the target's own."""
        table = SamplingTable(max_new_tokens=16, **settings)  # type: ignore[arg-type]
        tokens = self.session.generate(prompt, table).tokens
        assert tokens == self._plain.generate(prompt, table).tokens
        return list(tokens)

    def taken(self) -> tuple[list[int], list[int]]:
        return self.target.passes.taken(), self.draft.passes.taken()


@pytest.mark.parametrize("policy", ["constant", "svip"])
@pytest.mark.parametrize(
    ("engine", "family"), [*((engine, "llama") for engine in ENGINES), ("eager", "gemma2"), ("eager", "mistral")]
)
@pytest.mark.representatives("eager-llama-svip", "graph-llama-constant", "eager-gemma2-svip")
def test_a_turn_reads_only_what_is_new(engine: str, family: str, policy: str) -> None:
    chat = Chat(engine, family, policy)
    text = OPENING
    answer = chat.say(text)
    assert chat.taken() == ([69], [69])
    for _ in range(2):
        text = [*text, *answer, *NEXT]
        answer = chat.say(text)
        (ahead,), (draft_ahead,) = chat.taken()
        assert ahead == len(NEXT)  # the answer's last token takes the place of the prompt's, which the round reads
        assert draft_ahead < 2 * len(NEXT)  # with it what the target wrote when there was no room for a draft


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2"])
@pytest.mark.representatives("qwen3_next")
def test_a_recurrent_state_goes_on_from_the_last_turn(family: str) -> None:
    chat = Chat(family=family)
    answer = chat.say(OPENING)
    chat.taken()
    chat.say([*OPENING, *answer, *NEXT])
    assert chat.target.passes.taken()[0] == len(NEXT)
    chat.say([*OPENING, *NEXT])  # taken back: further than its saved states may reach
    chat.say(OPENING)


@pytest.mark.parametrize("which", [0, 1], ids=["target", "draft"])
@pytest.mark.parametrize(
    ("engine", "family"), [*((engine, "llama") for engine in ENGINES), ("eager", "gemma2"), ("eager", "qwen3_next")]
)
@pytest.mark.representatives("eager-llama-target", "eager-llama-draft", "static-llama-target")
def test_a_pass_that_fails_in_its_middle_leaves_nothing_behind(engine: str, family: str, which: int) -> None:
    chat = Chat(engine, family)
    model = (recurrent_model, noisy_recurrent)[which](family) if family in FAMILIES else None
    model = model or (random_model, noisy_copy)[which](family)
    for before in (0, 1, 5):  # in the prompt, the first round and a later one; after a text that is kept, or none
        passes = iter(range(before + 1))

        def fail(*_: object, passes: Iterator[int] = passes, before: int = before) -> None:
            if next(passes) == before:
                raise RuntimeError("257 against 256")

        hook = decoder_layers(model)[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="257 against 256"):
                chat.session.generate(OPENING[before:], SamplingTable(max_new_tokens=40))
        finally:
            hook.remove()
        chat.say([*OPENING, before])


def test_without_keeping_every_prompt_is_read_whole() -> None:
    chat = Chat()
    chat.session = Session(chat.pair, chat.drafter)
    answer = chat.say(OPENING)
    chat.taken()
    chat.say([*OPENING, *answer, *NEXT])
    assert chat.target.passes.taken() == [69 + 16 + 5]


def test_what_differs_is_read_again_from_there() -> None:
    chat = Chat()
    chat.say(OPENING)
    chat.taken()
    chat.say([*OPENING[:40], *NEXT, *NEXT])
    assert chat.taken() == ([9], [9])
    chat.say(OPENING[:35])  # less than is cached: the last token runs again, for its logits
    assert chat.taken() == ([], [])


def test_a_draft_that_paused_does_not_keep_what_was_taken_back() -> None:
    chat = Chat()
    answer = chat.say(OPENING)
    chat.session.drafter = None
    other = [*OPENING[:50], *NEXT]
    chat.say(other)
    assert chat.draft.length == 50
    chat.session.drafter = chat.drafter
    assert chat.say([*OPENING, *answer[:3]]) != []
    chat.taken()


def test_a_drafter_that_comes_back_takes_nothing_of_another_text_for_the_beginning() -> None:
    chat = Chat()
    chat.say(OPENING)
    first, second = chat.drafter, ModelDrafter(chat.draft, Constant(2))
    chat.session.drafter = second
    chat.say([*OPENING[:40], *NEXT])
    chat.session.drafter = first
    lengths: list[int] = []
    first.rollback = lengths.append  # type: ignore[method-assign]
    chat.say([*OPENING[:40], *NEXT, 9])
    assert lengths[0] == 0


def test_nothing_is_trusted_after_an_exception() -> None:
    chat = Chat()

    def fail(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.session.generate(OPENING, SamplingTable(), on_round=fail)
    chat.taken()
    chat.say(OPENING)
    assert chat.taken() == ([69], [69])


def test_a_completion_that_was_ended_early_is_kept_and_goes_on() -> None:
    chat = Chat()
    whole = chat.say(OPENING)
    rounds: list[object] = []
    done: Completion = chat.session.generate(
        OPENING, SamplingTable(max_new_tokens=16), on_round=rounds.append, enough=lambda: len(rounds) == 2
    )
    assert done.finish_reason is FinishReason.INTERRUPTED
    assert 2 <= len(done.tokens) < 16
    assert list(done.tokens) == whole[: len(done.tokens)]
    chat.taken()
    assert chat.say([*OPENING, *done.tokens])[: 16 - len(done.tokens)] == whole[len(done.tokens) :]
    assert chat.target.passes.taken() == []


def test_the_limit_ends_a_completion_even_if_it_is_enough_then() -> None:
    done = Chat().session.generate(OPENING, SamplingTable(max_new_tokens=1), enough=lambda: True)
    assert done.finish_reason is FinishReason.LENGTH


def test_a_stop_string_leaves_no_token_behind_it_in_the_caches() -> None:
    chat = Chat()
    said = chat.say(OPENING)
    text = TOKENIZER.decode(said[4:6])
    kept = chat.say(OPENING, stop=[text])
    assert len(kept) < 16
    chat.taken()
    chat.say([*OPENING, *kept, *NEXT])
    assert chat.target.passes.taken() == [len(NEXT)]


def test_sampling_draws_as_in_a_fresh_session() -> None:
    prompt = [*OPENING, *NEXT]
    table = SamplingTable(max_new_tokens=16, temperature=1.0, seed=3)
    kept, fresh = Chat(), Chat()
    kept.say(OPENING)
    assert kept.session.generate(prompt, table).tokens == fresh.session.generate(prompt, table).tokens


@pytest.mark.slow
def test_deterministic_turns_are_the_same_whatever_the_policy_in_bfloat16() -> None:
    changes = ["target.dtype=bfloat16", "draft.dtype=bfloat16", "deterministic=true", "sampling.max_new_tokens=40"]
    profile = resolve("embedded", overrides=changes).profile
    pair = load_pair(profile)
    found = set()
    for name in ("none", "constant", "svip"):
        session = Session(pair, build_drafter(pair, Setting(name)), keep_caches=True)
        text = pair.tokenizer.encode("Once upon a time")
        for more in ("Tom was sad.", "The next day,", ""):
            text += [*session.generate(text, profile.sampling).tokens, *pair.tokenizer.encode(more)]
        found.add(tuple(text))
    assert len(found) == 1


def test_every_model_of_a_hierarchy_keeps_its_cache() -> None:
    runners = [
        Slot(Counting(Slot(EagerPasses(model, 64)))) for model in (random_model("llama"), *2 * (noisy_copy("llama"),))
    ]
    pair = Pair(runners[0], tuple(runners[1:]), TOKENIZER, frozenset(), 1 << 31, (), ({}, {}))
    below = Setting.of({"name": "constant", "draft_length": 3})
    drafter = build_drafter(pair, Setting("constant", below=below))
    assert isinstance(drafter, PreVerifiedDrafter)
    session = Session(pair, drafter, keep_caches=True)
    table = SamplingTable(max_new_tokens=16)
    answer = session.generate(OPENING, table).tokens
    assert [runner.passes.taken()[0] for runner in runners] == [69] * 3
    session.generate([*OPENING, *answer, *NEXT], table)
    assert all(runner.passes.taken()[0] < 2 * len(NEXT) for runner in runners)


class InOneLine(PromptFormat):
    """Joins turns and answers by a character that the models know."""

    def conversation(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        lines = [text for pair in zip(turns, [*answers, ""], strict=False) for text in pair][:-1]
        return self._ids("+".join(lines) + "+")


def test_each_turn_of_a_record_reads_only_what_is_new() -> None:
    """The cost of a conversation grows with its length, not with the square of it."""
    read = {}
    chat = Chat()
    answers = Answerer(chat.session, InOneLine(TOKENIZER), SamplingTable(max_new_tokens=1))
    for turns in (10, 20, 40):
        answers.answer(Record(1, 1, {"turns": ["#$%&"] * turns}))
        read[turns] = [sum(taken) for taken in chat.taken()]
        answers.answer(Record(2, 2, {"turns": ["%$#&"] * turns}))
        assert [sum(taken) for taken in chat.taken()] == read[turns], "another record's turns are not these"
    for model in (0, 1):
        assert read[40][model] - read[20][model] == 2 * (read[20][model] - read[10][model]), read


def test_a_turn_after_passes_were_timed_is_read_from_its_beginning() -> None:
    chat, prompt = Chat(), [5, 3, 9]
    prompt += [*chat.say(prompt), 7]
    worthwhile(replace(chat.pair, vocabulary=64), 1)
    chat.say(prompt)
