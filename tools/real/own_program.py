"""specctl, driven by lines of JSON: ``python -m tools.real.own_program TARGET THREADS``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import specctl
from specctl.api.decoder import Decoder
from specctl.models.passes.ordinary_tokens import LAST, ordinary_tokens
from specctl.records import Completion, Round
from tools.real.llama_program import Clocks, resident, serve

NONE = "none"


class Program:
    """A pair with a decoder for each policy, so that what a policy learns stays with it from text to text."""

    def __init__(self, target: str, draft: str | None, settings: Sequence[str]) -> None:
        self._calls = Calls(target)
        self._first = specctl.load(target=target, draft=draft, overrides=settings, progress=_say)
        self._decoders: dict[str, Decoder] = {}

    def _decoder(self, policy: str) -> Decoder:
        if policy not in self._decoders:
            found = Decoder(self._first.resolved, self._first.pair)
            if found.profile.draft is not None:
                found.use(policy)
            elif policy != NONE:
                raise SystemExit(f"there is no draft for {policy}")
            self._decoders[policy] = found
        return self._decoders[policy]

    def ids(self, prompt: str) -> dict[str, Any]:
        """The ids of a prompt, through the chat template."""
        return {"ids": list(self._decoder(NONE).generate(prompt, max_new_tokens=1, temperature=0.0).prompt)}

    def passes(self, widths: Sequence[int], context: int) -> dict[str, Any]:
        """Milliseconds of a pass of each width after ``context`` tokens, logits of all its tokens wanted."""
        from specctl.observing.pass_times import fill  # imports torch, which decoding may not need

        target, found = self._first.pair.target, {}
        fill(target, ordinary_tokens(context, LAST))
        for width in [widths[0], *widths]:  # the first pass only warms up
            tokens, clocks = ordinary_tokens(width, LAST), Clocks()
            target.extend(tokens, keep=width)
            found[str(width)] = clocks.read()
            target.rollback(context)
        return {"passes": found}

    def write(self, ids: Sequence[int], count: int, policy: str = NONE) -> dict[str, Any]:
        """A greedy text."""
        first: list[tuple[dict[str, float], Clocks, dict[str, float], int]] = []
        whole = Clocks()

        def note(round_: Round) -> None:
            if not first:
                first.append((whole.read(), Clocks(), {**self._calls.ms}, len(round_.emitted)))

        found = self._decoder(policy).generate(ids, on_round=note, max_new_tokens=count, temperature=0.0)
        ((began, rest, before, emitted),) = first
        return {
            "ids": list(found.tokens),
            "first": began,
            "rest": rest.read(),
            "text": found.text,
            "decode": {clock: ms - before[clock] for clock, ms in self._calls.ms.items()},
            "rest_tokens": len(found.tokens) - emitted,
            "rounds": len(found.rounds),
            "drafted": sum(len(one.steps) for one in found.rounds),
            "accepted": sum(one.accepted for one in found.rounds),
        }

    def write_many(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Greedy texts, all of them in each pass."""
        decoder, other = self._decoder(NONE), ordinary_tokens(3, LAST)
        for _ in decoder.generate_many([other] * len(prompts), batch=len(prompts), max_new_tokens=1):
            pass  # so that no prompt is cached from an earlier question
        whole = Clocks()
        texts = [*decoder.generate_many(prompts, batch=len(prompts), max_new_tokens=count, temperature=0.0)]
        spent = whole.read()
        assert all(isinstance(text, Completion) for text in texts), texts
        return {"ids": [list(text.tokens) for text in texts if isinstance(text, Completion)], "whole": spent}

    def memory(self) -> dict[str, Any]:
        """The resident bytes now, and the most so far."""
        return {"memory": resident()}


class Calls:
    """Counts the time in ``llama_decode``, where a model runs on llama.cpp.

    Attributes:
        ms: milliseconds so far, by clock.
    """

    def __init__(self, target: str) -> None:
        self.ms = {"wall": 0.0, "processor": 0.0}
        if target.endswith(".gguf"):
            from specctl.models.llama.library import package

            if package() is not None:
                self._count()

    def _count(self) -> None:
        from specctl.models.llama.library import library

        opened = library()
        decode = opened.llama_decode

        def counted(*arguments: Any) -> int:
            clocks = Clocks()
            result: int = decode(*arguments)
            for clock, ms in clocks.read().items():
                self.ms[clock] += ms
            return result

        opened.llama_decode = counted  # type: ignore[attr-defined]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.real.own_program", description=(__doc__ or "").strip())
    parser.add_argument("target")
    parser.add_argument("threads", type=int)
    parser.add_argument("--draft")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    given = parser.parse_args()
    serve(Program(given.target, given.draft, [f"threads={given.threads}", *given.settings]))


if __name__ == "__main__":
    main()
