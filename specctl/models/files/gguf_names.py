"""GGUF files by the names that users type: paths, tags of the hub, and models of Ollama, LM Studio and llama.cpp.

Stores of other programs are only read.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from specctl.errors import AbsentError, ModelError
from specctl.models.files.gguf import is_gguf
from specctl.models.files.gguf_header import PART, parts_of
from specctl.models.files.library_calls import explained, hushed_hub
from specctl.profile.wording import KIND

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
"""What is taken of a repository without a tag, before its first file; as llama.cpp does (common/download.cpp)."""
NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of files that come with a model: projectors of pictures, and draft heads."""
SHOWN = 12  # The most names listed in a message
LATEST = "latest"  # Ollama's tag for a name without one

_HOST = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_PAGE = re.compile(r"([^/]+/[^/:]+)/(?:(?:resolve|blob)/main/)?([^?]+\.gguf)(?:\?.*)?", re.IGNORECASE)
_NAME = re.compile(r"(?:([\w.-]+)/)?([\w.-]+)(?:([:@])([\w./-]+))?", re.ASCII)
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F16|F32)\w*", re.ASCII | re.IGNORECASE)
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_MODEL_LAYER = "application/vnd.ollama.image.model"


@dataclass(frozen=True, slots=True)
class HubFiles:
    """GGUF files of one model on the hub, which are not on this machine.

    Attributes:
        repository: a hub id.
        revision: a branch, tag or commit; None for the main branch.
        sizes: bytes by name, in the order of the parts.
    """

    repository: str
    revision: str | None
    sizes: Mapping[str, int]

    @property
    def command(self) -> str:
        """What downloads them."""
        return f"hf download {self.repository} {' '.join(self.sizes)}"

    def fetch(self, role: str) -> Path:
        """Download them, and return the first; on a terminal, the hub client shows progress bars.

        Raises:
            ModelError: the hub cannot be reached, or denies access.
        """
        from huggingface_hub import hf_hub_download

        with explained(role, self.repository):
            found = [hf_hub_download(self.repository, name, revision=self.revision) for name in self.sizes]
        return Path(found[0])


@dataclass(frozen=True, slots=True)
class _Name:
    """A name with its parts, and how messages call it."""

    subject: str
    owner: str  # empty for a name without one, and for a model of Ollama's library
    model: str
    tag: str  # a tag or a file's name; empty where none is given
    on_hub: bool  # whether it names the hub's host
    key: bool  # whether its tag follows an @, as in LM Studio's keys

    @property
    def repository(self) -> str:
        return f"{self.owner}/{self.model}" if self.owner else self.model

    @property
    def says_gguf(self) -> bool:
        """Whether it says that it is a repository of GGUF files."""
        return bool(self.owner) and not self.key and (self.on_hub or bool(self.tag) or "gguf" in self.model.lower())

    @property
    def wanted(self) -> str:
        """The tag for choosing a file; empty for the default."""
        return "" if self.tag.lower() == LATEST else self.tag

    @classmethod
    def of(cls, name: str, role: str) -> "_Name | None":
        bare = _HOST.sub("", name, count=1)
        if bare != name and (page := _PAGE.fullmatch(bare)) is not None:
            bare = f"{page[1]}:{page[2]}"
        found = _NAME.fullmatch(bare)
        if found is None:
            return None
        owner, model, sign, tag = found.groups("")
        owner = "" if owner == "library" else owner
        return cls(f"The {role} model {name!r}", owner, model, tag, on_hub=bare != name, key=sign == "@")


def find(name: str, role: str, revision: str | None = None, *, certain: bool = False) -> Path | HubFiles | None:
    """The GGUF file that a name means: the first one of a split model.

    Args:
        name: what the user typed.
        role: the model's key in the profile, for messages.
        revision: of a hub repository.
        certain: whether a plain hub id is one of GGUF files; else its name has to say so.

    Returns:
        A file on this machine, files of the hub, or None where the name means something else.

    Raises:
        ModelError: there is no such file, tag or model; a part of a split model is missing; or the hub does not answer.
    """
    if KIND.match(name):
        return None
    path, subject = Path(name).expanduser(), f"The {role} model {name!r}"
    if path.is_file():
        return _first_part(path, subject) if is_gguf(path) else None
    if path.is_dir():
        return _in_folder(path, "", subject)
    before, _, tag = name.rpartition(":")
    if before and (folder := Path(before).expanduser()).is_dir():
        if (found := _in_folder(folder, tag, subject)) is None:
            raise ModelError(f"{subject}: there is no GGUF file in {folder}.", "Name the file itself.")
        return found
    if path.suffix.lower() == ".gguf" and not _HOST.match(name) and ":" not in name:
        return _from_lm_studio(name) or _no_such_file(path, subject)
    if name.startswith(("/", "./", "../", "~")) or (parsed := _Name.of(name, role)) is None:
        return None
    return _by_name(parsed, role, revision, certain=certain)


