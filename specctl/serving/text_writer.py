"""Writes texts with one pair, each as its order asks."""

from collections.abc import Generator

from specctl.decoding.composition import build_drafter
from specctl.decoding.named_drafters import NamedDrafters, alone
from specctl.decoding.session import Session
from specctl.models.running.pair import Pair
from specctl.models.running.rules.request_rules import ruled
from specctl.profile import Profile
from specctl.records import Completion, Round
from specctl.serving.order import Order


class TextWriter:
    """Writes one text at a time.

    Args:
        pair: loaded, or a row's.
        profile: says which draft is at work and what stops it.
    """

    def __init__(self, pair: Pair, profile: Profile) -> None:
        self._pair, self._session = pair, Session(pair, None)
        self._drafters = NamedDrafters(pair, profile.draft)

    def play(self, order: Order) -> Generator[Round, bool | None, Completion]:
        """The rounds of a text.

        Raises:
            ProfileError: there is no such policy, or the draft makes no signals for it.
            UsageError: a policy is named, and there is no draft for it to stop.
        """
        session, place = self._session, "specctl.policy"
        if order.rules.active:
            # Decided for itself: what all rows decide together is about drafts without rules.
            pair = ruled(alone(self._pair), order.rules.token_rules(len(order.prompt)))
            setting = self._drafters.setting(order.policy, drafts=order.draft, place=place)
            session = Session(pair, None if setting is None else build_drafter(pair, setting))
        else:
            session.drafter = self._drafters.of(order.policy, drafts=order.draft, place=place)
        return session.play(order.prompt, order.settings)
