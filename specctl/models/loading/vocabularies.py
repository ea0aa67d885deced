"""A draft's tokens: those shared with a target of another tokenizer, and limited vocabularies."""

from collections.abc import Iterable
from pathlib import Path

from specctl.errors import ModelError, ProfileError
from specctl.models.files.token_counts import TokenCounts
from specctl.models.files.tokenizer import CHOOSE, Tokenizer, check_vocabulary, difference
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.running.slot import Slot
from specctl.models.translation import TokenBytes, TokenMap, TranslatedPasses, WrittenPasses
from specctl.profile.schema import DraftTable, ModelTable

OTHERS = "Choose a draft with the target's own tokenizer, or let it copy from the text (prompt:lookup)."
COVERED = 0.75  # A draft drafts shared tokens if they are at least this share of a text, else it writes text


def token_map(
    table: ModelTable,
    target: Tokenizer,
    draft: Tokenizer,
    whole: int,
    draft_rows: int,
    *,
    needs_law: bool = False,
) -> TokenMap | None:
    """A draft's token map to its target, and its way of drafting; None if both have the same tokenizer.

    Args:
        table: the draft's.
        target: the target's tokenizer.
        draft: the draft's.
        whole: V, the pair's vocabulary: the target's ids, perhaps followed by padding.
        draft_rows: width of the draft's logits.
        needs_law: whether a head or a faster draft needs its distribution over the target's tokens.

    Raises:
        ModelError: they differ and must not; or they are the same and the draft has too few rows.
        ProfileError: no token of the draft's is one of the target's, one of them does not reproduce a text, or a draft
            that writes text needs a distribution.
    """
    if (why := difference(target, draft)) is None:
        check_vocabulary(target, draft, whole, draft_rows)
        return None
    assert isinstance(table, DraftTable)
    if table.vocabulary == "shared":
        raise ModelError(why, CHOOSE)
    if table.tokens is not None:
        raise ModelError(
            f"The draft {table.model!r} has another tokenizer than the target, and draft.tokens is about the target's.",
            "Leave draft.tokens out.",
        )
    if needs_law and table.vocabulary == "text":
        raise ProfileError(
            f"The draft {table.model!r} writes text, which is then cut into the target's tokens: no head can predict "
            "which are accepted, and it cannot verify a faster draft.",
            'Set draft.vocabulary = "intersection", or leave the head or the faster draft out.',
        )
    ours, theirs = TokenBytes(target, whole), TokenBytes(draft, draft_rows)
    shared = TokenMap(ours, theirs, whole)
    some = any(index in ours.of for index in shared.vocabulary.ids.tolist())
    by_text = table.vocabulary == "text" or (
        table.vocabulary == "auto" and not needs_law and covered(shared, target) < COVERED
    )
    if not (any(map(ours.encode, theirs.ids)) if by_text else some):
        raise ProfileError(f"The target and the draft {table.model!r} have no token in common.", OTHERS)
    for whose, spelt in (("target", ours), ("draft", theirs)):
        if (lost := spelt.lost) is not None:
            raise ProfileError(
                f"The tokenizers differ, and the {whose}'s does not reproduce a text: its tokens turn {lost!r} into "
                f"{spelt.reading(lost)!r}.",
                OTHERS,
            )
    return TokenMap(ours, theirs, whole, writes_text=True) if by_text else shared


def covered(tokens: TokenMap, target: Tokenizer) -> float:
    """The share of shared tokens among the target's tokens of the shipped prompts."""
    return TokenCounts.shipped(target).covered(tokens.vocabulary.ids.tolist())


def own_text_runner(runner: Slot, tokens: TokenMap) -> Slot:
    """The wrapper through which a draft with another tokenizer takes the target's ids."""
    return Slot((WrittenPasses if tokens.writes_text else TranslatedPasses)(runner, tokens))


def notice_of(role: str, table: ModelTable, tokens: TokenMap) -> str:
    """The notice about a draft with another tokenizer."""
    return f"{role} {table.model} has another tokenizer than the target: it {tokens.summary}"


WRITES_FEW = "it was trained to write {:,} of them"
PARTS = (1, 2, 4, 8, 16)  # ``auto`` chooses among V divided by each of these
DRAFTING = 0.4  # The draft's share of a round's time that ``auto`` assumes
WORTH = 1.5
"""The relative loss of round length per relative loss of acceptance that ``auto`` assumes: for rounds of five tokens,
each accepted with probability 0.7.
"""


def draft_vocabulary(
    table: ModelTable,
    tokenizer: Tokenizer,
    whole: int,
    eos: Iterable[int],
    rows: int | None = None,
    share: float = 0.0,
) -> DraftVocabulary | None:
    """The ids that a draft's table lets it write; None for all of them.

    Args:
        table: the draft's.
        tokenizer: the pair's.
        whole: V, the pair's shared vocabulary.
        eos: end-of-sequence ids, which are always included.
        rows: of its output layer; None if at least V.
        share: the output layer's share of the weights read in a draft step; used by ``auto`` only.

    Raises:
        ModelError: the table asks for more ids than there are, or its counts file does not exist.
    """
    if not isinstance(table, DraftTable) or table.tokens is None:
        return None
    shared = whole if rows is None else min(rows, whole)
    if table.tokens != "auto" and table.tokens > shared:
        raise ModelError(
            f"The draft {table.model!r} cannot write {table.tokens:,} tokens: it shares {shared:,} with its target.",
            f"Set draft.tokens to less than {shared:,}, or leave it out.",
        )
    counts = counts_for(table, tokenizer, whole)
    count = fitting(counts, shared, share) if table.tokens == "auto" else table.tokens
    return None if count == shared else DraftVocabulary(counts.likeliest(count, shared, eos), whole)


def counts_for(table: DraftTable, tokenizer: Tokenizer, whole: int) -> TokenCounts:
    """Token counts from the file that a draft's table names, or of the shipped prompts.

    Raises ModelError if the file has no counts, or counts of other tokens.
    """
    if (named := table.token_counts) is None:
        return TokenCounts.shipped(tokenizer)
    counts = TokenCounts.read(Path(named))
    if (most := max(counts.counts, default=0)) >= whole:
        raise ModelError(
            f"{named} counts ids up to {most:,}, and the pair shares {whole:,}.",
            "It was made for a pair with another tokenizer: name the right file, or leave token_counts out.",
        )
    return counts


def fitting(counts: TokenCounts, whole: int, share: float) -> int:
    """The vocabulary size that ``auto`` chooses: it weighs a smaller output layer against lost acceptance.

    ``counts`` are of the pair's texts, ``whole`` is V, ``share`` as in `draft_vocabulary`.
    """

    def gain(count: int) -> float:
        lost = 1 - counts.expected(counts.likeliest(count, whole), whole)
        return DRAFTING * share * (1 - count / whole) - WORTH * lost

    return max((whole // part for part in PARTS if whole >= part), key=gain)


def trained_on_few(name: str, count: int) -> ModelError:
    """The error for a draft head that was trained with a limited vocabulary and is given another one."""
    return cannot_write_fewer(name, WRITES_FEW.format(count))


def cannot_write_fewer(name: str, why: str) -> ModelError:
    """The error for a draft whose output layer cannot be trimmed."""
    return ModelError(f"The draft {name!r} cannot write fewer tokens: {why}.", "Leave draft.tokens out.")
