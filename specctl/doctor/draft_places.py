"""Where drafts for a target are looked for: this package, folders, the hub's cache, and the hub."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Thread

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.library_calls import hushed_hub

DEEPEST = 2
"""Levels of folders in a folder that are looked into."""
PATIENCE = 4.0
"""Seconds that the hub has for an answer."""
MOST = 10
"""Models that are named of the hub's answer."""
EMBEDDED = ("embedded:mid", "embedded:draft", "embedded:eagle3", "embedded:dspark")


def models_here(target: Checkpoint, folders: Sequence[Path]) -> Iterator[str]:
    """Names of models and draft heads whose files are on this machine, by which commands find them.

    Args:
        target: left out; of one that ships with the package, the others that do are named.
        folders: looked into before the hub's cache.
    """
    if target.source == "embedded":
        yield from (name for name in EMBEDDED if name != target.name)
    own = target.folder.resolve()
    for folder in folders:
        yield from (str(found) for found in _models_in(folder, DEEPEST) if found.resolve() != own)
    from huggingface_hub.constants import HF_HUB_CACHE

    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if name != target.name and any(folder.glob("snapshots/*/config.json")):
            yield name


@contextmanager
def files_here_only() -> Iterator[None]:
    """Ask the hub nothing inside the block: what is in its cache is taken as it is."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _models_in(folder: Path, depth: int) -> Iterable[Path]:
    inside: list[Path] = []
    with suppress(OSError):  # a folder that may not be read holds nothing for this user
        if (folder / "config.json").is_file():
            return (folder,)
        if depth:
            inside = sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    return chain.from_iterable(_models_in(inner, depth - 1) for inner in inside)


def models_on_hub(target: Checkpoint) -> tuple[list[str], str | None]:
    """Names of models that say on the hub that they were made from or for a target; and why there are none.

    Waits no longer than `PATIENCE`.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if target.source != "hub":
        return [], "the hub was not asked: the target is none of its models"
    if HF_HUB_OFFLINE:
        return [], "the hub was not asked: HF_HUB_OFFLINE is set"
    found: list[str] = []
    failed: list[str] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            with hushed_hub():
                some = HfApi().list_models(filter=f"base_model:{target.name}", sort="downloads", limit=MOST)
                found.extend(model.id for model in some)
        except Exception as error:  # whatever keeps the hub away, the answer is the same
            failed.append(type(error).__name__)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    if asking.is_alive():
        return [], f"the hub did not answer within {PATIENCE:.0f} seconds"
    if failed:
        return [], f"the hub cannot be reached ({failed[0]})"
    return found, None if found else f"the hub names no model that was made from {target.name}"
