"""Short names for models and heads, as tables and figures show them."""

from collections.abc import Sequence


def short_name(model: str) -> str:
    """A model's name without its family or owner."""
    return model.replace(":", "/").rpartition("/")[2]


def distinct_name(path: str, others: Sequence[str]) -> str:
    """The shortest end of a path that no other path ends with; ``others`` may contain the path itself."""
    own = _parts(path)
    for count in range(1, len(own)):
        if all(_parts(other)[-count:] != own[-count:] for other in others if other != path):
            return "/".join(own[-count:])
    return path


def short_names(models: Sequence[str]) -> list[str]:
    """For each of several models the shortest end of its name that no other has."""
    return [distinct_name(model, models) for model in models]


def _parts(path: str) -> list[str]:
    return path.replace(":", "/").strip("/").split("/")
