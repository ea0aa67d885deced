"""Writes texts with one pair, each as its order asks."""

from collections.abc import Generator
from dataclasses import replace

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import Drafter
from specctl.decoding.session import Session
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.models.running.rules.request_rules import ruled
from specctl.policies import Setting
from specctl.profile import Profile, parse_policy
from specctl.profile.schema import PolicyTable
from specctl.records import Completion, Round
from specctl.serving.order import Order

KEPT = 8
"""Policies that orders named whose drafters are kept, with what they learned."""


class TextWriter:
    """Writes one text at a time.

    Args:
        pair: loaded, or a row's.
        profile: says which draft is at work and what stops it.
    """

    def __init__(self, pair: Pair, profile: Profile) -> None:
        self._pair, self._profile = pair, profile
        draft = profile.draft
        self._session = Session(pair, None)
        self._own = None if draft is None else build_drafter(pair, draft.setting)
        self._others: dict[Setting, Drafter | None] = {}

    def play(self, order: Order) -> Generator[Round, bool | None, Completion]:
        """The rounds of a text.

        Raises:
            ProfileError: there is no such policy, or the draft makes no signals for it.
            UsageError: a policy is named, and there is no draft for it to stop.
        """
        session, setting = self._session, self._setting(order)
        if order.rules.active:
            # Decided for itself: what all rows decide together is about drafts without rules.
            pair = ruled(alone(self._pair), order.rules.token_rules(len(order.prompt)))
            session = Session(pair, None if setting is None else build_drafter(pair, setting))
        elif order.plain:
            session.drafter = self._own
        else:
            session.drafter = None if setting is None else self._kept(setting)
        return session.play(order.prompt, order.settings)

    def _setting(self, order: Order) -> Setting | None:
        draft = self._profile.draft
        if order.policy is None:
            return draft.setting if draft is not None and order.draft else None
        if draft is None:
            raise UsageError("there is no draft for a policy to stop", "leave specctl.policy out")
        table = PolicyTable(**parse_policy(order.policy, "specctl.policy"))
        return draft.model_copy(update={"policy": table}).setting if order.draft else None

    def _kept(self, setting: Setting) -> Drafter | None:
        if setting not in self._others:
            while len(self._others) >= KEPT:
                del self._others[next(iter(self._others))]
            self._others[setting] = build_drafter(alone(self._pair), setting)
        return self._others[setting]


def alone(pair: Pair) -> Pair:
    """A pair whose policies decide for its own text."""
    return replace(pair, policy=Setting.build)
