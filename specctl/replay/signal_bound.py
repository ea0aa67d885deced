"""From the outputs of a benchmark, the best that any rule on the draft's signals could have done."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from specctl.decoding.sampling import Sampling
from specctl.models.loading.pair import Pair
from specctl.observing.results import SignalBound
from specctl.replay.bound import LONGEST, play_best
from specctl.replay.costs import CostTable
from specctl.replay.recording import read_sequence
from specctl.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote greedily after a prompt.

    Attributes:
        prompt, category: their names.
        ids: of the prompt.
        tokens: of the output.
        limit: how many there might have been.
    """

    prompt: str
    category: str
    ids: list[int]
    tokens: list[int]
    limit: int


def signal_bound(pair: Pair, texts: Iterable[Text], costs: CostTable) -> SignalBound:
    """Let the draft read each output, and play the best stopping rule for each category on its signals.

    Args:
        pair: with a draft; other drafts than the first take no part.
        texts: at least one.
        costs: of the first draft and the target.
    """
    traces = [_trace(pair, text) for text in texts]
    replays = play_best(traces, costs, frozenset(pair.eos))
    return SignalBound(
        prompts=len({trace.prompt for trace in traces}),
        tokens=sum(replay.tokens for replay in replays),
        drafted=sum(sum(replay.drafted) for replay in replays),
        passes=sum(len(replay.starts) for replay in replays),
    )


def _trace(pair: Pair, text: Text) -> Trace:
    unused = torch.Generator(pair.target.device)  # nothing is drawn in greedy decoding
    first = replace(pair, drafts=pair.drafts[:1], named_heads=({},))
    with torch.inference_mode():
        draft, _ = read_sequence(first, text.ids, text.tokens, text.limit, LONGEST, Sampling(), unused)
    where = text.prompt, text.category, 0, len(text.ids), text.limit
    return Trace(*where, text.tokens, draft, 0.0)
