"""Which policy stops drafts: the table "specctl" in vLLM's ``--additional-config``, and where it would not be exact."""

from collections.abc import Iterator, Mapping
from typing import Any

from specctl.errors import UsageError
from specctl.policies import Setting
from specctl.profile.validation import check_policy

KEY = "specctl"
PLACE = f'"{KEY}" in --additional-config'
POLICIES = ("svip", "adaedl", "max-confidence", "cost-optimal")
"""The policies whose decisions mean in a batch of vLLM what they mean in specctl."""


def asked_policy(config: Any) -> Setting:
    """The policy that a `VllmConfig` asks for; drafts of at most ``num_speculative_tokens`` tokens unless it says less.

    Raises:
        UsageError: there is none, it cannot run here, or vLLM's options would make it inexact or let it hang.
        ProfileError: its settings have mistakes.
    """
    additional = config.additional_config
    table = additional.get(KEY) if isinstance(additional, Mapping) else None
    if not isinstance(table, Mapping):
        hint = f"""For example: --additional-config '{{"{KEY}": {{"name": "svip", "threshold": 0.54}}}}'"""
        raise UsageError(f"no policy is given: {PLACE} is not a policy table", hint)
    if table.get("name") not in POLICIES:
        raise UsageError(f"{PLACE}: name is {table.get('name')!r}; here it may be {', '.join(POLICIES)}")
    check_policy(dict(table), PLACE)
    if reason := next(_obstacles(config, table), None):
        raise UsageError(f"specctl-vllm does not start: {reason}")
    return Setting.of({"max_draft": config.speculative_config.num_speculative_tokens, **table})


def _obstacles(config: Any, table: Mapping[str, Any]) -> Iterator[str]:
    speculative, parallel = config.speculative_config, config.parallel_config
    if speculative is None or speculative.method != "draft_model":
        yield 'it stops drafts of a draft model alone: --speculative-config needs "method": "draft_model"'
        return
    if config.use_v2_model_runner:
        yield "it works in Model Slot V1: set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.scheduler_config.async_scheduling:
        yield (
            "asynchronous scheduling gives each request its draft tokens' places before it is known how many there "
            "are, and fills the rest with padding: add --no-async-scheduling"
        )
    if speculative.disable_padded_drafter_batch:
        yield "with disable_padded_drafter_batch it is not told how many draft tokens were accepted"
    if (method := speculative.rejection_sample_method) != "standard":
        yield f'rejection_sample_method is "{method}": {_NOT_STANDARD.get(method, "it is not known to be exact")}'
    if speculative.use_heterogeneous_vocab or speculative.parallel_drafting:
        yield "it knows draft models with the target's tokenizer that draft one token after another"
    if getattr(speculative, "use_local_argmax_reduction", False):
        yield "with use_local_argmax_reduction no process has the logits that the policy's signals are computed from"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        yield "the processes of pipeline and data parallelism wait for draft passes that a policy may end early"
    yield from _unfit(table, speculative.num_speculative_tokens, parallel.tensor_parallel_size)


_NOT_STANDARD = {
    "fly": "it keeps tokens that the target would not have written, so the text is not the target's",
    "synthetic": "it keeps draft tokens at a given rate, whatever the target says, so the text is not the target's",
    "block": "only Model Slot V2 verifies blocks, in which this does not work",
}


def _unfit(table: Mapping[str, Any], longest: int, processes: int) -> Iterator[str]:
    if table.get("max_draft", 0) > longest:
        yield f"max_draft = {table['max_draft']} is more than num_speculative_tokens = {longest}: make them equal"
    if table["name"] != "cost-optimal":
        return
    if processes > 1:
        yield "cost-optimal reads clocks, and with tensor parallelism processes would stop at different tokens and hang"
    if not table.get("carry_over", True):
        yield "with carry_over = false cost-optimal decides for each request alone, and takes shared passes for its own"
    if table.get("use_head") or table.get("use_foresight"):
        yield "cost-optimal has no acceptance head and no foresight here"
