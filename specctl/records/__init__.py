"""What happened while text was generated."""

from specctl.records.completions import Completion, CompletionSummary, FinishReason
from specctl.records.logprobs import TokenLogprobs
from specctl.records.rounds import DraftStep, ExtraToken, Round, RoundSummary, StopReason

__all__ = [
    "Completion",
    "CompletionSummary",
    "DraftStep",
    "ExtraToken",
    "FinishReason",
    "Round",
    "RoundSummary",
    "StopReason",
    "TokenLogprobs",
]
