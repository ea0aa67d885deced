"""What llguidance compiles: the text of a grammar in its own form. No torch and no numpy here."""

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specctl.models.running.grammars.schema_form import formed

WRITTEN: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written as Python's json module does: where blanks are free, a model may write nothing else for ever.
What llguidance does not know is an error."""
STATES = 50_000
"""Most states of the automaton that a grammar makes while a text is written; llguidance's own limit is five times that.
Each takes a kilobyte or two, and one token may need many, for which all texts of a batch wait."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar in llguidance's own form.

    Attributes:
        grammar: what it compiles.
        schema: of a JSON schema, the form of it that texts are judged by, as JSON; None for other grammars.
    """

    grammar: str
    schema: str | None = None


def grammar_text(kind: str, text: str, *, checked: bool = False) -> GrammarText:
    """A grammar in llguidance's form.

    Args:
        kind: ``json_schema``, ``regex`` or ``grammar``.
        text: the schema as JSON, the regular expression, or the Lark grammar.
        checked: whether a schema is compared with the rules of its draft, which takes long for a long one.

    Raises:
        ValueError: it is no such grammar, in one line.
        RecursionError: it is nested too deeply.
    """
    if kind == "regex":
        return GrammarText(LLMatcher.grammar_from_regex(text))
    if kind == "grammar":
        return GrammarText(LLMatcher.grammar_from_lark(text))
    schema = formed(json.loads(text))
    if checked:
        from jsonschema import SchemaError

        from specctl.models.running.grammars.schema_fit import SchemaFit

        try:
            SchemaFit(schema).require_schema()
        except SchemaError as error:
            raise ValueError(f"{error.json_path} is not a schema: {one_line(error.message)[:200]}") from error
    return GrammarText(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WRITTEN), json.dumps(schema))


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A grammar at its beginning.

    Args:
        tokens: its ids.
        grammar: as `GrammarText` has it.

    Raises:
        ValueError: it cannot be compiled, or llguidance warns that it leaves out a part of it; in one line.
    """
    limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if wrong := [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings():
        raise ValueError(one_line(" ".join(wrong)))
    return matcher


def one_line(message: str) -> str:
    """Without the lines that only point at something above them."""
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^|"))
