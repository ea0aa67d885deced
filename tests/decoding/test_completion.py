from itertools import count

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.session import Session
from specctl.decoding.text import TextStream
from specctl.errors import RecordError
from specctl.models.passes.forward import Forward
from specctl.models.running.pair import Pair
from specctl.profile.schema import SamplingTable
from specctl.records import FinishReason
from tests.support.checkpoints import tiny_tokenizer
from tests.support.runner import Runner
from tests.support.toys import Script

TOKENIZER = tiny_tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<tool>"]})
TOKENIZER.add_tokens(["<stop>"])
PROMPT = TOKENIZER("once ")["input_ids"]
EOS = 0


class Reciter(Runner):
    """A `Slot` that knows what comes after the prompt by heart, but for the places in ``slips``."""

    length = 0

    def __init__(self, text, slips=(), sharpness=50.0):
        said = [*PROMPT, *TOKENIZER(text)["input_ids"]]
        self.said = [1 if place in slips else token for place, token in enumerate(said)]
        self.context, self.device = 1 << 31, torch.device("cpu")
        self._sharpness = sharpness

    def extend(self, tokens, keep, *, hidden=False):  # noqa: ARG002 - the seam's own signature
        self.length += len(tokens)
        logits = torch.zeros(keep, len(TOKENIZER))
        for row, place in enumerate(range(self.length - keep, self.length)):
            token = self.said[place + 1] if place + 1 < len(self.said) else EOS
            logits[row, token] = self._sharpness
        return Forward(logits, None)

    def rollback(self, length):
        self.length = min(self.length, length)


def recite(text, limit=99, *, stop=(), eos=frozenset({EOS}), drafts=(3,), on_round=None):
    drafter = ModelDrafter(Reciter(text, slips={7, 12}), Script(*drafts)) if drafts else None
    pair = Pair(Reciter(text), (), TOKENIZER, eos, 1 << 31, (), ())
    settings = SamplingTable(max_new_tokens=limit, stop=list(stop))
    return Session(pair, drafter).generate(PROMPT, settings, on_round=on_round)


def ids(text):
    return tuple(TOKENIZER(text)["input_ids"])


DRAFTS = [(), (1,), (3,), (2, 5), (40,)]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_it_ends_with_the_sequence(drafts):
    done = recite("upon a thé time", drafts=drafts)
    assert (done.text, done.finish_reason) == ("upon a thé time", FinishReason.STOP)
    assert done.tokens == (*ids("upon a thé time"), EOS)
    assert done.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_it_ends_at_the_limit(drafts, limit):
    done = recite("upon a time", limit, drafts=drafts)
    assert (done.tokens, done.finish_reason) == (ids("upon a time")[:limit], FinishReason.LENGTH)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_limit_and_the_end_may_fall_together(drafts):
    assert recite("upon", 5, drafts=drafts).finish_reason == FinishReason.STOP
    assert recite("upon", 4, drafts=drafts).finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_first_of_several_ends_of_sequence_counts(drafts):
    other = ids("!")[0]
    done = recite("upon! a time", eos=frozenset({EOS, other}), drafts=drafts)
    assert done.tokens == ids("upon!")
    assert done.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (["a t"], "upon ", "upon a th"),  # the last token holds more than the stop string
        (["on a"], "up", "upon a"),
        (["time", "the"], "upon a ", "upon a the"),
        (["é"], "upon a the caf", "upon a the café"),
        (["u"], "", "u"),
        (["never"], "upon a the café", "upon a the café"),
    ],
)
def test_a_stop_string_ends_text_and_tokens_whatever_was_drafted(drafts, stop, text, kept):
    done = recite("upon a the café", 15, stop=stop, drafts=drafts)
    assert (done.text, done.tokens) == (text, ids(kept))
    assert done.finish_reason == (FinishReason.LENGTH if stop == ["never"] else FinishReason.STOP)


def test_rounds_are_told_in_order_and_add_up():
    seen = []
    done = recite("upon a time", on_round=seen.append)
    assert tuple(seen) == done.rounds
    assert [round_.index for round_ in seen] == list(range(len(seen)))
    assert tuple(token for round_ in seen for token in round_.emitted) == done.tokens
    assert any(round_.accepted for round_ in seen)
    assert not all(round_.fully_accepted for round_ in seen)


def test_the_parts_of_the_time_are_not_more_than_the_whole():
    done = recite("upon a time")
    assert 0 < done.prefill_seconds <= done.first_token_seconds <= done.total_seconds
    parts = sum(round_.draft_seconds + round_.verify_seconds for round_ in done.rounds)
    assert done.prefill_seconds + parts <= done.total_seconds


