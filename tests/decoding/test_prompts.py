import pytest

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import RecordError, UsageError
from specctl.profile.schema import PromptTable
from tests.support.checkpoints import tiny_tokenizer

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

    from specctl.profile.schema import model_path

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


STRICT = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}{% if m.role == 'user' and m.name %}"
    " {{ m.name }}{% endif %}>{{ m.content }}{% elif m.role == 'assistant' %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{% endfor %}<answer>"
)
TOOLS = STRICT.replace("('system', 'user')", "('system', 'user', 'tool')").replace(" | tojson", "")
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"at": 1}'}}


def written(template, *messages):
    return text(PromptFormat(tokenizer(template)).messages(messages))


def test_developer_is_system_where_the_template_does_not_know_it():
    rule = {"role": "developer", "content": "be"}
    assert written(STRICT, rule, USER) == "<system>be<user>hi<answer>"
    assert written(TEMPLATE, rule, USER) == "<developer>be<user>hi<answer>"
    refusing = "{% if messages[0].role == 'developer' %}{{ raise_exception('who?') }}{% endif %}" + STRICT
    assert written(refusing, rule, USER) == "<system>be<user>hi<answer>"
    assert text(PromptFormat(tokenizer(STRICT), system="own").messages([rule, USER])) == "<system>be<user>hi<answer>"
    with pytest.raises(RecordError, match="no systems here"):
        written(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no systems here') }}{% endif %}<answer>", rule
        )


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (STRICT, [USER, {"role": "tool", "content": "4", "tool_call_id": "1"}], r"messages\.1 \(role tool\)"),
        (STRICT, [{**USER, "role": "system", "name": "Bo"}, USER], r"messages\.0\.name"),
        (TEMPLATE, [{**USER, "name": "Bo"}], r"messages\.0\.name"),
        (TEMPLATE, [USER, {"role": "assistant", "tool_calls": [CALL]}], r"messages\.1\.tool_calls\.0\.function\.name"),
        (TEMPLATE, [{**USER, "mood": {"a": 1}}], r"messages\.0\.mood"),
        (TEMPLATE, [USER, {"role": "assistant", "content": "a", "refusal": "no"}, USER], r"messages\.1\.refusal"),
        (TEMPLATE, [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER], "reasoning_content"),
        ("{{ messages[0].content }}<answer>", [USER, {**USER, "content": "hi"}], r"messages\.1 \(role user\)"),
        ("{{ messages[-1].content }}", [{**USER, "role": "developer"}, USER], r"messages\.0 \(role system\)"),
    ],
)
def test_what_a_template_leaves_out_is_refused(template, messages, place):
    with pytest.raises(RecordError, match=f"the chat template has no place for .*{place}") as caught:
        written(template, *messages)
    assert caught.value.kind == "chat_template"


def test_a_system_message_of_the_profile_that_a_template_leaves_out_is_named_as_such():
    prompts = PromptFormat(
        tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"), system="be"
    )
    with pytest.raises(RecordError, match="no place for the profile's system message"):
        prompts.messages([USER])
    with pytest.raises(RecordError, match=r"no place for messages\.0\.name"):
        PromptFormat(tokenizer(), system="be").messages([{**USER, "name": "Bo"}])


def test_what_a_template_writes_is_what_transformers_writes():
    chat = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi", "name": "Bo"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "find"},
    ]
    filled = [chat[0], chat[1], {**chat[2], "content": ""}, chat[3]]
    whole = tokenizer(TOOLS).apply_chat_template(filled, add_generation_prompt=True, tokenize=False)
    assert written(TOOLS, *chat) == whole == '<system>be<user Bo>hi<assistant><call>find{"at": 1}<tool>4<answer>'
    for change in (" | tojson", ".items() | list"):
        assert '{"at": 1}' in written(TOOLS.replace("arguments", f"arguments{change}"), *chat).replace(
            "[('at', 1)]", '{"at": 1}'
        )


def test_a_template_may_change_what_it_writes_and_leave_out_earlier_reasoning():
    loud = TEMPLATE.replace("m.content", "(m.content | upper)")
    assert written(loud, USER) == "<user>HI<answer>"
    last = "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    template = TEMPLATE.replace("{% endfor %}", last)
    assert written(template, USER, answer, USER) == "<user>hi<assistant>a<user>hi<answer>"


def test_empty_messages_leave_nothing_out():
    assert written(STRICT, {"role": "developer", "content": " "}, USER) == "<user>hi<answer>"
    nothing = {"refusal": None, "tool_calls": [], "name": "", "audio": None, "annotations": [], "reasoning_content": ""}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a", "annotations": []}], "type": "message"}
    assert written(TEMPLATE, USER, {**answer, **nothing}, USER) == "<user>hi<assistant>a<user>hi<answer>"
    assert (
        written(TEMPLATE, USER, {"role": "assistant", "content": None}, USER) == "<user>hi<assistant><user>hi<answer>"
    )


def test_a_template_that_reads_parts_only_gets_parts():
    """As those of SmolVLM or LLaVA: of a string they would write nothing."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    made = PromptFormat(tokenizer(template), system="be")
    assert text(made.prompt("hi")) == "<system>be<user>hi<answer>"
    assert text(made.conversation(["a", "b"], ["A"])) == "<system>be<user>a<assistant>A<user>b<answer>"
    strict = "{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}"  # raises of a string
    assert text(PromptFormat(tokenizer(strict)).prompt("hi")) == "hi"


def test_a_picture_is_an_error_of_its_message():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    with pytest.raises(RecordError, match=r'messages\.0\.content\.1\.type is "image_url", and only parts of type text'):
        PromptFormat(tokenizer()).messages(asked)
