"""Speculative decoding inside transformers: ``model.generate(**inputs, custom_generate=speculative(draft))``."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import pairwise
from os import PathLike
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EosTokenCriteria, MaxLengthCriteria, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specctl.decoding.composition import Stage, compose_for, predictor_of
from specctl.decoding.draft import Drafter
from specctl.decoding.draws import DrawGenerator, generator_on
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import ONE_TEXT
from specctl.errors import ProfileError, UsageError
from specctl.metrics import Metrics
from specctl.models.loading.assembly import assembled, form_of, in_memory
from specctl.models.passes.cache import CACHE_ARGUMENTS
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.running.config_rules import TokenRules
from specctl.models.running.eager import EagerPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, StoppingPolicy
from specctl.profile import Profile, ResolvedProfile, parse_policy, resolve
from specctl.profile.profile_file import available, is_path
from specctl.profile.schema import DraftTable, Verification
from specctl.records import Completion, FinishReason, Round

ONE_SEQUENCE = "Speculative decoding here writes one sequence at a time: call generate once for each prompt."
HARMLESS = frozenset({"use_cache", "logits_to_keep", "cache_position"})
"""Model arguments about how ``generate`` runs passes; speculative decoding runs its own."""
SINGLE = {"num_beams": 1, "num_return_sequences": 1}
METHODS = {
    "penalty_alpha": "contrastive search compares several texts",
    "dola_layers": "DoLa mixes the logits of several layers",
    "prompt_lookup_num_tokens": "the draft is chosen in speculative(): name prompt:lookup there",
    "assistant_early_exit": "the draft is chosen in speculative()",
    "constraints": "constraints need beams",
    "force_words_ids": "forced words need beams",
}
"""Settings that select another decoding method, with the reason why each is rejected."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Request:
    """One call of ``generate``.

    Attributes:
        prompt: ids, at least one.
        limit: the most new tokens, at least 1.
        eos: ids that end the sequence.
        sampling: how tokens are drawn.
        rules: which tokens may follow a text.
        criteria: the user's stopping criteria, asked about every token.
        as_dict: whether a `GenerateDecoderOnlyOutput` is wanted.
        device: of the ids.
    """

    prompt: tuple[int, ...]
    limit: int
    eos: frozenset[int]
    sampling: Sampling
    rules: TokenRules
    criteria: tuple[Any, ...]
    as_dict: bool
    device: torch.device

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_inputs: Mapping[str, Any],
        verification: Verification,
    ) -> "Request":
        """The request that ``generate`` prepared.

        Args:
            input_ids: ``(1, T)``.
            logits_processor: a list of processors.
            stopping_criteria: a list of criteria, a maximum length among them.
            generation_config: in force.
            model_inputs: the model's other inputs.
            verification: how drawn draft tokens are verified.

        Raises:
            UsageError: the call uses a feature that speculative decoding does not support.
        """
        _require_one_sequence(input_ids, generation_config)
        _require_text_alone(input_ids, model_inputs)
        sampling, rules = sampling_and_rules(
            logits_processor,
            input_ids.device,
            do_sample=bool(generation_config.do_sample),
            verification=verification,
        )
        lengths = [one.max_length for one in stopping_criteria if isinstance(one, MaxLengthCriteria)]
        if not lengths:
            raise UsageError("generate was given no maximum length", "Add max_new_tokens.")
        ends = [one.eos_token_id for one in stopping_criteria if type(one) is EosTokenCriteria]
        return cls(
            prompt=tuple(input_ids[0].tolist()),
            limit=max(1, min(lengths) - input_ids.shape[1]),
            eos=frozenset(int(token) for end in ends for token in end.flatten().tolist()),
            sampling=sampling,
            rules=rules,
            criteria=tuple(one for one in stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)),
            as_dict=bool(generation_config.return_dict_in_generate),
            device=input_ids.device,
        )

    def kept(self, tokens: list[int], added: int) -> int | None:
        """The number of tokens to keep if a user's criterion stops at one of the last ones; None if none does.

        Args:
            tokens: all new ones.
            added: the number of tokens added since the last call.
        """
        if not self.criteria:
            return None
        ids = torch.tensor([[*self.prompt, *tokens]], device=self.device)  # (1, T)
        for count in range(len(tokens) - added + 1, len(tokens) + 1):
            text = ids[:, : len(self.prompt) + count]
            if any(bool(torch.as_tensor(one(text, None)).all()) for one in self.criteria):
                return count
        return None


