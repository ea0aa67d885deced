"""What `bench --peer` can name: settings of transformers, and other engines with the ways in which they draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specctl.errors import UsageError
from specctl.profile.wording import did_you_mean

# Set explicitly: transformers' defaults are 20 tokens, constant, threshold 0.4 (its confidence setting).
ASSISTED: dict[str, dict[str, Any]] = {
    "hf-constant": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-heuristic": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-confidence": {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
}
MOVING = frozenset(name for name, values in ASSISTED.items() if values["assistant_confidence_threshold"])
"""Those whose threshold transformers moves after each round, if it can import scikit-learn; else it stays."""
NO_DRAFT = "none"
DEFAULT_WAY = "constant"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft, which has one value.

    Attributes:
        key: what the value is, ``tokens`` of a draft or the ``threshold`` of a probability.
        least, most: its bounds.
        default: its value where none is given.
    """

    key: str
    least: float
    most: float
    default: float

    def value(self, text: str | None) -> float:
        """The value that a text gives; raises ValueError for what is no value of this way."""
        if text is None:
            return self.default
        value = float(text) if self.key == "threshold" else int(text)
        if not self.least <= value <= self.most:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine that is measured in a process of its own.

    Attributes:
        module: what its Python must be able to import; None for an engine that is a program.
        package: what pip installs for the module; for a program, its file name.
        ways: how it can draft, by name.
        batches: whether its worker can run several prompts at once, without a draft.
    """

    module: str | None
    package: str
    ways: Mapping[str, Way]
    batches: bool = False


_TOKENS = Way("tokens", 1, 64, 5)
_THRESHOLD = Way("threshold", 0, 1, 0.4)
ENGINES = {
    "onnxruntime-genai": PeerEngine(
        "onnxruntime_genai",
        "onnxruntime-genai",
        {"constant": Way("tokens", 1, 16, 5), "adaptive": Way("tokens", 1, 16, 2)},
        batches=True,
    ),
    "openvino": PeerEngine(
        "openvino_genai", "openvino-genai", {"constant": _TOKENS, "confidence": _THRESHOLD}, batches=True
    ),
    "llama.cpp": PeerEngine(None, "llama-server", {"constant": _TOKENS, "confidence": _THRESHOLD}),
}


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A peer with its setting.

    Attributes:
        label: its name in tables.
        peer: a key of `ASSISTED` or `ENGINES`.
        values: transformers' arguments; or ``draft``, the name of the way to draft, with its value.
    """

    label: str
    peer: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> PeerEngine | None:
        """None for transformers, which runs on specctl's own models."""
        return ENGINES.get(self.peer)

    @property
    def drafts(self) -> bool:
        return self.values.get("draft") != NO_DRAFT

    @property
    def batches(self) -> bool:
        """Whether it runs several prompts at once where others do."""
        return self.engine is not None and self.engine.batches and not self.drafts


def parse_peer(text: str) -> PeerSetting:
    """The setting that ``PEER``, ``PEER:WAY`` or ``PEER:WAY:VALUE`` names, such as ``openvino:confidence:0.5``.

    Raises:
        UsageError: there is no such peer, or it has no such setting.
    """
    peer, _, setting = text.partition(":")
    if peer in ASSISTED:
        if setting:
            raise UsageError(f"{peer} has no settings to choose", f"write --peer {peer}")
        return PeerSetting(peer, peer, ASSISTED[peer])
    if peer not in ENGINES:
        raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, [*ASSISTED, *ENGINES])}")
    ways = ENGINES[peer].ways
    name, _, value = setting.partition(":")
    name = name or DEFAULT_WAY
    if name == NO_DRAFT and not value:
        return PeerSetting(f"{peer}:{NO_DRAFT}", peer, {"draft": NO_DRAFT})
    if name not in ways:
        raise UsageError(f"{peer} cannot draft by '{name}'{did_you_mean(name, [NO_DRAFT, *ways])}")
    way = ways[name]
    try:
        chosen = way.value(value or None)
    except ValueError:
        raise UsageError(
            f"'{value}' is no {way.key} of {peer}:{name}",
            f"it is between {way.least:g} and {way.most:g}, by default {way.default:g}",
        ) from None
    return PeerSetting(f"{peer}:{name}:{chosen:g}", peer, {"draft": name, way.key: chosen})
