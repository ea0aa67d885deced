"""A loaded pair with one drafter, ready to complete prompts."""

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import perf_counter

import torch

from specctl.decoding.drafters import Drafter, ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.leaves import LeafDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.parallel import ParallelDrafter, require_parallel
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import decode_after, find_stop, special_ids
from specctl.decoding.tree_drafter import TreeDrafter
from specctl.errors import ProfileError
from specctl.models.loading.pair import Pair
from specctl.models.running.acceptance_head import AcceptanceHead
from specctl.models.running.foresight import foresight_of
from specctl.models.running.lookup import LookupRunner
from specctl.models.running.runner import Runner, StateReader
from specctl.models.running.trained_heads import TrainedHead, first_for, signal_of
from specctl.models.running.trees import tree_obstacle, tree_runner
from specctl.policies import (
    DISTRIBUTION_SIGNALS,
    LOOKUP_SIGNALS,
    POLICIES,
    TRAINED_SIGNALS,
    Setting,
    Signal,
    StoppingPolicy,
)
from specctl.policies.constant import Constant
from specctl.policies.leaves import Leaves, leaf_rule
from specctl.policies.trees import TreeSize
from specctl.profile.lookup import require_offered
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, FinishReason, Round


def readable(pair: Pair) -> frozenset[Signal]:
    """Every signal that can be recorded for at least one draft of a pair."""
    predicted: dict[Signal, bool] = {
        "next_accept_prob": any(isinstance(draft, LookupRunner) or foresight_of(draft) for draft in pair.drafts),
    }
    trained = {signal_of(head) for heads in pair.named_heads for head in heads.values()}
    return frozenset([*DISTRIBUTION_SIGNALS, *trained, *(name for name, known in predicted.items() if known)])


def build_drafter(
    pair: Pair, setting: Setting, record: Set[Signal] = frozenset(), *, drafts: Sequence[int] | None = None
) -> Drafter | None:
    """The drafter that a setting describes; None for target-only decoding.

    Drafts for a target that reads no trees are chains, and so are those of a draft that reads none.

    Args:
        pair: loaded models.
        setting: policies with their values, from the draft that the target verifies down.
        record: signals to compute at every level whether or not a policy reads them; predictions where they are made.
        drafts: for each level of the setting which of the pair's drafts plays it; without it they are taken in order.

    Raises:
        ProfileError: a policy reads predictions that its draft does not make, or a draft in parallel cannot be so.
    """
    if not setting.drafts:
        return None
    drafts = drafts or range(len(pair.drafts))
    for upper, draft in zip([None, *drafts], drafts[: len(setting.levels)], strict=False):
        if isinstance(pair.drafts[draft], StateReader) and pair.verifiers[draft] != upper:
            raise ProfileError(
                "a draft head drafts for a model whose states it was not made to read",
                "use it as it is used first in this command, directly below the same model",
            )
    for draft, level in zip(drafts, setting.levels, strict=False):
        if isinstance(pair.drafts[draft], LookupRunner):
            require_offered(level)
    stages = [
        Stage(
            pair.drafts[draft],
            level.build(),
            level.once,
            _head(pair, draft, level),
        )
        for draft, level in zip(drafts, setting.levels, strict=False)
    ]
    if setting.parallel:
        require_parallel(pair, setting, drafts[0])
        return ParallelDrafter(stages[0].runner, stages[0].policy, record & set(DISTRIBUTION_SIGNALS))
    if tree_obstacle(pair.target):
        return compose(stages, record)
    grows = setting.tree is not None and tree_obstacle(stages[0].runner) is None
    return compose(stages, record, setting.leaves, setting.tree if grows else None)


def _head(pair: Pair, draft: int, level: Setting) -> TrainedHead | None:
    """The head of a draft that a setting reads: the one it names, or the first of the kind that it needs."""
    named = pair.named_heads[draft] if pair.named_heads else {}
    if level.head is not None:
        return named[level.head]
    return first_for(level.signals, named.values()) or next(iter(named.values()), None)


@dataclass(frozen=True, slots=True)
class Stage:
    """How one draft takes part.

    Attributes:
        runner: the model.
        policy: ends its blocks.
        once: whether a block is offered after a single inner round; only for a stage that has another below it.
        head: the model's acceptance head, if it has one.
    """

    runner: Runner
    policy: StoppingPolicy
    once: bool = False
    head: TrainedHead | None = None


