"""Decoding beside the bare passes of its graphs, which is what the host adds: ``python -m tools.loop_time``.

Each text is decoded on onnxruntime with one thread, and then the very passes that it took are run again, nothing
between them. Texts of all policies and samplings take turns; both count processor time, from a text's second round on.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from time import process_time
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import EMBEDDED, load_suite, sample
from specctl.statistics import bootstrap

SETTINGS = {
    "none": Setting("none"),
    "constant:5": Setting("constant", (("draft_length", 5),)),
    "svip": Setting("svip"),
    "max-confidence": Setting("max-confidence"),
    "cost-optimal": Setting("cost-optimal"),
}
SAMPLINGS = {"greedy": 0.0, "T=1": 1.0}


class Spent(NamedTuple):
    """Seconds of processor time for a text and for its bare passes, and what they were for."""

    loop: float
    bare: float
    rounds: int
    drafted: int


class PassLog:
    """The passes of some runners in order, to run them again."""

    def __init__(self, runners: Sequence[Any]) -> None:
        self.calls: list[partial[Any]] = []
        for runner in runners:
            passes = runner.bare.passes
            assert isinstance(passes, OnnxPasses), "only passes of onnxruntime are run again"
            setattr(passes, "one", partial(self._run, passes.one))  # noqa: B010 - a method

    def _run(self, run: Any, *args: Any, **named: Any) -> Any:
        self.calls.append(partial(run, *args, **named))
        return run(*args, **named)


def spent(session: Session, log: PassLog, prompt: Sequence[int], sampling: SamplingTable) -> Spent:
    """A text, and its passes once more."""
    playing = session.play(prompt, sampling)
    next(playing)
    log.calls.clear()
    began = process_time()
    rounds = [*playing]
    middle = process_time()
    calls = [*log.calls]
    again = process_time()
    for call in calls:
        call()
    return Spent(middle - began, process_time() - again, len(rounds), sum(round_.drafted for round_ in rounds))


def open_pair() -> Pair:
    """The embedded pair's graphs, which are made if they are not there."""
    profile = resolve("embedded", overrides=["engine=onnx", "threads=1"]).profile
    engines = EngineSettings.of(profile)
    pair = load_pair(profile, engines=engines, models=False)
    return pair if not pair.models else load_pair(profile, engines=engines, models=False)


def main(
    prompts: Annotated[int, typer.Option(min=2, help="Of the embedded suite.")] = 12,
    tokens: Annotated[int, typer.Option(min=8, help="The most of a text.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Texts of each prompt; the least time of each part counts.")] = 3,
    policy: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
) -> None:
    """Print a line for each policy and sampling: loop over bare passes with its interval, and the host's time."""
    pair = open_pair()
    texts = [pair.tokenizer.encode(str(each.data["prompt"])) for each in sample(load_suite(EMBEDDED), prompts).prompts]
    log = PassLog([pair.target, *pair.drafts])
    sessions = {name: Session(pair, build_drafter(pair, SETTINGS[name])) for name in policy or SETTINGS}
    rows: dict[tuple[str, str], list[list[Spent]]] = {key: [[] for _ in texts] for key in product(sessions, SAMPLINGS)}
    for repeat in range(repeats + 1):  # the first time everything is cold
        for number, text in enumerate(texts):
            for (name, kind), found in rows.items():
                table = SamplingTable(temperature=SAMPLINGS[kind], max_new_tokens=tokens, seed=number)
                one = spent(sessions[name], log, text, table)
                if repeat:
                    found[number].append(one)
    print(f"{'policy':16}{'sampling':10}{'loop / bare':>22}{'us a round':>12}{'drafted':>9}{'bare us':>9}")
    for (name, kind), found in rows.items():
        print(f"{name:16}{kind:10}{line(found)}")


def line(texts: Sequence[Sequence[Spent]]) -> str:
    """The numbers of one policy and sampling; of each text the least time counts."""
    loop = np.array([min(one.loop for one in some) for some in texts])
    bare = np.array([min(one.bare for one in some) for some in texts])
    rounds = sum(one.rounds for some in texts for one in some) / len(texts[0])
    drafted = sum(one.drafted for some in texts for one in some) / len(texts[0])
    ratio = bootstrap(lambda weights: (weights @ loop) / (weights @ bare), len(texts))
    shown = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    beside, alone = 1e6 * (loop.sum() - bare.sum()) / rounds, 1e6 * bare.sum() / rounds
    return f"{shown:>22}{beside:12.0f}{drafted / rounds:9.2f}{alone:9.0f}"


if __name__ == "__main__":
    typer.run(main)
