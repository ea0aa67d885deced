"""Under which terms a checkpoint may be used."""

from contextlib import suppress

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.hushing import hushed_hub


def terms_of(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """The licence from the model card, and for a hub model whether its files are gated."""
    if checkpoint.source == "embedded":
        return "apache-2.0", None  # as specctl's own; MODEL_CARD.md says what they learnt from
    import huggingface_hub
    from huggingface_hub import constants

    licence = gated = None
    card = checkpoint.folder / "README.md"
    with suppress(Exception):  # a card is free text and may be malformed
        if card.exists():
            licence = (huggingface_hub.metadata_load(card) or {}).get("license")
    if checkpoint.source == "hub" and not constants.HF_HUB_OFFLINE:
        with suppress(Exception), hushed_hub():
            answer = huggingface_hub.HfApi().model_info(checkpoint.name, timeout=10).gated
            kinds = {"auto": "yes, access granted automatically", "manual": "yes, access granted by the owner"}
            gated = kinds.get(str(answer), "no")
    return licence, gated
