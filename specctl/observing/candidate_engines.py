"""Which engine ran each candidate of a benchmark."""

from specctl.observing.results import Header
from specctl.peers.names import ASSISTED
from specctl.policies import NONE


def engine_of(header: Header, label: str) -> str | None:
    """On which engine a candidate's passes ran; None where the file does not tell.

    Where its models ran on several, each is named with its model: ``target graph, draft eager``.
    """
    candidate = header.candidate(label)
    if candidate.peer is not None:
        # transformers calls the models as they are, whatever engine the profile's own passes have.
        return "eager" if candidate.peer in ASSISTED else candidate.peer
    if candidate.engine is not None:
        return candidate.engine
    used = () if candidate.setting == NONE else candidate.drafts
    keys = ["target", *("draft" + ".draft" * draft for draft in used)]
    # Behind the name may stand, in parentheses, why it is no other.
    ran = {key: header.engines[key].partition(" (")[0] for key in keys if key in header.engines}
    if len(set(ran.values())) > 1:
        return ", ".join(f"{key} {engine}" for key, engine in ran.items())
    return next(iter(ran.values()), None)
