"""Which form a draft with a tokenizer of its own takes."""

from collections.abc import Sequence
from dataclasses import replace

from specctl.errors import ModelError
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.files.vocabulary import CHOOSE, check_vocabulary, difference
from specctl.models.loading.profile_models import Level, reader_of
from specctl.models.translation.token_bytes import TokenBytes
from specctl.models.translation.token_map import TokenMap
from specctl.profile.schema import DraftTable, ModelTable

OTHERS = "Choose a draft with the target's own tokenizer, or let it copy from the text (prompt:lookup)."


def token_map(table: ModelTable, target: Tokenizer, draft: Tokenizer, whole: int, draft_rows: int) -> TokenMap | None:
    """What a draft shares with its target; None where their tokenizers are one.

    Args:
        table: the draft's.
        target: the target's tokenizer.
        draft: the draft's.
        whole: V, the pair's vocabulary: the target's ids, perhaps with padding behind them.
        draft_rows: width of the draft's logits.

    Raises:
        ModelError: they differ and have to be one, they share no token, or one does not give back a text; or they are
            one and the draft has too few rows.
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
    ours, theirs = TokenBytes(target, whole), TokenBytes(draft, draft_rows)
    found = TokenMap(ours, theirs, whole)
    if not any(index in ours.of for index in found.vocabulary.ids.tolist()):
        raise ModelError(
            f"The target and the draft {table.model!r} have not a single token in common.",
            OTHERS,
        )
    for whose, spelt in (("target", ours), ("draft", theirs)):
        if (lost := spelt.lost) is not None:
            raise ModelError(
                f"The tokenizers differ, and the {whose}'s does not give back a text: of {lost!r} its tokens make "
                f"{spelt.reading(lost)!r}.",
                OTHERS,
            )
    return found


def notice_of(role: str, table: ModelTable, tokens: TokenMap) -> str:
    """What is told of a draft with another tokenizer before it drafts."""
    return f"{role} {table.model} has another tokenizer than the target: it drafts the {tokens.told}"


def translated(level: Level, target: Tokenizer, draft: Tokenizer, whole: int) -> Level:
    """A draft model's level with what it shares with the target.

    Args:
        level: of a model that is loaded.
        target, draft, whole: as of `token_map`.

    Raises:
        ModelError: as there.
    """
    assert level.model is not None, "a draft head has no tokenizer"
    return replace(level, tokens=token_map(level.table, target, draft, whole, level.model.vocabulary))


def require_own_tokenizers(levels: Sequence[Level], above: Sequence[int | None]) -> None:
    """Raise a ModelError if a draft head is to read the states of a model that reads the text in tokens of its own."""
    for level, upper in zip(levels[1:], above, strict=True):
        if level.network is not None and level.model is None and reader_of(levels, upper).tokens is not None:
            raise ModelError(
                f"The draft head of {level.role} cannot read the states of a model with another tokenizer than the "
                "target's: they are of other tokens.",
                f"Leave [{level.role}] out, or take a model in its place.",
            )
