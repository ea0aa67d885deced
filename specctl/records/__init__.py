"""What happened while text was generated."""

from specctl.records.completions import Completion, CompletionSummary, FinishReason
from specctl.records.rounds import DraftStep, ExtraToken, Round, RoundSummary, StopReason, TokenLogprobs

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
