"""The policies of the papers, each with the settings of its paper."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specctl.observing.candidate import Candidate
from specctl.policies import Setting
from specctl.policies.policy_text import policy_table
from specctl.policies.tree_shape import TreeSize


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy as a paper ran it.

    Attributes:
        policy: with its settings, as ``--policy`` names it.
        source: the paper, and where its settings are from.
        tree: the size of its dynamic trees; None for chains.
        at_every_level: whether it stops every draft of a hierarchy; otherwise it runs on the target's own draft alone.
    """

    policy: str
    source: str
    tree: TreeSize | None = None
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
    """The source of every candidate that runs as an entrant does, by label, in the order of `PAPERS`."""
    candidates = list(candidates)
    found = {
        candidate.label: entrant.source
        for entrant in PAPERS
        for candidate in candidates
        if candidate.setting is not None and _runs_as(entrant, candidate.setting)
    }
    return found | {one.label: PEERS[one.peer] for one in candidates if one.peer in PEERS}


def _runs_as(entrant: Entrant, setting: Setting) -> bool:
    # Which head it reads is the pair's affair.
    levels = {replace(level, below=None, head=None) for level in setting.levels}
    return levels == {entrant.setting} and entrant.at_every_level == (len(setting.levels) > 1)
