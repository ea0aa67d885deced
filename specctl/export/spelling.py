"""Settings written as each engine reads them: command lines, files, lines of Python."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from shlex import join
from typing import Any

from specctl.export.foreign_engine import Names, Sampled, Written
from specctl.export.rule_space import ADAPTIVE_VERIFICATION
from specctl.policies import Setting
from specctl.profile.model_names import short_name


def length_of(setting: Setting) -> int:
    """The longest draft of a setting of `specctl.export.rule_space`, or the first one's length where it moves."""
    values = setting.all_values
    return int(next(values[name] for name in ("draft_length", "first", "least", "max_draft") if name in values))


def threshold_of(setting: Setting) -> float:
    """The threshold of such a setting, 0 without one."""
    return float(setting.all_values.get("threshold", 0.0))


def lengths_of(setting: Setting) -> list[tuple[int, int | None, int]]:
    """For each number of texts at once from which on a length holds, the last one (None for any) and the length."""
    steps = [(1, setting.at(1)), *setting.batches]
    ends = [least - 1 for least, _ in steps[1:]]
    lengths = [length_of(one) if one.drafts else 0 for _, one in steps]
    return [(least, end, k) for (least, _), end, k in zip(steps, [*ends, None], lengths, strict=True)]


def transformers(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001 - every engine's arguments
    """The keys of the draft's generation_config.json; transformers reads them there, not from the call."""
    schedule = "constant"
    if setting.policy == "heuristic":
        schedule = "heuristic" if setting.all_values["carry_over"] else "heuristic_transient"
    keys = {
        "num_assistant_tokens": length_of(setting),
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": threshold_of(setting),
    }
    notes = ["Add these keys to that file, or set them on draft.generation_config: only the draft's are read."]
    if threshold_of(setting):
        notes.append("Where scikit-learn can be imported, transformers moves the threshold: it stays only without.")
    return Written(f"generation_config.json in {names.draft}", json.dumps(keys, indent=2), tuple(notes))


def vllm(names: Names, setting: Setting, sampled: Sampled) -> Written:
    """A command line. Drawn draft tokens need their probabilities kept, which is not vLLM's default."""
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": names.draft,
        "num_speculative_tokens": length_of(setting),
    }
    if setting.batches:
        steps = lengths_of(setting)
        config["num_speculative_tokens"] = max(length for *_, length in steps)
        # The last length holds for more texts, too, whatever the end of its range.
        config["num_speculative_tokens_per_batch_size"] = [[low, high or low, length] for low, high, length in steps]
    if sampled.temperature:
        config["draft_sample_method"] = "probabilistic"
    if sampled.blocks:
        config["rejection_sample_method"] = "block"
    note = ("Block verification is done by Model Runner V2 only, vLLM's default.",) if sampled.blocks else ()
    if setting.policy == ADAPTIVE_VERIFICATION.policy:
        config["enable_adaptive_verification"] = True
        note = (
            *note,
            "Adaptive verification takes Model Runner V2 with full CUDA graphs, and neither LoRA nor pipelines; the "
            "draft makes all its passes.",
        )
    if setting.batches:
        note = (*note, "Lengths by number of requests are off with data parallelism.")
    command = join(["vllm", "serve", names.target, "--speculative-config", json.dumps(config)])
    return Written("command line", command, note)


def vllm_plugin(names: Names, setting: Setting, sampled: Sampled) -> Written:
    """A command line with the policy as a table for specctl-vllm; vLLM's own for a constant length."""
    plain = vllm(names, setting, sampled)
    if setting.policy == "constant":
        return replace(plain, notes=("A constant length is the best setting: it needs no plugin.",))
    table = {"specctl": {"name": setting.policy, **dict(setting.values), "max_draft": length_of(setting)}}
    options = ["--no-async-scheduling", "--worker-cls", "specctl_vllm.worker.Worker"]
    command = f"VLLM_USE_V2_MODEL_RUNNER=0 {plain.text} {join([*options, '--additional-config', json.dumps(table)])}"
    note = "The experimental distribution specctl-vllm has to be installed; compare with vLLM's own best length there."
    return Written("command line", command, (note,))


