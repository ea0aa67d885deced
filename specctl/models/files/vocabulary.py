"""Checking that two models have the same vocabulary, and its size."""

from specctl.errors import ModelError
from specctl.models.files.tokenizer import PROBES, Tokenizer

CHOOSE = 'Choose a draft from the target\'s own family, or set draft.vocabulary = "auto".'


def check_vocabulary(
    target_tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
    target_rows: int,
    draft_rows: int,
) -> int:
    """The number of ids that both models share: both models' logits are cut to ``[..., :size]``.

    Models of one family often pad their logits to different widths; ids that the tokenizer does not know are cut off.
    Every known id that the target can emit needs a row in the draft's logits too, else the cut would change the
    target's output.

    Args:
        target_tokenizer: the target's tokenizer.
        draft_tokenizer: the draft's tokenizer.
        target_rows: width of the target's logits.
        draft_rows: width of the draft's logits.

    Raises:
        ModelError: the tokenizers differ (the message shows the first difference), or the draft has too few rows.
    """
    if told := difference(target_tokenizer, draft_tokenizer):
        raise ModelError(told, CHOOSE)
    size = known_ids(target_tokenizer, target_rows)
    if size > draft_rows:
        raise ModelError(
            f"The draft has {draft_rows} output rows, but the target can emit {size} tokens of the shared tokenizer.",
            "Choose a draft whose embeddings cover the whole vocabulary, or resize and retrain it.",
        )
    return size


def known_ids(tokenizer: Tokenizer, rows: int) -> int:
    """How many ids of a model belong to its tokenizer, as far as it has a row for them; the others are padding."""
    return min(max(tokenizer.get_vocab().values()) + 1, rows)


def difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """In what two tokenizers differ, as a sentence; None if they are one."""
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if target_ids != draft_ids:
        return f"The tokenizers differ: {_first_difference(target_ids, draft_ids)}."
    return _other_encoding(target, draft)


def _first_difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """The tokens of both vocabularies at the lowest id at which they differ."""
    target_tokens, draft_tokens = ({index: token for token, index in ids.items()} for ids in (target, draft))
    differing = [
        index
        for index in target_tokens.keys() | draft_tokens.keys()
        if target_tokens.get(index) != draft_tokens.get(index)
    ]
    if not differing:
        token = min(target.keys() ^ draft.keys())
        return f"only one of them has the token {token!r}"
    index = min(differing)
    ours, theirs = (repr(tokens[index]) if index in tokens else "nothing" for tokens in (target_tokens, draft_tokens))
    return (
        f"id {index} is {ours} in the target and {theirs} in the draft "
        f"({len(differing)} ids differ; {len(target)} and {len(draft)} tokens)"
    )


def _other_encoding(target: Tokenizer, draft: Tokenizer) -> str | None:
    for probe in PROBES:
        ours, theirs = (tokenizer.encode(probe, add_special_tokens=False) for tokenizer in (target, draft))
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            tails = [tokenizer.decode(ids[at : at + 3]) for tokenizer, ids in ((target, ours), (draft, theirs))]
            return (
                f"The tokenizers split text differently: in {probe!r} the target continues with {tails[0]!r} where "
                f"the draft continues with {tails[1]!r}."
            )
    return None