def _require_one_sequence(input_ids: torch.Tensor, config: Any) -> None:
    for name, one in SINGLE.items():
        if (value := getattr(config, name, None)) not in (None, one):
            raise UsageError(f"generate was asked for {name} = {value}", ONE_SEQUENCE)
    if input_ids.shape[0] != 1:
        raise UsageError(f"generate was given {input_ids.shape[0]} prompts", ONE_SEQUENCE)
    if not input_ids.shape[1]:
        raise UsageError("generate was given no prompt", "Pass input_ids of at least one token.")
    for name, why in METHODS.items():
        if getattr(config, name, None):
            raise UsageError(f"generate was asked for {name} = {getattr(config, name)}: {why}", f"Leave {name} out.")
    wanted = [name for name in OUTPUTS if getattr(config, name, None)]
    if wanted and config.return_dict_in_generate:
        raise UsageError(
            f"generate was asked for {', '.join(wanted)}, and passes of several tokens do not keep them",
            f"Leave {', '.join(wanted)} out, or generate without custom_generate.",
        )


def _require_text_alone(input_ids: torch.Tensor, given: Mapping[str, Any]) -> None:
    """Raise UsageError for inputs that a pass over the ids alone would ignore."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not bool(mask.all()):
        raise UsageError("the prompt is padded", "Pass it without padding: one prompt needs none.")
    if positions is not None:
        plain = torch.arange(input_ids.shape[1], device=positions.device).expand_as(positions)
        if not torch.equal(positions, plain.to(positions.dtype)):
            raise UsageError("generate was given position_ids of another order", "Leave position_ids out.")
    for name in CACHE_ARGUMENTS:
        cache = given.get(name)
        if cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length():
            raise UsageError(
                f"generate was given {name} that holds a text",
                f"Leave {name} out: the prompt is read from its start, which gives the same tokens.",
            )
    text = {"attention_mask", "position_ids", *CACHE_ARGUMENTS} | HARMLESS
    if more := [name for name, value in given.items() if value is not None and name not in text]:
        raise UsageError(
            f"generate was given {', '.join(more)}, and a draft reads token ids alone", f"Leave out {', '.join(more)}."
        )


TARGET = "the model that generates"
Draft = PreTrainedModel | str | PathLike[str] | None
Policy = str | Profile | ResolvedProfile | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft and its stopping policy.

    Attributes:
        table: names the models, policies and heads.
        given: a model in memory that is the only draft; None to load the models of the table.
        verification: how drawn draft tokens are verified.
    """

    table: DraftTable
    given: PreTrainedModel | None
    verification: Verification

    @classmethod
    def of(cls, draft: Draft, policy: Policy, head: str | PathLike[str] | None = None) -> "Drafting":
        """The drafting for a draft and a policy.

        Args:
            draft: a model in memory, a folder, a hub id, a draft head's folder or hub id, ``prompt:lookup`` or
                ``embedded:draft``; None for the drafts of a profile.
            policy: a policy's name, or with settings as ``--policy`` has them; a profile, its name or its path, such as
                the file that ``calibrate`` wrote; None for ``cost-optimal``.
            head: the acceptance head that the policy reads: a folder, a hub id or ``embedded:NAME``.

        Raises:
            ProfileError: there is no such policy or profile, or it has mistakes.
            UsageError: there is no draft, or the profile does not fit the draft.
        """
        given = draft if isinstance(draft, PreTrainedModel) else None
        name = (draft.name_or_path or "draft") if isinstance(draft, PreTrainedModel) else draft and os.fspath(draft)
        profile = _profile(policy, {"draft.model": name, "draft.head": None if head is None else os.fspath(head)})
        table = profile.draft
        if table is None:
            raise UsageError("there is no draft", "Name one: speculative(draft, policy).")
        if given is not None and table.draft is not None:
            raise UsageError(
                "the profile has a draft for its draft, and one model is given",
                "Leave the draft out, so that all models of the profile are loaded.",
            )
        if table.parallel:
            raise UsageError("a draft in parallel needs `specctl generate`", "Set draft.parallel = false.")
        return cls(table, given, profile.sampling.verification)


