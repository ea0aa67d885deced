"""The number of threads of forward passes on the CPU: the user's choice, else the fastest one here and now."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.weights import weight_bytes
from specctl.models.running.slot import Slot
from specctl.processes import CoreTime, cores_text, usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Choice = TypeVar("Choice")

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # Environment variables that set torch's number of threads

CONTEXT, WIDTH = 16, 6  # Cached tokens during the timing, and tokens in the pass that represents a verification
ENOUGH = 0.05  # Seconds of timing per number of threads that are enough
PATIENCE = 1.5  # Total seconds of timing after which no further measurement starts
LARGE = 1 << 30
"""From this many bytes of weights on, a trial takes too long. Every free core helps then, since reading the weights
takes the time.
"""
ONE_THREAD = 16 << 20
"""Models up to this size in bytes run with one thread: their passes are over before other threads have started."""
FEW = 4  # A number of threads to try where there are more cores: small models gain from a few, but not from many
GAIN = 0.95
"""More threads must take at most this share of the time, since they suffer more from other programs."""


def threads_of(runner: Slot) -> int:
    """The number of threads of a runner's passes on the CPU."""
    return runner.threads or torch_threads()


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads that passes run with, and why."""

    number: int  # the number of threads
    cores: int  # cores that this process can use
    reason: str  # who or what chose the number
    # the time of a small round by tried number of threads; empty without a trial
    milliseconds: Mapping[int, float] = field(default_factory=dict)
    # cores that other processes used while the models were loaded; None if unknown
    others_busy: float | None = None

    @property
    def free(self) -> int:
        """Cores left by other processes, at least one."""
        return _free(self.cores, self.others_busy)

    @property
    def crowded(self) -> bool:
        """Whether threads wait for each other because other processes leave fewer cores."""
        return self.number > 1 and self.others_busy is not None and self.number > self.cores - self.others_busy + 0.5

    @property
    def warning(self) -> str | None:
        """The warning for a machine with fewer free cores than threads; None without need."""
        if not self.crowded:
            return None
        advice = "" if self.milliseconds else "; --threads 1 may be faster"  # with times, a single thread was tried
        return (
            f"other processes keep {self.others_busy:.1f} of {cores_text(self.cores)} busy, and passes run with "
            f"{self.number} threads, which wait for each other{advice}"
        )

    def by_engine(self, runner: Slot) -> "Threads":
        """The same, or the numbers that a runner found in its own trial."""
        if not runner.tried:
            return self
        name = "onnxruntime" if runner.engine.startswith("onnx") else runner.engine
        return replace(self, number=threads_of(runner), reason=f"measured with {name}", milliseconds=runner.tried)

    def __str__(self) -> str:
        tried = " and ".join(f"{milliseconds:.1f} ms with {n}" for n, milliseconds in self.milliseconds.items())
        busy = "" if self.others_busy is None else f"; other processes keep {self.others_busy:.1f} cores busy"
        what = f"{self.reason}{f': a small round takes {tried}' if tried else ''}"
        return f"{self.number} of {cores_text(self.cores)} ({what}){busy}"


def torch_threads() -> int:
    """torch's number of threads; before torch is imported, the number that it would use."""
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    for name in reversed(VARIABLES):  # the second one is for a library of torch's own
        first = os.environ.get(name, "").partition(",")[0]
        if first.isdecimal() and int(first):
            return int(first)
    return usable_cores()


def tell_torch(number: int) -> None:
    """Set torch's number of threads. Runs none of torch before it has been imported."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(number)


def _free(cores: int, others_busy: float | None) -> int:
    return max(1, round(cores - (others_busy or 0.0)))


def decided(setting: int | Literal["auto"], environ: Mapping[str, str] = os.environ) -> Threads | None:
    """The number of threads where no measurement is needed: it was chosen, or there is a single core.

    Args:
        setting: as in the profile.
        environ: environment variables.
    """
    cores, now = usable_cores(), torch_threads()
    if setting != "auto":
        return Threads(setting, cores, "as set")
    for name in VARIABLES:
        if environ.get(name):
            return Threads(now, cores, f"by {name}")
    if cores == 1:
        return Threads(1, cores, "the only core")
    # Fewer than torch's default, so it was set.
    return Threads(now, cores, "torch's setting") if now < cores else None


def share_of(setting: int | Literal["auto"], processes: int) -> int | Literal["auto"]:
    """The number of threads for each of several processes that run the same passes on one machine."""
    return max(1, usable_cores() // processes) if setting == "auto" and decided(setting) is None else setting


def use(setting: int | Literal["auto"]) -> None:
    """Set torch to the user's number of threads, before or without a loaded pair."""
    if setting != "auto":
        import torch

        torch.set_num_threads(setting)