def compose(
    stages: Sequence[Stage],
    record: Set[Signal] = frozenset(),
    leaves: Leaves | None = None,
    tree: TreeSize | None = None,
) -> Drafter | None:
    """A drafter of one level for each stage; None if the first stage never drafts.

    Args:
        stages: the first drafts for the target, each further one for the stage before it. Stages from the first that
            never drafts on take no part.
        record: signals to record at every level even if no policy reads them; predictions only where they are made.
        leaves: of the drafts that the target verifies; None for none.
        tree: the size of the trees that a single stage drafts; None for chains.

    Raises:
        ProfileError: a policy reads predictions that its stage does not make, or several stages are to draft trees.
    """
    if not stages or not stages[0].policy.drafts:
        return None
    top = stages[0]
    if isinstance(top.runner, LookupRunner):
        return LookupDrafter(top.runner, top.policy, record & LOOKUP_SIGNALS)
    made: frozenset[Signal] = frozenset() if top.head is None else frozenset({signal_of(top.head)})
    if missing := (top.policy.signals & TRAINED_SIGNALS) - made:
        raise _no_prediction(missing, top.head)
    inner = compose(stages[1:], record)
    foreseeing = inner is None and foresight_of(top.runner) is not None
    if not foreseeing and "next_accept_prob" in top.policy.signals:
        raise ProfileError(
            "this policy reads what a draft head predicts of its next token, and its draft predicts nothing",
            "draft with a DSpark head that has a confidence head, or choose another policy",
        )
    record = record - (TRAINED_SIGNALS - made)
    if not foreseeing:
        record = record - {"next_accept_prob"}
    drafter: Drafter
    if tree is not None:
        if inner is not None:
            raise ProfileError("a tree is drafted by one model", "set draft.tree = 0, or leave out [draft.draft]")
        return TreeDrafter(tree_runner(top.runner), top.policy, tree, record, top.head)
    if inner is None:
        drafter = ModelDrafter(top.runner, top.policy, record, top.head, laws=leaves is not None)
    else:
        drafter = PreVerifiedDrafter(
            inner, top.runner, top.policy, once=top.once, record=record, head=top.head, laws=leaves is not None
        )
    return drafter if leaves is None else LeafDrafter(drafter, leaf_rule(leaves))


def _no_prediction(missing: Set[Signal], head: TrainedHead | None) -> ProfileError:
    """The error for a policy whose draft has no head, or one of the other kind."""
    if head is None:
        return ProfileError("this policy reads a head's predictions, and its draft has no head", "set head in [draft]")
    wanted, kind = ("DISCO", "disco") if "own_accept_prob" in missing else ("SpecDec++", "specdec++")
    found = "DISCO" if wanted == "SpecDec++" else "SpecDec++"
    return ProfileError(
        f"this policy reads a {wanted} head's predictions, and head in [draft] names a {found} head",
        f"train one with `specctl train-head --kind {kind}`, or choose another policy",
    )


def warm_up(pair: Pair, settings: SamplingTable, *, leaves: bool = False, tree: TreeSize | None = None) -> None:
    """Run each kind of pass once, so that no request waits for compiling or capturing.

    Args:
        pair: loaded models.
        settings: the sampling table in force.
        leaves: whether drafts have leaves.
        tree: the size of the first draft's trees; None for chains.
    """
    few = [token for token in range(64) if token not in pair.eos][:4]
    sampling = Sampling.of(settings)
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)
            runner.extend(few, keep=0)  # makes the buffers
            runner.extend(few[:1], keep=1)
            if not isinstance(runner, StateReader):  # it never verifies
                runner.extend(few[:2], keep=2)
        if (leaves or tree is not None) and not tree_obstacle(pair.target):
            tree_runner(pair.target).extend_tree(few[:3], [0, 0])
        if tree is not None and pair.drafts and not tree_obstacle(pair.drafts[0]):
            pair.drafts[0].rollback(len(few))
            grown = TreeDrafter(tree_runner(pair.drafts[0]), Constant(2), tree)
            grown.begin(sampling, frozenset(), None)
            grown.draft([*few, *few[:2]], budget=2)
        # Any draft may be the lowest level, and its head may or may not be used.
        for runner, head in zip(pair.drafts, pair.heads, strict=True):
            if isinstance(runner, LookupRunner):
                continue
            for predicts in (False, True) if head is not None else (False,):
                runner.rollback(len(few))
                record = frozenset[Signal]({signal_of(head)} if predicts and head is not None else ())
                drafter = ModelDrafter(runner, POLICIES["constant"](), record, head, laws=leaves)
                drafter.begin(sampling, frozenset(), torch.Generator(pair.target.device))
                drafter.draft([*few, *few[:2]], budget=2)
                if predicts and isinstance(head, AcceptanceHead) and not isinstance(runner, StateReader):
                    runner.extend(few[:2], keep=2, hidden=True)
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)