def files_in(folder: Path) -> list[Path]:
    """The GGUF models in a folder and the folders in it: the first file of each; no projectors and draft heads."""
    return [folder / name for name in _models(_listed(folder))]


def names_here() -> list[str]:
    """Names of the GGUF models in the hub's cache, Ollama's store and LM Studio's folder."""
    found = []
    for place in _hub_caches():
        for folder in sorted(place.glob("models--*")):
            repository = folder.name.removeprefix("models--").replace("--", "/")
            files = [file.name for one in sorted(folder.glob("snapshots/*")) for file in files_in(one)]
            found += [f"{repository}:{quantisation(file)}" for file in files]
    return [*dict.fromkeys([*found, *_ollama_names(), *_lm_studio_keys()])]


def download_command(model: str) -> str | None:
    """The command that downloads the GGUF files that a name means; None for names of other models."""
    name = None if Path(model).expanduser().exists() else _Name.of(model, "")
    return None if name is None or not name.says_gguf else _download(name)


def hub_page(model: str) -> str:
    """The address of a hub model's page; ``model`` is a hub id, or another name of GGUF files on the hub."""
    name = _Name.of(model, "")
    return f"https://huggingface.co/{model if name is None or not name.says_gguf else name.repository}"


def _download(name: _Name) -> str:
    what = name.wanted or DEFAULT_TAGS[0]
    files = what if what.lower().endswith(".gguf") else f"--include '*{what}*'"
    return f"hf download {name.repository} {files}"


def quantisation(file: str) -> str:
    """The tag in a file's name, such as ``Q4_K_M``; else the name."""
    found = [*_QUANTISATION.finditer(_stem(file))]
    return found[-1][0].upper() if found else file


def choose(names: Sequence[str], tag: str) -> str | None:
    """The name of the first file of the model that a tag means; None if there is none.

    Upper and lower case are alike. Projectors and draft heads are chosen by their whole names only.

    Args:
        names: relative paths of GGUF files.
        tag: such as ``Q4_K_M``, a file's name, or empty for the default.
    """
    lower = tag.lower()
    if lower.endswith(".gguf"):
        exact = [name for name in names if lower in (name.lower(), name.lower().rpartition("/")[2])]
        return exact[0] if exact else None
    models = _models(names)
    for wanted in [tag] if tag else DEFAULT_TAGS:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?=[.-])", re.IGNORECASE)
        for name in models:
            if pattern.search(name.rpartition("/")[2]):
                return name
    return models[0] if models and not tag else None


def _models(names: Sequence[str]) -> list[str]:
    """The names that are models' first files."""
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    lower = {name: name.rpartition("/")[2].lower() for name in files}
    firsts = (name for name in files if (part := PART.fullmatch(name)) is None or int(part[2]) == 1)
    return [name for name in firsts if not any(other in lower[name] for other in NO_MODELS)]


def _stem(file: str) -> str:
    name = file.rpartition("/")[2]
    part = PART.fullmatch(name)
    return part[1] if part else name.removesuffix(".gguf")


def _first_part(file: Path, subject: str) -> Path:
    """The first file of a model, where all of them are here."""
    files = parts_of(file)
    if missing := [part.name for part in files if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{subject} is one of {len(files)} files, and {missing[0]}{more} is missing from {file.parent}.",
            "Download the missing files into that folder, or copy them there.",
        )
    return files[0]


