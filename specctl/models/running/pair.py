"""A target with its drafts, ready to run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, RecordError, UsageError
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor
from specctl.models.running.slot import Slot
from specctl.models.running.threads import Threads, torch_threads
from specctl.policies import Setting, StoppingPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Pair:
    """The runners of a target and its drafts, with a shared vocabulary."""

    target: Slot  # the target model's runner
    # the runner of the draft, then of the model that drafts for the draft, and so on; empty if only the target was
    # loaded. In a benchmark, the drafts of several profiles one after the other.
    drafts: tuple[Slot, ...]
    tokenizer: Tokenizer  # the target's tokenizer
    eos: frozenset[int]  # ids that end a sequence
    context: int  # the longest sequence that the target can hold, in tokens; a draft may hold less (`Slot.room`)
    # for each runner with `Facts.runs_model`, the target's first, its transformers model, or None where an engine runs
    # a file without it; empty where they are all None. If loaded without ``torch_weights``, models that onnxruntime
    # runs have shapes but no weights.
    models: "tuple[PreTrainedModel | None, ...]"
    # for each draft its predictors by name, on the draft's device; the first one is the default
    named_predictors: tuple[Mapping[str, TrainedPredictor], ...] = ()
    # for each draft the index of the draft that supplies its states, None for the target; empty where each draft reads
    # those of the model before it
    above: tuple[int | None, ...] = ()
    # the number of threads for passes on the CPU, with the reason; None for a pair assembled by hand
    threads: Threads | None = None
    # V: all models know the ids below it; unknown for a pair assembled by hand
    vocabulary: int = 1 << 31
    # builds a policy from one draft's setting; in a batch, this policy may decide jointly with those of other texts
    policy: Callable[[Setting], StoppingPolicy] = Setting.build
    texts: int = 1  # the number of texts in the batch
    # the target's generation_config.json rules that depend on a text's prompt, by sampling table key; used where the
    # table does not set them
    prompt_rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shared_context(self) -> int:
        """The longest sequence that every model can hold, in tokens."""
        return min(self.context, *(draft.context for draft in self.drafts)) if self.drafts else self.context

    @property
    def thread_count(self) -> int:
        """The number of threads of the target's passes on the CPU."""
        return torch_threads() if self.threads is None else self.threads.number

    @property
    def predictors(self) -> tuple[TrainedPredictor | None, ...]:
        """The first head of each draft; None for a draft without heads."""
        return tuple(next(iter(predictors.values()), None) for predictors in self.named_predictors)

    @property
    def verifiers(self) -> tuple[int | None, ...]:
        """`above` with its default filled in."""
        return self.above or in_a_row(len(self.drafts))

    @property
    def predictor(self) -> TrainedPredictor | None:
        """The first head of the first draft; None without a draft or head."""
        return self.predictors[0] if self.named_predictors else None

    @property
    def lower(self) -> "Pair":
        """The pair with the first draft as the target of the drafts below it."""
        target, *drafts = self.drafts
        return replace(
            self,
            target=target,
            drafts=tuple(drafts),
            context=target.context,
            named_predictors=self.named_predictors[1:],
            above=(),
        )

    @property
    def runners(self) -> "list[tuple[Slot, PreTrainedModel | None]]":
        """The target's runner and those of the drafts, each with its transformers model, if it has one."""
        models = iter(self.models)
        return [(runner, next(models, None) if runner.runs_model else None) for runner in (self.target, *self.drafts)]

    def torch_model(self, place: int, what: str) -> "PreTrainedModel":
        """The transformers model of `models` at a place.

        Raises:
            ModelError: it has none. The message says ``what`` needs it.
        """
        if (found := self.models[place] if place < len(self.models) else None) is None:
            raise ModelError(
                f"{what} needs a model that torch runs, and another library runs it from its GGUF file.",
                "Name the folder or repository of the checkpoint that the file was made from.",
            )
        return found

    def devices(self, draft: int | None) -> frozenset[str]:
        """The devices of a draft's weights, or of the target's for None."""
        runner, model = self.runners[0 if draft is None else draft + 1]
        weights = [] if model is None else model.parameters()
        # Models that onnxruntime runs have no weights in torch.
        return frozenset({str(runner.device), *(str(weight.device) for weight in weights if not weight.is_meta)})

    @property
    def is_eager(self) -> bool:
        """Whether all runners with a transformers model run it eagerly."""
        return all(model is None or runner.engine == "eager" for runner, model in self.runners)

    def eagerly(self) -> "Pair":
        """The same models with runners of the eager engine and new caches; weights are shared.

        Runners without a transformers model stay as they are. The pair must be loaded with ``torch_weights``, and its
        models must be whole.
        """
        from specctl.models.running.eager import EagerPasses

        def eager(runner: Slot, model: "PreTrainedModel | None") -> Slot:
            return runner if model is None else runner.transformed(Slot(EagerPasses(model, self.vocabulary)))

        target, *drafts = (eager(*each) for each in self.runners)
        return replace(self, target=target, drafts=tuple(drafts))

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time in seconds that the runners spent on compiling or capturing; None if no runner does that."""
        spent = [seconds for runner in (self.target, *self.drafts) if (seconds := runner.preparing_seconds) is not None]
        return sum(spent) if spent else None

    def require_law(self, what: str) -> None:
        """Raise UsageError if the draft writes text, since it then has no distribution over the target's tokens.

        Args:
            what: the feature that needs the distribution.
        """
        if self.drafts[0].writes_text:
            raise UsageError(
                f"{what} reads a draft's distribution over the target's tokens, and this draft writes text",
                "take a draft with the target's tokenizer, or --set draft.vocabulary=intersection",
            )

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt; raises the RecordErrors of `room_in`."""
        return room_in(self.context, self.vocabulary, prompt)


def room_in(context: int, vocabulary: int, prompt: Sequence[int]) -> int:
    """How many tokens of a context may follow a prompt.

    Args:
        context: the most tokens of a sequence.
        vocabulary: V; the models know the ids below it. Another id would read outside the embeddings, which on CUDA
            makes the device unusable for all texts.
        prompt: ids (T,).

    Raises:
        RecordError: there is no room for a token, or the models do not know an id.
    """
    least, most = (min(prompt), max(prompt)) if prompt else (0, 0)
    if least < 0 or most >= vocabulary:
        what = f"the prompt has the token id {least if least < 0 else most}"
        raise RecordError("unknown_token", f"{what}, and the model's ids are 0 to {vocabulary - 1}")
    if len(prompt) >= context:
        raise RecordError("prompt_too_long", f"the prompt has {len(prompt)} tokens; the target holds {context}")
    return context - len(prompt)


def in_a_row(drafts: int) -> tuple[int | None, ...]:
    """For each draft of a hierarchy the index of the draft above it; None for the first, which is below the target."""
    return (None, *range(drafts - 1))[:drafts]