def choose(
    setting: int | Literal["auto"], models: "Sequence[PreTrainedModel]", vocabulary: int, since: CoreTime | None
) -> Threads:
    """Choose the number of threads and `tell_torch`.

    Args:
        setting: as in the profile.
        models: loaded, the target's first; empty for torch's default.
        vocabulary: all of them know the ids below it.
        since: when loading began.
    """
    now = CoreTime.now()
    others = since.others_until(now) if since is not None and now is not None else None
    found = decided(setting)
    if found is not None:
        chosen = replace(found, others_busy=others)
    elif not models:
        chosen = Threads(torch_threads(), usable_cores(), "torch's own choice", {}, others)
    else:
        cores = usable_cores()
        if any(weight.device.type != "cpu" for model in models for weight in model.parameters()):
            return Threads(torch_threads(), cores, "models are not on the CPU", {}, others)
        free = _free(cores, others)
        if sum(map(weight_bytes, models)) > LARGE:
            chosen = Threads(free, cores, "the models are large", {}, others)
        else:
            import torch

            from specctl.models.running.eager import EagerPasses

            numbers = sorted({number for number in (1, FEW, free, cores) if number <= cores})
            runners = [Slot(EagerPasses(model, vocabulary)) for model in models]
            run = small_round(runners, vocabulary)

            def work(number: int) -> None:
                torch.set_num_threads(number)
                run()

            tried = timed(work, numbers)
            spent = {number: median(seconds) * 1e3 for number, seconds in tried.items()}
            chosen = Threads(fastest(tried), cores, "measured", spent, others)
    tell_torch(chosen.number)
    return chosen


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """The number of threads with the shortest median time; among nearly equal ones the smallest.

    Args:
        seconds: times by number of threads, at least one for each.
    """
    best, *more = sorted(seconds)
    for number in more:
        if median(seconds[number]) <= GAIN * median(seconds[best]):
            best = number
    return best


def timed(
    work: Callable[[Choice], object],
    choices: Sequence[Choice],
    clock: Callable[[], float] = perf_counter,
    enough: float = ENOUGH,
) -> dict[Choice, list[float]]:
    """Seconds of some work with each choice, such as a number of threads, measured in turn.

    Args:
        work: the work; run once with the first choice before the measurement.
        choices: at least one.
        clock: returns seconds.
        enough: seconds per choice that are enough.
    """
    found: dict[Choice, list[float]] = {choice: [] for choice in choices}
    began = clock()
    work(choices[0])
    while min(map(sum, found.values())) < enough or min(map(len, found.values())) < 2:
        for choice in choices:
            start = clock()
            work(choice)
            found[choice].append(clock() - start)
        if clock() - began > PATIENCE:
            break
    return found


def small_round(runners: Sequence[Slot], vocabulary: int) -> Callable[[], None]:
    """A function that runs a round representative of decoding: target passes of one and of `WIDTH` tokens, and one pass
    of each draft.

    Args:
        runners: the target's first; their caches are overwritten.
        vocabulary: all of them know the ids below it.
    """
    tokens = ordinary_tokens(CONTEXT + WIDTH, vocabulary)

    @in_inference_mode
    def run() -> None:
        for runner, widths in zip(runners, [(1, WIDTH), *[(1,)] * (len(runners) - 1)], strict=True):
            if runner.length < CONTEXT:
                runner.extend(tokens[runner.length : CONTEXT], keep=0)
            for width in widths:
                runner.extend(tokens[-width:], keep=width)
                runner.rollback(CONTEXT)

    return run
