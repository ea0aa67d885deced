"""The parts of the report, the worst suspicion first."""

from dataclasses import dataclass
from typing import Literal

HERE = "tools.gpu_report"


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: by which it is chosen.
        title: what it finds out.
        work: module and function that find it out, as ``package.module:function``.
        limit: seconds that it may take.
        arguments: given to the function behind a `Recorder` and a `Stage`.
        rehearsed: on what it runs without a device: on the ``cpu``, or on ``pretended`` devices of the tests.
    """

    name: str
    title: str
    work: str
    limit: int
    arguments: tuple[str, ...] = ()
    rehearsed: Literal["cpu", "pretended"] = "cpu"


def _captured(name: str, title: str, function: str) -> Part:
    return Part(name, title, f"{HERE}.captures:{function}", 60, rehearsed="pretended")


def _engine(name: str, title: str, *arguments: str, limit: int = 90) -> Part:
    return Part(name, title, f"{HERE}.speeds:engine_speeds", limit, arguments)


PARTS: tuple[Part, ...] = (
    Part("machine", "Versions, driver, cards, attention kernels, bandwidth", f"{HERE}.machine:examine", 60),
    Part("lengths", "Attention at new lengths, with and without cuDNN", f"{HERE}.attention:new_lengths", 60),
    Part("tests", "The tests that need a device", f"{HERE}.device_tests:run_tests", 150),
    _captured("second-card", "Passes captured on a card that is not the current one", "second_card"),
    _captured("failed-capture", "A capture that fails, and what it leaves", "failed_capture"),
    _captured("growth", "Buffers that grow under another model's graphs", "growth"),
    Part("rare-tokens", "Whether rare tokens get their due", f"{HERE}.draws:rare_tokens", 45),
    Part("prompt", "The prompt's time and the device's", f"{HERE}.prompts:prompt_time", 60, (), "pretended"),
    Part("texts", "Texts by engine, in float32", f"{HERE}.texts:same_texts", 90),
    Part("batch-texts", "Texts by engine, several at once", f"{HERE}.batches:same_texts", 120),
    _engine("graph", "The graph engine", "graph", "plain"),
    _engine("eager", "The eager engine", "eager", "plain"),
    _engine("static", "The static engine", "static", "plain"),
    Part("batches", "Several texts at once", f"{HERE}.batches:speeds", 120),
    Part("transformers", "transformers alone and assisted", f"{HERE}.speeds:transformers_speeds", 90),
    Part("policies", "specctl by policy", f"{HERE}.speeds:policy_speeds", 120),
    _captured("late-captures", "Captures after the warm-up, inside of rounds", "late_captures"),
    Part("counts", "Waits and launches of a drafted token and of a round", f"{HERE}.counts:count", 90, (), "pretended"),
    Part("masks", "One query over a masked span, and over a plain one", f"{HERE}.attention:masked_spans", 45),
    _engine("graph-compiled", "The graph engine, compiled", "graph", "compiled", limit=150),
    _engine("static-compiled", "The static engine, compiled", "static", "compiled", limit=150),
    _engine("eager-cudnn", "The eager engine with cuDNN's attention allowed", "eager", "cudnn", limit=75),
    _engine("graph-cudnn", "The graph engine with cuDNN's attention allowed", "graph", "cudnn", limit=75),
)