def _no_such_file(path: Path, subject: str) -> Path:
    """The first file of a split of which another part is here; else raise a ModelError."""
    if any(part.is_file() for part in parts_of(path)):
        return _first_part(path, subject)
    here = _listed(path.parent) if path.parent.is_dir() else []
    near = get_close_matches(path.name, here, n=2) or _models(here)[:SHOWN]
    hint = f"There is {', '.join(str(path.parent / name) for name in near)}. " if near else ""
    if not here and len(path.parts) == 3 and not path.is_absolute():
        hint = f"A file on the hub is named '{path.parent.as_posix()}:{path.name}'. "
    raise ModelError(
        f"{subject}: there is no such file.", f"{hint}Paths are relative to the current directory, {Path.cwd()}."
    )


def _in_folder(folder: Path, tag: str, subject: str) -> Path | None:
    """The model in a folder of GGUF files; None for one of another kind."""
    names = _listed(folder)
    if not tag and (any(folder.glob("*.safetensors*")) or not names):
        return None
    models = _models(names)
    if not tag and len(models) > 1:
        raise ModelError(
            f"{subject} is a folder with {len(models)} GGUF models: {_some(models)}.",
            f"Name one of them, such as {str(folder / models[0])!r}.",
        )
    if not tag and not models:
        return None
    return _chosen(names, tag, folder, subject)


def _chosen(names: Sequence[str], tag: str, folder: Path, subject: str) -> Path:
    found = choose(names, tag)
    if found is None:
        raise _no_tag(names, tag, subject)
    return _first_part(folder / found, subject)


def _no_tag(names: Sequence[str], tag: str, subject: str) -> ModelError:
    models = _models(names)
    if not models:
        return ModelError(f"{subject}: there is no GGUF model in it.", "Name a repository with GGUF files.")
    tags = [*dict.fromkeys(quantisation(name) for name in models)]
    return ModelError(f"{subject}: no GGUF file in it has the tag {tag!r}.", f"Its tags are {_some(tags)}.")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _listed(folder: Path) -> list[str]:
    """The GGUF files in a folder and the folders in it, as sorted relative paths; none where it cannot be read."""
    with suppress(OSError):
        found = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf"), *folder.glob("*.GGUF")]
        return sorted({path.relative_to(folder).as_posix() for path in found})
    return []


def _by_name(name: _Name, role: str, revision: str | None, *, certain: bool) -> Path | HubFiles | None:
    """The model of a name that is not a path: in the stores on this machine, then on the hub."""
    if name.key:
        if (found := _in_lm_studio(name)) is None:
            raise _unknown(name, "LM Studio's folder", _lm_studio_keys())
        return found
    if not name.owner:
        if not name.tag and _is_cached_model(name):
            return None
        found = _in_ollama(name) or (None if name.tag else _in_lm_studio(name))
        if found is None and name.tag:
            raise _unknown(name, "Ollama's store", _ollama_names())
        return found
    if not (name.says_gguf or certain):
        return None
    cached = _cached(name, revision)
    if cached is not None and (found := _whole(cached, name.wanted or DEFAULT_TAGS[0])) is not None:
        return found
    if revision is None and (found := _in_ollama(name) or _in_lm_studio(name) or _in_flat_cache(name)) is not None:
        return found
    return _on_hub(name, role, revision, cached)


def _unknown(name: _Name, store: str, known: Sequence[str]) -> ModelError:
    near = get_close_matches(f"{name.repository}{'@' if name.key else ':'}{name.tag}", known, n=3)
    hint = f"There is {', '.join(near or known[:SHOWN])}. " if known else ""
    for folder in () if name.key else _ollama_stores():
        if os.path.isdir(folder.parent) and not os.access(folder, os.R_OK | os.X_OK):
            hint += f"{folder} may not be read by this user. "
    pull = "" if name.key else f"Run `ollama pull {name.repository}:{name.tag}`, or "
    give = "give a path or 'owner/repository:Q4_K_M'."
    return ModelError(f"{name.subject}: {store} has no such model.", f"{hint}{pull}{give if pull else 'G' + give[1:]}")


# The hub and llama.cpp's cache of it


