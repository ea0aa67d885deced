"""Checking of a policy's settings against the fields of its dataclass."""

import dataclasses
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from specctl.policies import POLICIES


def setting_names(policy: str) -> list[str]:
    """The names of a policy's settings, in the order of its class."""
    return list(settings_model(policy).model_fields)


@cache
def settings_model(policy: str) -> type[BaseModel]:
    """A strict model of the public fields of a policy's dataclass.

    The dataclass itself cannot be used: in strict mode pydantic accepts only its instances, not a table.
    """
    cls = POLICIES[policy]
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], _default(field))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.init and not field.name.startswith("_")
    }
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model(f"{cls.__name__}Settings", __config__=config, **fields)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ...