def _profile(policy: Policy, flags: dict[str, Any]) -> Profile:
    """A profile with the draft and policy; without a named profile, its target is still unknown."""
    if isinstance(policy, ResolvedProfile):
        policy = policy.profile
    if isinstance(policy, Profile):
        if flags["draft.model"] is None and flags["draft.head"] is None:
            return policy
        changed = {key.partition(".")[2]: value for key, value in flags.items() if value is not None}
        if policy.draft is None:
            return _resolved(None, {**flags, "target.model": TARGET})
        return policy.model_copy(update={"draft": policy.draft.model_copy(update={"kind": "auto", **changed})})
    if policy is None:
        return _resolved(None, {**flags, "target.model": TARGET})
    if policy.partition(":")[0].strip() not in POLICIES and (is_path(policy) or policy in available()):
        return _resolved(policy, flags)
    return _resolved(None, {**flags, "draft.policy": parse_policy(policy, "speculative"), "target.model": TARGET})


def _resolved(name: str | None, flags: Mapping[str, Any]) -> Profile:
    if name is None and flags.get("draft.model") is None:
        raise UsageError("there is no draft", "Name one: speculative(draft, policy).")
    # Variables that change profiles are for commands; the folders of a user's own profiles are found here too.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SPECCTL_")}
    try:
        return resolve(name, flags=flags, environ=environ).profile
    except ProfileError as error:
        hint = error.hint.replace("Add --draft MODEL.", "Name a draft.")
        raise ProfileError(error.message.replace(f"profile '--target {TARGET} ", "profile '"), hint) from error


_CACHE_FIELD = next(field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_ARGUMENTS)


def speculative(
    draft: Draft = None,
    policy: Policy = None,
    *,
    head: str | PathLike[str] | None = None,
    streamer: Any = None,
) -> "Speculative":
    """A ``custom_generate`` for transformers that gives the output of ``generate``, but uses a draft.

    Args:
        draft: a transformers model in memory, a folder or hub id of a model or a draft head, ``prompt:lookup``, or
            ``embedded:draft``; None for the drafts of a profile.
        policy: a stopping policy's name, or with settings as ``--policy`` has them: ``"svip:threshold=0.4"``; or a
            profile, its name or its path, such as the file that ``calibrate`` wrote. By default ``cost-optimal``.
        head: the acceptance head that ``specdec++`` or ``disco`` reads: a folder, a hub id or ``embedded:NAME``.
        streamer: a streamer of transformers. Pass it here, because ``generate`` does not forward it to a custom method.

    Raises:
        ProfileError: there is no such policy, setting or profile.
        UsageError: there is no draft, or it does not fit the profile.
    """
    return Speculative(Drafting.of(draft, policy, head), streamer)


