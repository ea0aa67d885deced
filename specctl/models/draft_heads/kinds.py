"""The table of draft head kinds: how to recognise their files, their module, and how to train them.

The modules need torch and are imported to read, write or train a head. Recognising a file needs no torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from specctl.errors import ModelError

Config = Mapping[str, Any]  # The contents of a config.json


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings for training a draft head; a kind's defaults are its published settings."""

    kind: str  # what it is
    depth: int = 1  # its decoder layers
    # tokens drafted from each position in training; for block heads, the block's tokens; for GliDe, the tokens of a
    # stretch, which attend to the target's keys before the stretch only
    steps: int = 1
    # share of the rounds that continue after their first token in training, drawn anew for each answer and epoch; less
    # than 1 saves most of the time
    rounds: float = 1.0
    # size of the draft vocabulary: the answers' most frequent tokens; 0 for all tokens
    draft_vocabulary: int = 32_000
    markov_rank: int = 0  # of DSpark's sequential head
    anchors: int = 0  # blocks per answer and epoch, at random positions
    gamma: float = 0.0  # how slowly the loss weights of a block's later tokens decay
    # ``adamw`` for all weights, or ``muon`` for the matrices between embeddings and output layer
    optimizer: str = "adamw"


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of draft head. Its `module` has these functions, the last two only if specctl can train it.

    - ``read(file: HeadFile)``: a head, see `read_head`.
    - ``describe(head, verifier: Verifier)``: the config.json and the tensors for ``read``, except the parts common to
      all kinds (`write_head`); raises ValueError if the layout cannot describe the head.
    - ``new(recipe, given: Given)``: a head to train, with weights from torch's default generator, on the CPU except for
      shared modules.
    - ``loss(head, lesson: Lesson, recipe, generator)``: the loss ``()`` of an answer of at least two tokens, a sum over
      its tokens; the generator, on the CPU, draws noise and anchors.
    - ``fit(head, lessons: Iterable[Lesson])``, only if it `fits`: sets weights of a new head before training.
    """

    kind: str  # its name in flags, files and reports
    title: str  # its name in prose
    paper: str  # where it was published
    name: str  # name of its module in this package
    # whether a file is of this kind, judged by its config.json and tensor names, which may be unknown
    is_one: Callable[[Config, Set[str]], bool]
    speculators: bool = False  # whether speculators has this kind by the same name; its layout is then written
    blocks: bool = False  # whether one pass drafts several tokens
    recipe: Recipe | None = None  # published training settings; None if specctl cannot train it
    flags: frozenset[str] = frozenset()  # fields of the recipe that a user may set
    fits: bool = False  # whether weights of a new head are fitted before training

    @property
    def module(self) -> Any:
        """Import its module, which needs torch."""
        return import_module(f"{__package__}.{self.name}")


def _eagle1(_: Config, names: Set[str]) -> bool:
    # Ordinary models have names like model.layers.0 and an output norm; other heads have other norms.
    others = {"norm.weight", "hidden_norm.weight", "layers.0.hidden_norm.weight"}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and not others & names


def _eagle3(config: Config, names: Set[str]) -> bool:
    known = {"LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel", "Qwen3Eagle3Model"}
    tensors = "midlayer.hidden_norm.weight" in names or {"fc.weight", "layers.0.hidden_norm.weight"} <= names
    return tensors or bool(known & _architectures(config))


def _peagle(config: Config, names: Set[str]) -> bool:
    return bool({"PEagleSpeculator", "PEagleDraftModel"} & _architectures(config)) or "mask_hidden" in names


def _glide(config: Config, names: Set[str]) -> bool:
    return "smallLlamaForCausalLM" in _architectures(config) or "model.layers.0.cross_attn.q_proj.weight" in names


def _mtp(_: Config, __: Set[str]) -> bool:
    return False  # a target's files with MTP layers are not a head; MTP layers alone are speculators'


def _dflash2(config: Config, names: Set[str]) -> bool:
    return "DFlash2DraftModel" in _architectures(config) or "candidate_selector.successor_codebook" in names


def _dflash(config: Config, names: Set[str]) -> bool:
    return _block(config, names) and not _sequential(config, names)


def _dspark(config: Config, names: Set[str]) -> bool:
    return _block(config, names) and _sequential(config, names)


def _block(config: Config, names: Set[str]) -> bool:
    """Whether a head drafts blocks; some architectures with such names are rejected on reading."""
    named = any(re.search("D(Flash|Spark)(Draft)?Model$", name) for name in _architectures(config))
    return named or {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= names


def _sequential(config: Config, names: Set[str]) -> bool:
    """Whether a block's tokens depend on each other; DeepSpec's class for DSpark is also its class for DFlash."""
    nested = config.get("dflash_config")
    settings = {**(nested if isinstance(nested, dict) else {}), **config}
    named = bool(settings.get("markov_rank")) or settings.get("projector_type") == "dspark"
    return named or "markov_head.markov_w1.weight" in names


def _architectures(config: Config) -> set[str]:
    named = config.get("architectures")
    return {str(name) for name in named} if isinstance(named, list) else set()


MTP = HeadKind(
    "mtp",
    "MTP",
    "FastMTP, arXiv 2509.18362",
    "mtp",
    _mtp,
    speculators=True,
    recipe=Recipe("mtp", steps=3),
    flags=frozenset({"steps"}),
)
"""The only kind that may be in its target's own files."""

