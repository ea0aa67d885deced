"""Another engine in its own process, with the `generate` method of a `Session`."""

from collections.abc import Callable, Sequence

from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.models.running.rules.ruled import RuledRunner
from specctl.peers.completion import completion_of
from specctl.peers.launch import Launch
from specctl.peers.process import PeerError, PeerProcess
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round

LOADING_SECONDS = 600.0
RUN_SECONDS, TOKEN_SECONDS = 60.0, 2.0
"""How long an answer may take: so much, and so much for each token of the prompt and of the limit."""


class MeasuredPeer:
    """A peer whose models are loaded; its rounds are not visible, but it counts its passes where it can.

    Times are the process's own, from ids to ids; what passes between the processes is in none.

    Args:
        pair: the same models, loaded here; gives the context, the ids that end a text, and the tokenizer.
        launch: how the peer drafts, and its models.
        process: was started by the launch's command.

    Attributes:
        passes: for each completion so far, forward passes of the target and of the draft.
        version: of the engine.

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
        seconds = RUN_SECONDS + TOKEN_SECONDS * (len(prompt) + most)
        found = self._process.ask({"do": "run", "ids": list(prompt), "most": most}, seconds)
        try:
            tokens = [int(token) for token in found["ids"]]
            total, first = float(found["seconds"]), float(found["first_seconds"])
            passes, drafted = int(found["passes"]), int(found["drafted"])
        except (LookupError, TypeError, ValueError) as error:
            raise PeerError(f"{self._label}: its answer lacks something ({error!r})") from error
        end = next((place for place, token in enumerate(tokens) if token in self._pair.eos), None)
        tokens = tokens[: most if end is None else end + 1]
        self.passes.append((passes, drafted))
        return completion_of(self._pair, prompt, settings.seed + seed_offset, tokens, total, first)
