"""Calls to huggingface_hub and transformers: silencing them, and turning their exceptions into errors with hints."""

import difflib
import json
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.errors import AbsentError, ModelError, out_of_memory, pip_install, reason

CONVERT = (
    "Convert it once on a machine where you trust the files: "
    'python -c "from transformers import AutoModelForCausalLM as M, '
    "AutoTokenizer as T; n, d = '{name}', 'converted'; M.from_pretrained(n).save_pretrained(d); "
    'T.from_pretrained(n).save_pretrained(d)", then set model = "converted" in [{role}].'
)
ADAPTER = "adapter_config.json"  # What peft writes next to an adapter's weights
_PACKAGE = re.compile(r"pip install ([A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9])")
"""The package's name in transformers' messages about a missing package."""
MEMORY_HINT = (
    "Free memory on the device, set quantize or a smaller dtype, choose a smaller checkpoint, or spread it with "
    'device = "balanced"; `specctl doctor` shows which model fits on which device.'
)


@contextmanager
def explained(role: str, name: str, *, by_config: bool = False) -> Iterator[None]:
    """Turn any exception raised inside into a ModelError about this model, with the original as its cause.

    ``by_config`` says that only its config.json is read inside.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise explain(error, role, name, by_config=by_config) from error


def explain(error: BaseException, role: str, name: str, *, by_config: bool = False) -> ModelError:
    """The ModelError for an exception: from its first known cause, by exception type before message.

    For the other arguments see `explained`.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    import huggingface_hub.errors as hub

    subject = f"The {role} model {name!r}"
    for cause in chain:
        if found := _from_type(cause, subject, role, name):
            gated = isinstance(cause, hub.GatedRepoError)
            return AbsentError(*found, gated=gated) if gated or _unreachable(cause) else ModelError(*found)
    for cause in chain:
        if found := _from_message(str(cause), subject, role):
            return ModelError(*found)
    if by_config:
        return ModelError(
            f"{subject}: transformers cannot make a model from its config.json: {_innermost(error)}.",
            "Copy or download that file again, or correct it; a new model may need a newer transformers.",
        )
    return ModelError(
        f"{subject} cannot be loaded: {type(error).__name__}: {_first_line(error)}",
        "SPECCTL_DEBUG=1 shows the full traceback.",
    )


def _unreachable(error: BaseException) -> bool:
    import huggingface_hub.errors as hub

    silent = hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled | hub.HTTPError  # type: ignore[attr-defined]
    return isinstance(error, silent) and not isinstance(error, hub.HfHubHTTPError)


def _from_type(error: BaseException, subject: str, role: str, name: str) -> tuple[str, str] | None:
    import huggingface_hub.errors as hub
    from safetensors import SafetensorError

    match error:
        case hub.GatedRepoError():
            return f"{subject} is gated: the hub denies access to its files.", _access_hint(name)
        case hub.RevisionNotFoundError():
            return (
                f"{subject} has no such revision on the hub.",
                f"Correct `revision` in [{role}] to a branch, tag or commit listed at https://huggingface.co/{name}.",
            )
        case hub.RepositoryNotFoundError():
            hint = f"{similar_models(name)}Check the spelling; if the repository is private, run `hf auth login` first."
            return f"{subject} is neither a folder here nor a repository on the hub.", hint
        case hub.DisabledRepoError():
            return f"{subject} has been disabled on the hub.", "Choose another checkpoint."
        case hub.HFValidationError():
            return (
                f"{subject} is neither a folder here nor a valid hub id.",
                f"{similar_models(name)}Give a folder, or a hub id such as 'Qwen/Qwen3-0.6B'.",
            )
        case hub.LocalEntryNotFoundError() if isinstance(error.__cause__, hub.HfHubHTTPError):
            return None  # the hub did respond; its response is the next cause in the chain
        case hub.LocalEntryNotFoundError() | hub.OfflineModeIsEnabled():
            return _not_cached(subject, name)
        case hub.NotASafetensorsRepoError():
            return pickle_only(subject, role, name)
        case SafetensorError() | hub.SafetensorsParsingError():
            return (
                f"{subject} has damaged weights: {_first_line(error)}.",
                "Copy or download the .safetensors files again; the last download may have been cut short.",
            )
        case _ if out_of_memory(error):
            return f"{subject} ran out of memory while loading: {_first_line(error)}", MEMORY_HINT
        case hub.HfHubHTTPError():
            return (
                f"The hub did not deliver {subject[0].lower()}{subject[1:]}: {_first_line(error)}",
                "Try again later, or name a folder with the files.",
            )
        case hub.HTTPError():  # type: ignore[attr-defined]
            # Any error of the hub's HTTP client without an answer; versions of the hub library use different clients.
            return _not_cached(subject, name)
        case PermissionError():
            return f"{subject} cannot be read: {_first_line(error)}", "Fix the permissions of that file or folder."
        case ImportError() if named := _PACKAGE.search(str(error)):
            return f"{subject} needs {named[1]}, which is not installed.", f"Run `{pip_install(named[1])}`."
        case ImportError():
            return f"{subject} needs a package that is not installed: {_first_line(error)}", "Install it and try again."
    return None


