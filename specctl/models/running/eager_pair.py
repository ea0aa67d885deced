"""The models of a loaded pair, run eagerly, as other code that calls them runs them."""

from dataclasses import replace

from specctl.models.running.engines import eager_twin
from specctl.models.running.pair import Pair


def is_eager(pair: Pair) -> bool:
    """Whether the target and the drafts with a model of their own run eagerly already."""
    return all(runner.engine == "eager" for runner in (pair.target, *pair.drafts) if runner.runs_model)


def eager_pair(pair: Pair) -> Pair:
    """The same models with runners of the eager engine, over caches of their own; weights are shared.

    Draft heads, lookups and registered drafters keep their runners.

    Args:
        pair: loaded with ``torch_weights``, of whole models.
    """
    models = iter(pair.models)
    target = next(models)
    return replace(
        pair,
        target=eager_twin(pair.target, target, pair.vocabulary),
        drafts=tuple(
            eager_twin(draft, next(models), pair.vocabulary) if draft.runs_model else draft for draft in pair.drafts
        ),
    )
