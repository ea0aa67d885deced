"""What every table of a profile is, and those that name no model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specctl.policies import Setting

Verification = Literal["token", "block"]
"""How the tokens of a sampled draft are verified."""
DEFAULT_POLICY = "svip"
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""An id of the target's vocabulary: keys of tables are texts."""
Repetition = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
"""Of logits, as OpenAI's interface bounds the last two."""
MOST_LOGPROBS = 20
"""Of how many ids a result tells log-probabilities at each token."""
FILTERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""The keys of a sampling table that say which tokens may be drawn, by their probabilities."""
ABOUT_PROMPTS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
"""Those of a sampling table's rules that are about the prompt alone; generation_config.json may have them too."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", *ABOUT_PROMPTS)
"""The keys of a sampling table that make tokens more or less likely, by what the text has."""
GRAMMARS = ("json_schema", "regex", "grammar")
"""The keys of a sampling table that say which texts there may be."""


def with_one_grammar(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a sampling table; a grammar among them takes the place of one of another kind."""
    return {**(dict.fromkeys(GRAMMARS) if values.keys() & {*GRAMMARS} else {}), **values}


class Table(BaseModel):
    """A TOML table: unknown keys are mistakes, values are never converted to another type, results are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SamplingTable(Table):
    """How tokens are sampled. Temperature 0 is greedy.

    top_k 0, top_p 1, min_p 0, typical_p 1, epsilon_cutoff 0, eta_cutoff 0 and top_h 0 switch that filter off.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the tokens whose information is nearest to the entropy, of this total probability."""
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keeps tokens of at least this probability, and the likeliest one."""
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The same with a lower bound where the entropy is high: this, or its square root times exp(-entropy) if less."""
    top_h: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keeps the likeliest of 100 tokens as long as their part of the entropy is at most this."""
    verification: Verification = "block"
    """Whether sampled draft tokens are verified one by one or as a block; greedy decoding is the same with both."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    seed: Annotated[int, Field(ge=0)] = 0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Of each token its log-probability, and how many of the likeliest ids are told with theirs; None for neither."""
    repetition_penalty: Repetition = 1.0
    """Divides positive logits of ids that the text has, prompt included, and multiplies negative ones."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of ids that were written behind the prompt."""
    frequency_penalty: Penalty = 0.0
    """The same once for each time."""
    encoder_repetition_penalty: Repetition = 1.0
    """Multiplies positive logits of ids that the prompt has, and divides negative ones: above 1 favours them."""
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0)] = 0
    """So many ids in a row that the prompt has are not written again; 0 for no such rule."""
    logit_bias: dict[Token, Bias] | None = None
    """Added to the logits of these ids."""
    json_schema: dict[str, Any] | bool | None = None
    """The text is JSON that fits this schema; true and {} stand for any JSON."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The whole text matches this regular expression, in the syntax of Rust's regex."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """The text follows this grammar, in llguidance's variant of Lark."""

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if len(given := [name for name in self.rules if name in GRAMMARS]) > 1:
            raise ValueError(f"{' and '.join(given)} each say what the text may be; give one of them")
        return self

    @property
    def rules(self) -> list[str]:
        """The keys in force that say which tokens may follow a text, or change how likely they are."""
        return [name for name, nothing in self._nothing().items() if getattr(self, name) != nothing]

    @property
    def unruled(self) -> Self:
        """The same without such rules."""
        return self.model_copy(update=self._nothing())

    @classmethod
    def _nothing(cls) -> dict[str, Any]:
        return {name: cls.model_fields[name].default for name in (*PENALTIES, *GRAMMARS)}


class PromptTable(Table):
    """How a prompt becomes tokens: raw text, or through the tokenizer's chat template."""

    chat: bool | None = None
    """Whether texts go through the chat template; None for the rule: they do where the target's tokenizer has one."""
    system: str | None = None


class PolicyTable(Table):
    """A stopping policy by name, with its settings as further keys; the policy's dataclass defines and checks them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = DEFAULT_POLICY

    @property
    def setting(self) -> Setting:
        return Setting.of({"name": self.name, **(self.model_extra or {})})