class Session:
    """Generates with one pair and one drafter; a policy's state carries over between prompts if the policy says so.

    Args:
        pair: loaded models.
        drafter: from `build_drafter`, or None for target-only decoding. Another may take its place between prompts.
        keep_caches: whether a prompt that begins like the last one and its completion, as the next turn of a
            conversation does, is read only from where they differ. Otherwise every prompt is read from its beginning,
            so that neither its times nor the rounding of its logits depend on the prompts before it.
    """

    def __init__(self, pair: Pair, drafter: Drafter | None, *, keep_caches: bool = False) -> None:
        self.pair = pair
        self.drafter = drafter
        self._keeps = keep_caches
        self._cached: tuple[int, ...] = ()  # all runners of the pair have cached a part of it, from the start

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Completion:
        """Complete one prompt; a token limit beyond the context is lowered to it.

        Args:
            prompt: ids, at least one.
            settings: the sampling table in force.
            seed_offset: added to the seed, so that each record of a stream has its own randomness whatever came before.
            on_round: called with each round as it ends; its own time is not counted.
            enough: asked after each round whether to end the completion there.

        Raises:
            RecordError: the prompt fills the context.
        """
        pair, drafter = self.pair, self.drafter
        limit = min(settings.max_new_tokens, pair.room(prompt))
        # torch takes seeds of 64 bits; a profile or record may have a longer one.
        seed = (settings.seed + seed_offset) % (1 << 64)
        generator = torch.Generator(pair.target.device).manual_seed(seed)
        eos = pair.eos | special_ids(pair.tokenizer, settings.stop)
        rounds: list[Round] = []
        tokens: list[int] = []
        text: str | None = None
        arrivals: list[float] = []
        interrupted = False
        watching = 0.0  # seconds in on_round
        with torch.inference_mode(), ExitStack() as stack:
            self._roll_back(prompt)
            began = perf_counter()
            prefill(pair.target, drafter, prompt)
            prefilled = perf_counter()
            decoding = decode(pair.target, drafter, prompt, limit, Sampling.of(settings), eos, generator)
            for round_ in stack.enter_context(closing(decoding)):
                rounds.append(round_)
                tokens.extend(round_.emitted)
                # The verdict has reached the host: its tokens are here.
                arrivals.append(perf_counter() - began - watching)
                if on_round is not None:
                    paused = perf_counter()
                    on_round(round_)
                    watching += perf_counter() - paused
                if settings.stop and (found := find_stop(pair.tokenizer, prompt, tokens, settings.stop)):
                    count, text = found
                    del tokens[count:]
                    break
                if interrupted := enough():
                    break
            ended = perf_counter()
        if self._keeps:
            self._cached = (*prompt, *tokens[:-1])  # the last token need not be cached yet
        stopped = text is not None or (bool(tokens) and tokens[-1] in eos)
        unfinished = FinishReason.INTERRUPTED if interrupted and len(tokens) < limit else FinishReason.LENGTH
        return Completion(
            prompt=tuple(prompt),
            seed=seed,
            tokens=tuple(tokens),
            text=decode_after(pair.tokenizer, prompt, tokens) if text is None else text,
            finish_reason=FinishReason.STOP if stopped else unfinished,
            rounds=tuple(rounds),
            prefill_seconds=prefilled - began,
            total_seconds=ended - began - watching,
            first_token_seconds=arrivals[0] if arrivals else prefilled - began,
            arrivals=tuple(arrivals),
        )

    def _roll_back(self, prompt: Sequence[int]) -> None:
        """Roll all caches back to what they share with a prompt."""
        shared = next((n for n, (old, new) in enumerate(zip(self._cached, prompt, strict=False)) if old != new), None)
        length = min(len(self._cached), len(prompt)) if shared is None else shared
        self._cached = ()  # so that nothing is trusted if this prompt ends in an exception
        # Those of models that do not draft at the moment too: they would miss how the text went on without them.
        for runner in (self.pair.target, *self.pair.drafts):
            runner.rollback(length)
        if self.drafter is not None:
            self.drafter.rollback(length)
