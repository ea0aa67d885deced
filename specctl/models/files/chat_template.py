"""Chat templates without transformers, for messages that are plain text."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

OLDEST_JINJA = (3, 1, 6)
"""Sandboxes of earlier versions have known ways out."""
LEFT_OUT = ("dict", "lipsum", "cycler", "joiner")
"""Jinja's own functions that few templates call, and that a stranger's program need not have."""
PARTS = {"role", "content"}


class CannotRender(Exception):  # noqa: N818 - it is a finding
    """Only transformers renders this, or says what is wrong with it."""


class ChatTemplate:
    """A chat template with what transformers gives it. It may be a stranger's program, so it runs in Jinja's sandbox.

    Args:
        source: in Jinja's language.
        names: special tokens by the names that the template knows them by.

    Raises:
        CannotRender: there is no Jinja, or the template is not in its language.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise CannotRender from error
        self._names = names

    def render(self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Args:
            conversation: messages with a role and a content.
            add_generation_prompt: whether the assistant's turn is opened at the end.

        Raises:
            CannotRender: a message has more, there is none, or the template raised an error.
        """
        if not conversation or any({*message} - PARTS for message in conversation):
            raise CannotRender
        if not all(type(part) is str for message in conversation for part in message.values()):
            raise CannotRender
        given = {**self._names, "messages": [dict(one) for one in conversation], "tools": None, "documents": None}
        try:
            return self._template.render(**given, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            raise CannotRender from error


def _environment() -> "ImmutableSandboxedEnvironment":
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, jinja2.__version__.split(".")[:3])) < OLDEST_JINJA:
        raise CannotRender

    class Names(jinja2.utils.Namespace):
        """Whose attributes with an underscore would be Python's own."""

        def __init__(self, **values: Any) -> None:
            super().__init__()
            for name, value in values.items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise CannotRender
            super().__setitem__(name, value)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    for name in LEFT_OUT:
        del made.globals[name]
    made.globals |= {"namespace": Names, "raise_exception": _refuse, "strftime_now": _now}
    made.filters["tojson"] = _json
    return made


def _refuse(message: str) -> None:
    raise CannotRender(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
