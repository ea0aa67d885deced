"""The signal `DraftStep.agreement` on recorded drafts. No torch here."""

from dataclasses import replace

from specctl.decoding.copying.lookup_agreement import Agreement
from specctl.errors import UsageError
from specctl.replay.recorded import Recorded
from specctl.replay.traces import Trace


def agreeing(trace: Trace) -> Recorded:
    """The draft of a trace with the signal at each of its steps: it follows from the tokens, so that no file holds it.

    Raises:
        UsageError: the trace lacks the prompt.
    """
    if len(trace.prompt_ids) != trace.prompt_tokens:
        raise UsageError(
            "the trace holds no prompts, which a lookup copies from", "record it again, with another --output"
        )
    draft, agreement, before = trace.draft, Agreement(), [*trace.prompt_ids]
    along, branches = draft.along, [*draft.branches]
    # Behind whichever round a shared branch is read, the tokens before it are the same; the last one has fewest.
    last = {tail: start for start, tail in enumerate(draft.tails) if tail is not None}
    tails = {start: tail for tail, start in last.items()}
    found: list[float] = []
    for start, token in enumerate(trace.tokens if draft.reach is None else trace.tokens[: draft.reach]):
        if along is not None:
            agreement.begin(before)
            found.append(agreement.of(along.tokens[start]))
        if (tail := tails.get(start)) is not None:
            agreement.begin(before)
            for drafted in [] if along is None else along.tokens[start : start + draft.shared[start]]:
                agreement.of(drafted)
            branch = branches[tail]
            branches[tail] = replace(branch, agreement=[agreement.of(drafted) for drafted in branch.tokens])
        before.append(token)
    return replace(draft, along=None if along is None else replace(along, agreement=found), branches=branches)
