"""Whether transformers moved the confidence threshold of its assisted generation, which it does with scikit-learn."""

from statistics import median

from specctl.observing.results import RunSet
from specctl.observing.run_facts import SCIKIT_LEARN
from specctl.peers.names import MOVING


def threshold_note(results: RunSet) -> str:
    """A sentence for each candidate whose threshold transformers may move; empty where that was not recorded."""
    installed = results.header.versions.get(SCIKIT_LEARN)
    labels = [one.label for one in results.header.candidates if one.peer in MOVING]
    return "".join(_sentence(results, label, installed) for label in labels) if installed is not None else ""


def _sentence(results: RunSet, label: str, installed: str) -> str:
    turns = [turn for run in results.of(label) for turn in run.thresholds if turn is not None]
    if not turns:
        return ""
    first, last = turns[0][0], sorted(end for _, end in turns)
    moved = sum(begin != end for begin, end in turns)
    if not moved:
        why = " (scikit-learn is not installed, with which transformers moves it)" if installed == "none" else ""
        return f" The threshold of {label} stayed at {first:g}{why}."
    ends = f"between {last[0]:.2f} and {last[-1]:.2f} at their ends (median {median(last):.2f})"
    return (
        f" With scikit-learn {installed}, transformers moved the threshold of {label} in {moved} of {len(turns)} "
        f"answers, from {first:g} to {ends}."
    )
