"""`specctl calibrate --export`: what is asked for, and what is shown of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.export.exports import GivenCosts, Order
    from specctl.profile import Profile


def export_order(
    names: Sequence[str], costs: Sequence[str], profile: "Profile", sizes: Sequence[int] = ()
) -> "Order | None":
    """What to export, checked before a model is loaded; None for nothing.

    Args:
        names: of engines.
        costs: the texts of ``--costs``, for several texts at once with their number before a colon.
        profile: with a draft.
        sizes: numbers of texts at once, from 2 on, for which lengths are exported.

    Raises:
        UsageError: an engine is not known, takes no such draft or samples by a rule that cannot be replayed; the draft
            is a lookup or not the only one; or the costs are no costs, or those of no engine.
        ModelError: a model cannot be found.
    """
    if not names:
        if costs:
            raise UsageError("--costs are those of an engine", "name it with --export")
        return None
    from specctl.decoding.sampling import Sampling
    from specctl.export.engines import engine_of
    from specctl.export.exports import Order
    from specctl.export.search import reading_of
    from specctl.models.loading.pair_members import find_head

    draft = profile.draft
    assert draft is not None
    engines = tuple(engine_of(name) for name in dict.fromkeys(names))
    if draft.draft is not None:
        raise UsageError("--export is for one draft model, and the profile has several", "no other engine takes these")
    if draft.is_lookup:
        raise UsageError("--export is for a draft that is a model of its own or a head", "choose a profile with one")
    found = find_head("draft", draft, ("target", profile.target))
    head, sampling = None if found is None else found.kind, Sampling.of(profile.sampling)
    for engine in engines:
        if head is not None and head not in engine.heads:
            raise UsageError(
                f"no settings for {engine.name} are written for {head} heads",
                f"choose a profile whose draft is a model of its own{_others(head)}",
            )
        if head is not None and not sampling.greedy:
            raise UsageError("--export for a draft head is for greedy decoding", "export with -t 0")
        reading_of(engine, sampling)
    given: dict[int, GivenCosts] = {}
    for text in costs:
        number, colon, times = text.rpartition(":")
        if colon and not (number.isdecimal() and int(number)):
            raise UsageError(f"--costs {text}: {number} is not a number of texts", "e.g. --costs 4:1.5,12,0.2")
        if (rows := int(number) if colon else 1) in given:
            texts = f"{rows} texts at once" if rows > 1 else "one text"
            raise UsageError(f"--costs {text}: those for {texts} are given already", "give them once for each number")
        given[rows] = _given(times)
    if given and (missing := [rows for rows in (1, *sizes) if rows not in given]):
        texts = f"{missing[0]} texts at once" if missing[0] > 1 else "one text"
        place = f"as {missing[0]}:DRAFT,TARGET,TOKEN" if missing[0] > 1 else "without a number"
        raise UsageError(f"--costs are not given for {texts}", f"give them {place}")
    if others := [rows for rows in given if rows not in (1, *sizes)]:
        raise UsageError(f"--costs are given for {others[0]} texts at once", "name that number with --batch too")
    return Order(engines, given.pop(1, None), given, head)


def _others(head: str) -> str:
    """The engines that take such a head, as the end of a hint."""
    from specctl.export.engines import ENGINES

    taking = [f"--export {engine.name}" for engine in ENGINES.values() if head in engine.heads]
    return f", or {' or '.join(taking)}" if taking else ""


def _given(text: str) -> "GivenCosts":
    from specctl.export.exports import GivenCosts

    try:
        draft, target, *more = map(float, text.split(","))
        each, alone, *others = [*more, *(0.0, target)[len(more) :]]
        if others or not (0 < draft < 1e9 and 0 < target < 1e9 and 0 <= each < 1e9 and 0 < alone < 1e9):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--costs {text} is not DRAFT_MS,TARGET_MS[,PER_TOKEN_MS[,ALONE_MS]]",
            "milliseconds of a draft step, of a target pass over one token, of each further token of that pass, and of "
            "a pass without a draft: e.g. --costs 1.5,12,0.2",
        ) from None
    return GivenCosts(draft, target, each, alone)
