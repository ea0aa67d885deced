"""What every table of a profile is, and those that name no model."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specctl.policies import Setting

Verification = Literal["token", "block"]
"""How the tokens of a sampled draft are verified."""
DEFAULT_POLICY = "svip"
MOST_LOGPROBS = 20
"""Of how many ids a result tells log-probabilities at each token."""
GRAMMARS = ("json_schema", "regex", "grammar")
"""The keys of a sampling table that say which texts there may be."""


class Table(BaseModel):
    """A TOML table: unknown keys are mistakes, values are never converted to another type, results are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SamplingTable(Table):
    """How tokens are sampled. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch that filter off."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    verification: Verification = "block"
    """Whether sampled draft tokens are verified one by one or as a block; greedy decoding is the same with both."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    seed: Annotated[int, Field(ge=0)] = 0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Of each token its log-probability, and how many of the likeliest ids are told with theirs; None for neither."""
    json_schema: dict[str, Any] | bool | None = None
    """The text is JSON that fits this schema; true and {} stand for any JSON."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The whole text matches this regular expression, in the syntax of Rust's regex."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """The text follows this grammar, in llguidance's variant of Lark."""

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if len(self.names_grammar) > 1:
            raise ValueError(f"{' and '.join(self.names_grammar)} each say what the text may be; give one of them")
        return self

    @property
    def names_grammar(self) -> list[str]:
        """The keys that say which texts there may be: none, or one."""
        return [name for name in GRAMMARS if getattr(self, name) is not None]


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
