"""OpenVINO GenAI: its pipeline for text, with a draft model where it drafts."""

from pathlib import Path
from time import perf_counter
from typing import Any

from .serving import Answer, serve


def version() -> str:
    import openvino_genai

    return str(openvino_genai.__version__)


class Pair:
    """The models that a question names."""

    def __init__(self, question: dict[str, Any]) -> None:
        import openvino_genai

        self._engine = openvino_genai
        folder = Path(question["folder"])
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": question["threads"]}
        if question["cache"] == "float32":
            settings["KV_CACHE_PRECISION"] = "f32"
        if question["weights"] == "float32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
        options = openvino_genai.GenerationConfig()
        options.do_sample = False
        options.apply_chat_template = False
        options.stop_token_ids = set(question["stop"])
        draft = {}
        if question["draft"] != "none":
            draft["draft_model"] = openvino_genai.draft_model(str(folder / "draft"), "CPU", **settings)
        if question["draft"] == "constant":
            options.num_assistant_tokens = question["tokens"]
        if question["draft"] == "confidence":
            options.assistant_confidence_threshold = question["threshold"]
            options.logprobs = 1  # without them every greedy token counts as certain, and each draft ends after one
        self._drafts, self._options = bool(draft), options
        self._pipeline = openvino_genai.LLMPipeline(
            str(folder / "target"), "CPU", scheduler_config=scheduler, **draft, **settings
        )

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        import numpy
        from openvino import Tensor

        began = perf_counter()
        self._options.max_new_tokens = most
        ids = numpy.zeros((len(batch), max(map(len, batch))), dtype=numpy.int64)
        given = numpy.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, : len(prompt)], given[row, : len(prompt)] = prompt, 1
        inputs = self._engine.TokenizedInputs(Tensor(ids), Tensor(given))
        result = self._pipeline.generate(inputs, self._options)
        texts = [[int(token) for token in tokens] for tokens in result.tokens]
        seconds = perf_counter() - began
        first = result.perf_metrics.get_ttft().mean / 1e3
        if not self._drafts:
            return [Answer(found, seconds, first, passes=len(found)) for found in texts]
        counts = result.extended_perf_metrics
        target = counts.main_model_metrics.raw_metrics.m_durations if counts is not None else []
        draft = counts.draft_model_metrics.raw_metrics.m_durations if counts is not None else []
        (found,) = texts  # passes of several texts are not told apart
        return [Answer(found, seconds, first, len(target), len(draft))]


if __name__ == "__main__":
    serve(version, Pair)
