"""Builds drafters from settings: the runner, policy and shape of each level."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from specctl.decoding.chained import ChainedDrafter
from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.parallel import ParallelDrafter, require_parallel
from specctl.decoding.trees import TreeDrafter
from specctl.errors import ProfileError
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, first_for, signal_of
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import (
    DISTRIBUTION_SIGNALS,
    LOOKUP_SIGNALS,
    TRAINED_SIGNALS,
    Setting,
    Signal,
    StoppingPolicy,
)
from specctl.policies.setting import TreeSize
from specctl.profile.validation import require_offered


def readable(pair: Pair) -> frozenset[Signal]:
    """Every signal that at least one draft of a pair can record."""
    signals: set[Signal] = {*DISTRIBUTION_SIGNALS} if any(draft.index is None for draft in pair.drafts) else set()
    signals |= {signal_of(predictor) for predictors in pair.named_predictors for predictor in predictors.values()}
    if any(draft.index is not None or draft.foresee is not None for draft in pair.drafts):
        signals.add("next_accept_prob")
    if len(pair.drafts) == 1 and pair.drafts[0].index is None:
        signals.add("agreement")
    return frozenset(signals)


def build_drafter(
    pair: Pair, setting: Setting, record: Set[Signal] = frozenset(), *, drafts: Sequence[int] | None = None
) -> Drafter | None:
    """The drafter that a setting describes; None for target-only decoding.

    Drafts are chains unless both the target and the draft can read trees.

    Args:
        pair: loaded models.
        setting: policies with their values, from the draft that the target verifies down.
        record: signals to compute at every level whether or not a policy reads them; predictions where they are made.
        drafts: the index of the pair's draft for each level of the setting; without it the drafts are taken in order.

    Raises:
        ProfileError: a policy reads predictions that its draft does not make, or cannot draft in parallel.
    """
    if not (setting := setting.at(pair.texts)).drafts:
        return None
    drafts = drafts or range(len(pair.drafts))
    for upper, draft in zip([None, *drafts], drafts[: len(setting.levels)], strict=False):
        if pair.drafts[draft].reads_states and pair.verifiers[draft] != upper:
            raise ProfileError(
                "a draft head drafts for a model whose states it was not made to read",
                "use it as it is used first in this command, directly below the same model",
            )
    for draft, level in zip(drafts, setting.levels, strict=False):
        if pair.drafts[draft].index is not None:
            require_offered(level)
    build = pair.policy if setting.below is None else Setting.build
    stages = [
        Stage(
            pair.drafts[draft],
            build(level),
            level.once,
            predictor_of(pair.named_predictors[draft] if pair.named_predictors else {}, level),
        )
        for draft, level in zip(drafts, setting.levels, strict=False)
    ]
    if setting.parallel:
        require_parallel(pair, setting, drafts[0])
        return ParallelDrafter(stages[0].runner, stages[0].policy, record & set(DISTRIBUTION_SIGNALS))
    return compose_for(pair.target, stages, setting, record)


def predictor_of(named: Mapping[str, TrainedPredictor], level: Setting) -> TrainedPredictor | None:
    """The head that a level reads: the one it names, or the draft's first head of the required kind.

    Args:
        named: the draft's heads.
        level: the setting of this draft.
    """
    if level.head is not None:
        return named[level.head]
    return first_for(level.signals, named.values()) or next(iter(named.values()), None)


@dataclass(frozen=True, slots=True)
class Stage:
    """One draft's part in a drafter."""

    runner: Slot  # the draft model
    policy: StoppingPolicy  # stops its blocks
    # whether a block is offered after a single inner round; only for a stage above another one
    once: bool = False
    predictor: TrainedPredictor | None = None  # the model's predictor, if it has one


def compose_for(
    target: Slot, stages: Sequence[Stage], setting: Setting, record: Set[Signal] = frozenset()
) -> Drafter | None:
    """`compose` with a setting's lookup, or with its trees where both the target and the first stage can read trees."""
    if setting.lookup:
        model = compose(stages, record)
        return ChainedDrafter(model, setting.earlier) if isinstance(model, ModelDrafter | PreVerifiedDrafter) else model
    grows = bool(stages) and target.no_trees is None and stages[0].runner.no_trees is None
    return compose(stages, record, setting.tree if grows else None)


def compose(
    stages: Sequence[Stage],
    record: Set[Signal] = frozenset(),
    tree: TreeSize | None = None,
) -> Drafter | None:
    """A drafter of one level for each stage; None if the first stage never drafts.

    Args:
        stages: the first drafts for the target, each further one for the stage before it. The first stage that never
            drafts and all stages after it are left out.
        record: signals to record at every level even if no policy reads them; predictions only where they are made.
        tree: the size of the trees that a single stage drafts; None for chains.

    Raises:
        ProfileError: a policy reads predictions that its stage does not make, or several stages are to draft trees.
    """
    if not stages or not stages[0].policy.drafts:
        return None
    top = stages[0]
    alone = len(stages) == 1 and tree is None
    if not alone and any("agreement" in stage.policy.signals for stage in stages):
        raise ProfileError(
            "agreement with a lookup is a signal of chains that one draft writes",
            "set use_agreement = false, or leave out tree and [draft.draft]",
        )
    if top.runner.index is not None:
        return LookupDrafter(top.runner, top.policy, record & LOOKUP_SIGNALS)
    made: frozenset[Signal] = frozenset() if top.predictor is None else frozenset({signal_of(top.predictor)})
    if missing := (top.policy.signals & TRAINED_SIGNALS) - made:
        raise _no_prediction(missing, top.predictor)
    inner = compose(stages[1:], record)
    foreseeing = inner is None and top.runner.foresee is not None
    if not foreseeing and "next_accept_prob" in top.policy.signals:
        raise ProfileError(
            "this policy reads a draft head's predictions for the next token, and its draft makes none",
            "draft with a DSpark head that has a confidence head, or choose another policy",
        )
    record = record - (TRAINED_SIGNALS - made) - (frozenset() if alone else {"agreement"})
    if not foreseeing:
        record = record - {"next_accept_prob"}
    if tree is not None:
        if inner is not None:
            raise ProfileError("a tree is drafted by one model", "set draft.tree = 0, or leave out [draft.draft]")
        return TreeDrafter(top.runner, top.policy, tree, record, top.predictor)
    if inner is None:
        return ModelDrafter(top.runner, top.policy, record, top.predictor)
    return PreVerifiedDrafter(inner, top.runner, top.policy, once=top.once, record=record, predictor=top.predictor)


def _no_prediction(missing: Set[Signal], predictor: TrainedPredictor | None) -> ProfileError:
    """The error for a policy that reads a head's predictions where the draft has no head of that kind."""
    if predictor is None:
        return ProfileError("this policy reads a head's predictions, and its draft has no head", "set head in [draft]")
    wanted, kind = ("DISCO", "disco") if "own_accept_prob" in missing else ("SpecDec++", "specdec++")
    found = "DISCO" if wanted == "SpecDec++" else "SpecDec++"
    return ProfileError(
        f"this policy reads a {wanted} head's predictions, and head in [draft] names a {found} head",
        f"train one with `specctl train-head --kind {kind}`, or choose another policy",
    )
