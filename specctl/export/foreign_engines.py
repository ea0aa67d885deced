"""The engines that `calibrate --export` writes settings for, each as its source says of the version that is named."""

from importlib.metadata import PackageNotFoundError, version

from specctl.errors import UsageError
from specctl.export import spelling as writing
from specctl.export.foreign_engine import Engine
from specctl.export.rule_space import (
    ADAPTIVE_VERIFICATION,
    CALIBRATED,
    GROWING,
    POLICY_KINDS,
    PROBED,
    STEPPED,
    THRESHOLD,
)
from specctl.profile.wording import did_you_mean

_TABLE = (
    Engine(
        "transformers",
        "transformers",
        "5.24.0",
        "2026-11-21",
        "transformers/generation/candidate_generator.py",
        writing.transformers,
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
        writing.vllm,
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
        writing.vllm_plugin,
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
        writing.sglang,
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
        writing.llama_cpp,
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
        writing.tensorrt_llm,
        "likeliest",
        scheduled=True,
    ),
    Engine("mlx-lm", "mlx-lm", "0.32.2", "2026-10-16", "mlx_lm/generate.py", writing.mlx_lm, "matched"),
    Engine(
        "openvino",
        "openvino-genai",
        "2026.4.1.0",
        "2026-10-01",
        "src/cpp/src/speculative_decoding/continuous_batching/fast_draft_strategy.cpp",
        writing.openvino,
        None,
        own_rule="keeps a draft token by the draft's probability of it against the target's of a token of its own, "
        "which is not a rule of speculative sampling and follows another law",
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
        writing.exllamav3,
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
        writing.onnxruntime_genai,
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
        raise UsageError(f"{name} cannot be handed a target and a draft model", WITHOUT_PAIRS[name])
    if name not in ENGINES:
        raise UsageError(f"--export: there is no engine '{name}'{did_you_mean(name, [*ENGINES, *WITHOUT_PAIRS])}")
    return ENGINES[name]


def other_version(engine: Engine) -> str | None:
    """The version of the engine that this Python has, if it is another than the one that was read."""
    if engine.package is None:
        return None
    try:
        found = version(engine.package)
    except PackageNotFoundError:
        return None
    return None if found == engine.version else found
