"""A target with its drafts, ready to run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specctl.errors import RecordError, UsageError
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor
from specctl.models.running.slot import Slot
from specctl.models.running.threads import Threads, torch_threads
from specctl.policies import Setting, StoppingPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Pair:
    """Runners of a target and its drafts, over one shared vocabulary."""

    target: Slot  # runner of the target model
    # runner of the draft, then of the model that drafts for it, and so on down; empty if only the target was loaded. In
    # a benchmark, the drafts of several profiles in a row.
    drafts: tuple[Slot, ...]
    tokenizer: Tokenizer  # the target's tokenizer
    eos: frozenset[int]  # ids that end a sequence
    context: int  # the longest sequence that the target can hold, in tokens; a draft may hold fewer (`Slot.room`)
    # the transformers models of the runners, the target's first; draft heads, lookups and registered drafters are none.
    # Loaded without ``torch_weights``, those that onnxruntime runs have shapes and no weights.
    models: "tuple[PreTrainedModel, ...]"
    # for each draft its predictors by name, on the draft's device; the first is the default
    named_predictors: tuple[Mapping[str, TrainedPredictor], ...] = ()
    # for each draft the index of the draft whose states it may read, None for the target; empty where each draft reads
    # those of the model before it
    above: tuple[int | None, ...] = ()
    # with how many threads passes on the CPU run, and why; None for a pair that was put together by hand
    threads: Threads | None = None
    # V, ids below it are known to all models; of a pair that was put together by hand, no bound is known
    vocabulary: int = 1 << 31
    # makes a policy of a setting of one draft; in a batch, one that may decide together with those of others
    policy: Callable[[Setting], StoppingPolicy] = Setting.build
    texts: int = 1  # how many are written at once, this pair's among them
    # rules of the target's generation_config.json about each text's prompt, by the keys of a sampling table, which hold
    # where that has no others
    prompt_rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shared_context(self) -> int:
        """The longest sequence that every model can hold, in tokens."""
        return min(self.context, *(draft.context for draft in self.drafts)) if self.drafts else self.context

    @property
    def thread_count(self) -> int:
        """With how many threads the target's passes on the CPU run."""
        return torch_threads() if self.threads is None else self.threads.number

    @property
    def predictors(self) -> tuple[TrainedPredictor | None, ...]:
        """The first head of each draft; None for a draft without one."""
        return tuple(next(iter(predictors.values()), None) for predictors in self.named_predictors)

    @property
    def verifiers(self) -> tuple[int | None, ...]:
        """`above`, never empty but without drafts."""
        return self.above or in_a_row(len(self.drafts))

    @property
    def predictor(self) -> TrainedPredictor | None:
        """The first head of the first draft; None without a draft or head."""
        return self.predictors[0] if self.named_predictors else None

    @property
    def lower(self) -> "Pair":
        """The pair in which the first draft is the target of the drafts below it."""
        target, *drafts = self.drafts
        return replace(
            self,
            target=target,
            drafts=tuple(drafts),
            context=target.context,
            named_predictors=self.named_predictors[1:],
            above=(),
        )

    def devices(self, draft: int | None) -> frozenset[str]:
        """The devices on which the weights of a draft are, or of the target for None."""
        runner = self.target if draft is None else self.drafts[draft]
        found = {str(runner.device)}
        if draft is None or runner.runs_model:
            place = 0 if draft is None else 1 + sum(above.runs_model for above in self.drafts[:draft])
            # What onnxruntime runs has no weights in torch.
            weights = [weight for model in self.models[place : place + 1] for weight in model.parameters()]
            found |= {str(weight.device) for weight in weights if not weight.is_meta}
        return frozenset(found)

    @property
    def is_eager(self) -> bool:
        """Whether the target and the drafts with a model of their own run eagerly."""
        return all(runner.engine == "eager" for runner in (self.target, *self.drafts) if runner.runs_model)

    def eagerly(self) -> "Pair":
        """The same models with runners of the eager engine, over caches of their own; weights are shared.

        Draft heads, lookups and registered drafters keep their runners. It has to be loaded with ``torch_weights``, and
        of whole models.
        """
        from specctl.models.running.eager import EagerPasses

        models = iter(self.models)

        def eager(runner: Slot) -> Slot:
            return runner.transformed(Slot(EagerPasses(next(models), self.vocabulary))) if runner.runs_model else runner

        return replace(self, target=eager(self.target), drafts=tuple(eager(draft) for draft in self.drafts))

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time in seconds that the runners have spent on compiling or capturing; None if no runner does either."""
        spent = [seconds for runner in (self.target, *self.drafts) if (seconds := runner.preparing_seconds) is not None]
        return sum(spent) if spent else None

    def require_law(self, what: str) -> None:
        """Raise UsageError if the draft writes text, and so has no distribution over the target's tokens.

        Args:
            what: reads it.
        """
        if self.drafts[0].writes_text:
            raise UsageError(
                f"{what} reads a draft's distribution over the target's tokens, and this draft writes text",
                "take a draft with the target's tokenizer, or --set draft.vocabulary=intersection",
            )

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt; raises RecordError as `room_in` does."""
        return room_in(self.context, self.vocabulary, prompt)


def room_in(context: int, vocabulary: int, prompt: Sequence[int]) -> int:
    """How many tokens of a context may follow a prompt.

    Args:
        context: the most tokens of a sequence.
        vocabulary: V, the models know the ids below it. Another id would read outside the embeddings; on CUDA that ends
            the device for all texts.
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
    """For each draft of a hierarchy the index of the draft above it, None for the target."""
    return (None, *range(drafts - 1))[:drafts]
