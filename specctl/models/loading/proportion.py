"""How large a draft is beside the model that it drafts for."""

from collections.abc import Iterator, Sequence

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


def large_drafts(networks: Sequence[object], above: Sequence[int | None], roles: Sequence[str]) -> Iterator[str]:
    """What `large_draft` tells of loaded models; what is no model, or a share of one, is left out.

    Args:
        networks: the target's first, then drafts in a row.
        above: as in `Pair`.
        roles: the networks' keys in the profile.
    """
    from specctl.models.loading.model import LoadedModel

    for number, upper in enumerate(above, start=1):
        place = 0 if upper is None else upper + 1
        pair = networks[place], networks[number]
        models = [one for one in pair if isinstance(one, LoadedModel) and one.sharding is None]
        if len(models) == 2:
            upper_count, count = (sum(weight.numel() for weight in one.model.parameters()) for one in models)
            if told := large_draft((roles[place], upper_count), (roles[number], count)):
                yield told
