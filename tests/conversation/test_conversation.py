"""A conversation with the embedded pair."""

from collections.abc import Callable

import pytest

from specctl.conversation import SLASHES, Chat, Transcript, Turn, is_slash, run_slash
from specctl.decoding.answers import Answerer
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.errors import ProfileError, SpecctlError, UsageError
from specctl.jsonl import Record
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.profile import Profile, resolve
from specctl.records import FinishReason

PROFILE = resolve(overrides=["sampling.max_new_tokens=24", "prompt.chat=true"], environ={}).profile


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(PROFILE)


@pytest.fixture
def chat(pair: Pair) -> Chat:
    return Chat(pair, PROFILE)


def with_prompt(profile: Profile, **values: object) -> Profile:
    return profile.model_copy(update={"prompt": profile.prompt.model_copy(update=values)})


def said(chat: Chat, text: str) -> str:
    chat.say(text)
    turn = chat.answer()
    assert turn is not None
    assert turn.answer is not None
    return turn.answer


def alone(chat: Chat) -> str:
    """What the target alone answers to the last turn, from nothing."""
    prompts = PromptFormat.of(chat.pair.tokenizer, chat.profile.prompt)
    answerer = Answerer(Session(chat.pair, None), prompts, chat.profile.sampling)
    record = chat.transcript.as_record(chat=True, system=None)
    return answerer.answer(Record(1, 1, {"messages": record["messages"]}))[0].text


def test_every_answer_is_the_targets_own(chat: Chat) -> None:
    for text in ("Tom has 3 apples and buys 4 more. How many?", "He eats 2. How many are left?", "Why?"):
        assert said(chat, text) == alone(chat)
    assert chat.metrics.sequences == 3
    assert [turn.finish_reason for turn in chat.transcript.turns] != [None] * 3


def test_a_turn_does_not_read_the_conversation_again(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    extend = chat.pair.target.extend

    def counted(tokens, keep, **more):  # type: ignore[no-untyped-def]
        read.extend([len(tokens) - keep] if len(tokens) > keep else [])  # of a prompt
        return extend(tokens, keep, **more)

    monkeypatch.setattr(chat.pair.target, "extend", counted)
    said(chat, "Tom has 3 apples and buys 4 more. How many apples does Tom have now?")
    first = read.pop()
    said(chat, "Why?")
    (second,) = read
    assert second < first / 2


def test_plain_turns_are_joined_line_by_line(pair: Pair) -> None:
    chat = Chat(pair, with_prompt(PROFILE, chat=False))
    answer = said(chat, "Once upon a time")
    chat.say("Then")
    ids = chat.answerer.prompts.plain(["Once upon a time", "Then"], [answer])
    assert chat._prompt_ids() == ids
    assert pair.tokenizer.decode(ids, skip_special_tokens=True) == f"Once upon a time\n{answer}\nThen\n"


def test_the_policy_can_be_switched_and_the_text_stays(chat: Chat) -> None:
    first = said(chat, "Tell me a story.")
    for policy in ("none", "constant:draft_length=2", "specdec++", "svip:threshold=0.3"):
        run_slash(chat, f"/policy {policy}")
        assert run_slash(chat, "/retry").answer
        turn = chat.answer()
        assert turn is not None
        assert turn.answer == first
        assert turn.completion is not None
        assert any(round_.drafted for round_ in turn.completion.rounds) == (policy != "none")
    assert len(chat.transcript.turns) == 1


def test_a_policy_that_cannot_run_changes_nothing(pair: Pair) -> None:
    headless = load_pair(PROFILE, with_predictors=False)
    for chat, policy in ((Chat(headless, PROFILE), "specdec++"), (Chat(pair, PROFILE), "svpi")):
        before = chat.policy
        with pytest.raises(ProfileError):
            run_slash(chat, f"/policy {policy}")
        assert chat.policy == before
        said(chat, "Hello")


def test_a_target_alone_has_no_policy_to_switch(pair: Pair) -> None:
    chat = Chat(pair, PROFILE.model_copy(update={"draft": None}))
    assert chat.policy == "none"
    with pytest.raises(UsageError, match="no draft"):
        run_slash(chat, "/policy svip")
    said(chat, "Hello")


def test_retry_draws_anew_when_sampling(chat: Chat) -> None:
    run_slash(chat, "/set temperature=1")
    first = said(chat, "Tell me a story.")
    found = {first}
    for _ in range(3):
        chat.answer()
        found.add(chat.transcript.last().answer or "")
    assert len(found) > 1
    assert chat.metrics.sequences == 4


def test_undo_reset_and_the_same_again(chat: Chat) -> None:
    first = said(chat, "Tell me a story.")
    said(chat, "Go on.")
    assert "Go on." in run_slash(chat, "/undo").text
    assert [turn.answer for turn in chat.transcript.turns] == [first]
    run_slash(chat, "/reset")
    assert chat.transcript.turns == []
    assert said(chat, "Tell me a story.") == first


def test_a_conversation_that_fills_the_context_says_what_to_do(chat: Chat) -> None:
    first = said(chat, "Tell me a story.")
    chat.say("word " * 5000)
    with pytest.raises(SpecctlError, match=r"the conversation has \d+ tokens; the target holds 1024.*\n/undo"):
        chat.answer()
    assert [turn.answer for turn in chat.transcript.turns] == [first]
    chat.say("word " * 900)
    run_slash(chat, "/set max_new_tokens=1000")
    turn = chat.answer()
    assert turn is not None
    assert chat.fills_context(turn) == (turn.finish_reason is FinishReason.LENGTH)


@pytest.mark.parametrize("text", ["\ud800", "a\udcff"])
def test_a_turn_that_no_tokenizer_reads_is_taken_back(chat: Chat, text: str) -> None:
    chat.say(text)
    with pytest.raises(SpecctlError, match="surrogate"):
        chat.answer()
    assert chat.transcript.turns == []


def interrupting(after: int) -> Callable[..., None]:
    rounds: list[object] = []

    def watch(*round_: object) -> None:
        rounds.append(round_)
        if len(rounds) == after:
            raise KeyboardInterrupt

    return watch


def test_an_answer_that_is_enough_ends_there_and_stays(chat: Chat) -> None:
    whole = said(chat, "Tell me a story.")
    turn = chat.answer(enough=lambda: True)
    assert turn is not None
    assert turn.finish_reason is FinishReason.INTERRUPTED
    assert turn.answer
    assert whole.startswith(turn.answer)
    assert said(chat, "Go on.") == alone(chat)


def test_an_interrupt_within_a_round_keeps_the_rounds_before_it(chat: Chat) -> None:
    whole = said(chat, "Tell me a story.")
    turn = chat.answer(interrupting(after=2))
    assert turn is not None
    assert turn.finish_reason is FinishReason.INTERRUPTED
    assert turn.answer
    assert whole.startswith(turn.answer)
    assert said(chat, "Go on.") == alone(chat)


def test_an_interrupt_before_the_first_round_leaves_all_as_it_was(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = said(chat, "Tell me a story.")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat._session, "generate", interrupt)
        assert chat.answer() is None  # a retry
        chat.say("Go on.")
        assert chat.answer() is None
    assert [turn.answer for turn in chat.transcript.turns] == [whole]
    assert said(chat, "Go on.") == alone(chat)


# Slash commands


def test_what_begins_with_two_slashes_is_said() -> None:
    assert [is_slash(line) for line in ("/help", "/", "//help", "help", " /help")] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sett", "no command /sett; did you mean '/set'"),
        ("/", "no command /"),
        ("/save", "/save needs FILE"),
        ("/undo 3", "/undo takes no argument"),
        ("/undo", "nothing has been said"),
        ("/retry", "nothing has been said"),
        ("/set temprature=1", "did you mean 'temperature'"),
        ("/set engine=eager", "no such setting"),
        ("/set draft.model=x", "no such setting"),
        ("/set temperature", "expected KEY=VALUE"),
        ("/set temperature=-1", "greater than or equal to 0"),
        ("/set stop=a", "must be a list"),
        ("/set chat=false", None),
        ("/load nowhere.jsonl", "cannot read nowhere.jsonl"),
    ],
)
def test_mistakes_are_explained_and_change_nothing(chat: Chat, line: str, message: str | None) -> None:
    before = chat.profile
    if message is None:
        run_slash(chat, line)
        assert chat.profile != before
        return
    with pytest.raises(SpecctlError, match=message):
        run_slash(chat, line)
    assert chat.profile == before