class Speculative:
    """A decoding method for ``model.generate(..., custom_generate=...)``, exact for greedy decoding and sampling.

    The draft is loaded when the first model generates, and stays. Draws are seeded from torch's global generator, so
    that ``torch.manual_seed`` repeats a text. Adaptive policies keep their state from call to call if their
    ``carry_over`` is set.

    Args:
        drafting: the draft and its stopping policy.
        streamer: gets the prompt and the tokens as rounds end.

    Attributes:
        rounds: those of the last call.
        metrics: of the last call.
    """

    def __init__(self, drafting: Drafting, streamer: Any = None) -> None:
        self.streamer = streamer
        self.rounds: tuple[Round, ...] = ()
        self.metrics = Metrics()
        self._drafting = drafting
        self._target: _Target | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_inputs: Any,
    ) -> "torch.Tensor | GenerateDecoderOnlyOutput":
        """Called by ``generate`` with the inputs that it has prepared.

        Returns:
            ``(1, T)`` int64, the prompt and the new tokens; in a `GenerateDecoderOnlyOutput` with the cache of the text
            without its last token where ``return_dict_in_generate`` asks for one.

        Raises:
            UsageError: the call uses a feature that speculative decoding does not support; the message names it.
            ModelError: the draft cannot be loaded, or the model cannot take back rejected tokens.
        """
        request = Request.of(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_inputs,
            self._drafting.verification,
        )
        target = self._target_of(model)
        try:
            new = [token for tokens in self._rounds(target, request) for token in tokens]
            written = torch.tensor([new], dtype=input_ids.dtype, device=input_ids.device)
            sequences = torch.cat([input_ids, written], dim=-1)
            if not request.as_dict:
                return sequences
            wanted = model_inputs.get("use_cache", True)
            cache = target.plain_cache([*request.prompt, *new[:-1]]) if wanted else None
        finally:
            target.forget()
        found: dict[str, Any] = {"sequences": sequences, _CACHE_FIELD: cache}
        return GenerateDecoderOnlyOutput(**found)

    def stream(self, model: PreTrainedModel, *args: Any, **settings: Any) -> Iterator[list[int]]:
        """The new tokens of ``model.generate(*args, **settings)``, a list of ids for each round, as rounds end.

        Closing the iterator ends the text; ``rounds`` then holds the finished rounds.
        """

        def begin(
            model: PreTrainedModel,
            input_ids: torch.Tensor,
            *,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_inputs: Any,
        ) -> Iterator[list[int]]:
            verification = self._drafting.verification
            prepared = logits_processor, stopping_criteria, generation_config, model_inputs
            return self._rounds(self._target_of(model), Request.of(input_ids, *prepared, verification))

        generate: Callable[..., Iterator[list[int]]] = model.generate  # type: ignore[assignment]
        with closing(generate(*args, **settings, custom_generate=begin)) as rounds:  # type: ignore[type-var]
            try:
                yield from rounds
            finally:
                if self._target is not None:
                    self._target.forget()

    def _target_of(self, model: PreTrainedModel) -> "_Target":
        given = self._drafting.given
        forms = [form_of(one) for one in (model, given) if one is not None]
        if self._target is None or self._target.forms != forms:
            self._target = _Target(model, self._drafting, forms)
        return self._target

    # Passes must leave no inference tensors in the user's models: training with these would fail.
    @torch.no_grad()
    def _rounds(self, target: "_Target", request: Request) -> Generator[list[int], None, None]:
        """Generate; yields the tokens of each round that stay."""
        prompt, tokens, rounds, arrivals = request.prompt, list[int](), list[Round](), list[float]()
        self.rounds, self.metrics = (), Metrics()
        generator: DrawGenerator | None = None
        seed = 0
        if not request.sampling.greedy:
            seed = int(torch.randint(1 << 62, ()))
            generator = generator_on(target.runner.device, seed)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([prompt]))
        began, away = working_seconds(), 0.0
        try:
            for round_ in target.rounds(request, generator):
                rounds.append(round_)
                tokens.extend(round_.emitted)
                arrivals.append(working_seconds() - began - away)
                count = request.kept(tokens, len(round_.emitted))
                new = list(round_.emitted)
                if count is not None:
                    new = new[: len(new) - (len(tokens) - count)]
                    del tokens[count:]
                if self.streamer is not None:
                    self.streamer.put(torch.tensor(new))
                paused = working_seconds()
                yield new
                away += working_seconds() - paused
                if count is not None:
                    break
            if self.streamer is not None:
                self.streamer.end()
        finally:
            self.rounds = tuple(rounds)
            ended = bool(tokens) and tokens[-1] in request.eos
            completion = Completion(
                prompt=prompt,
                seed=seed,
                tokens=tuple(tokens),
                text="",
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                rounds=self.rounds,
                prefill_seconds=arrivals[0] - rounds[0].total_seconds if arrivals else 0.0,
                total_seconds=arrivals[-1] if arrivals else 0.0,
                first_token_seconds=arrivals[0] if arrivals else 0.0,
                arrivals=tuple(arrivals),
            )
            self.metrics = Metrics.of([completion])


