import pytest
from transformers import Cache

from specctl.models.passes.cache import cache_argument


class Newest:
    def forward(self, input_ids: object, cache: Cache | None = None, past_key_values: object = None) -> None: ...


class Before:
    def forward(self, input_ids: object, past_key_values: Cache | None = None) -> None: ...


class State:
    def forward(self, input_ids: object, cache_params: Cache | None = None) -> None: ...


class Layer:
    def forward(self, hidden_states: object, layer_past: Cache | None = None) -> None: ...


class Dictionary:
    """As XLM has it, which computes every text anew."""

    def forward(self, input_ids: object, cache: dict[str, object] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Newest, "cache"),
        (Before, "past_key_values"),
        (State, "cache_params"),
        (Layer, "layer_past"),
        (Dictionary, ""),
    ],
)
def test_the_cache_goes_by_the_newest_name_that_a_module_knows(module: type, name: str) -> None:
    assert cache_argument(module) == name
