"""The policies of the papers, each with the settings of its paper."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specctl.errors import UsageError
from specctl.observing.results import Candidate
from specctl.peers.engines import PeerSetting, parse_peer
from specctl.policies import DISTRIBUTION_SIGNALS, LOOKUP_SIGNALS, Setting, Signal, nested
from specctl.policies.registry import policy_table
from specctl.policies.setting import TreeSize
from specctl.profile.schema import DraftTable, Profile

if TYPE_CHECKING:
    from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy as a paper ran it."""

    policy: str  # with its settings, as in ``--policy``
    source: str  # the paper, and the source of its settings
    tree: TreeSize | None = None  # the size of its dynamic trees; None for chains
    # whether it stops every draft of a hierarchy; otherwise it runs on the target's own draft alone
    at_every_level: bool = False

    @property
    def setting(self) -> Setting:
        """Of one draft."""
        return replace(Setting.of(policy_table(self.policy)), tree=self.tree)

    @property
    def label(self) -> str:
        return f"{self.setting.label} at every level" if self.at_every_level else self.setting.label


PAPERS = (
    Entrant("constant:draft_length=3", "Leviathan et al. 2023, arXiv 2211.17192, Table 2"),
    Entrant("constant", "Leviathan et al. 2023, arXiv 2211.17192, Table 2"),
    Entrant("constant:draft_length=7", "Leviathan et al. 2023, arXiv 2211.17192, Table 2"),
    Entrant("constant:draft_length=10", "HSDDW, Syu and Lee 2025, Table 2"),
    Entrant("heuristic", "transformers' assisted generation, and SVIP's baseline"),
    Entrant("max-confidence", "AdaEDL's baseline, arXiv 2410.18351"),
    Entrant("svip", "SVIP, arXiv 2411.18462, Alg. 1; c of its code"),
    Entrant("adaedl", "AdaEDL, arXiv 2410.18351, Alg. 1"),
    Entrant("self-verify", "HSDDW, Syu and Lee 2025, Table 2"),
    Entrant("self-verify", "HSDDW, Syu and Lee 2025, the full loop", at_every_level=True),
    Entrant("specdec++", "SpecDec++, arXiv 2405.19715; limits of its code"),
    Entrant("disco", "DISCO, arXiv 2405.04304, with the two layers of our heads"),
    Entrant("confidence", "DSpark, arXiv 2607.05147, Alg. 1"),
    Entrant("bandit", "TapOut, arXiv 2511.02017, over the policies here"),
    Entrant("constant:draft_length=6", "EAGLE-2, arXiv 2406.16858, 60 tokens of 10 beams", tree=TreeSize(60)),
    Entrant("svip", "SVIP on EAGLE-2's trees, in our reading", tree=TreeSize(60)),
    Entrant("cost-optimal", "specctl"),
    Entrant("cost-optimal:use_foresight=true", "specctl"),
)
PEERS = dict.fromkeys(("hf-constant", "hf-heuristic", "hf-confidence"), "transformers' own code")
"""Those that run on the same models in this process."""


def sources(candidates: Iterable[Candidate]) -> dict[str, str]:
    """The source of every candidate with an entrant's settings, by label, in the order of `PAPERS`."""
    candidates = list(candidates)
    found = {
        candidate.label: entrant.source
        for entrant in PAPERS
        for candidate in candidates
        if candidate.setting is not None and _runs_as(entrant, candidate.setting)
    }
    return found | {one.label: PEERS[one.peer] for one in candidates if one.peer in PEERS}


def _runs_as(entrant: Entrant, setting: Setting) -> bool:
    # The head depends on the pair, so it is not compared.
    levels = {replace(level, below=None, head=None) for level in setting.levels}
    return levels == {entrant.setting} and entrant.at_every_level == (len(setting.levels) > 1)


LACKING = {
    "accept_prob": "the profile names no head of the kind specdec++",
    "own_accept_prob": "the profile names no head of the kind disco",
    "next_accept_prob": "the draft predicts nothing of its next token",
}
"""By signal, why it cannot be read. For signals without an entry: a lookup has no distribution."""


@dataclass(slots=True)
class RunnablePapers:
    """The papers' policies on a pair."""

    tables: list[DraftTable] = field(default_factory=list)  # a draft table for each policy that the pair can run
    # transformers' assisted generation, where it can run the pair
    peers: list[PeerSetting] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # by label, why a policy cannot run


def runnable_papers(profile: Profile, *, oracle: bool = False) -> RunnablePapers:
    """The papers' policies on the drafts of a profile, and transformers' own assisted generation.

    Args:
        profile: names the models and heads.
        oracle: whether the runs are compared with bounds, which hold for chains.

    Raises:
        ModelError: a draft cannot be found.
        UsageError: the profile has no draft.
    """
    draft = profile.draft
    if draft is None:
        raise UsageError("--papers has no draft to stop", "name a profile with a draft, or add --draft MODEL")
    from specctl.models.loading.pair_members import find_head
    from specctl.peers.assisted import pairing_obstacle

    head = None if draft.is_lookup else find_head("draft", draft, ("target", profile.target))
    offered = _offered(draft, head)
    found = RunnablePapers()
    for entrant in PAPERS:
        why = _obstacle(entrant, profile, draft, head, offered, oracle)
        if why:
            found.left_out[entrant.label] = why
        elif entrant.at_every_level:
            found.tables.append(draft.stopped_by(nested([entrant.setting] * len(draft.levels))))
        else:
            alone = draft.model_copy(update={"draft": None, "pre_verify": None})
            found.tables.append(alone.stopped_by(entrant.setting))
    if why := pairing_obstacle(profile.target, draft):
        found.left_out |= dict.fromkeys(PEERS, why)
    else:
        found.peers += map(parse_peer, PEERS)
    return found


def left_out_lines(left_out: Mapping[str, str]) -> Iterator[str]:
    """One line for each reason, with all policies that it excludes."""
    for why in dict.fromkeys(left_out.values()):
        yield f"left out, because {why}: {', '.join(name for name, reason in left_out.items() if reason == why)}"


def _offered(draft: DraftTable, head: "DraftHeadCheckpoint | None") -> frozenset[Signal]:
    """The signals that a policy of the first draft, drafting alone, can read."""
    if draft.is_lookup:
        return LOOKUP_SIGNALS
    from specctl.models.predictors.predictor_checkpoint import KIND_SIGNALS, locate_predictor

    signals: set[Signal] = {*DISTRIBUTION_SIGNALS}
    if draft.head is not None:
        signals.add(KIND_SIGNALS[locate_predictor(draft.head).kind])
    if head is not None and head.foresees:
        signals.add("next_accept_prob")
    return frozenset(signals)


def _obstacle(
    entrant: Entrant,
    profile: Profile,
    draft: DraftTable,
    head: "DraftHeadCheckpoint | None",
    offered: frozenset[Signal],
    oracle: bool,
) -> str | None:
    """Why the pair cannot run it, as the end of a sentence; None if it can."""
    if entrant.at_every_level:
        if draft.draft is None:
            return "the profile has one draft"
        offered -= {"entropy"} if any(level.is_lookup for level in draft.levels) else set()
    for signal in sorted(entrant.setting.signals - offered):
        return LACKING.get(signal, "a lookup has no distribution")
    if entrant.tree is None:
        return None
    if draft.is_lookup:
        return "a lookup knows no other tokens"
    if profile.deterministic:
        return "deterministic passes read chains"
    if oracle:
        return "--oracle is a bound for chains"
    if head is not None and head.writes_blocks:
        return "the draft writes a whole block in one pass"
    return None