class _Target:
    """A model that generates, with runners for it and its drafts; their caches are empty between calls.

    Args:
        model: the target.
        drafting: its drafts.
        forms: those of the models that their user can change, by `form_of`: of the target and a given draft.
    """

    def __init__(self, model: PreTrainedModel, drafting: Drafting, forms: list[Any]) -> None:
        self.forms = forms
        made = assembled(in_memory(model, "target"), drafting.table, drafting.given)
        self._inner, self.runner, self._drafts, self._heads = made.bare, made.target, made.drafts, made.named_predictors
        self._turn = 0
        self._setting = drafting.table.setting
        # One object for all calls, so that policies carry over what they learn.
        self._policies: list[StoppingPolicy] = [level.build() for level in self._setting.levels]

    def rounds(self, request: Request, generator: DrawGenerator | None) -> Iterator[Round]:
        """Rounds to the end of the text."""
        self.forget()  # left over from a call that ended in an exception
        for runner in (self.runner, *self._drafts):
            runner.begin(len(request.prompt))
        self._turn += 1
        turn = self._turn
        target = Slot(RuledPasses(self.runner, request.rules)) if request.rules.active else self.runner
        drafter = self._drafter(target, request.rules)
        text = list(request.prompt)
        read_prompt(target, drafter, text)
        wait(self.runner.device, *(runner.device for runner in self._drafts))
        rounds = decode(target, drafter, text, request.limit, request.sampling, request.eos, generator)
        with closing(rounds) as playing:
            for round_ in playing:
                yield round_
                if self._turn != turn:
                    raise UsageError("another text was begun before this one ended", ONE_TEXT)

    def _drafter(self, target: Slot, rules: TokenRules) -> Drafter | None:
        stages = [
            Stage(
                # Lookups and text drafts have no scores for rules; the target rejects what breaks them.
                Slot(RuledPasses(runner, rules))
                if rules.active and runner.index is None and not runner.writes_text
                else runner,
                policy,
                setting.once,
                predictor_of(heads, setting),
            )
            for runner, heads, policy, setting in zip(
                self._drafts, self._heads, self._policies, self._setting.levels, strict=False
            )
        ]
        return compose_for(target, stages, self._setting)

    def plain_cache(self, text: Sequence[int]) -> DynamicCache:
        """A cache of transformers' own layers that holds this text; a prefix of the text must be cached here."""
        self._inner.rollback(len(text))
        if pending := text[self._inner.length :]:
            self._inner.extend(pending, keep=0)
        passes = self._inner.bare.passes
        assert isinstance(passes, EagerPasses), "its cache is transformers' own"
        return passes.plain_cache(text)

    def forget(self) -> None:
        """Empty all caches."""
        for runner in (self.runner, *self._drafts):
            runner.rollback(0)


FILTERS: dict[type, str] = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopHLogitsWarper: "top_h",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
    transformers.MinPLogitsWarper: "min_p",
    transformers.TypicalLogitsWarper: "typical_p",
    transformers.EpsilonLogitsWarper: "epsilon_cutoff",
    transformers.EtaLogitsWarper: "eta_cutoff",
}
"""The processors that `Sampling` implements, in its order, each with the name of its setting there."""
OWN_NAMES = {"typical_p": "mass", "epsilon_cutoff": "epsilon", "eta_cutoff": "epsilon"}
"""The processors' own names of these settings."""
RULES = frozenset(
    {
        transformers.EncoderNoRepeatNGramLogitsProcessor,
        transformers.EncoderRepetitionPenaltyLogitsProcessor,
        transformers.ExponentialDecayLengthPenalty,
        transformers.ForcedBOSTokenLogitsProcessor,
        transformers.ForcedEOSTokenLogitsProcessor,
        transformers.InfNanRemoveLogitsProcessor,
        transformers.LogitNormalization,
        transformers.MinLengthLogitsProcessor,
        transformers.MinNewTokensLengthLogitsProcessor,
        transformers.NoBadWordsLogitsProcessor,
        transformers.NoRepeatNGramLogitsProcessor,
        transformers.RepetitionPenaltyLogitsProcessor,
        transformers.SequenceBiasLogitsProcessor,
        transformers.SuppressTokensAtBeginLogitsProcessor,
        transformers.SuppressTokensLogitsProcessor,
    }
)
"""The processors that are functions of the text before a token and its scores, so that a verification in one pass can
apply them position by position."""


