"""Figures of drafted and accepted lengths. Matplotlib is imported when a figure is drawn."""

import numpy as np

from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.candidate_panels import (
    Look,
    candidate_panel,
    drafting_rounds,
    note_after,
    panel_columns,
    panel_height,
    parts_of,
)
from specctl.observing.results import Run
from specctl.reporting.style import INK, MissingDataError, Picture, page, panels, shorten, tint

MOST_ROUNDS = 80


def lengths_by_category(digest: Digest, look: dict[str, Look]) -> Picture:
    parts = [(name, [summary for summary in summaries if summary.draft_length]) for name, summaries in parts_of(digest)]
    names = [summary.candidate for summary in parts[0][1]]
    if not names:
        raise MissingDataError("no candidate drafted a token")
    keenest = max(parts[0][1], key=lambda summary: summary.acceptance_rate or 0)
    picture = page(
        "lengths-by-category",
        "Drafted and accepted tokens per round, and the acceptance rate",
        f"What to see: the dark part of a bar was accepted, the pale part was discarded; "
        f"{keenest.candidate} wastes least, {keenest.acceptance_rate:.0%} accepted overall. Means over rounds; the "
        "percentage behind a bar is accepted / drafted.",
        panel_height(parts, names),
    )
    for axes, (name, summaries) in zip(
        panels(picture, len(parts), panel_columns(parts), "tokens per round"), parts, strict=True
    ):
        prompts = max((summary.prompts for summary in summaries), default=0)
        candidate_panel(axes, f"{shorten(name, 24)}, n = {prompts}", names)
        for summary in summaries:
            if summary.draft_length and summary.accepted_length:
                row, colour = names.index(summary.candidate), look[summary.candidate].colour
                axes.barh(row, summary.draft_length.mean, 0.7, color=tint(colour, 0.65))
                axes.barh(row, summary.accepted_length.mean, 0.7, color=colour)
                note_after(axes, summary.draft_length.mean, row, f"{summary.acceptance_rate:.0%}")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    return picture


def accepted_histogram(digest: Digest, look: dict[str, Look]) -> Picture:
    from matplotlib.ticker import MaxNLocator

    shown = {summary.candidate: summary.accepted_length for summary in digest.overall if summary.accepted_length}
    if not shown:
        raise MissingDataError("no candidate has visible rounds with accepted draft tokens")
    lengths = {
        name: [round_.accepted for run in digest.results.of(name) for round_ in drafting_rounds(run)] for name in shown
    }
    longest = max(int(np.quantile(values, 0.99, method="higher")) for values in lengths.values())
    more = f"; the last bar contains {longest} and more" if longest < max(map(max, lengths.values())) else ""
    widest, spread = max(shown.items(), key=lambda item: item[1].sd)
    picture = page(
        "accepted-lengths",
        "Accepted tokens per round",
        f"What to see: the wider the distribution, the more there is to gain from stopping at the right moment; widest "
        f"for {widest} (sd {spread.sd:.1f}). The dashed line is the mean; the target's own token is not counted{more}.",
        1.35 * -(-len(shown) // panel_columns(shown)) + 0.3,
    )
    grid = panels(picture, len(shown), panel_columns(shown), "accepted tokens", "% of rounds")
    for axes, (name, values) in zip(grid, lengths.items(), strict=True):
        shares = np.bincount(np.minimum(values, longest), minlength=longest + 1) / len(values)
        axes.bar(range(longest + 1), 100 * shares, 0.85, color=look[name].colour)
        axes.axvline(float(np.mean(values)), color=INK, linestyle="--", linewidth=1)
        axes.set_title(f"{shorten(name, 24)}, n = {len(values)} rounds")
        axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return picture


def draft_length_over_rounds(digest: Digest, look: dict[str, Look]) -> Picture:
    names = [summary.candidate for summary in digest.overall if summary.draft_length]
    by_prompt: dict[tuple[str, int], dict[str, Run]] = {}
    for run in digest.results.runs:
        if run.candidate in names and any(drafting_rounds(run)):
            by_prompt.setdefault((run.prompt, run.length), {}).setdefault(run.candidate, run)
    if not by_prompt:
        raise MissingDataError("no candidate has visible rounds with draft tokens")
    fullest = max(map(len, by_prompt.values()))
    ordered = sorted(
        (item for item in by_prompt.items() if len(item[1]) == fullest),
        key=lambda item: sum(len(drafting_rounds(run)) for run in item[1].values()),
    )
    (prompt, _), runs = ordered[len(ordered) // 2]  # Neither the easiest prompt nor the hardest.
    shown = [name for name in names if name in runs]
    rounds = {name: drafting_rounds(runs[name]) for name in shown}
    most = min(MOST_ROUNDS, max(map(len, rounds.values())))
    cut = f" (the first {MOST_ROUNDS})" if max(map(len, rounds.values())) > MOST_ROUNDS else ""
    picture = page(
        "draft-length-over-rounds",
        f"Draft length round by round, prompt {shorten(prompt)}",
        f"What to see: an adaptive policy has a ragged outline, long where drafting is easy; a constant one is "
        f"flat. One bar per round{cut}: dark accepted, pale discarded. Fewer rounds are fewer target passes.",
        0.85 * len(shown) + 0.3,
    )
    for axes, name in zip(panels(picture, len(shown), 1, "round"), shown, strict=True):
        drawn = rounds[name][:most]
        numbers = range(1, len(drawn) + 1)
        axes.bar(numbers, [round_.drafted for round_ in drawn], 0.9, color=tint(look[name].colour, 0.65))
        axes.bar(numbers, [round_.accepted for round_ in drawn], 0.9, color=look[name].colour)
        axes.set_title(f"{shorten(name, 40)}: {len(rounds[name])} rounds for {runs[name].tokens} tokens")
        axes.set_xlim(0.4, most + 0.6)
        axes.grid(axis="y")
    picture.figure.supylabel("tokens drafted", fontsize=9)
    return picture
