"""The engines of `calibrate --export`: their stopping rules, taken from their source code, and their formats."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from shlex import join
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.policies import Setting
from specctl.profile.wording import did_you_mean, short_name

Acceptance = Literal["ratio", "likeliest", "matched"]
"""Which draft tokens an engine keeps when sampling. ``ratio``: drawn from q and kept with probability min(1, p/q).
``likeliest``: the draft's likeliest token, kept with probability p. ``matched``: drawn from q, and kept if a token
drawn from p is the same."""
Confidence = Literal["chosen", "largest", "top ten", "top logit"]
"""An engine's confidence in a draft token: the draft's probability of the chosen token, the largest probability, that
after a softmax over the ten largest logits, or the largest logit."""
LONGEST = 20  # The longest draft that is tried


@dataclass(frozen=True, slots=True)
class Pairing:
    """A pair and its sampling, as input for an engine's settings."""

    # target, draft: folders or hub ids
    target: str
    draft: str
    head: str | None = None  # the kind of draft head; None for a draft model
    temperature: float = 0.0  # 0 in greedy decoding
    blocks: bool = False  # whether draft tokens are verified as a block


@dataclass(frozen=True, slots=True)
class Written:
    """A setting in the engine's own format."""

    place: str  # the place for the text
    text: str  # a command line, a file, or lines of Python
    notes: tuple[str, ...] = ()  # notes on its use


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with its rules for stopping drafts."""

    name: str  # its name in ``--export``
    package: str | None  # on PyPI; its installed version is compared. None for an engine without one
    version: str  # whose source was read
    released: str  # its date, or a description where the date is not known
    source: str  # the file that has the rule
    write: Callable[[Pairing, Setting], Written]  # writes a setting of its rule as it reads it
    # when sampling; None for a rule of its own that cannot be replayed, which ``own_rule`` describes
    acceptance: Acceptance | None
    own_rule: str = ""  # ends a sentence that begins with the engine's name
    confidence: Confidence | None = None  # the signal that its rules compare with a threshold; None for none
    keeps_trigger: bool = True  # whether the token below the threshold is also verified
    capped: bool = True  # whether a threshold can be combined with a longest draft
    kinds: "tuple[Kind, ...]" = ()  # of rules that it has besides drafts of one length
    stops_at_eos: bool = False  # whether a draft ends at an end-of-sequence token; else drafting continues
    blocks: bool = False  # whether it can verify draft tokens as a block
    # why its threshold takes time that no replay includes, as the beginning of a sentence; such a threshold is shown,
    # and a length is written. Empty if it does not.
    unpriced: str = ""
    further_passes: int = 0  # of the draft in each round, apart from those that draft
    passes_when_full: int = 0  # further ones in a round whose tokens are all accepted
    passes_when_idle: int = 0  # of either model in a round without a draft, apart from the target's one
    scheduled: bool = False  # whether it supports a draft length for each batch size
    heads: tuple[str, ...] = ()  # supported kinds of draft heads
    longest: int | None = None  # longest supported draft; None for any
    read: str = "2026-11-22"  # the day on which its source was read

    def lengths(self, recorded: int) -> range:
        """The draft lengths to try if recorded drafts have ``recorded`` tokens."""
        return range(1, min(LONGEST, recorded, self.longest or LONGEST) + 1)


UNCAPPED = 1_000_000  # The longest draft of a rule that has none
SHORT = (4, 6, 8)
"""The longest drafts of policies in a batch, where each round takes as long as its longest draft."""
LADDERS = ((1, 2, 3), (1, 3, 5), (2, 4, 6), (1, 3, 5, 7), (3, 5, 7, 9), (1, 2, 3, 4, 5, 6, 7, 8))
"""The lengths that an adaptive rule may step between."""
_TWENTIETHS = tuple(round(0.05 * n, 2) for n in range(1, 20))
_TENTHS = tuple(round(0.1 * n, 1) for n in range(1, 10))
Values = Iterable[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rule."""

    policy: str  # the policy that implements it
    # the settings to try in an engine, from the lengths of drafts that can be replayed
    values: Callable[[Engine, Sequence[int]], Values]
    words: Callable[[dict[str, Any]], str]  # describes a setting in the same words for all engines
    compares: bool = False  # whether it reads `Engine.confidence`
    for_heads: bool = False  # whether an engine has it only for draft heads


