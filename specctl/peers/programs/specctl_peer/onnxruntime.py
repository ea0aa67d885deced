"""onnxruntime-genai: a target, with a draft where it drafts, in one model of its own."""

import json
from collections.abc import Iterable
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
        known = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
        self._pad = int(known["pad_token_id"])
        if question["draft"] != "none":
            draft = json.loads((folder / DRAFT / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
            options = {**draft["session_options"], **session}
            model["draft"] = {**draft, "filename": f"{DRAFT}/{draft['filename']}", "session_options": options}
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": model}))
        self._model = onnxruntime_genai.Model(config)
        self._drafting: dict[str, Any] = {
            "none": {},
            "constant": {"max_draft_tokens": question.get("tokens")},
            "adaptive": {"min_adaptive_k": question.get("tokens")},
        }[question["draft"]]
        if question.get("cooldown"):
            self._drafting["cooldown"] = True

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        began = perf_counter()
        longest = max(map(len, batch))
        options = self._engine.GeneratorParams(self._model)
        options.set_search_options(max_length=longest + most, do_sample=False, batch_size=len(batch))
        if self._drafting:
            options.set_speculative_options(**self._drafting)
        generator = self._engine.Generator(self._model, options)
        # On the right, where padding moves no position.
        generator.append_tokens([token for ids in batch for token in [*ids, *[self._pad] * (longest - len(ids))]])
        arrivals = []
        while not generator.is_done():
            generator.generate_next_token()
            arrivals.append(perf_counter() - began)
        texts = [self._text(generator.get_sequence(row)[longest:], most) for row in range(len(batch))]
        seconds = perf_counter() - began
        if not self._drafting:
            return [Answer(ids, seconds, arrivals[0], len(ids), arrivals=arrivals[: len(ids)]) for ids in texts]
        counts = generator.get_speculative_stats()
        (ids,) = texts  # it drafts for one text only
        return [Answer(ids, seconds, arrivals[0], counts["rounds"], counts["draft_tokens_proposed"], arrivals)]

    def _text(self, sequence: Iterable[int], most: int) -> list[int]:
        """What a row wrote: the token that ended it is not in a sequence of its own, and padding follows in others."""
        found = [int(token) for token in sequence]
        end = next((place for place, token in enumerate(found) if token in (*self._stop, self._pad)), len(found))
        last = [token for token in found[end : end + 1] if token in self._stop] or self._stop[:1]
        return [*found[:end], *last][:most]


if __name__ == "__main__":
    serve(version, Pair)
