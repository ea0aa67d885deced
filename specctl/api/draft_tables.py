"""What users name as draft and policy becomes a draft table."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from specctl.errors import ProfileError, UsageError
from specctl.policies import POLICIES
from specctl.profile import Profile, ResolvedProfile, parse_policy, resolve
from specctl.profile.profile_file import available, is_path
from specctl.profile.schema import DraftTable, Verification

TARGET = "the model that generates"
Draft = PreTrainedModel | str | PathLike[str] | None
Policy = str | Profile | ResolvedProfile | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft and what stops it.

    Attributes:
        table: names the models, policies and heads.
        given: a model in memory that is the only draft; None to load what the table names.
        verification: how drawn draft tokens are verified.
    """

    table: DraftTable
    given: PreTrainedModel | None
    verification: Verification

    @classmethod
    def of(cls, draft: Draft, policy: Policy, head: str | PathLike[str] | None = None) -> "Drafting":
        """The drafting that a draft and a policy describe.

        Args:
            draft: a model in memory, a folder, a hub id, a draft head's folder or hub id, ``prompt:lookup`` or
                ``embedded:draft``; None for the drafts of a profile.
            policy: a policy's name, or with settings as ``--policy`` has them; a profile, its name or its path, such as
                the file that ``calibrate`` wrote; None for ``cost-optimal``.
            head: the acceptance head that the policy reads: a folder, a hub id or ``embedded:NAME``.

        Raises:
            ProfileError: there is no such policy or profile, or it has mistakes.
            UsageError: there is no draft, or the profile does not fit the draft.
        """
        given = draft if isinstance(draft, PreTrainedModel) else None
        name = (draft.name_or_path or "draft") if isinstance(draft, PreTrainedModel) else draft and os.fspath(draft)
        profile = _profile(policy, {"draft.model": name, "draft.head": None if head is None else os.fspath(head)})
        table = profile.draft
        if table is None:
            raise UsageError("there is no draft", "Name one: speculative(draft, policy).")
        if given is not None and table.draft is not None:
            raise UsageError(
                "the profile has a draft for its draft, and one model is given",
                "Leave the draft out, so that all models of the profile are loaded.",
            )
        if table.parallel:
            raise UsageError("a draft in parallel needs `specctl generate`", "Set draft.parallel = false.")
        return cls(table, given, profile.sampling.verification)


def _profile(policy: Policy, flags: dict[str, Any]) -> Profile:
    """A profile with the draft and policy; where none is meant, of a target that is not named yet."""
    if isinstance(policy, ResolvedProfile):
        policy = policy.profile
    if isinstance(policy, Profile):
        if flags["draft.model"] is None and flags["draft.head"] is None:
            return policy
        changed = {key.partition(".")[2]: value for key, value in flags.items() if value is not None}
        if policy.draft is None:
            return _resolved(None, {**flags, "target.model": TARGET})
        return policy.model_copy(update={"draft": policy.draft.model_copy(update={"kind": "auto", **changed})})
    if policy is None:
        return _resolved(None, {**flags, "target.model": TARGET})
    if policy.partition(":")[0].strip() not in POLICIES and (is_path(policy) or policy in available()):
        return _resolved(policy, flags)
    return _resolved(None, {**flags, "draft.policy": parse_policy(policy, "speculative"), "target.model": TARGET})


def _resolved(name: str | None, flags: Mapping[str, Any]) -> Profile:
    if name is None and flags.get("draft.model") is None:
        raise UsageError("there is no draft", "Name one: speculative(draft, policy).")
    # Variables that change profiles are for commands; the folders of a user's own profiles are found here too.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SPECCTL_")}
    try:
        return resolve(name, flags=flags, environ=environ).profile
    except ProfileError as error:
        hint = error.hint.replace("Add --draft MODEL.", "Name a draft.")
        raise ProfileError(error.message.replace(f"profile '--target {TARGET} ", "profile '"), hint) from error