def _thresholds(engine: Engine, lengths: Sequence[int]) -> Values:
    rule = {"adapt": False, "keep_trigger": engine.keeps_trigger}
    caps = lengths if engine.capped else (UNCAPPED,)
    return [{**rule, "threshold": threshold, "max_draft": cap} for cap in caps for threshold in _TWENTIETHS]


def _growing(_: Engine, lengths: Sequence[int]) -> Values:
    rule = {"max_draft": UNCAPPED}
    return [{**rule, "draft_length": k, "carry_over": carried} for k in lengths for carried in (False, True)]


def _probed(_: Engine, lengths: Sequence[int]) -> Values:
    adaptive = [
        {"least": k, "max_draft": lengths[-1], "cooldown": rests} for k in lengths[:-1] for rests in (False, True)
    ]
    return adaptive + [{"least": k, "max_draft": k, "cooldown": True} for k in lengths]


def _policy(name: str) -> Kind:
    """A policy of specctl that an engine runs, with short drafts."""
    return Kind(
        name,
        lambda _, lengths: [
            {"threshold": threshold, "max_draft": cap} for cap in SHORT if cap in lengths for threshold in _TWENTIETHS
        ],
        lambda values: f"{name} threshold {values['threshold']:g}, K = {values['max_draft']}",
    )


def _longest(values: dict[str, Any]) -> str:
    return f"K = {values['max_draft']}" if values["max_draft"] < UNCAPPED else "any K"


def _probed_words(values: dict[str, Any]) -> str:
    least, most = values["least"], values["max_draft"]
    return (f"K = {least}" if least == most else f"K probed from {least}") + ", cooldown" * bool(values["cooldown"])


LENGTHS = Kind(
    "constant",
    lambda _, lengths: [{"draft_length": k} for k in lengths],
    lambda values: f"K = {values['draft_length']}",
)
GROWING = Kind(
    "heuristic",
    _growing,
    lambda values: f"K from {values['draft_length']}, +2 or -1" + ", kept between texts" * bool(values["carry_over"]),
)
THRESHOLD = Kind(
    "max-confidence",
    _thresholds,
    lambda values: f"threshold {values['threshold']:g}, {_longest(values)}",
    compares=True,
)
ADAPTIVE_VERIFICATION = Kind(
    "vllm-adaptive",
    lambda _, lengths: [{"max_draft": k} for k in lengths],
    lambda values: f"K = {values['max_draft']}, verified adaptively",
    compares=True,
)
PROBED = Kind("probed-length", _probed, _probed_words)
CALIBRATED = Kind(
    "calibrated-confidence",
    lambda _, lengths: [{"confidence": share, "max_draft": k} for k in lengths for share in _TENTHS],
    lambda values: f"confidence {values['confidence']:g}, {_longest(values)}",
    compares=True,
)
STEPPED = Kind(
    "stepped-length",
    lambda _, lengths: [
        {"lengths": ladder, "first": first} for ladder in LADDERS if ladder[-1] in lengths for first in ladder
    ],
    lambda values: f"K of {', '.join(map(str, values['lengths']))} from {values['first']}",
    for_heads=True,
)
POLICY_KINDS = tuple(map(_policy, ("svip", "adaedl", "max-confidence")))  # Run by `vllm-plugin`
_WORDS = {one.policy: one.words for one in (*POLICY_KINDS[:2], LENGTHS, GROWING, THRESHOLD, ADAPTIVE_VERIFICATION)} | {
    one.policy: one.words for one in (PROBED, CALIBRATED, STEPPED)
}


def rule_space(engine: Engine, confidence: Confidence | None, longest: int, head: str | None = None) -> list[Setting]:
    """Every setting of an engine's rules to try.

    Args:
        engine: the engine.
        confidence: the traces' values of the engine's confidence; None to try no thresholds.
        longest: the longest draft that can be replayed.
        head: the kind of draft head; None for a draft model.
    """
    lengths = engine.lengths(longest)
    return [
        Setting.of({"name": kind.policy, **values})
        for kind in (LENGTHS, *engine.kinds)
        if not (kind.compares and confidence is None) and (head is not None or not kind.for_heads)
        for values in kind.values(engine, lengths)
    ]


def words_of(setting: Setting) -> str:
    """A setting of `rule_space` in the same words for all engines."""
    if not setting.drafts:
        return "no draft"
    values = setting.all_values
    if setting.policy == "max-confidence" and values["adapt"]:
        return POLICY_KINDS[-1].words(values)
    return _WORDS[setting.policy](values)


