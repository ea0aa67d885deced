"""How large a draft is beside the model that it drafts for."""

from collections.abc import Iterator, Sequence

from specctl.models.loading.pair_members import PairMember, reader_of

LARGE_DRAFT = 0.5


def large_draft(verifier: tuple[str, int], draft: tuple[str, int]) -> str | None:
    """What to tell of a draft that is too large to pay; None for one that is not.

    Args:
        verifier: the model that reads what is drafted: its key in the profile, and its number of parameters.
        draft: the same of the draft.
    """
    (upper, larger), (lower, smaller) = verifier, draft
    if smaller <= LARGE_DRAFT * larger:
        return None
    return (
        f"The {lower} model has {smaller / larger:.0%} of the parameters of the {upper} model; drafting pays off when "
        "the draft is many times smaller."
    )


def large_drafts(members: Sequence[PairMember], above: Sequence[int | None]) -> Iterator[str]:
    """The warnings of `large_draft` about a pair; draft heads and models in shards are left out.

    Args:
        members: from the target down, loaded.
        above: as in `Pair`.
    """
    for draft, upper in zip(members[1:], above, strict=True):
        sizes = [
            (one.role, one.model.parameters)
            for one in (reader_of(members, upper), draft)
            if one.model is not None and (one.torch_model is None or one.torch_model.sharding is None)
        ]
        if len(sizes) == 2 and (warning := large_draft(*sizes)):
            yield warning