def test_settings_may_be_named_in_full_and_are_shown(chat: Chat) -> None:
    run_slash(chat, "/set sampling.top_k=7")
    run_slash(chat, "/set temperature = 0.5")
    assert (chat.profile.sampling.top_k, chat.profile.sampling.temperature) == (7, 0.5)
    assert "sampling.top_k = 7" in run_slash(chat, "/set").text


def test_a_system_message_needs_a_template(pair: Pair, chat: Chat) -> None:
    assert "no system message" in run_slash(chat, "/system").text
    run_slash(chat, "/system Be kind.")
    assert chat.profile.prompt.system == "Be kind."
    with pytest.raises(UsageError, match="needs a chat template"):
        run_slash(Chat(pair, with_prompt(PROFILE, chat=False)), "/system Be kind.")
    with pytest.raises(UsageError, match="needs a chat template"):
        Chat(pair, with_prompt(PROFILE, chat=False, system="Be kind."))


def test_without_a_template_only_plain_turns_can_be_had(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="no chat template"):
        Chat(pair, PROFILE)
    chat = Chat(pair, with_prompt(PROFILE, chat=False))
    with pytest.raises(UsageError, match="no chat template"):
        run_slash(chat, "/set chat=true")
    said(chat, "Once upon a time")


def test_saved_and_loaded_it_goes_on_alike(chat: Chat, tmp_path) -> None:  # type: ignore[no-untyped-def]
    said(chat, "Tell me a story.")
    run_slash(chat, f"/save {tmp_path}/talk.jsonl")
    then = said(chat, "Go on.")
    run_slash(chat, "/reset")
    assert run_slash(chat, f"/load {tmp_path}/talk.jsonl").text.startswith("1 turn from")
    assert said(chat, "Go on.") == then


def test_a_loaded_turn_without_an_answer_can_be_answered(chat: Chat) -> None:
    chat.load(Transcript([Turn("Tell me a story.")], "Be kind."))
    assert chat.profile.prompt.system == "Be kind."
    run_slash(chat, "/retry")
    turn = chat.answer()
    assert turn is not None
    assert turn.answer


def test_help_and_stats_name_what_there_is(chat: Chat) -> None:
    said(chat, "Hello")
    text = run_slash(chat, "/help").text
    assert all(name in text for name in SLASHES)
    stats = dict(line.rsplit(maxsplit=1) for line in run_slash(chat, "/stats").text.splitlines())
    assert stats["answers"] == "1"
    assert float(stats["tokens/s"]) > 0
    assert stats["acceptance rate"].endswith("%")


def test_stats_show_no_acceptance_rate_where_nothing_was_drafted(chat: Chat) -> None:
    run_slash(chat, "/policy none")
    said(chat, "Hello")
    stats = dict(line.rsplit(maxsplit=1) for line in run_slash(chat, "/stats").text.splitlines())
    assert stats["acceptance rate"] == "-"