def sglang(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """A command line; the number of draft tokens counts the token that they follow. A file for adaptive ones."""
    length = length_of(setting)
    options = {
        "model-path": names.target,
        "speculative-algorithm": {"eagle1": "EAGLE", "eagle3": "EAGLE3"}.get(names.head or "", "STANDALONE"),
        "speculative-draft-model-path": names.draft,
        "speculative-num-steps": length,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": length + 1,
    }
    command, place = ["python", "-m", "sglang.launch_server"], "command line"
    if names.head is None:
        note = ("Its adaptive lengths, --speculative-adaptive, are for EAGLE heads alone.",)
        return Written(place, _command(command, options), note)
    ladders = {str(least): [k] for least, _, k in lengths_of(setting)}
    ladders["1"] = list(setting.all_values.get("lengths", (length,)))
    if ladders == {"1": [length]}:
        return Written(place, _command(command, options))
    options["speculative-adaptive-config"] = "adaptive.json"
    started = f"{_command(command, options)} --speculative-adaptive"
    # Where a number of texts has no entry, that of the next smaller one holds.
    file = json.dumps({rows: {"candidate_steps": steps} for rows, steps in ladders.items()})
    return Written(f"adaptive.json, for: {started}", file, ("It is off with attention data parallelism.",))


def llama_cpp(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """A command line for models that were converted to GGUF."""
    options = {
        "model": _gguf(names.target),
        "spec-type": "draft-simple",
        "spec-draft-model": _gguf(names.draft),
        "spec-draft-n-max": length_of(setting),
        "spec-draft-n-min": 0,
        "spec-draft-p-min": f"{threshold_of(setting):g}",
    }
    note = "The files are what llama.cpp's convert_hf_to_gguf.py writes for these models; requests cannot override it."
    return Written("command line", _command(["llama-server"], options), (note,))


def tensorrt_llm(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """A YAML file for ``trtllm-serve``."""
    config: dict[str, Any] = {
        "decoding_type": "Draft_Target",
        "max_draft_len": length_of(setting),
        "speculative_model": names.draft,
    }
    notes: tuple[str, ...] = ()
    if setting.batches:
        schedule, notes = _schedule(lengths_of(setting))
        config["draft_len_schedule"] = schedule
    lines = ["speculative_config:", *(f"  {key}: {_yaml(value)}" for key, value in config.items())]
    command = join(["trtllm-serve", names.target, "--config", "speculative.yaml"])
    return Written(f"speculative.yaml, for: {command}", "\n".join(lines), notes)


def _schedule(steps: list[tuple[int, int | None, int]]) -> tuple[dict[int, int], tuple[str, ...]]:
    """`lengths_of` as TensorRT-LLM takes them, by the last number of requests of each, and what is to be said of them.

    Its first length has to be its longest one, for which it reserves memory. Behind the last number it never drafts.
    """
    longest = steps[0][-1]
    while not steps[-1][-1]:
        steps = steps[:-1]
    low, high, _ = steps[-1]
    notes = [
        f"With {first} requests at once K = {k} is the fastest, but none may be longer than the first."
        for first, _, k in steps
        if k > longest
    ]
    unknown = "" if high else ": that was not priced"
    notes.append(f"With more than {high or low} requests at once it does not draft{unknown}.")
    return {last or first: min(k, longest) for first, last, k in steps}, tuple(notes)


def mlx_lm(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """A command line."""
    options = {"model": names.target, "draft-model": names.draft, "num-draft-tokens": length_of(setting)}
    return Written("command line", _command(["mlx_lm.server"], options))


def openvino(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """Lines for a GenerationConfig. A threshold and a length exclude each other."""
    if not threshold_of(setting):
        return Written("openvino_genai.GenerationConfig", json.dumps({"num_assistant_tokens": length_of(setting)}))
    notes = (
        "Without logprobs OpenVINO takes every greedy token for certain; with a threshold it has no longest draft.",
        "On an NPU there is no threshold.",
    )
    keys = {"assistant_confidence_threshold": threshold_of(setting), "logprobs": 1}
    return Written("openvino_genai.GenerationConfig", json.dumps(keys), notes)


def exllamav3(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """Arguments of exllamav3's Generator."""
    confidence = setting.all_values.get("confidence")
    text = f"Generator(..., num_draft_tokens={length_of(setting)}, dynamic_draft_tokens={confidence is not None}"
    text += ")" if confidence is None else f", draft_confidence={confidence:g})"
    note = f"The pair is {names.target} and {names.draft}, converted to EXL3."
    return Written("Python, with model, cache, tokenizer, draft_model and draft_cache", text, (note,))


def onnxruntime_genai(names: Names, setting: Setting, sampled: Sampled) -> Written:  # noqa: ARG001
    """A call of onnxruntime-genai's GeneratorParams."""
    length, values = length_of(setting), setting.all_values
    adaptive = length if values.get("max_draft", length) > length else 0
    options = f"max_draft_tokens={length}, min_adaptive_k={adaptive}, cooldown={values.get('cooldown', False)}"
    text = f"params.set_speculative_options({options})"
    note = f"The pair is {names.target} and {names.draft} in one genai_config.json, the second as model.draft."
    return Written("Python, with GeneratorParams params", text, (note,))


def _command(words: list[str], options: Mapping[str, object]) -> str:
    return join([*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))])


def _yaml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {each}' for key, each in value.items())}}}"
    return json.dumps(value)


def _gguf(model: str) -> str:
    return f"{PurePath(short_name(model.rstrip('/'))).name}.gguf"
