"""What can be trained, by name, and what its replicas do."""

from typing import Any, Literal

from specctl.models.predictors.predictor_checkpoint import Kind
from specctl.observing.progress import SILENT
from specctl.profile.schema import Profile
from specctl.replicas.job import Answer
from specctl.training.drafts.draft_workshop import DraftHeads
from specctl.training.predictors.predictor_workshop import Predictors
from specctl.training.subject import Subject


def replica(*, number: int, profile: Profile, kind: Kind | Literal["draft"]) -> Answer:  # noqa: ARG001 - all do the same
    """A replica that makes shards of material: for ``draft`` heads, or for predictors of a kind."""
    subject: Subject[Any, Any] = DraftHeads(profile) if kind == "draft" else Predictors(profile, kind)
    return subject.collector(subject.load(SILENT)).answering(subject.folder)
