"""onnxruntime-genai: a target, with a draft where it drafts, in one model of its own."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

from .serving import Answer, serve

DRAFT = "draft"
"""The folder of the draft's model, within that of the target's."""


def version() -> str:
    import onnxruntime_genai

    return str(onnxruntime_genai.__version__)


class Pair:
    """The models that a question names."""

    def __init__(self, question: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._engine = onnxruntime_genai
        self._stop = question["stop"]
        folder = Path(question["folder"])
        session = {"intra_op_num_threads": question["threads"], "inter_op_num_threads": 1}
        model: dict[str, Any] = {"decoder": {"session_options": session}}
        if self._stop:
            model["eos_token_id"] = self._stop
        if question["draft"] != "none":
            draft = json.loads((folder / DRAFT / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
            options = {**draft["session_options"], **session}
            model["draft"] = {**draft, "filename": f"{DRAFT}/{draft['filename']}", "session_options": options}
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": model}))
        self._model = onnxruntime_genai.Model(config)
        self._drafting = {
            "none": {},
            "constant": {"max_draft_tokens": question.get("tokens")},
            "adaptive": {"min_adaptive_k": question.get("tokens")},
        }[question["draft"]]

    def run(self, ids: list[int], most: int) -> Answer:
        began = perf_counter()
        options = self._engine.GeneratorParams(self._model)
        options.set_search_options(max_length=len(ids) + most, do_sample=False)
        if self._drafting:
            options.set_speculative_options(**self._drafting)
        generator = self._engine.Generator(self._model, options)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = perf_counter() - began
        while not generator.is_done():
            generator.generate_next_token()
        found = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
        seconds = perf_counter() - began
        if len(found) < most and self._stop and (not found or found[-1] not in self._stop):
            found.append(self._stop[0])  # the token that ended the text is not in the sequence
        if not self._drafting:
            return Answer(found, seconds, first, passes=len(found))
        counts = generator.get_speculative_stats()
        return Answer(found, seconds, first, counts["rounds"], counts["draft_tokens_proposed"])


if __name__ == "__main__":
    serve(version, Pair)
