"""Records of a results file that are no runs: of prompts, of candidates, and of the whole benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OraclePasses:
    """The fewest target passes for a prompt that Theorem 4.1 of SpecDec++ allows, |S| + 1."""

    prompt: str
    passes: int


@dataclass(frozen=True, slots=True)
class Stretches:
    """For each turn of a prompt, how verification would read the baseline's text, see `specctl.replay.pearl`.

    Attributes:
        turns: of each, the draft tokens from where the draft begins afresh to the rejected one, or to the text's end.
    """

    prompt: str
    turns: list[list[int]]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that cannot be run on these models, with the reason."""

    prompt: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A peer that failed in a run, with the reason; it is not asked again in the same benchmark."""

    candidate: str
    reason: str


@dataclass(frozen=True, slots=True)
class SignalBound:
    """The best stopping rule on entropy and top probability, replayed on one of the baseline's runs of each prompt.

    Attributes:
        prompts, tokens: number of prompts, and of tokens in their outputs.
        drafted, passes: number of draft steps and of target passes that the rule makes for these tokens.
    """

    prompts: int
    tokens: int
    drafted: int
    passes: int
