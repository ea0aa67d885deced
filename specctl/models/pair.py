"""A target with the drafts that write ahead for it, loaded and matched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specctl.errors import RecordError
from specctl.models.engines import EngineSettings, build_runner, fixed_width, preparing_seconds
from specctl.models.loading import LoadedModel, eos_ids, load_model, load_tokenizer, model_tables
from specctl.models.runner import Runner
from specctl.models.vocabulary import check_vocabulary
from specctl.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Pair:
    """Runners over one shared vocabulary.

    Attributes:
        target: the model that decides.
        drafts: the draft, then the model that drafts for it, and so on down; empty when only the target was loaded.
        tokenizer: the target's.
        eos: ids that end a sequence.
        context: the longest sequence that every model of the pair can hold, in tokens.
        models: the transformers models behind the runners, the target's first.
    """

    target: Runner
    drafts: tuple[Runner, ...]
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    context: int
    models: tuple[PreTrainedModel, ...]

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time its runners have spent on compiling or capturing; None where none of them does."""
        spent = [
            seconds for runner in (self.target, *self.drafts) if (seconds := preparing_seconds(runner)) is not None
        ]
        return sum(spent) if spent else None

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt; raises RecordError where none can."""
        room = self.context - len(prompt)
        if room < 1:
            raise RecordError("prompt_too_long", f"the prompt has {len(prompt)} tokens; the models hold {self.context}")
        return room


def load_pair(
    profile: Profile,
    *,
    with_drafts: bool = True,
    progress: Callable[[str], None] = lambda _: None,
    engines: EngineSettings | None = None,
) -> Pair:
    """Load every model of a profile.

    Args:
        profile: names them.
        with_drafts: whether the drafts are wanted too.
        progress: hears what is being loaded.
        engines: how passes are to run; without it, as the profile says.

    Raises:
        ModelError: a model cannot be loaded, does not fit, its tokenizer is not the target's, or it cannot be run as
            asked.
    """
    tables = model_tables(profile) if with_drafts else [("target", profile.target)]
    loaded: dict[str, LoadedModel] = {}
    for role, table in tables:
        progress(table.model)
        loaded[role] = load_model(table, role=role)
    target = loaded.pop("target")
    tokenizer = load_tokenizer(profile.target)
    vocabulary = check_vocabulary(tokenizer, tokenizer, target.vocabulary, target.vocabulary)
    for role, table in tables[:-1]:
        check_vocabulary(tokenizer, load_tokenizer(table, role=role), target.vocabulary, loaded[role].vocabulary)
    models = [target, *reversed(loaded.values())]
    settings = engines or EngineSettings.of(profile)
    runners = [build_runner(model.model, vocabulary, model.name, settings) for model in models]
    if settings.deterministic:
        runners[0] = fixed_width(runners[0], target.model)
    return Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos_ids(target.model, tokenizer),
        context=min(runner.context for runner in runners),
        models=tuple(model.model for model in models),
    )