def sampling_and_rules(
    processors: Iterable[Any], device: torch.device, *, do_sample: bool, verification: Verification
) -> tuple[Sampling, TokenRules]:
    """How ``generate`` draws with these processors.

    Args:
        processors: as ``generate`` prepares them.
        device: that they were made for.
        do_sample: whether tokens are drawn; otherwise filters make no difference, because they keep the likeliest
            token.
        verification: how drawn draft tokens are verified.

    Raises:
        UsageError: a processor's class is unknown, a filter comes before a rule or out of `Sampling`'s order, or a
            filter keeps more tokens than its setting allows.
    """
    given = _without_idle_normalization(list(processors))
    kinds = [type(one) for one in given]
    if unknown := [kind.__name__ for kind in dict.fromkeys(kinds) if kind not in RULES and kind not in FILTERS]:
        raise UsageError(
            f"generate was given {', '.join(unknown)}, which speculative decoding cannot verify token by token",
            "Leave it out, or generate without custom_generate. Known are "
            f"{', '.join(sorted(kind.__name__ for kind in [*RULES, *FILTERS]))}.",
        )
    ranks = [[*FILTERS].index(kind) if kind in FILTERS else -1 for kind in kinds]
    for (one, rank), (other, next_rank) in pairwise(zip(kinds, ranks, strict=True)):
        if next_rank <= rank and rank >= 0:
            raise UsageError(
                f"{one.__name__} comes before {other.__name__}, and the order is rules, "
                f"{', '.join(FILTERS.values())}, each once",
                "Set them in the generation config, which puts them in this order.",
            )
    rules = TokenRules((one for one in given if type(one) in RULES), device)
    if not do_sample:
        return Sampling(), rules
    values: dict[str, Any] = {"temperature": 1.0}
    for one in given:
        if (name := FILTERS.get(type(one))) is not None:
            _require_plain(one)
            value = getattr(one, OWN_NAMES.get(name, name))
            values[name] = float(value) if isinstance(value, torch.Tensor) else value
    return Sampling(**values, verification=verification), rules


def _without_idle_normalization(processors: list[Any]) -> list[Any]:
    """The processors without each `LogitNormalization` after the last rule.

    It shifts all scores of a row equally, which changes no filter and no draw. It matters only to a rule that depends
    on a score's sign or size, such as a repetition penalty.
    """
    rules = (place for place, one in enumerate(processors) if type(one) in RULES - {transformers.LogitNormalization})
    last = max(rules, default=-1)
    return [
        one for place, one in enumerate(processors) if place < last or type(one) is not transformers.LogitNormalization
    ]


def _require_plain(processor: Any) -> None:
    """Raise UsageError for a filter with `min_tokens_to_keep` above 1 or a finite `filter_value`."""
    settings: Mapping[str, Any] = vars(processor)
    # `TopKLogitsWarper` has put it into top_k.
    least = 1 if isinstance(processor, transformers.TopKLogitsWarper) else settings.get("min_tokens_to_keep", 1)
    if least != 1 or settings.get("filter_value", -float("inf")) != -float("inf"):
        raise UsageError(
            f"{type(processor).__name__} has min_tokens_to_keep or a filter_value of its own",
            "Leave both at their defaults.",
        )
