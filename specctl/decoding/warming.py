"""Passes that run once before anything is answered or timed."""

import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import generator_on
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.passes.fixed_buffers import SHORTEST, span_class
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.predictors.predictor_checkpoint import signal_of
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.graph import WIDTHS, width_class
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, Signal
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.profile.schema import SamplingTable


def warm_up(pair: Pair, settings: SamplingTable, *, tree: TreeSize | None = None, longest: int = 1) -> None:
    """Run each kind of pass once, so that no request waits for compiling or capturing.

    Args:
        pair: loaded models.
        settings: the sampling table in force.
        tree: the size of the first draft's trees; None for chains.
        longest: the most tokens drafted in a round. Passes of all widths up to it are captured, for texts as long as a
            short prompt with its completion; other passes are captured when they first run.
    """
    captures = any(runner.captures for runner in (pair.target, *pair.drafts))
    few = ordinary_tokens(4, pair.vocabulary, pair.eos)
    if captures:
        end = min(SHORTEST + settings.max_new_tokens, pair.shared_context - longest - 4)
        span = span_class(end)  # the longest first: growing buffers discard all captures
        while span > SHORTEST:
            text = [few[place % 4] for place in range(span // 2)]
            _warm_up_after(text, pair, settings, tree, longest)
            span //= 2
    _warm_up_after(few, pair, settings, tree, longest if captures else 1)


def _warm_up_after(text: list[int], pair: Pair, settings: SamplingTable, tree: TreeSize | None, longest: int) -> None:
    """Run the passes of `warm_up` after a text of at least four tokens."""
    sampling = Sampling.of(settings.unruled)  # token rules do not change the passes
    widths = [width for width in WIDTHS if 1 < width <= width_class(min(max(longest, 1) + 1, WIDEST))]
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)
            _observe_states(runner, len(text))
            runner.extend(text, keep=0)  # creates the buffers
            if runner.verifies and runner not in pair.drafts[-1:]:
                for width in (1, *widths):
                    runner.rollback(len(text))
                    runner.extend([text[place % 4] for place in range(width)], keep=width)
        if tree is not None and pair.target.no_trees is None:
            pair.target.extend_tree(text[:3], [0, 0])
        if tree is not None and pair.drafts and pair.drafts[0].no_trees is None:
            pair.drafts[0].rollback(len(text))
            grown = TreeDrafter(pair.drafts[0], Constant(2), tree)
            grown.begin(sampling, frozenset(), None)
            grown.draft([*text, *text[:2]], budget=2)
        # Any draft may be the lowest level, with or without its head.
        for runner, predictor in zip(pair.drafts, pair.predictors, strict=True):
            if runner.index is not None:
                continue
            for predicts in (False, True) if predictor is not None else (False,):
                record = frozenset[Signal]({signal_of(predictor)} if predicts and predictor is not None else ())
                drafter = ModelDrafter(runner, POLICIES["constant"](), record, predictor)
                drafter.begin(sampling, frozenset(), generator_on(pair.target.device, 0))
                # After a fully accepted draft of a model, the draft's last token and the target's are pending. A draft
                # head has received the states of accepted tokens, and reads the last draft token and the target's.
                for count in (0, 1, *widths) if runner.reads_states else (1,):
                    runner.rollback(len(text) - 1)
                    _observe_states(runner, len(text) - 1 + count)
                    drafter.draft([*text, *(text[place % 4] for place in range(count))], budget=2)
                if predicts and isinstance(predictor, StatePredictor) and not runner.reads_states:
                    runner.extend(text[:2], keep=2, hidden=True)
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)


def _observe_states(runner: Slot, count: int) -> None:
    """Have a draft head observe states of ``count`` positions, with arbitrary values."""
    if runner.reads_states and count > runner.observed:
        states = torch.zeros(count - runner.observed, runner.state_size, device=runner.device)
        runner.observe_states(runner.observed, dict.fromkeys(runner.layers, states))
