"""Models whose files are missing: their names, their sizes, and how to get them."""

import re
from collections.abc import Iterable, Sequence

from specctl.errors import AbsentError, ModelError
from specctl.models.files.checkpoint import Checkpoint, locate, terms_of
from specctl.models.files.gguf_names import download_command, hub_page
from specctl.models.files.library_calls import similar_models
from specctl.models.placing.placement import named_devices
from specctl.profile.schema import ModelTable

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bm])(?![A-Za-z0-9])", re.IGNORECASE)
_BYTES = 2  # Bytes of a weight in 16 bits, as most of the hub's models are stored


def absence(tables: Sequence[tuple[str, ModelTable]], here: Iterable[str]) -> AbsentError:
    """One error about all missing models of a profile, with instructions to get them.

    ``tables`` are key and table of every model; at least one model is absent. ``here`` are the machine's device names.
    """
    found: dict[str, tuple[str, str]] = {}
    gated: list[str] = []
    sizes = bytes_by_name(tables)
    for role, table in sorted(tables, key=lambda each: (each[0] != "target", len(each[0]))):
        try:
            locate(table, role)
        except AbsentError as error:
            size = sizes.get(role)
            gated += [error.hint] if error.gated and error.hint not in gated else []
            found.setdefault(table.model, (error.message, f" (about {size_text(size)})" if size else ""))
        except ModelError:
            pass  # a different problem, reported once this one is solved
    lines = [message.replace(repr(model), f"{model!r}{size}", 1) for model, (message, size) in found.items()]
    flags = " ".join(f"--{role} DIR" for role, table in tables[::-1] if table.model in found and "." not in role)
    near = [sentence for model in found if (sentence := similar_models(model).strip())]
    hint = [*near, *(gated or commands(found)), f"Or name folders that you have: {flags}."]
    return AbsentError("\n".join(lines), "\n".join([*hint, *lacking_devices(tables, here)]))


def bytes_by_name(tables: Iterable[tuple[str, ModelTable]]) -> dict[str, float]:
    """The approximate bytes of a profile's models in 16 bits, by key, if their names give the size.

    GGUF files have other sizes.
    A draft whose name gives the target's size is a small head named after its verifier, so it is left out.
    """
    named = {key: table.model for key, table in tables if download_command(table.model) is None}
    weights = {key: found for key, model in named.items() if (found := weights_by_name(model)) is not None}
    largest = max(weights.values(), default=None)
    return {key: count * _BYTES for key, count in weights.items() if key == "target" or count != largest}


def lacking_devices(tables: Sequence[tuple[str, ModelTable]], here: Iterable[str]) -> list[str]:
    """Sentences about requested devices that a machine lacks; for the arguments see `absence`."""
    hint: list[str] = []
    asked = {name for _, table in tables for name in _asked(table)}
    if lacking := sorted(asked - set(here)):
        keys = [f"--set {role}.device=auto" for role, table in tables if _asked(table) and table.shards is None]
        hint.append(f"The profile also asks for {', '.join(lacking)}, which this machine does not have.")
        if keys:
            hint[-1] += f" With {' '.join(keys)} it uses what there is."
        if any(table.shards for _, table in tables):
            hint[-1] += " `specctl profiles list` shows profiles for fewer cards."
    return hint


def commands(models: Iterable[str]) -> list[str]:
    """Commands to download hub models, and the folder that stores them."""
    from huggingface_hub import constants, get_token

    names = list(models)
    page, whole = hub_page(names[0]), 'hf download {} --exclude "original/*"'
    login = [] if get_token() else [f"  hf auth login  # first, if {page} asks you to accept a licence"]
    return [
        f"Get {'them' if names[1:] else 'it'} where there is a network:",
        *login,
        *(f"  {download_command(name) or whole.format(name)}" for name in names),
        f"They are kept in {constants.HF_HUB_CACHE}; HF_HOME names another place.",
    ]


def download_note(checkpoint: Checkpoint) -> str | None:
    """The notice before a model's weights are downloaded; None if nothing is downloaded."""
    from huggingface_hub import constants

    if checkpoint.source != "hub" or checkpoint.has_weights():
        return None
    parts = [f"downloading {checkpoint.name}"]
    try:
        parts.append(size_text(checkpoint.headers().stored_bytes))
    except AbsentError:
        return None  # nothing will be downloaded
    except ModelError:
        pass  # reported when it is fetched
    if licence := terms_of(checkpoint)[0]:
        parts.append(f"licence {licence}")
    return f"{', '.join(parts)}, from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}"


def weights_by_name(name: str) -> float | None:
    """The number of weights in a model's name, such as ``7e10`` for ``Meta-Llama-3-70B``; None if not given."""
    found = _SIZE.search(name.rpartition("/")[2])
    return float(found[1]) * {"b": 1e9, "m": 1e6}[found[2].lower()] if found else None


def size_text(count: float) -> str:
    """Bytes in the hub's units, such as ``16 GB``."""
    return (
        f"{count / 1e9:.0f} GB"
        if count >= 10e9
        else f"{count / 1e9:.1f} GB"
        if count >= 1e8
        else f"{count / 1e6:.1f} MB"
    )


def _asked(table: ModelTable) -> set[str]:
    """The devices except the CPU that a table requests by name or by number of shards."""
    names = set(named_devices(table) or ()) | {f"cuda:{index}" for index in range(table.shards or 0)}
    return names - {"cpu", "disk"}
