"""Whether the embedded pair writes the CPU's text on the device too, with every engine, with and without drafts."""

from collections.abc import Iterator

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile.schema import Profile, SamplingTable
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

PROMPTS = ("Once upon a time", "The little dog ran to the", "Lily and Tom were in the garden. They")
POLICIES = ("constant", "svip", "cost-optimal")


def same_texts(to: Recorder, stage: Stage) -> None:
    """Greedy texts in float32, all compared with the target alone, eager, on the CPU."""
    settings = SamplingTable(max_new_tokens=stage.sized(64, 16))
    prompts = PROMPTS[: stage.sized(3, 1)]
    reference = embedded_pair("cpu", "eager", to)
    ids: list[list[int]] = [reference.tokenizer.encode(prompt) for prompt in prompts]
    wanted = [Session(reference, None).generate(prompt, settings).tokens for prompt in ids]
    for engine in ("eager", "static", "graph") if not stage.rehearsal else ("eager", "static"):
        pair = embedded_pair(stage.device, engine, to)
        for policy, texts in _texts(pair, ids, settings, to):
            claim = f"{pair.target.engine}, drafts by {policy}: the CPU's own text"
            to.check(claim, texts == wanted, difference(texts, wanted))


def _texts(
    pair: Pair, prompts: list[list[int]], settings: SamplingTable, to: Recorder
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    for policy in ("none", *POLICIES):
        drafter = build_drafter(pair, Setting.of({"name": policy})) if policy != "none" else None
        done = [Session(pair, drafter).generate(prompt, settings) for prompt in prompts]
        rounds = [round_ for one in done for round_ in one.rounds]
        if drafter is not None and (drafted := sum(round_.drafted for round_ in rounds)):
            share = sum(round_.accepted for round_ in rounds) / drafted
            to.row(
                "Embedded pair",
                engine=pair.target.engine,
                policy=policy,
                drafted=drafted,
                accepted=f"{share:.0%}",
            )
        yield policy, [one.tokens for one in done]


def embedded_pair(
    device: str, engine: str, to: Recorder, *, dtype: str = "float32", deterministic: bool = False
) -> Pair:
    """The embedded pair on a device."""
    tables = {"device": device, "dtype": dtype}
    profile = Profile.model_validate(
        {
            "target": {"model": "embedded:target", **tables},
            "draft": {"model": "embedded:draft", **tables},
            "engine": engine,
            "deterministic": deterministic,
        }
    )
    return load_pair(profile, engines=EngineSettings.of(profile, notice=to.note), measured=False)


def difference(found: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> str:
    """Where texts first differ from those that were wanted, or how many tokens they have."""
    for number, (text, other) in enumerate(zip(found, wanted, strict=True)):
        if text != other:
            place = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
            return f"prompt {number} differs from token {place} on"
    return f"{sum(map(len, found))} tokens"
