"""What the rounds of chains and of trees are tried with."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.decoding.sampling import Sampling

Test = Callable[..., None]


def scripted_rounds(*, ends: int = 2, **more: st.SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Run a test with 150 scripts of draft lengths, prompts and all else that decides about a sequence of rounds.

    Args:
        ends: the most ids that end the sequence.
        more: strategies of further arguments.
    """
    examples = given(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
        limit=st.integers(1, 15),
        sampling=st.sampled_from([Sampling(), Sampling(temperature=1.0), Sampling(0.7, 3, 0.9)]),
        eos=st.frozensets(st.integers(0, 4), max_size=ends),
        prompt=st.lists(st.integers(0, 4), min_size=1, max_size=4),
        seed=st.integers(0, 1000),
        prefilled=st.booleans(),
        **more,
    )
    return lambda test: settings(deadline=None, derandomize=True, max_examples=150)(examples(test))
