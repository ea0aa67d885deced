from typing import Any

from specctl.heads.collection import describe
from specctl.profile import resolve
from specctl.prompts.suites import Suite


def facts(*overrides: str) -> dict[str, Any]:
    return describe(resolve("embedded", overrides=overrides).profile, Suite("suite", "0", ()))


def test_examples_of_quantised_models_are_others() -> None:
    """So that collecting is not continued with other weights, while earlier folders of plain models still can be."""
    plain = facts()
    assert not [key for key in plain if "quantize" in key]
    assert facts("target.quantize=int8") == plain | {"target_quantize": "int8"}
    assert facts("draft.quantize=int4") == plain | {"draft_quantize": "int4"}