def length_of(setting: Setting) -> int:
    """The longest draft of a setting of this module, or the first length of an adaptive one."""
    values = setting.all_values
    return int(next(values[name] for name in ("draft_length", "first", "least", "max_draft") if name in values))


def threshold_of(setting: Setting) -> float:
    """The threshold of a setting, 0 without one."""
    return float(setting.all_values.get("threshold", 0.0))


def lengths_of(setting: Setting) -> list[tuple[int, int | None, int]]:
    """Ranges of batch sizes: by first size, the last size (None for no limit) and the draft length."""
    steps = [(1, setting.at(1)), *setting.batches]
    ends = [least - 1 for least, _ in steps[1:]]
    lengths = [length_of(one) if one.drafts else 0 for _, one in steps]
    return [(least, end, k) for (least, _), end, k in zip(steps, [*ends, None], lengths, strict=True)]


def for_transformers(pair: Pairing, setting: Setting) -> Written:
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
    return Written(f"generation_config.json in {pair.draft}", json.dumps(keys, indent=2), tuple(notes))


def for_vllm(pair: Pairing, setting: Setting) -> Written:
    """A command line. Sampled draft tokens need stored probabilities, which is not vLLM's default."""
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": pair.draft,
        "num_speculative_tokens": length_of(setting),
    }
    if setting.batches:
        steps = lengths_of(setting)
        config["num_speculative_tokens"] = max(length for *_, length in steps)
        # The last length also applies beyond the end of its range.
        config["num_speculative_tokens_per_batch_size"] = [[low, high or low, length] for low, high, length in steps]
    if pair.temperature:
        config["draft_sample_method"] = "probabilistic"
    if pair.blocks:
        config["rejection_sample_method"] = "block"
    note = ("Block verification is done by Model Slot V2 only, vLLM's default.",) if pair.blocks else ()
    if setting.policy == ADAPTIVE_VERIFICATION.policy:
        config["enable_adaptive_verification"] = True
        note = (
            *note,
            "Adaptive verification takes Model Slot V2 with full CUDA graphs, and neither LoRA nor pipelines; the "
            "draft makes all its passes.",
        )
    if setting.batches:
        note = (*note, "Lengths by number of requests are off with data parallelism.")
    command = join(["vllm", "serve", pair.target, "--speculative-config", json.dumps(config)])
    return Written("command line", command, note)


def for_vllm_plugin(pair: Pairing, setting: Setting) -> Written:
    """A command line with the policy as a table for specctl-vllm; vLLM's own for a constant length."""
    plain = for_vllm(pair, setting)
    if setting.policy == "constant":
        return replace(plain, notes=("A constant length is the best setting: it needs no plugin.",))
    table = {"specctl": {"name": setting.policy, **dict(setting.values), "max_draft": length_of(setting)}}
    options = ["--no-async-scheduling", "--worker-cls", "specctl_vllm.worker.Worker"]
    command = f"VLLM_USE_V2_MODEL_RUNNER=0 {plain.text} {join([*options, '--additional-config', json.dumps(table)])}"
    note = "The experimental distribution specctl-vllm has to be installed; compare with vLLM's own best length there."
    return Written("command line", command, (note,))


def for_sglang(pair: Pairing, setting: Setting) -> Written:
    """A command line, whose number of draft tokens includes the token before them; a file for adaptive lengths."""
    length = length_of(setting)
    options = {
        "model-path": pair.target,
        "speculative-algorithm": {"eagle1": "EAGLE", "eagle3": "EAGLE3"}.get(pair.head or "", "STANDALONE"),
        "speculative-draft-model-path": pair.draft,
        "speculative-num-steps": length,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": length + 1,
    }
    command, place = ["python", "-m", "sglang.launch_server"], "command line"
    if pair.head is None:
        note = ("Its adaptive lengths, --speculative-adaptive, are for EAGLE heads alone.",)
        return Written(place, _command(command, options), note)
    ladders = {str(least): [k] for least, _, k in lengths_of(setting)}
    ladders["1"] = list(setting.all_values.get("lengths", (length,)))
    if ladders == {"1": [length]}:
        return Written(place, _command(command, options))
    options["speculative-adaptive-config"] = "adaptive.json"
    started = f"{_command(command, options)} --speculative-adaptive"
    # A batch size without an entry uses that of the next smaller size.
    file = json.dumps({rows: {"candidate_steps": steps} for rows, steps in ladders.items()})
    return Written(f"adaptive.json, for: {started}", file, ("It is off with attention data parallelism.",))


