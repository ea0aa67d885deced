"""Checking of a policy's settings against the fields of its dataclass."""

import dataclasses
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

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
        field.name: (_from_toml(hints[field.name]), _default(field))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.init and not field.name.startswith("_")
    }
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model(f"{cls.__name__}Settings", __config__=config, **fields)


def _from_toml(hint: Any) -> Any:
    """A field's type as a table has it: TOML knows lists, a setting is a tuple, which can be hashed."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return Annotated[hint, Field(strict=False)] if get_origin(bare) is tuple else hint


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ...
