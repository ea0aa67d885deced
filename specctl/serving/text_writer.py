"""Writes texts with one pair, each as its order asks."""

from collections.abc import Generator

from specctl.decoding.named_drafters import NamedDrafters
from specctl.decoding.session import Session
from specctl.models.running.pair import Pair
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
        self._session = Session(pair, None, keep_caches=True)
        self._drafters = NamedDrafters(pair, profile.draft)

    @property
    def kept(self) -> int:
        """Tokens of the last text's prompt that the target had in its cache."""
        return self._session.kept

    def play(self, order: Order) -> Generator[Round, bool | None, Completion]:
        """The rounds of a text.

        Raises:
            ProfileError: there is no such policy, or the draft makes no signals for it.
            UsageError: a policy is named, and there is no draft for it to stop.
        """
        self._session.drafter = self._drafters.of(order.policy, drafts=order.draft, place="specctl.policy")
        return self._session.play(order.prompt, order.settings)