def test_the_prompt_is_read_with_the_first_draft(monkeypatch):
    """By a clock that each look moves on by a second: each phase takes one, the first passes share with the prompt."""
    clock = count()
    monkeypatch.setattr("specctl.decoding.round.working_seconds", lambda: float(next(clock)))
    monkeypatch.setattr("specctl.decoding.drafters.working_seconds", lambda: float(next(clock)))
    passes = {"target": [], "draft": []}

    class Noting(Reciter):
        def __init__(self, name):
            super().__init__("upon a time")
            self.passes = passes[name]

        def extend(self, tokens, keep, *, hidden=False):
            self.passes.append((len(tokens), keep))
            return super().extend(tokens, keep, hidden=hidden)

    pair = Pair(Noting("target"), (), TOKENIZER, frozenset({EOS}), 1 << 31, (), ())
    done = Session(pair, ModelDrafter(Noting("draft"), Script(3))).generate(PROMPT, SamplingTable())
    unread, first = len(PROMPT) - 1, done.rounds[0]
    assert passes["target"][0] == (len(PROMPT) + 3, 4)
    assert passes["draft"][:3] == [(len(PROMPT), 1), (1, 1), (1, 1)]
    assert [keep for _, keep in passes["target"]] == [round_.drafted + 1 for round_ in done.rounds]
    # The clock is looked at before and after the text's first step, too.
    assert [round_.draft_seconds for round_ in done.rounds] == [
        3.0 - unread / len(PROMPT),
        *[1.0] * (len(done.rounds) - 1),
    ]
    assert first.verify_seconds == 4 / (len(PROMPT) + 3)
    assert all(round_.verify_seconds == 1.0 for round_ in done.rounds[1:])
    assert all(round_.total_seconds == round_.draft_seconds + round_.verify_seconds for round_ in done.rounds)
    assert done.prefill_seconds == done.first_token_seconds - first.total_seconds


def test_tokens_arrive_at_the_end_of_each_round(monkeypatch):
    """By a clock that each look moves on by a second, and that whoever watches a round stops for an hour."""
    clock = count()
    monkeypatch.setattr("specctl.decoding.session.working_seconds", lambda: float(next(clock)))
    watched = recite("upon a time", on_round=lambda _: [next(clock) for _ in range(3600)])
    # The clock is looked at when a round ends and when the watcher ends, between which nothing is counted.
    assert watched.arrivals == tuple(1.0 + index for index in range(len(watched.rounds)))
    assert watched.first_token_seconds == watched.arrivals[0]
    assert watched.total_seconds == watched.arrivals[-1] + 1.0
    assert watched.summary.arrivals_ms == tuple(1e3 * seconds for seconds in watched.arrivals)


def session(text="upon a time", context=99, sharpness=50.0):
    pair = Pair(Reciter(text, sharpness=sharpness), (), TOKENIZER, frozenset({EOS}), context, (), ())
    return Session(pair, None)


def test_a_limit_beyond_the_context_is_lowered_to_it():
    done = session(context=len(PROMPT) + 4).generate(PROMPT, SamplingTable())
    assert (done.tokens, done.finish_reason) == (ids("upon"), FinishReason.LENGTH)


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(RecordError, match=f"has {len(PROMPT)} tokens; the target holds {len(PROMPT)}") as caught:
        session(context=len(PROMPT)).generate(PROMPT, SamplingTable())
    assert caught.value.kind == "prompt_too_long"


def test_a_special_token_can_be_a_stop_string():
    done = session("upon<tool> a time").generate(PROMPT, SamplingTable(stop=["<tool>"]))
    assert (done.text, done.finish_reason) == ("upon", FinishReason.STOP)


def test_a_seed_is_the_same_text_and_another_is_another():
    def say(seed, offset=0):
        settings = SamplingTable(temperature=1.0, seed=seed, max_new_tokens=20)
        return session(sharpness=0.0).generate(PROMPT, settings, seed_offset=offset).tokens

    assert say(1) == say(1)
    assert say(1) != say(2)
    assert say(1, offset=1) == say(2)
    assert say((1 << 64) + 1) == say(1), "torch holds 64 bits; any number is a seed"


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("stop", [(), ("p>",), ("<stop>", "zz")])
def test_an_end_that_the_tokenizer_spells_as_text_is_no_part_of_the_text(drafts, stop):
    """An added token that is not special, as generation configurations name them."""
    (end,) = ids("<stop>")
    rounds = []
    done = recite("a thin <stop> and more", drafts=drafts, stop=stop, eos=frozenset({EOS, end}), on_round=rounds.append)
    assert (done.text, done.finish_reason, done.tokens[-1]) == ("a thin ", FinishReason.STOP, end)
    stream = TextStream(TOKENIZER, PROMPT, frozenset({EOS, end}))
    pieces = [stream.push(round_.emitted) for round_ in rounds]
    assert "".join([*pieces, stream.flush()]) == done.text
    plain = recite("a thin <stop> and", drafts=drafts)
    assert (plain.text, plain.tokens[-1]) == ("a thin <stop> and", EOS)