def _on_hub(name: _Name, role: str, revision: str | None, cached: tuple[Path, list[str]] | None) -> Path | HubFiles:
    try:
        with explained(role, name.repository), hushed_hub():
            sizes = _sizes_on_hub(name.repository, revision)
    except AbsentError as error:
        if error.gated:
            raise
        if cached is not None and (first := _whole(cached, name.wanted)) is not None:
            return first
        here = f"Here are {_some(_models(cached[1]))}. " if cached is not None and cached[1] else ""
        raise AbsentError(error.message, f"{here}Run `{_download(name)}` where there is a network.") from error
    found = choose([*sizes], name.wanted)
    if found is None:
        raise _no_tag([*sizes], name.wanted, name.subject)
    parts = [part.as_posix() for part in parts_of(Path(found))]
    if missing := [part for part in parts if part not in sizes]:
        raise ModelError(f"{name.subject}: the repository lacks {missing[0]}.", "Choose another tag.")
    return HubFiles(name.repository, revision, {part: sizes[part] for part in parts})


@cache
def _sizes_on_hub(repository: str, revision: str | None) -> Mapping[str, int]:
    """The bytes of a repository's GGUF files by name. Listed once in a process, which looks names up several times."""
    from huggingface_hub import HfApi

    # One request, which fails at once where the hub cannot be reached; a listing of the tree is tried for a minute.
    files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    return {one.rfilename: one.size or 0 for one in files if one.rfilename.lower().endswith(".gguf")}


def _hub_caches() -> Iterator[Path]:
    from huggingface_hub import constants

    yield Path(constants.HF_HUB_CACHE)
    if folder := os.environ.get("LLAMA_CACHE"):
        yield Path(folder).expanduser()


def _is_cached_model(name: _Name) -> bool:
    """Whether a name without an owner is a model of the hub's cache, which goes before other programs' stores."""
    folder = f"models--{name.repository.replace('/', '--')}"
    return any(any((place / folder).glob("snapshots/*/config.json")) for place in _hub_caches())


def _cached(name: _Name, revision: str | None) -> tuple[Path, list[str]] | None:
    """A snapshot of a repository in the hub's cache with GGUF files, and their names."""
    folder = f"models--{name.repository.replace('/', '--')}"
    for place in _hub_caches():
        snapshots = place / folder / "snapshots"
        commit = revision or "main"
        with suppress(OSError, UnicodeDecodeError):
            commit = (place / folder / "refs" / commit).read_text(encoding="utf-8").strip() or commit
        found = [snapshots / commit]
        if revision is None:
            with suppress(OSError):
                found += sorted(snapshots.iterdir())
        for one in found:
            if names := [file for file in _listed(one) if (one / file).is_file()]:
                return one, names
    return None


def _whole(cached: tuple[Path, list[str]], tag: str) -> Path | None:
    """The first file of the model of a snapshot that a tag means, if all of its files are there."""
    folder, names = cached
    found = choose(names, tag)
    return None if found is None or any(not file.is_file() for file in parts_of(folder / found)) else folder / found


def _in_flat_cache(name: _Name) -> Path | None:
    """A model in the folder where llama.cpp kept its downloads before it took the hub's cache."""
    caches = Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    default = Path(os.environ.get("XDG_CACHE_HOME") or caches) / "llama.cpp"
    folder, prefix = Path(os.environ.get("LLAMA_CACHE") or default), f"{name.owner}_{name.model}_"
    own = [file for file in _listed(folder) if file.startswith(prefix)]
    found = choose([file.removeprefix(prefix) for file in own], name.wanted)
    return None if found is None else _first_part(folder / f"{prefix}{found}", name.subject)


# Ollama


def _ollama_stores() -> list[Path]:
    """The folders of Ollama's models: of this user, and of the service on Linux."""
    own = os.environ.get("OLLAMA_MODELS")
    mine = Path(own).expanduser() if own else Path.home() / ".ollama" / "models"
    return [mine, Path("/usr/share/ollama/.ollama/models")]


def _in_ollama(name: _Name) -> Path | None:
    """The file with a model's weights in Ollama's store."""
    tag = name.tag or LATEST
    hosts = ["hf.co", "huggingface.co"] if name.owner else []
    if not name.on_hub and (name.tag or not name.owner):
        hosts.append("registry.ollama.ai")
    for store in _ollama_stores():
        for host in hosts:
            manifest = store / "manifests"
            for part in (host, name.owner or "library", name.model, tag):
                manifest = _entry(manifest, part)
            if os.path.isfile(manifest):
                return _blob(store, manifest, name.subject)
    return None


