"""Scores a setting of an engine's rule: replays it and prices the rounds as that engine would run them."""

from collections.abc import Sequence

import numpy as np

from specctl.calibration.scores import Score
from specctl.errors import UsageError
from specctl.export.adaptive_verification import AdaptiveVerification
from specctl.export.foreign_engine import Engine
from specctl.export.rule_space import ADAPTIVE_VERIFICATION, UNCAPPED
from specctl.policies import Setting, StoppingPolicy
from specctl.records import Round, StopReason
from specctl.replay.costs import CostTable
from specctl.replay.play import Clock, rounds
from specctl.replay.trace_files import TraceSet


def score_in(
    engine: Engine, setting: Setting, traces: TraceSet, prompts: Sequence[str], costs: CostTable
) -> Score | None:
    """Score a setting on prompts; None where it drafts more than the traces or the costs hold.

    Beyond `specctl.calibration.scores.score` it counts the draft's passes as the engine makes them: one for a token
    that is dropped because it stopped the draft, those behind an end-of-sequence token where the engine does not look
    for one, those of tokens that are drafted and not verified, and `Engine.further_passes` with its like.

    Args:
        engine: whose rule the setting is.
        setting: of a single draft, see `specctl.export.rule_space`.
        traces: as the engine would keep draft tokens.
        prompts: ids.
        costs: of a draft alone.
    """
    eos, clock, most = frozenset(traces.header.eos), costs.clock(setting.signals), costs.lengths[-1]
    policy = _policy(setting, clock, int(costs.contexts[0]))
    sums = {prompt: np.zeros(5) for prompt in prompts}  # tokens, ms, rounds, drafted and accepted tokens
    for trace in traces.of(prompts):
        start = 0
        try:
            for round_ in rounds(policy, trace, eos, clock):
                room = trace.limit - start - 1
                width = _verified(engine, setting, round_, room)
                passes = width + _further(engine, setting, round_, room)
                if isinstance(policy, AdaptiveVerification):
                    passes = min(policy.whole, room)
                    policy.look(trace.draft, start, eos)
                if width > most:
                    return None
                context = trace.prompt_tokens + start
                ms = 1e3 * (clock(context, passes, 0)[0] + clock(context, width, 0)[1]) + costs.overhead_ms
                if setting.drafts and not width and room > 0:
                    ms += 1e3 * engine.passes_when_idle * (clock(context, 1, 0)[0] + clock(context, 0, 0)[1])
                sums[trace.prompt] += (len(round_.emitted), ms, 1, round_.drafted, round_.accepted)
                start += len(round_.emitted)
        except UsageError:  # a draft is longer than the recorded ones
            return None
    columns = np.stack([sums[prompt] for prompt in prompts], axis=1)  # (5, P)
    return Score(setting, *columns)


def _policy(setting: Setting, clock: Clock, context: int) -> StoppingPolicy:
    """What stops drafts in the engine."""
    if setting.policy != ADAPTIVE_VERIFICATION.policy:
        return setting.build()
    times = [clock(context, count, 0) for count in range(setting.longest_draft + 1)]
    return AdaptiveVerification(times[-1][0], [verify for _, verify in times])


def _verified(engine: Engine, setting: Setting, round_: Round, room: int) -> int:
    """How many draft tokens the target verifies; what follows the end of a sequence below a threshold is not known, and
    counted up to the longest draft if there is one."""
    longest = setting.longest_draft
    if round_.stop is StopReason.EOS and not engine.stops_at_eos and longest < UNCAPPED:
        return min(longest, room)
    return round_.drafted


def _further(engine: Engine, setting: Setting, round_: Round, room: int) -> int:
    """Passes of the draft apart from one for each token that is verified."""
    if not setting.drafts or room < 1:
        return 0
    dropped = round_.stop is StopReason.POLICY and not setting.all_values.get("keep_trigger", True)
    full = round_.fully_accepted and round_.drafted > 0
    return engine.further_passes + dropped + engine.passes_when_full * full
