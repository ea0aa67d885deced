"""Drafters of a pair for texts that name a policy of their own."""

import json
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specctl.decoding.composition import build_drafter
from specctl.decoding.rows.draft import Drafter
from specctl.errors import ProfileError, RecordError, UsageError
from specctl.models.running.pair import Pair
from specctl.policies import Setting, Signal
from specctl.profile import parse_policy
from specctl.profile.schema import DraftTable, PolicyTable

KEPT = 8
"""Policies that texts named whose drafters are kept, with what they learned."""
LONGEST_WORD = 20
"""Characters of a text in a record's ``draft`` that is taken for an answer, such as ``no``."""


class NamedDrafters:
    """The profile's drafter, and one for each policy that texts name in its place.

    A named policy decides for its own text, also where those of other texts decide together.

    Args:
        pair: loaded, or a row's.
        draft: the profile's table; None without a draft.
        signals: to record at every level whether or not a policy reads them.
    """

    def __init__(self, pair: Pair, draft: DraftTable | None, signals: Set[Signal] = frozenset()) -> None:
        self._pair, self._draft, self._signals = pair, draft, signals
        self._own = None if draft is None else build_drafter(pair, draft.setting, signals)
        self._others: dict[Setting, Drafter | None] = {}

    def setting(self, policy: str | None, *, drafts: bool = True, place: str = "policy") -> Setting | None:
        """The setting for a text; None where nothing is to be drafted.

        Args:
            policy: of the draft that the target verifies, as ``--policy`` writes it; None for the profile's.
            drafts: whether the text shall have drafts.
            place: what the text calls its policy, for messages.

        Raises:
            ProfileError: there is no such policy, or it cannot stop this draft.
            UsageError: a policy is named, and there is no draft for it to stop.
        """
        draft = self._draft
        if policy is None:
            return draft.setting if draft is not None and drafts else None
        if draft is None:
            raise UsageError("there is no draft for a policy to stop", f"leave {place} out")
        table = PolicyTable(**parse_policy(policy, place))
        found = draft.model_copy(update={"policy": table, "batch_policies": None}).setting
        if found.parallel and not found.fixed_length:
            raise ProfileError(f"a draft in parallel is stopped by a fixed length alone, and {place} names {policy}")
        return found if drafts else None

    def of(self, policy: str | None, *, drafts: bool = True, place: str = "policy") -> Drafter | None:
        """The drafter for a text, as of `setting`; None where nothing is to be drafted."""
        setting = self.setting(policy, drafts=drafts, place=place)
        if policy is None:
            return self._own if drafts else None
        if setting is None:
            return None
        found = self._others.pop(setting, None) or build_drafter(alone(self._pair), setting, self._signals)
        while len(self._others) >= KEPT:
            del self._others[next(iter(self._others))]
        self._others[setting] = found  # the one used last comes last
        return found

    def of_record(self, data: Mapping[str, Any]) -> Drafter | None:
        """The drafter for a record: of the ``policy`` that it names, and None where its ``draft`` is false.

        Raises:
            RecordError: the policy is none, or cannot stop this draft; or ``draft`` seems to say whether to draft, and
                is not true or false.
        """
        policy, drafts = data.get("policy"), data.get("draft") is not False
        if _seems_an_answer(data.get("draft")):
            raise RecordError("invalid_draft", f"draft must be true or false, and is {json.dumps(data['draft'])}")
        if policy is not None and not isinstance(policy, str):
            raise RecordError("invalid_policy", "policy must be a string such as svip:threshold=0.4")
        if policy is not None and not drafts:
            raise RecordError("invalid_policy", "a policy stops drafts, and draft is false; leave one of them out")
        try:
            return self.of(policy, drafts=drafts)
        except (ProfileError, UsageError) as error:
            raise RecordError("invalid_policy", error.message) from error


def _seems_an_answer(draft: object) -> bool:
    """Whether a record's ``draft`` is a number or at most a word; data sets carry longer texts and objects there."""
    if isinstance(draft, str):
        return len(draft.split()) < 2 and len(draft) <= LONGEST_WORD
    return isinstance(draft, int | float) and not isinstance(draft, bool)


def alone(pair: Pair) -> Pair:
    """A pair whose policies decide for its own text."""
    return replace(pair, policy=Setting.build)