def _entry(folder: Path, name: str) -> Path:
    """An entry of a folder, whose upper and lower case may be another."""
    if not os.path.exists(folder / name):
        with suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                if entry.lower() == name.lower():
                    return folder / entry
    return folder / name


def _blob(store: Path, manifest: Path, subject: str) -> Path:
    """The file that a manifest of Ollama names as the model."""
    again = "Run `ollama pull` again, or name a GGUF file."
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{subject}: Ollama's manifest {manifest} cannot be read: {error}.", again) from error
    known = [found[1] for digest in digests if (found := _DIGEST.fullmatch(digest))]
    if len(known) != 1:
        kinds = f"{len(known)} GGUF files" if known else "no GGUF file"
        raise ModelError(f"{subject}: Ollama's store has {kinds} for it.", "Name a model with one GGUF file.")
    file = store / "blobs" / f"sha256-{known[0].lower()}"
    if not os.path.isfile(file):
        raise ModelError(f"{subject}: Ollama's store lacks its file {file}.", again)
    if not os.access(file, os.R_OK):
        raise ModelError(f"{subject}: {file} may not be read by this user.", "Give this user the right to read it.")
    if not is_gguf(file):
        raise ModelError(f"{subject}: {file} is not a GGUF file.", "Name a model whose weights are in a GGUF file.")
    return file


def _ollama_names() -> list[str]:
    """The models of Ollama's store, as `ollama list` shows them."""
    found = []
    for store in _ollama_stores():
        with suppress(OSError):
            for manifest in sorted((store / "manifests").glob("*/*/*/*")):
                host, owner, model, tag = manifest.parts[-4:]
                place = "" if host == "registry.ollama.ai" else f"{host}/"
                owner = "" if (place, owner) == ("", "library") else f"{owner}/"
                found.append(f"{place}{owner}{model}:{tag}")
    return found


# LM Studio


def _lm_studio_stores() -> list[Path]:
    """The folders of LM Studio's models, the first that it uses now first."""
    homes = [Path.home() / ".lmstudio", Path.home() / ".cache" / "lm-studio"]
    with suppress(OSError, UnicodeDecodeError):
        homes.insert(0, Path((Path.home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()))
    found: list[Path] = []
    for home in homes:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            settings: Any = json.loads((home / "settings.json").read_text(encoding="utf-8"))
            found.append(Path(settings["downloadsFolder"]))
        found.append(home / "models")
    return [*dict.fromkeys(found)]


def _from_lm_studio(name: str) -> Path | None:
    """The file ``publisher/repository/file.gguf``."""
    for store in _lm_studio_stores():
        if os.path.isfile(store / name):
            return _first_part(store / name, name)
    return None


def _in_lm_studio(name: _Name) -> Path | None:
    """The model of a key of LM Studio, or of a repository in its folder."""
    found = [
        (folder, names)
        for store in _lm_studio_stores()
        for folder, names in _lm_studio_folders(store)
        if name.model.lower() in (_keys(folder) if name.key or not name.owner else _keys(folder)[:1])
        and name.owner.lower() in ("", folder.parent.name.lower())
    ]
    if len(found) > 1 and not name.owner:
        some = [f"{folder.parent.name}/{folder.name}" for folder, _ in found]
        tag = f"@{name.tag}" if name.tag else ""
        raise ModelError(
            f"{name.subject}: LM Studio's folder has it {len(found)} times.",
            f"Name {' or '.join(one + tag for one in some)}.",
        )
    for folder, names in found:
        if name.key or choose(names, name.wanted) is not None:  # else the hub may have it
            return _chosen(names, name.wanted, folder, name.subject)
    return None


def _lm_studio_folders(store: Path) -> Iterator[tuple[Path, list[str]]]:
    with suppress(OSError):
        for folder in sorted(store.glob("*/*")):
            if names := _listed(folder):
                yield folder, names


def _keys(folder: Path) -> tuple[str, str]:
    """The names that mean a folder of LM Studio."""
    name = folder.name.lower()
    return name, re.sub(r"[-_.]gguf$", "", name)


def _lm_studio_keys() -> list[str]:
    """The models in LM Studio's folder, as its keys."""
    found = []
    for store in _lm_studio_stores():
        for folder, names in _lm_studio_folders(store):
            found += [f"{_keys(folder)[1]}@{quantisation(name).lower()}" for name in _models(names)]
    return found
