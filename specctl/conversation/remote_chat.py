"""A conversation whose answers a server writes."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specctl.conversation.conversation import Chat
from specctl.conversation.transcript import Transcript, Turn
from specctl.decoding.answers import OnRound
from specctl.errors import UsageError
from specctl.metrics import Metrics
from specctl.outputs import Outputs
from specctl.profile import Profile, parse_policy
from specctl.profile.schema import PolicyTable, SamplingTable
from specctl.records import FinishReason
from specctl.remote.api_settings import api_settings
from specctl.remote.chunks import Usage
from specctl.remote.server import Server

if TYPE_CHECKING:
    import httpx

OURS = "specctl"
NOT_ASKED = frozenset({"verification", "regex", "grammar", "logprobs"})
"""Keys of the sampling table that no request of a conversation has."""


class RemoteChat(Chat):
    """One conversation with a server; no model is loaded.

    Args:
        server: that answers.
        client: connected with it.
        profile: its sampling and prompt tables alone are read; turns go through the server's chat template unless
            ``prompt.chat`` is false.
        outputs: as of `Chat`.

    Attributes:
        heard: told of each piece of an answer.
        usage: of the last answer.
        seconds: that it took.

    Raises:
        UsageError: there is a system message, and no chat template for it.
    """

    def __init__(self, server: Server, client: "httpx.Client", profile: Profile, outputs: Outputs) -> None:
        self.server, self._client = server, client
        self._require_template(profile)
        self.profile = profile
        self.transcript = Transcript()
        self.metrics = Metrics()
        self.heard: Callable[[str], None] = lambda _: None
        self.usage, self.seconds = Usage(), 0.0
        self._outputs = outputs
        self._asked = 0
        self._policy: str | None = None
        self._sums = {"answers": 0, "generated tokens": 0, "drafted": 0, "accepted": 0}
        self._all_seconds = 0.0

    @property
    def through_template(self) -> bool:
        return self.profile.prompt.chat is not False

    def _write(self, turn: Turn, on_round: OnRound | None, enough: Callable[[], bool]) -> bool:  # noqa: ARG002
        texts: list[str] = []
        usage, reason, pieces = Usage(), None, 0
        began = perf_counter()
        body = self._body()
        self._asked += 1
        try:
            answer = self.server.stream(self._client, body)
            for chunk in answer:
                if chunk.text:
                    pieces += 1
                    texts.append(chunk.text)
                    self.heard(chunk.text)
                usage, reason = chunk.usage or usage, chunk.finish_reason or reason
                if enough():
                    reason = FinishReason.INTERRUPTED.value
                    answer.close()
                    break
        except KeyboardInterrupt:
            reason = FinishReason.INTERRUPTED.value
        if reason == FinishReason.INTERRUPTED.value and not texts:
            return False
        known = {one.value: one for one in FinishReason}
        turn.answer, turn.finish_reason, turn.completion = "".join(texts), known.get(reason or ""), None
        self.usage, self.seconds = usage, perf_counter() - began
        accepted = usage.accepted or 0
        added = 1, pieces if usage.completion is None else usage.completion, accepted + (usage.rejected or 0), accepted
        self._sums = {name: before + more for (name, before), more in zip(self._sums.items(), added, strict=True)}
        self._all_seconds += self.seconds
        return True

    def _body(self) -> dict[str, Any]:
        plain, sampling = SamplingTable(), self.profile.sampling
        settings = {
            key: value
            for key, value in sampling.model_dump().items()
            if key in ("temperature", "max_new_tokens") or (key not in NOT_ASKED and value != getattr(plain, key))
        }
        if sampling.temperature:
            settings["seed"] = sampling.seed + self._asked
        found = api_settings(settings, chat=self.through_template)
        if self._policy is not None:
            found["specctl"] = {"policy": self._policy}
        if not self.through_template:
            both = zip(self.transcript.texts, [*self.transcript.answers, ""], strict=True)
            said = [text for pair in both for text in pair]
            return {**found, "prompt": "\n".join(said[:-1]) + "\n"}
        system = self.profile.prompt.system
        first = [] if system is None else [{"role": "system", "content": system}]
        return {**found, "messages": [*first, *self.transcript.messages]}

    def use_policy(self, text: str) -> None:
        """Name the policy of the coming answers; raises UsageError where the server is none of specctl's."""
        if self.server.owner != OURS:
            raise UsageError("/policy is for servers of specctl: to others no request can name one")
        PolicyTable(**parse_policy(text, "/policy"))
        self._policy = text

    @property
    def policy(self) -> str:
        return self._policy or "of the server"

    def change(self, text: str) -> None:
        key = text.partition("=")[0].strip().removeprefix("sampling.")
        if key in NOT_ASKED:
            raise UsageError(f"/set {key}: no request to a server can have it")
        super().change(text)

    def figures(self) -> Iterator[tuple[str, str]]:
        tokens, drafted = self._sums["generated tokens"], self._sums["drafted"]
        yield "answers", str(self._sums["answers"])
        yield "generated tokens", str(tokens)
        yield "tokens/s", f"{tokens / self._all_seconds:.1f}" if self._all_seconds else "-"
        if drafted:
            yield "acceptance rate", f"{self._sums['accepted'] / drafted:.1%}"
        yield "seconds in all", f"{self._all_seconds:.2f}"

    def _require_template(self, profile: Profile) -> None:
        if profile.prompt.system is not None and profile.prompt.chat is False:
            raise UsageError("a system message needs a chat template", "plain turns have no place for one")
