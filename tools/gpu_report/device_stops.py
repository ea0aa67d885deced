"""The experiment `stop_on_device`: whether steps behind a stop are left out on a device, and what that gains."""

from statistics import median

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.running.engines import EngineSettings
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from tools.gpu_report.captures import Tiny
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

STOPS = {
    "a policy that stops after each token": Setting.of({"name": "svip", "threshold": 0.0}),
    "a policy that never stops": Setting.of({"name": "svip", "threshold": 100.0, "max_draft": 6}),
    "a policy that adapts": Setting.of({"name": "max-confidence", "threshold": 0.03, "max_draft": 6}),
}


def device_stops(to: Recorder, stage: Stage) -> None:
    """Texts of the tiny pair against eager ones; then rounds of the pair of real size with and without, in turn."""
    with stage.cards() as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0")
        usual, stopping = tiny.pair("eager"), tiny.pair("graph", stop_on_device=True)
        prompt = stage.prompt(30)
        for name, setting in STOPS.items():
            for temperature in (0.0, 1.0):
                settings = SamplingTable(max_new_tokens=24, temperature=temperature, seed=3)
                drafters = [ModelDrafter(pair.drafts[0], setting.build()) for pair in (usual, stopping)]
                wanted, found = (
                    [round_.emitted for round_ in Session(pair, drafter).generate(prompt, settings).rounds]
                    for pair, drafter in zip((usual, stopping), drafters, strict=True)
                )
                claim = f"{name}, temperature {temperature:g}"
                to.check(f"{claim}: rounds are those of eager passes", found == wanted)
                redone = drafters[1].redone
                to.check(f"{claim}: no step is left out that is wanted", not redone, f"{redone} steps")
        said = "; ".join(tiny.heard)
        to.check("conditional nodes are captured", not said, said)
    if not stage.rehearsal:
        _gains(to, stage)


def _gains(to: Recorder, stage: Stage) -> None:
    """Milliseconds of a round of `max-confidence`, the median of three runs each, in turn."""
    stage.keep_from_cudnn()
    setting = Setting.of({"name": "max-confidence"})
    pairs = {
        stops: stage.pair(EngineSettings(engine="graph", notice=to.note, stop_on_device=stops))
        for stops in (False, True)
    }
    settings = SamplingTable(max_new_tokens=128)
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in pairs.values():
        warm_up(pair, settings, longest=setting.longest_draft)
    for _ in range(4):
        for stops, pair in pairs.items():
            done = Session(pair, build_drafter(pair, setting)).generate(stage.prompt(200), settings)
            times[stops].append(1e3 * sum(round_.total_seconds for round_ in done.rounds) / len(done.rounds))
    usual, found = (median(times[stops][1:]) for stops in (False, True))
    to.row("Stops on the device", **{"usual ms a round": usual, "stopping ms a round": found, "factor": usual / found})
