"""Another engine in its own process, with the `generate` method of a `Session`."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.models.running.rules.ruled import RuledRunner
from specctl.peers.completion import completion_of
from specctl.peers.launch import Launch
from specctl.peers.process import PeerError, PeerProcess
from specctl.peers.programs.specctl_peer.serving import Answer
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round

LOADING_SECONDS = 600.0
RUN_SECONDS, TOKEN_SECONDS = 60.0, 2.0
"""How long an answer may take: so much, and so much for each token of the prompt and of the limit."""


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt for a peer: its ids, and how many tokens may follow."""

    ids: list[int]
    most: int
    size: float = 1.0


class MeasuredPeer:
    """A peer whose models are loaded; its rounds are not visible, but it counts its passes where it can.

    Times are the process's own, from ids to ids; what passes between the processes is in none. Several prompts at once
    share the time of their batch, as texts of specctl's batches share passes; to a `Hub` the peer is what they share.

    Args:
        pair: the same models, loaded here; gives the context, the ids that end a text, and the tokenizer.
        launch: how the peer drafts, and its models.
        process: was started by the launch's command.

    Attributes:
        passes: for each completion so far, forward passes of the target and of the draft.
        version: of the engine.
        batches: whether it can `run` several prompts at once.

    Raises:
        UsageError: the pair's target has rules that the peer does not follow.
        PeerError: the process cannot load the models.
    """

    def __init__(self, pair: Pair, launch: Launch, process: PeerProcess) -> None:
        self._pair, self._process = pair, process
        self._label = launch.setting.label
        if isinstance(pair.target, RuledRunner):
            raise UsageError(
                f"{launch.setting.peer} does not follow the rules in the target's generation_config.json",
                "leave the rules out with --set generation_config=false",
            )
        self.passes: list[tuple[int, int]] = []
        self.batches = launch.setting.batches
        self._answered: Callable[[PeerPrompt], Answer | PeerError] = lambda prompt: self.run([prompt])[0]
        self.version = str(process.hello.get("version", "unknown"))
        question = {
            "do": "load",
            "folder": str(launch.folder),
            **launch.setting.values,
            "weights": launch.converted.weights,
            "cache": launch.converted.cache,
            "threads": pair.thread_count,
            "context": pair.context,
            "stop": sorted(pair.eos),
        }
        process.ask(question, LOADING_SECONDS)

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._pair.eos

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,  # noqa: ARG002 - rounds are not visible
    ) -> Completion:
        """Complete one prompt of ids greedily.

        Raises:
            RecordError: the prompt leaves no room in the context.
            PeerError: the process does not answer, or with something else than so many tokens and their times.
        """
        most = min(settings.max_new_tokens, self._pair.room(prompt))
        found = self._answered(PeerPrompt(list(prompt), most))
        if isinstance(found, PeerError):
            raise found
        end = next((place for place, token in enumerate(found.ids) if token in self._pair.eos), None)
        tokens = found.ids[: most if end is None else end + 1]
        self.passes.append((found.passes, found.drafted))
        seed, arrivals = settings.seed + seed_offset, tuple(found.arrivals[: len(tokens)])
        return completion_of(self._pair, prompt, seed, tokens, found.seconds, found.first_seconds, arrivals)

    def run(self, requests: Sequence[PeerPrompt]) -> list[Answer | PeerError]:
        """What follows each prompt, of all at once; each has an equal share of the seconds.

        Prompts that have no room in the context once they are padded to the longest are run one by one.
        """
        batch, most = [one.ids for one in requests], max(one.most for one in requests)
        longest = max(map(len, batch))
        if len(requests) > 1 and longest + most > self._pair.context:
            return [self.run([one])[0] for one in requests]
        seconds = RUN_SECONDS + TOKEN_SECONDS * len(batch) * (longest + most)
        try:
            found = self._process.ask({"do": "run", "batch": batch, "most": most}, seconds)
            return [self._share(one, len(batch)) for _, one in zip(batch, found["batch"], strict=True)]
        except PeerError as error:
            return [error for _ in requests]
        except (LookupError, TypeError, ValueError) as error:
            return [PeerError(f"{self._label}: its answer lacks something ({error!r})") for _ in requests]

    def row(self, answered: Callable[[PeerPrompt], Answer | PeerError]) -> Self:
        """A peer with `passes` of its own that gives its prompts to ``answered``, to be run with others'."""
        one = copy(self)
        one.passes, one._answered = [], answered
        return one

    @staticmethod
    def _share(found: Any, count: int) -> Answer:
        """The answer to one of so many prompts; raises LookupError, TypeError or ValueError for what is none."""
        seconds = float(found["seconds"])
        arrivals = [float(one) for one in found["arrivals"]]
        if count > 1 and not arrivals:
            arrivals = [seconds]  # when all of it was there: its share says less
        times = seconds / count, float(found["first_seconds"])
        return Answer([int(one) for one in found["ids"]], *times, int(found["passes"]), int(found["drafted"]), arrivals)
