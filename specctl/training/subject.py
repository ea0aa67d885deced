"""The subject of a training command: collection of its material, here or in replicas, and its output folder."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.errors import UsageError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.observing.progress import SILENT, Advance, Progress, ignored
from specctl.observing.prompt_answers import AnsweredPrompt, answer_each, prompt_writer
from specctl.observing.results import Skipped
from specctl.profile.schema import PolicyTable, Profile, SamplingTable
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.text_engine.dispatch import GivenUp, in_order
from specctl.text_engine.engine import Answer, TextEngine
from specctl.text_engine.here import HereEngine
from specctl.text_engine.job import ReplicaError
from specctl.text_engine.row_count import Batch
from specctl.training.epochs import Learner, Schedule, Training
from specctl.training.material import INDEX, Item, Material

PROMPTS_PER_SHARD = 16  # Prompts per shard: the most work lost when a run is killed
SHARDS_AHEAD = 2  # Shards for each replica that may wait in memory for an earlier one; they hold hidden states


MakeShard = Callable[[Sequence[SuitePrompt], int, Advance], tuple[bytes, dict[str, str]]]
"""Makes a shard's content, and the reasons for skipped ids, from prompts, the first one's index, and a callback after
each prompt.
"""


def collect(
    material: Material[Any],
    prompts: Sequence[SuitePrompt],
    source: MakeShard | TextEngine,
    advance: Advance = ignored,
) -> None:
    """Answer the prompts that a folder has no answers to.

    The data of a prompt depend on its index and the seed only, not on interruptions or on the replica.

    Args:
        material: the folder.
        prompts: all prompts of the suite, including those that are already answered.
        source: answers them here, or an engine of replicas with the writer of `Subject.replica`.
        advance: called after each prompt.

    Raises:
        ReplicaError: no replica survived the prompts of a shard, or none is left.
    """
    starts = range(material.done, len(prompts), PROMPTS_PER_SHARD)
    shards = [(first, list(prompts[first : first + PROMPTS_PER_SHARD])) for first in starts]
    began = perf_counter()
    for count, content, left_out in _made(source, shards, advance):
        now = perf_counter()
        material.add(content, count, left_out, now - began)
        began = now


def _made(
    source: MakeShard | TextEngine, shards: Sequence[tuple[int, list[SuitePrompt]]], advance: Advance
) -> Iterator[tuple[int, bytes, dict[str, str]]]:
    """For each shard, the number of its prompts, its content, and the reasons for skipped ids."""
    if callable(source):
        for first, prompts in shards:
            yield len(prompts), *source(prompts, first, advance)
        return
    tasks = (((first, len(prompts)), {"first": first, "prompts": prompts}) for first, prompts in shards)
    for (first, count), answer in in_order(source, tasks, SHARDS_AHEAD * source.count):
        if isinstance(answer, GivenUp):
            raise ReplicaError(
                f"no replica survived prompts {first + 1} to {first + count}; {answer.why}",
                "what was finished is kept; run them with one process to see why",
            )
        yield count, answer["content"], answer["left_out"]
        for tokens in answer["tokens"]:
            advance(tokens)


STATE = "training.safetensors"  # The checkpoint of an interrupted training; a complete run has none

Models = TypeVar("Models")


@dataclass(frozen=True, slots=True)
class Source(Generic[Item, Models]):
    """The inputs of training: complete material, and the source of model states."""

    material: Material[Item]
    models: Models


class Subject(ABC, Generic[Item, Models]):
    """What a command trains.

    Args:
        profile: names the models. Predictors and hierarchies are left out of it, and a policy that reads a
            predictor is replaced by ``constant``.

    Attributes:
        profile: the changed profile.
    """

    command: str  # its name, for messages
    folder: type[Material[Item]]  # the material's subfolder in the output folder
    ends: Collection[str]  # files written last: any of them marks the folder as complete
    others: Collection[str]  # further files that identify its folder
    scratch: Collection[str] = (STATE,)  # what it keeps while training, removed at the end
    maker: str  # the maker of replicas that collect its material (`specctl.text_engine.job.Job`)

    def __init__(self, profile: Profile) -> None:
        if (draft := profile.draft) is not None:
            policy = PolicyTable(name="constant") if draft.policy.setting.needs_predictor else draft.policy
            draft = draft.model_copy(update={"policy": policy, "head": None, "draft": None})
        self.profile = profile.model_copy(update={"draft": draft})

    def facts(self, suite: Suite) -> dict[str, Any]:
        """Everything that determines the material."""
        profile = self.profile
        tables = {"target": profile.target} | ({} if profile.draft is None else {"draft": profile.draft})
        return {
            "target": profile.target.model,
            "draft": None if profile.draft is None else profile.draft.model,
            "policy": None if profile.draft is None else profile.draft.policy.model_dump(mode="json"),
            "sampling": profile.sampling.model_dump(mode="json"),
            # Independent of their file's path.
            "prompts": {"name": Path(suite.name).name, "sha256": suite.sha256, "count": len(suite.prompts)},
            "prompt": profile.prompt.model_dump(mode="json"),
            **{f"{key}_quantize": table.quantize for key, table in tables.items() if table.quantize is not None},
        }

    def sampling(self, number: int) -> SamplingTable:  # noqa: ARG002 - some treat all prompts alike
        """The settings for the prompt of an index."""
        return self.profile.sampling

    @abstractmethod
    def items(self, pair: Pair, found: AnsweredPrompt) -> Iterable[Item]:
        """The items to store for an answered prompt."""

    def shards(
        self, pair: Pair, batch: Batch = 1, prompts: int = 0, warn: Callable[[str], None] = lambda _: None
    ) -> MakeShard:
        """A source that turns prompts into shards, ``batch`` prompts at once. The draft's policy does not change the
        answers' distribution.

        ``prompts`` is the number of all prompts; ``warn`` receives the reason for a smaller batch.
        """
        prompt_format, draft = PromptFormat.of(pair.tokenizer, self.profile.prompt), self.profile.draft
        settings = [] if draft is None else [draft.policy.setting]

        def answerer(pair: Pair, number: int) -> Answerer:
            # A new one for each prompt: a policy with old state would make an answer depend on where a run was resumed.
            drafter = None if draft is None else build_drafter(pair, draft.policy.setting)
            return Answerer(Session(pair, drafter), prompt_format, self.sampling(number))

        limit = self.profile.sampling.max_new_tokens
        engine = HereEngine.of(
            pair, lambda row: prompt_writer(partial(answerer, row)), batch, prompts, limit, settings, warn
        )

        def shard(some: Sequence[SuitePrompt], first: int, advance: Advance) -> tuple[bytes, dict[str, str]]:
            items: list[Item] = []
            left_out: dict[str, str] = {}
            for found in answer_each(engine, some, first=first, advance=advance):
                if isinstance(found, Skipped):
                    left_out[found.prompt] = found.reason
                else:
                    items += self.items(pair, found)
            return self.folder.content(items), left_out

        return shard

    def replica(self) -> Answer:
        """A replica's writer: it turns a shard's prompts into the content of the shard's file, without writing the
        file.
        """
        shard = self.shards(self.load(SILENT))

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            counts: list[int] = []

            def count(tokens: int = 0) -> None:
                counts.append(tokens)

            content, left_out = shard(question["prompts"], question["first"], count)
            return {"content": content, "left_out": left_out, "tokens": counts}

        return answer

    @property
    def setup(self) -> dict[str, Any]:
        """The arguments of the replicas' `maker` besides the profile."""
        return {}

    @abstractmethod
    def check(self, material: Material[Item]) -> None:
        """Raise UsageError if an earlier run's material is for other models."""

    @abstractmethod
    def models(self, pair: Pair | None, progress: Progress) -> Models:
        """The source of model states for training, loaded unless a pair is given."""

    def load(self, progress: Progress) -> Pair:
        with progress.doing("loading") as say:
            pair = load_pair(
                self.profile, with_predictors=False, measured=False, progress=lambda what: say(f"loading {what}")
            )
        self.require(pair)
        return pair

    def require(self, pair: Pair) -> None:
        """Raise ModelError if what is trained cannot be trained for these models."""

    def is_finished(self, output: Path) -> bool:
        """Whether an earlier run into this folder is complete; if so, its leftovers are removed.

        Raises:
            UsageError: the folder is not empty and has no file that identifies it as the command's.
        """
        held = {path.name.removesuffix(".part") for path in output.iterdir()}
        if held and not held & {self.folder.contents, *self.scratch, *self.others}:
            raise UsageError(f"{output} holds nothing that specctl {self.command} has written", "use another folder")
        if not held & set(self.ends):
            return False
        self.remove(output, *self.scratch)
        return True

    def start_over(self, output: Path) -> None:
        """Remove an earlier run's material and checkpoint from this folder."""
        self.remove(output, *self.ends, *self.others, *self.scratch, f"{self.folder.contents}/{INDEX}")

    @staticmethod
    def remove(output: Path, *names: str) -> None:
        """Remove files and folders with these names, where they exist."""
        for path in (output / name for name in names):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def open(self, path: Path, progress: Progress) -> Source[Item, Models]:
        """Open the material of an earlier run.

        Raises:
            UsageError: it cannot be read, or is not for these models.
        """
        material = self.folder.open(path)
        with progress.doing("reading the models' files"):
            self.check(material)
        return Source(material, self.models(None, progress))

    def collect(
        self,
        output: Path,
        suite: Suite,
        progress: Progress,
        *,
        resume: bool,
        batch: Batch = 1,
        replicas: Callable[[], AbstractContextManager[TextEngine]] | None = None,
    ) -> Source[Item, Models]:
        """The material from these prompts; missing parts are collected first.

        Args:
            output: the folder to write; the material is in a folder inside it.
            suite: the prompts.
            progress: receives the stages.
            resume: continue what an earlier run left in the folder, instead of starting over.
            batch: the number of prompts that are answered at once in this process.
            replicas: starts collecting replicas, which end before models are loaded here; None to collect here.

        Raises:
            UsageError: the folder holds material of other models, prompts or settings.
        """
        path = output / self.folder.contents
        with progress.doing("reading the models' files"):
            facts = self.facts(suite)
        material = self.folder.open(path) if resume and (path / INDEX).exists() else None
        if material is not None:
            material.require_same(facts)
        pair: Pair | None = None
        if material is None or material.done < material.prompts:
            with ExitStack() as stack:
                source: MakeShard | TextEngine
                if replicas is not None:
                    source = stack.enter_context(replicas())
                else:
                    pair = self.load(progress)
                    source = self.shards(pair, batch, len(suite.prompts), progress.say)
                    if note := PromptFormat.of(pair.tokenizer, self.profile.prompt).note(self.profile.prompt):
                        progress.say(f"note: {note}")
                if material is None:
                    self.start_over(output)
                    material = self.folder.create(path, facts, len(suite.prompts))
                with progress.counting("answers", material.prompts, material.done) as advance:
                    collect(material, suite.prompts, source, advance)
            progress.say(
                f"{material.contents}: {material.prompts} prompt{'s'[: material.prompts != 1]} in "
                f"{material.seconds:.1f} s, in {path}"
            )
        return Source(material, self.models(pair, progress))

    def train(
        self, output: Path, learner: Learner, schedule: Schedule, items: Sequence[Item], progress: Progress
    ) -> float:
        """Train to the end, resuming an earlier run; returns the seconds of all runs."""
        training = Training(learner, schedule, len(items), output / STATE)
        with progress.counting("steps", training.steps, training.step) as advance:
            training.run(advance)
        progress.say(f"training: {training.steps} steps in {training.seconds:.1f} s")
        return training.seconds
