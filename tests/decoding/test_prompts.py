import pytest
from checkpoints import tiny_tokenizer

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import RecordError, UsageError
from specctl.profile.schema import PromptTable

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def tokenizer(template=TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def text(ids):
    return tiny_tokenizer().decode(ids)


def test_a_prompt_is_fed_as_it_is():
    assert text(PromptFormat(tokenizer(None)).prompt("  as is\n")) == "  as is\n"
    assert text(PromptFormat(tokenizer(), chat=False).prompt("  as is\n")) == "  as is\n"


def test_the_template_is_used_where_there_is_one_and_nobody_says_otherwise():
    assert text(PromptFormat(tokenizer()).prompt("hi")) == "<user>hi<answer>"
    assert text(PromptFormat(tokenizer(), chat=False).conversation(["a", "b"], ["A"])) == "a\nA\nb\n"
    unset, said, raw = PromptTable(), PromptTable(chat=True), PromptTable(chat=False)
    assert "--raw" in (PromptFormat.of(tokenizer(), unset).note(unset) or "")
    for made, table in ((tokenizer(), said), (tokenizer(), raw), (tokenizer(None), unset)):
        assert PromptFormat.of(made, table).note(table) is None


def test_a_system_message_needs_a_template_to_stand_in():
    with pytest.raises(UsageError, match="a system message needs a chat template"):
        PromptFormat.of(tokenizer(None), PromptTable(system="be"))


def test_with_chat_a_prompt_is_what_the_user_says():
    assert text(PromptFormat(tokenizer(), chat=True).prompt("hi")) == "<user>hi<answer>"
    assert text(PromptFormat(tokenizer(), chat=True, system="be").prompt("hi")) == "<system>be<user>hi<answer>"


def test_a_chat_may_bring_its_own_system_prompt():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert text(PromptFormat(tokenizer(), system="be").messages(messages)) == "<system>own<user>hi<answer>"
    assert text(PromptFormat(tokenizer(), system="be").messages(messages[1:])) == "<system>be<user>hi<answer>"
    assert messages[0]["content"] == "own"


def test_special_tokens_of_a_template_are_not_added_twice():
    from transformers import AutoTokenizer

    from specctl.profile.known_names import model_path

    embedded = AutoTokenizer.from_pretrained(model_path("target"))
    ids = PromptFormat(embedded, chat=True).prompt("What is 2 + 2?")
    assert ids.count(embedded.bos_token_id) == 1
    assert PromptFormat(embedded).prompt("What")[0] == embedded.bos_token_id


def test_answers_are_fed_back():
    prompts = PromptFormat(tokenizer(), system="be")
    assert text(prompts.conversation(["a", "b"], [])) == "<system>be<user>a<answer>"
    assert text(prompts.conversation(["a", "b"], ["A"])) == "<system>be<user>a<assistant>A<user>b<answer>"


def test_without_a_template_a_conversation_is_lines():
    prompts = PromptFormat(tokenizer(None))
    assert text(prompts.conversation(["a", "b"], [])) == "a\n"
    assert text(prompts.conversation(["a", "b"], ["A"])) == "a\nA\nb\n"


@pytest.mark.parametrize(
    "ask",
    [
        lambda prompts: prompts.messages([{"role": "user", "content": "hi"}]),
        lambda prompts: prompts.prompt("hi"),
        lambda prompts: prompts.conversation(["a"], []),
    ],
    ids=["messages", "prompt", "turns"],
)
def test_a_chat_needs_a_template(ask):
    with pytest.raises(RecordError, match="no chat template") as caught:
        ask(PromptFormat(tokenizer(None), chat=True, system="be"))
    assert caught.value.kind == "no_chat_template"


def test_a_template_may_refuse():
    refusing = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RecordError, match="roles must alternate") as caught:
        PromptFormat(refusing, chat=True).prompt("hi")
    assert caught.value.kind == "chat_template"


def test_nothing_cannot_be_continued():
    with pytest.raises(RecordError, match="empty") as caught:
        PromptFormat(tokenizer(None)).prompt("")
    assert caught.value.kind == "empty_prompt"


@pytest.mark.parametrize("chat", [False, True])
def test_half_a_character_cannot_be_read(chat):
    with pytest.raises(RecordError, match=r"'\\ud83d'") as caught:
        PromptFormat(tokenizer(), chat=chat).prompt("a\ud83db")
    assert caught.value.kind == "invalid_text"
