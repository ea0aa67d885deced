"""Speculative decoding inside transformers: ``model.generate(**inputs, custom_generate=speculative(draft))``."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from os import PathLike
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specctl.api.draft_tables import Draft, Drafting, Policy
from specctl.api.request import Request
from specctl.decoding.composition import Stage, compose_for, predictor_of
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.rows.draft import Drafter
from specctl.decoding.rows.draws import DrawGenerator, generator_on
from specctl.decoding.session import ONE_TEXT
from specctl.errors import UsageError
from specctl.metrics import Metrics
from specctl.models.loading.assembly import assembled, form_of, in_memory
from specctl.models.passes.cache import CACHE_ARGUMENTS
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.running.eager import EagerPasses
from specctl.models.running.rules.ruled import RuledRunner
from specctl.models.running.rules.token_rules import TokenRules
from specctl.models.running.slot import Slot
from specctl.policies import StoppingPolicy
from specctl.records import Completion, FinishReason, Round

_CACHE_FIELD = next(field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_ARGUMENTS)


def speculative(
    draft: Draft = None,
    policy: Policy = None,
    *,
    head: str | PathLike[str] | None = None,
    streamer: Any = None,
) -> "Speculative":
    """A ``custom_generate`` for transformers that writes what ``generate`` would, with a draft.

    Args:
        draft: a transformers model in memory, a folder or hub id of a model or a draft head, ``prompt:lookup``, or
            ``embedded:draft``; None for the drafts of a profile.
        policy: a stopping policy's name, or with settings as ``--policy`` has them: ``"svip:threshold=0.4"``; or a
            profile, its name or its path, such as the file that ``calibrate`` wrote. By default ``cost-optimal``.
        head: the acceptance head that ``specdec++`` or ``disco`` reads: a folder, a hub id or ``embedded:NAME``.
        streamer: a streamer of transformers. It is taken here because ``generate`` passes none on to a custom method.

    Raises:
        ProfileError: there is no such policy, setting or profile.
        UsageError: there is no draft, or it does not fit the profile.
    """
    return Speculative(Drafting.of(draft, policy, head), streamer)


class Speculative:
    """A decoding method for ``model.generate(..., custom_generate=...)``, exact for greedy decoding and sampling.

    The draft is loaded when the first model generates, and stays. Draws are seeded from torch's global generator, so
    that ``torch.manual_seed`` repeats a text. Policies that learn keep what they learnt from call to call where their
    ``carry_over`` says so.

    Args:
        drafting: which draft, stopped by what.
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
        """What ``generate`` calls with the inputs that it has prepared.

        Returns:
            ``(1, T)`` int64, the prompt and the new tokens; in a `GenerateDecoderOnlyOutput` with the cache of the text
            without its last token where ``return_dict_in_generate`` asks for one.

        Raises:
            UsageError: something is asked that speculative decoding cannot do; the message names it.
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

        Closing the iterator ends the text; ``rounds`` then has those that were played.
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
        self.forget()  # what a call left that ended in an exception
        for runner in (self.runner, *self._drafts):
            runner.begin(len(request.prompt))
        self._turn += 1
        turn = self._turn
        target = RuledRunner(self.runner, request.rules) if request.rules.active else self.runner
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
                # A lookup has no scores, nor has text: what they draft against the rules the target rejects.
                RuledRunner(runner, rules)
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
        """A cache of transformers' own layers that holds this text, of which a beginning is cached here."""
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
