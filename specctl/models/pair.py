"""A target with the drafts that write ahead for it, loaded and matched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specctl.errors import ModelError, RecordError
from specctl.models.acceptance_head import AcceptanceHead
from specctl.models.checkpoint import locate
from specctl.models.head_checkpoint import locate_head, mismatch
from specctl.models.loading import LoadedModel, eos_ids, load_model, load_tokenizer, model_tables
from specctl.models.runner import EagerRunner, Runner
from specctl.models.vocabulary import check_vocabulary
from specctl.profile.schema import DraftTable, Profile


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
        head: foretells acceptance from the first draft's hidden states, on its device; None where none was loaded.
    """

    target: Runner
    drafts: tuple[Runner, ...]
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    context: int
    models: tuple[PreTrainedModel, ...]
    head: AcceptanceHead | None = None

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
    with_head: bool = True,
    on_foreign_head: Callable[[str], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Pair:
    """Load every model of a profile.

    Args:
        profile: names them.
        with_drafts: whether to load more than the target.
        with_head: whether to load the draft's head, if the profile names one.
        on_foreign_head: hears that the head was trained on another draft's weights; without it, such a head is refused.
        progress: hears what is being loaded.

    Raises:
        ModelError: a model cannot be loaded, does not fit, or its tokenizer is not the target's; or the draft's head
            cannot be loaded or was trained on another draft.
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
    runners = [EagerRunner(model.model, vocabulary) for model in models]
    head = None
    if with_drafts and with_head and profile.draft is not None and profile.draft.head is not None:
        progress(profile.draft.head)
        head = _load_head(profile.draft, profile.draft.head, loaded["draft"], on_foreign_head).to(runners[1].device)
    return Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos_ids(target.model, tokenizer),
        context=min(runner.context for runner in runners),
        models=tuple(model.model for model in models),
        head=head,
    )


def _load_head(
    table: DraftTable, name: str, draft: LoadedModel, on_foreign: Callable[[str], None] | None
) -> AcceptanceHead:
    checkpoint = locate_head(name)
    head = checkpoint.load(draft.config.hidden_size)
    if reason := mismatch(checkpoint, locate(table, "draft")):
        if on_foreign is None:
            raise ModelError(f"{reason}.", "Train one on this draft with `specctl train-head`, or try it with --force.")
        on_foreign(f"{reason}; what it foretells may be far off")
    return head
