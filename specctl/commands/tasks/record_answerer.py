"""Loads what answers records: here, or in a replica. Torch is imported when a function runs."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specctl.commands.options import warn
from specctl.commands.tasks.pair_loading import load

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.batching.row_replicas import RowReplicas
    from specctl.decoding.answers import Answerer
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.jsonl import Record
    from specctl.models.running.pair import Pair
    from specctl.policies import Setting, Signal
    from specctl.profile import Profile
    from specctl.records import Completion
    from specctl.replicas.job import Answer
    from specctl.replicas.replica import Replicas
    from specctl.terminal.progress import TerminalProgress

REPLICA = "specctl.commands.tasks.record_answerer:replica"
"""What makes a replica that answers records, as `specctl.replicas.job.Job` names it."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A loaded pair and how it answers records.

    Attributes:
        pair: loaded models.
        profile: how they are used, with the draft that is at work.
        prompts: makes prompts.
        signals: to record though no policy reads them.
        traced: whether rounds are traced.
    """

    pair: "Pair"
    profile: "Profile"
    prompts: "PromptFormat"
    signals: "frozenset[Signal]"
    traced: bool

    def answerer(self, pair: "Pair | None" = None) -> "Answerer":
        """One whose policies have learnt nothing yet; with another ``pair`` of the same models, over that."""
        from specctl.decoding.answers import Answerer
        from specctl.decoding.named_drafters import NamedDrafters
        from specctl.decoding.session import Session

        pair = pair or self.pair
        drafters = NamedDrafters(pair, self.profile.draft, self.signals)
        session = Session(pair, None, keep_caches=self._keeps)

        def begin(record: "Record") -> None:
            session.drafter = drafters.of_record(record.data)

        return Answerer(session, self.prompts, self.profile.sampling, begin)

    def answer(self, pair: "Pair | None" = None) -> "Answer":
        """What answers questions of `specctl.observing.replicated_records`, over another ``pair`` if one is given."""
        from specctl.jsonl import Record
        from specctl.observing.record_stream import reply_to, trace_alone
        from specctl.round_trace import trace_line

        served, answerer = "", self.answerer(pair)

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            nonlocal served, answerer
            if question["run"] != served:
                served, answerer = question["run"], self.answerer(pair)
            record = Record(question["line"], question["id"], question["data"])
            trace: list[dict[str, Any]] = []
            on_round = (lambda turn, _, round_: trace.append(trace_line(record, turn, round_))) if self.traced else None
            done, keep = question.get("done", ()), question.get("on_turn", lambda *_: None)

            def on_turn(turn: int, completion: "Completion") -> None:
                keep(turn, completion, [line for line in trace if line["turn"] == turn])

            with question.get("watch", trace_alone)(record, on_round) as heard:
                reply = reply_to(
                    record,
                    lambda each: [*done, *answerer.answer(each, heard, done=done, on_turn=on_turn)],
                    rounds=question["rounds"],
                    token_ids=question["token_ids"],
                )
            return {"trace": trace, "line": reply.line, "tokens": reply.tokens, "fine": reply.fine}

        return answer

    def batch(self, asked: "Batch", records: int | None) -> "Replicas | None":
        """The pair answering several records at once; None where it answers them one at a time.

        Args:
            asked: how many at once; a number that cannot be is warned of.
            records: how many there are; None if that is not known.
        """
        from specctl.batching.auto_replicas import AutoReplicas
        from specctl.batching.pair_rows import why_alone
        from specctl.batching.row_count import MOST

        if asked == "auto" and records is None and why_alone(self.pair, *self._settings) is None:
            return AutoReplicas(self.answer(), partial(self._rows, "auto"), MOST)
        return self._rows(asked, records if records is not None else MOST if asked == "auto" else asked)

    @property
    def _keeps(self) -> bool:
        """Whether a prompt is read only from where it differs from a text before it, which changes roundings."""
        return not self.profile.deterministic

    @property
    def _settings(self) -> "list[Setting]":
        return [] if self.profile.draft is None else [self.profile.draft.setting]

    def _rows(self, asked: "Batch", records: int) -> "RowReplicas | None":
        from specctl.batching.row_replicas import RowReplicas

        limit = self.profile.sampling.max_new_tokens
        return RowReplicas.of(
            self.pair, self.answer, asked, records, limit, settings=self._settings, warn=warn, kept=self._keeps
        )


def load_answering(
    profile: "Profile",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    traced: bool,
    foreign_head: bool,
    expected_tokens: int,
) -> Answering:
    """Load the models that the profile's policies use.

    Args:
        profile: names the models and how they are used.
        progress: shows what is loaded.
        quiet: show only warnings.
        traced: whether rounds are traced, with every signal that can be read.
        foreign_head: as in `load`.
        expected_tokens: number of tokens to generate in all, 0 if unknown.
    """
    draft = profile.draft.at_work() if profile.draft is not None else None
    profile = profile.model_copy(update={"draft": draft})  # a draft that never runs need not be loaded
    with_predictors = traced or (draft is not None and draft.setting.needs_predictors)
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

    from specctl.decoding.composition import readable
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.policies import Signal

    signals = readable(pair) if traced else frozenset[Signal]()
    return Answering(pair, profile, PromptFormat.of(pair.tokenizer, profile.prompt), signals, traced)


def replica(
    *,
    number: int,
    profile: "Profile",
    quiet: bool,
    traced: bool,
    foreign_head: bool,
    expected_tokens: int,
    batch: "Batch" = 1,
) -> "Answer | Replicas":
    """A replica of the pair: answers questions of `specctl.observing.replicated_records`.

    Args:
        number: from 0; the first one alone says what all have to say.
        profile, quiet, traced, foreign_head, expected_tokens: as in `load_answering`.
        batch: how many questions it answers at once.
    """
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    quiet = quiet or number > 0
    silent = TerminalProgress(Console(stderr=True), False)
    loaded = load_answering(
        profile, silent, quiet=quiet, traced=traced, foreign_head=foreign_head, expected_tokens=expected_tokens
    )
    return loaded.batch(batch, None) or loaded.answer()