def for_llama_cpp(pair: Pairing, setting: Setting) -> Written:
    """A command line for models that were converted to GGUF."""
    options = {
        "model": _gguf(pair.target),
        "spec-type": "draft-simple",
        "spec-draft-model": _gguf(pair.draft),
        "spec-draft-n-max": length_of(setting),
        "spec-draft-n-min": 0,
        "spec-draft-p-min": f"{threshold_of(setting):g}",
    }
    note = "The files are what llama.cpp's convert_hf_to_gguf.py writes for these models; requests cannot override it."
    return Written("command line", _command(["llama-server"], options), (note,))


def for_tensorrt_llm(pair: Pairing, setting: Setting) -> Written:
    """A YAML file for ``trtllm-serve``."""
    config: dict[str, Any] = {
        "decoding_type": "Draft_Target",
        "max_draft_len": length_of(setting),
        "speculative_model": pair.draft,
    }
    notes: tuple[str, ...] = ()
    if setting.batches:
        schedule, notes = _schedule(lengths_of(setting))
        config["draft_len_schedule"] = schedule
    lines = ["speculative_config:", *(f"  {key}: {_yaml(value)}" for key, value in config.items())]
    command = join(["trtllm-serve", pair.target, "--config", "speculative.yaml"])
    return Written(f"speculative.yaml, for: {command}", "\n".join(lines), notes)


def _schedule(steps: list[tuple[int, int | None, int]]) -> tuple[dict[int, int], tuple[str, ...]]:
    """`lengths_of` in TensorRT-LLM's form, by the last batch size of each range, with notes.

    Its first length has to be its longest one, for which it reserves memory. After the last number it never drafts.
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


def for_mlx_lm(pair: Pairing, setting: Setting) -> Written:
    """A command line."""
    options = {"model": pair.target, "draft-model": pair.draft, "num-draft-tokens": length_of(setting)}
    return Written("command line", _command(["mlx_lm.server"], options))


def for_openvino(pair: Pairing, setting: Setting) -> Written:  # noqa: ARG001 - models are named elsewhere
    """Lines for a GenerationConfig. A threshold and a length exclude each other."""
    if not threshold_of(setting):
        return Written("openvino_genai.GenerationConfig", json.dumps({"num_assistant_tokens": length_of(setting)}))
    notes = (
        "Without logprobs OpenVINO takes every greedy token for certain; with a threshold it has no longest draft.",
        "On an NPU there is no threshold.",
    )
    keys = {"assistant_confidence_threshold": threshold_of(setting), "logprobs": 1}
    return Written("openvino_genai.GenerationConfig", json.dumps(keys), notes)


def for_exllamav3(pair: Pairing, setting: Setting) -> Written:
    """Arguments of exllamav3's Generator."""
    confidence = setting.all_values.get("confidence")
    text = f"Generator(..., num_draft_tokens={length_of(setting)}, dynamic_draft_tokens={confidence is not None}"
    text += ")" if confidence is None else f", draft_confidence={confidence:g})"
    note = f"The pair is {pair.target} and {pair.draft}, converted to EXL3."
    return Written("Python, with model, cache, tokenizer, draft_model and draft_cache", text, (note,))


def for_onnxruntime_genai(pair: Pairing, setting: Setting) -> Written:
    """A call of onnxruntime-genai's GeneratorParams."""
    length, values = length_of(setting), setting.all_values
    adaptive = length if values.get("max_draft", length) > length else 0
    options = f"max_draft_tokens={length}, min_adaptive_k={adaptive}, cooldown={values.get('cooldown', False)}"
    text = f"params.set_speculative_options({options})"
    note = f"The pair is {pair.target} and {pair.draft} in one genai_config.json, the second as model.draft."
    return Written("Python, with GeneratorParams params", text, (note,))


def _command(words: list[str], options: Mapping[str, object]) -> str:
    return join([*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))])


def _yaml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {each}' for key, each in value.items())}}}"
    return json.dumps(value)


def _gguf(model: str) -> str:
    name = PurePath(short_name(model.rstrip("/"))).name
    return name if name.lower().endswith(".gguf") else f"{name}.gguf"


