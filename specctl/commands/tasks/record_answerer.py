"""Loads what answers records: here, or in a replica. Torch is imported when a function runs."""

from typing import TYPE_CHECKING, Any

from specctl.commands.tasks.pair_loading import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from specctl.decoding.answers import Answerer
    from specctl.profile import Profile
    from specctl.replicas.job import Answer
    from specctl.terminal.work_progress import TerminalProgress

REPLICA = "specctl.commands.tasks.record_answerer:replica"
"""What makes a replica that answers records, as `specctl.replicas.job.Job` names it."""


def load_answerers(
    profile: "Profile",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    traced: bool,
    foreign_head: bool,
    expected_tokens: int,
) -> "Callable[[], Answerer]":
    """Load the models that the profile's policies use, ready to answer records.

    Args:
        profile: names the models and how they are used.
        progress: shows what is loaded.
        quiet: show only warnings.
        traced: whether rounds are traced, with every signal that can be read.
        foreign_head: as in `load`.
        expected_tokens: number of tokens to generate in all, 0 if unknown.

    Returns:
        A function that makes an answerer whose policies have learnt nothing yet.
    """
    draft = profile.draft.at_work() if profile.draft is not None else None
    profile = profile.model_copy(update={"draft": draft})  # a draft that never runs need not be loaded
    levels = draft.setting.levels if draft is not None else ()
    with_predictors = traced or any(level.needs_predictor for level in levels)
    pair = load(
        profile,
        progress.console,
        expected_tokens=expected_tokens,
        with_predictors=with_predictors,
        foreign_head=foreign_head,
        quiet=quiet,
        models=False,
        progress=progress,
    )

    from specctl.decoding.answers import Answerer
    from specctl.decoding.composition import build_drafter, readable
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.decoding.session import Session
    from specctl.policies import Signal

    signals = readable(pair) if traced else frozenset[Signal]()
    prompts = PromptFormat.of(pair.tokenizer, profile.prompt)

    def fresh() -> Answerer:
        drafter = build_drafter(pair, draft.setting, signals) if draft is not None else None
        session = Session(pair, drafter, keep_caches=True)  # from turn to turn of a record, and no further
        return Answerer(session, prompts, profile.sampling, session.forget)

    return fresh


def replica(
    *, number: int, profile: "Profile", quiet: bool, traced: bool, foreign_head: bool, expected_tokens: int
) -> "Answer":
    """A replica of the pair: answers questions of `specctl.observing.replicated_records`.

    Args:
        number: from 0; the first one alone says what all have to say.
        profile, quiet, traced, foreign_head, expected_tokens: as in `load_answerers`.
    """
    from rich.console import Console

    from specctl.terminal.work_progress import TerminalProgress

    quiet = quiet or number > 0
    silent = TerminalProgress(Console(stderr=True), False)
    fresh = load_answerers(
        profile, silent, quiet=quiet, traced=traced, foreign_head=foreign_head, expected_tokens=expected_tokens
    )

    from specctl.jsonl import Record
    from specctl.observing.record_stream import reply_to
    from specctl.round_trace import trace_line

    served, answerer = "", fresh()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal served, answerer
        if question["run"] != served:
            served, answerer = question["run"], fresh()
        record = Record(question["line"], question["id"], question["data"])
        trace: list[dict[str, Any]] = []
        on_round = (lambda turn, _, round_: trace.append(trace_line(record, turn, round_))) if traced else None
        reply = reply_to(
            record,
            lambda each: answerer.answer(each, on_round),
            rounds=question["rounds"],
            token_ids=question["token_ids"],
        )
        return {"trace": trace, "line": reply.line, "tokens": reply.tokens, "fine": reply.fine}

    return answer
