"""What ``generate`` of transformers asks of a custom method, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria

from specctl.api.processors import sampling_and_rules
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.passes.cache import CACHE_ARGUMENTS
from specctl.models.running.rules.token_rules import TokenRules
from specctl.profile.schema import Verification

ONE_SEQUENCE = "Speculative decoding here writes one sequence at a time: call generate once for each prompt."
HARMLESS = frozenset({"use_cache", "logits_to_keep", "cache_position"})
"""Model arguments that say how ``generate`` runs passes, which it does not do here."""
SINGLE = {"num_beams": 1, "num_return_sequences": 1}
METHODS = {
    "penalty_alpha": "contrastive search compares several texts",
    "dola_layers": "DoLa mixes the logits of several layers",
    "prompt_lookup_num_tokens": "the draft is chosen in speculative(): name prompt:lookup there",
    "assistant_early_exit": "the draft is chosen in speculative()",
    "constraints": "constraints need beams",
    "force_words_ids": "forced words need beams",
}
"""Settings that ask for another way to generate, and why they are refused."""
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
            model_inputs: what else would go to the model.
            verification: how drawn draft tokens are verified.

        Raises:
            UsageError: something is asked that speculative decoding cannot do.
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
        """How many tokens stay if a criterion of the user's stops at one of the last ones; None if none does.

        Args:
            tokens: all new ones.
            added: how many of them are new since the last question.
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