HEAD_KINDS = {
    row.kind: row
    for row in (
        HeadKind(
            "eagle1",
            "EAGLE-1",
            "Li, Wei, Zhang, Zhang 2024, arXiv 2401.15077",
            "eagle1",
            _eagle1,
            recipe=Recipe("eagle1", draft_vocabulary=0),
            flags=frozenset({"depth", "steps", "draft_vocabulary"}),
            fits=True,
        ),
        HeadKind("peagle", "P-EAGLE", "arXiv 2602.01469", "eagle3", _peagle, speculators=True, blocks=True),
        HeadKind(
            "eagle3",
            "EAGLE-3",
            "Li, Wei, Zhang, Zhang 2025, arXiv 2503.01840",
            "eagle3",
            _eagle3,
            speculators=True,
            recipe=Recipe("eagle3", steps=7),
            flags=frozenset({"depth", "steps", "draft_vocabulary"}),
        ),
        HeadKind(
            "glide",
            "GliDe",
            "Du et al. 2024, arXiv 2402.02082",
            "glide",
            _glide,
            recipe=Recipe("glide", steps=5),
            flags=frozenset({"depth", "steps"}),
        ),
        MTP,
        HeadKind("dflash2", "DFlash2", "z-lab 2026", "dflash", _dflash2, speculators=True, blocks=True),
        HeadKind(
            "dflash",
            "DFlash",
            "arXiv 2602.06036",
            "dflash",
            _dflash,
            speculators=True,
            blocks=True,
            recipe=Recipe("dflash", depth=5, steps=15, anchors=512, gamma=7.0),
            flags=frozenset({"depth", "steps", "anchors"}),
        ),
        HeadKind(
            "dspark",
            "DSpark",
            "arXiv 2607.05147",
            "dflash",
            _dspark,
            speculators=True,
            blocks=True,
            recipe=Recipe("dspark", depth=5, steps=7, anchors=512, gamma=4.0, markov_rank=256),
            flags=frozenset({"depth", "steps", "anchors"}),
        ),
    )
}
"""The kinds by name, in the order of recognition."""
RECIPES = {row.kind: row.recipe for row in HEAD_KINDS.values() if row.recipe is not None}
"""The published training settings, by kind."""


def recognise(config: Config, tensors: Iterable[str]) -> str | None:
    """The kind of a draft head, from its configuration or else its tensors, never from its name.

    Args:
        config: the contents of config.json.
        tensors: the names of the tensors in its file.

    Returns:
        None for an ordinary language model.

    Raises:
        ModelError: a draft head of a kind that specctl does not run.
    """
    # speculators' `eagle` is a layout of its own for EAGLE-1.
    if (kind := config.get("speculators_model_type")) is not None:
        known = [row.kind for row in HEAD_KINDS.values() if row.speculators]
        if str(kind) not in known:
            raise ModelError(
                f"specctl runs no draft heads of speculators' type {kind!r}.", f"It runs {', '.join(known)}."
            )
        return str(kind)
    for names in (frozenset[str](), frozenset(tensors)):
        for row in HEAD_KINDS.values():
            if row.is_one(config, names):
                return row.kind
    return None
