"""Which form a draft with a tokenizer of its own takes."""

from collections.abc import Sequence
from dataclasses import replace

from specctl.errors import ModelError, ProfileError
from specctl.models.files.token_counts import TokenCounts
from specctl.models.files.tokenizer import CHOOSE, Tokenizer, check_vocabulary, difference
from specctl.models.loading.pair_members import PairMember, reader_of
from specctl.models.running.slot import Slot
from specctl.models.translation import OwnTextRunner, TokenBytes, TokenMap, TranslatedRunner, WrittenRunner
from specctl.profile.schema import DraftTable, ModelTable

OTHERS = "Choose a draft with the target's own tokenizer, or let it copy from the text (prompt:lookup)."
COVERED = 0.75
"""The share of a text that shared tokens have to be, for a draft to draft those rather than to write text."""


def token_map(
    table: ModelTable,
    target: Tokenizer,
    draft: Tokenizer,
    whole: int,
    draft_rows: int,
    *,
    needs_law: bool = False,
) -> TokenMap | None:
    """What a draft shares with its target, and how it drafts; None where their tokenizers are one.

    Args:
        table: the draft's.
        target: the target's tokenizer.
        draft: the draft's.
        whole: V, the pair's vocabulary: the target's ids, perhaps with padding behind them.
        draft_rows: width of the draft's logits.
        needs_law: whether a head or a draft below it needs its distribution over the target's tokens.

    Raises:
        ModelError: they differ and have to be one; or they are one and the draft has too few rows.
        ProfileError: nothing of the draft's are tokens of the target's, one of them does not give back a text, or what
            writes text needs a law.
    """
    if (told := difference(target, draft)) is None:
        check_vocabulary(target, draft, whole, draft_rows)
        return None
    assert isinstance(table, DraftTable)
    if table.vocabulary == "shared":
        raise ModelError(told, CHOOSE)
    if table.tokens is not None:
        raise ModelError(
            f"The draft {table.model!r} has another tokenizer than the target, and draft.tokens is about the target's.",
            "Leave draft.tokens out.",
        )
    if needs_law and table.vocabulary == "text":
        raise ProfileError(
            f"The draft {table.model!r} writes text, of which the target's tokens are cut: no head can predict which "
            "are accepted, and it cannot verify a faster draft.",
            'Set draft.vocabulary = "intersection", or leave the head or the faster draft out.',
        )
    ours, theirs = TokenBytes(target, whole), TokenBytes(draft, draft_rows)
    shared = TokenMap(ours, theirs, whole)
    some = any(index in ours.of for index in shared.vocabulary.ids.tolist())
    by_text = table.vocabulary == "text" or (
        table.vocabulary == "auto" and not needs_law and covered(shared, target) < COVERED
    )
    if not (any(map(ours.encode, theirs.ids)) if by_text else some):
        raise ProfileError(f"The target and the draft {table.model!r} have not a single token in common.", OTHERS)
    for whose, spelt in (("target", ours), ("draft", theirs)):
        if (lost := spelt.lost) is not None:
            raise ProfileError(
                f"The tokenizers differ, and the {whose}'s does not give back a text: of {lost!r} its tokens make "
                f"{spelt.reading(lost)!r}.",
                OTHERS,
            )
    return TokenMap(ours, theirs, whole, writes_text=True) if by_text else shared


def covered(tokens: TokenMap, target: Tokenizer) -> float:
    """The share of shared tokens among the target's of the prompts that come with the package."""
    return TokenCounts.shipped(target).covered(tokens.vocabulary.ids.tolist())


def own_text_runner(runner: Slot, tokens: TokenMap) -> OwnTextRunner:
    """A runner of the target's ids around a draft with another tokenizer."""
    return (WrittenRunner if tokens.writes_text else TranslatedRunner)(runner, tokens)


def notice_of(role: str, table: ModelTable, tokens: TokenMap) -> str:
    """What is told of a draft with another tokenizer before it drafts."""
    return f"{role} {table.model} has another tokenizer than the target: it {tokens.told}"


def translated(draft: PairMember, target: Tokenizer, own: Tokenizer, whole: int, *, verifies: bool) -> PairMember:
    """A draft model with what it shares with the target.

    Args:
        draft: a model that is loaded.
        target, whole: as in `token_map`.
        own: the draft's tokenizer.
        verifies: whether another draft drafts for it.

    Raises:
        ModelError, ProfileError: as there.
    """
    assert draft.model is not None, "a draft head has no tokenizer"
    needs_law = verifies or bool(draft.predictors)
    tokens = token_map(draft.table, target, own, whole, draft.model.vocabulary, needs_law=needs_law)
    return replace(draft, tokens=tokens)


def require_own_tokenizers(members: Sequence[PairMember], above: Sequence[int | None]) -> None:
    """Raise a ModelError if a draft head would read the states of a model with another tokenizer than the target."""
    for draft, upper in zip(members[1:], above, strict=True):
        if draft.head is not None and reader_of(members, upper).tokens is not None:
            raise ModelError(
                f"The draft head of {draft.role} cannot read the states of a model with another tokenizer than the "
                "target's: they are of other tokens.",
                f"Leave [{draft.role}] out, or take a model in its place.",
            )
