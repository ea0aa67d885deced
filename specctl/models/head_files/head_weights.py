"""The tensors of a draft head's file, under the names that its network has for them."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from specctl.errors import ModelError

ANEW = "Copy or download it again; if it is whole, it is of a layout that specctl does not know."

NOT_THE_HEADS = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
"""Copies of the verifier's weights that speculators' trainer needs."""


def own_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that are the network's; old files also hold rotary frequencies, which follow from the config."""
    return {
        name: weight
        for name, weight in weights.items()
        if name not in NOT_THE_HEADS and not name.endswith("rotary_emb.inv_freq")
    }


def published_names(head: nn.Module, prefixes: Mapping[str, str]) -> dict[str, str]:
    """What a file calls each of a network's weights.

    Args:
        head: the network.
        prefixes: how names begin in the file, by how they begin in the network; the first that fits counts.
    """

    def published(name: str) -> str:
        own = next((own for own in prefixes if name.startswith(own)), "")
        return prefixes.get(own, "") + name.removeprefix(own)

    return {name: published(name) for name in head.state_dict()}


def published_weights(head: nn.Module, prefixes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """A network's weights by the names that a file has for them; see `published_names`."""
    names = published_names(head, prefixes)
    return {names[own]: weight for own, weight in head.state_dict().items()}


def fill(head: nn.Module, weights: Mapping[str, torch.Tensor], names: Mapping[str, str], subject: str) -> None:
    """Give a head on the meta device its weights, as they are in the file: neither copied nor cast.

    Args:
        head: the network.
        weights: all tensors of the file that the network has to understand.
        names: what the file calls each of the network's weights (`published_names`).
        subject: the draft head, for messages.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of finite numbers.
    """
    wanted = {names[own]: weight for own, weight in head.state_dict().items()}
    _refuse(subject, "lacks", wanted.keys() - weights.keys())
    _refuse(subject, "holds unknown", weights.keys() - wanted.keys())
    for name, weight in wanted.items():
        given = weights[name]
        if given.shape != weight.shape:
            raise ModelError(
                f"{subject}: {name} has shape {tuple(given.shape)}; its config.json asks for {tuple(weight.shape)}."
            )
        if not given.is_floating_point() or not bool(given.isfinite().all()):
            kind = "holds NaN or infinite numbers" if given.is_floating_point() else f"is of dtype {given.dtype}"
            raise ModelError(f"{subject}: {name} {kind}.", ANEW)
    head.load_state_dict({own: weights[names[own]] for own in head.state_dict()}, assign=True)


def _refuse(subject: str, what: str, names: Iterable[str]) -> None:
    if listed := sorted(names):
        shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
        raise ModelError(f"{subject} {what} tensors: {shown}.", ANEW)


def drafted_tokens(
    weights: dict[str, torch.Tensor], draft_vocabulary: int, vocabulary: int, subject: str
) -> torch.Tensor | None:
    """Take ``d2t`` and ``t2d`` out of a file's tensors.

    Args:
        weights: of the file; the two are removed.
        draft_vocabulary: D.
        vocabulary: V.
        subject: the draft head, for messages.

    Returns:
        The verifier's id ``(D,)`` int64 of each draft token; None where the vocabularies are the same.

    Raises:
        ModelError: they are missing, or contradict each other or the sizes.
    """
    offsets, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        if draft_vocabulary != vocabulary:
            raise ModelError(
                f"{subject} lacks d2t, without which its {draft_vocabulary} draft tokens have no ids in the "
                f"vocabulary of {vocabulary}.",
                ANEW,
            )
        return None
    if offsets.shape != (draft_vocabulary,) or offsets.is_floating_point():
        raise ModelError(
            f"{subject}: d2t has shape {tuple(offsets.shape)} and dtype {offsets.dtype}; "
            f"it must hold {draft_vocabulary} whole numbers.",
            ANEW,
        )
    ids = torch.arange(draft_vocabulary) + offsets.long()  # d2t holds offsets, not ids
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise ModelError(
            f"{subject}: d2t does not give rising ids from 0 to {vocabulary - 1} "
            f"(from {int(ids.min())} to {int(ids.max())}).",
            ANEW,
        )
    if known is not None and not (
        known.shape == (vocabulary,) and int(known.bool().sum()) == len(ids) and bool(known[ids].all())
    ):
        raise ModelError(f"{subject}: t2d does not mark the {len(ids)} tokens that d2t names.", ANEW)
    return None if len(ids) == vocabulary else ids