def _from_message(text: str, subject: str, role: str) -> tuple[str, str] | None:
    """Explain failures that differ only in the exception's message."""
    if "trust_remote_code" in text:
        return (
            f"{subject} can only run with code from its own repository.",
            f"Read that code first; if you trust it, set trust_remote_code = true in [{role}].",
        )
    if "not a valid JSON file" in text:
        return f"{subject} has a damaged config.json.", "Copy or download that file again."
    unknown = ("does not recognize this architecture", "Should have a `model_type` key", "Unrecognized model type")
    if any(said in text for said in unknown):
        return (
            f"{subject} has an architecture this version of transformers does not know.",
            "Update transformers, or check `model_type` in its config.json.",
        )
    if "Unrecognized configuration class" in text:
        return (
            f"{subject} does not write text: transformers has no class for it that does.",
            "Choose a decoder checkpoint such as Llama, Qwen, Gemma, Mistral or Pythia. Models that read pictures too, "
            "such as LLaVA or Qwen2.5-VL, run as well, on text alone.",
        )
    if "can't allocate memory" in text or "out of memory" in text.lower():
        return f"{subject} ran out of memory while loading.", MEMORY_HINT
    return None


def adapter(subject: str, role: str, name: str, folder: Path) -> tuple[str, str]:
    """Message and hint for a folder with an adapter and no model."""
    base = ""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        found = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base = str(found.get("base_model_name_or_path") or "")
    return (
        f"{subject} is an adapter{f' of {base!r}' if base else ''}, not a whole model.",
        f'Set model = "{base or "BASE"}" and adapter = "{name}" in [{role}], or --set {role}.model={base or "BASE"} '
        f"--set {role}.adapter={name}.",
    )


def pickle_only(subject: str, role: str, name: str) -> tuple[str, str]:
    return (
        f"{subject} has no safetensors weights, and weights in other formats can run code when they are read.",
        f"Look for a revision with safetensors (on the hub often refs/pr/1). {CONVERT.format(name=name, role=role)}",
    )


def _access_hint(name: str) -> str:
    from huggingface_hub import get_token

    licence = f"Accept the licence at https://huggingface.co/{name}"
    if get_token() is None:
        return f"{licence}, then log in with `hf auth login` or set HF_TOKEN: no token is set."
    return f"{licence} with the account of the token in use (`hf auth whoami` shows it)."


def _not_cached(subject: str, name: str) -> tuple[str, str]:
    from huggingface_hub import constants

    cached = similar_models(name)
    if constants.HF_HUB_OFFLINE:
        return (
            f"{subject} is not in the local cache, and HF_HUB_OFFLINE forbids a download.",
            f"{cached}Unset HF_HUB_OFFLINE, or run `hf download {name}` on a machine with a network.",
        )
    return (
        f"{subject} is not in the local cache, and the hub cannot be reached.",
        f"{cached}Check the network and HF_ENDPOINT, run `hf download {name}` where there is one, or name a folder "
        "with the files.",
    )


def similar_models(name: str) -> str:
    """A sentence with similarly named folders next to the given path and cached hub models; else an empty string."""
    from huggingface_hub import constants

    path = Path(name).expanduser()
    names: list[str] = []
    if path.parent.is_dir():
        folders = {entry.name: str(entry) for entry in path.parent.iterdir() if entry.is_dir()}
        names += [folders[near] for near in difflib.get_close_matches(path.name, folders, n=2)]
    cached = [
        entry.name.removeprefix("models--").replace("--", "/")
        for entry in Path(constants.HF_HUB_CACHE).glob("models--*")
    ]
    names += difflib.get_close_matches(name, [model for model in cached if model != name], n=2)
    return f"Did you mean {' or '.join(repr(near) for near in names)}? " if names else ""


def _innermost(error: BaseException) -> str:
    """The message of an exception's first cause, shortened, with its type unless it is about a wrong value."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = textwrap.shorten(_first_line(error), 200, placeholder=" ...")
    return said if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {said}"


def _first_line(error: BaseException) -> str:
    return (reason(error) or type(error).__name__).rstrip(".")


def hush_imports() -> None:
    """Suppress warnings of torchao and bitsandbytes on import by transformers; call it before torch is imported."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def hushed() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings inside the block."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def hushed_hub() -> Iterator[None]:
    """Suppress the hub client's warnings and progress bars inside the block."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