_TABLE = (
    Engine(
        "transformers",
        "transformers",
        "5.24.0",
        "2026-11-21",
        "transformers/generation/candidate_generator.py",
        for_transformers,
        "ratio",
        confidence="chosen",
        kinds=(GROWING, THRESHOLD),
        stops_at_eos=True,
    ),
    Engine(
        "vllm",
        "vllm",
        "0.33.0",
        "2026-11-02",
        "vllm/config/speculative.py",
        for_vllm,
        "ratio",
        confidence="largest",
        kinds=(ADAPTIVE_VERIFICATION,),
        blocks=True,
        scheduled=True,
        read="2026-11-24",
    ),
    Engine(
        "vllm-plugin",
        "vllm",
        "0.33.0",
        "2026-11-02",
        "vllm/v1/spec_decode/llm_base_proposer.py",
        for_vllm_plugin,
        "ratio",
        kinds=POLICY_KINDS,
        read="2026-11-24",
    ),
    Engine(
        "sglang",
        "sglang",
        "0.5.23",
        "2026-10-30",
        "sglang/srt/arg_groups/speculative_hook.py",
        for_sglang,
        "likeliest",
        kinds=(STEPPED,),
        heads=("eagle1", "eagle3"),
        read="2026-11-24",
    ),
    Engine(
        "llama.cpp",
        None,
        "0c1e570",
        "2026-10-01",
        "common/speculative.cpp",
        for_llama_cpp,
        "likeliest",
        confidence="top ten",
        kinds=(THRESHOLD,),
        keeps_trigger=False,
        further_passes=1,  # over the tokens that the target has verified
    ),
    Engine(
        "tensorrt-llm",
        "tensorrt-llm",
        "0004396",
        "a commit of main",
        "tensorrt_llm/llmapi/llm_args.py",
        for_tensorrt_llm,
        "likeliest",
        scheduled=True,
    ),
    Engine("mlx-lm", "mlx-lm", "0.32.2", "2026-10-16", "mlx_lm/generate.py", for_mlx_lm, "matched"),
    Engine(
        "openvino",
        "openvino-genai",
        "2026.4.1.0",
        "2026-10-01",
        "src/cpp/src/speculative_decoding/continuous_batching/fast_draft_strategy.cpp",
        for_openvino,
        None,
        own_rule="keeps a draft token by the draft's probability of it against the target's of a token of its own, "
        "which is not a rule of speculative sampling and follows another distribution",
        confidence="chosen",
        kinds=(THRESHOLD,),
        capped=False,
        unpriced="A threshold takes log-probabilities of all tokens",
    ),
    Engine(
        "exllamav3",
        "exllamav3",
        "1.6.5",
        "2026-10-25",
        "exllamav3/generator/generator.py",
        for_exllamav3,
        "likeliest",
        confidence="top logit",
        kinds=(CALIBRATED,),
        further_passes=1,  # over the last draft token
    ),
    Engine(
        "onnxruntime-genai",
        "onnxruntime-genai",
        "0.18.0",
        "built 2026-10-13",
        "src/speculative_decoding_strategy.h of a0c04eb (2026-08-22)",
        for_onnxruntime_genai,
        "ratio",
        kinds=(PROBED,),
        passes_when_full=1,  # over the last draft token
        passes_when_idle=1,  # over the token that was drawn, before the next draft
        longest=16,
        read="2026-11-24",
    ),
)
ENGINES = {engine.name: engine for engine in _TABLE}
WITHOUT_PAIRS = {
    "ollama": "it drafts with MTP and DFlash heads alone (v0.33.0-rc2, llm/llama_server.go), and its "
    "draft_num_predict is for these; llama.cpp's server, which it runs, takes a pair: --export llama.cpp"
}
"""Engines that take no ordinary draft model, with the reason."""


def engine_of(name: str) -> Engine:
    """The engine of this name.

    Raises:
        UsageError: there is none, or it takes no ordinary draft model.
    """
    if name in WITHOUT_PAIRS:
        raise UsageError(f"{name} cannot run a target with a draft model", WITHOUT_PAIRS[name])
    if name not in ENGINES:
        raise UsageError(f"--export: there is no engine '{name}'{did_you_mean(name, [*ENGINES, *WITHOUT_PAIRS])}")
    return ENGINES[name]


def other_version(engine: Engine) -> str | None:
    """The version of the engine installed here, if it differs from the version whose source was read."""
    if engine.package is None:
        return None
    try:
        found = version(engine.package)
    except PackageNotFoundError:
        return None
    return None if found == engine.version else found
