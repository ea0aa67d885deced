"""From the outputs of a benchmark, the best that any rule on the draft's signals could have done."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from specctl.decoding.sampling import Sampling
from specctl.models.running.pair import Pair
from specctl.observing.findings import SignalBound
from specctl.replay.bound import LONGEST, play_best
from specctl.replay.costs import CostTable
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy output.

    Attributes:
        prompt, category: the prompt's id and category.
        ids: token ids of the prompt.
        tokens: token ids of the output.
        limit: the token limit of the output.
    """

    prompt: str
    category: str
    ids: list[int]
    tokens: list[int]
    limit: int


def signal_bound(pair: Pair, texts: Iterable[Text], costs: CostTable) -> SignalBound:
    """Read each output with the draft, and replay the best stopping rule of each category on the draft's signals.

    Args:
        pair: with a draft; only its first draft is used.
        texts: at least one.
        costs: of the first draft and the target.
    """
    traces = [greedy_trace(pair, text) for text in texts]
    replays = play_best(traces, costs, frozenset(pair.eos))
    return SignalBound(
        prompts=len({trace.prompt for trace in traces}),
        tokens=sum(replay.tokens for replay in replays),
        drafted=sum(sum(replay.drafted) for replay in replays),
        passes=sum(len(replay.starts) for replay in replays),
    )


def greedy_trace(pair: Pair, text: Text) -> Trace:
    """The trace of a text with the first draft."""
    unused = torch.Generator(pair.target.device)  # nothing is drawn in greedy decoding
    first = replace(pair, drafts=pair.drafts[:1], named_predictors=({},))
    with torch.inference_mode():
        draft = read_sequence(first, text.ids, text.tokens, text.limit, LONGEST, Sampling(), unused)
    origin = text.prompt, text.category, 0, len(text.ids), text.limit
    return Trace(*origin, text.tokens, draft, 0.0)
