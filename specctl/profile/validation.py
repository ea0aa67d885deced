"""Validates a merged table: a `Profile`, or a list of every mistake."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from specctl.errors import ProfileError, UsageError
from specctl.policies import LOOKUP_SIGNALS, POLICIES, TRAINED_SIGNALS, Setting
from specctl.policies.registry import policy_table
from specctl.profile.schema import DEFAULT_POLICY, LOOKUP, LOOKUP_POLICY, DraftTable, Profile
from specctl.profile.wording import Key, did_you_mean, dotted, shown


def unoffered(policy: str) -> str:
    """The error about a policy that reads a draft's distribution, for a lookup, with the policies that fit."""
    fitting = [name for name, rule in POLICIES.items() if rule.drafts and not rule.signals_of({}) - LOOKUP_SIGNALS]
    default = Setting.of(LOOKUP_POLICY).label
    return f"{policy} reads signals that a lookup does not have; choose {', '.join(fitting)} or {default}"


def require_offered(setting: Setting) -> None:
    """Raise ProfileError if the policy of a lookup reads a draft's distribution."""
    if setting.signals - LOOKUP_SIGNALS:
        raise ProfileError(unoffered(setting.policy))


def require_models(drafts: Iterable[DraftTable], purpose: str, hint: str) -> None:
    """Raise UsageError if one of the drafts is a lookup; ``purpose`` is what needs a distribution."""
    if any(draft.is_lookup for draft in drafts):
        raise UsageError(f"{purpose} reads a draft's distributions, and a lookup has none", hint)


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
    """A field's type in a table: a list in TOML becomes a hashable tuple."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return Annotated[hint, Field(strict=False)] if get_origin(bare) is tuple else hint


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ...


Mistakes = dict[Key, str]


def validate(table: dict[str, Any], place: Callable[[Key], str], name: str) -> Profile:
    """Check a merged table and fill in every default, including the defaults of its policies.

    Args:
        table: the merged table; the settings of its policies are completed in place.
        place: returns where a key was set, for messages.
        name: the profile's name in messages.

    Raises:
        ProfileError: lists every mistake: where it is, its key and value, and what is allowed.
    """
    mistakes: Mistakes = {}
    for key, draft in _drafts(table):
        mistakes |= _complete_policy(draft, (*key, "policy")) or _unread(draft, key)
        mistakes |= _wrong_batches(draft, (*key, "batch_policies"))
    try:
        profile = Profile.model_validate(table)
    except ValidationError as error:
        mistakes = _mistakes(error, table, (), _unknown_key) | mistakes
    else:
        if not mistakes:
            return profile
    raise ProfileError(_listing(mistakes, place, name))


def check_policy(policy: dict[str, Any], place: str) -> None:
    """Check a policy table: a name and settings. Raises ProfileError that lists every mistake."""
    if mistakes := _complete_policy({"policy": dict(policy)}, ()):
        raise ProfileError(_listing(mistakes, lambda _: place, "policy"))


def _drafts(table: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    key: Key = ("draft",)
    draft = table.get("draft")
    while isinstance(draft, dict):
        yield key, draft
        key, draft = (*key, "draft"), draft.get("draft")


def _complete_policy(draft: dict[str, Any], key: Key) -> Mistakes:
    """Check the policy of a draft table and fill in its settings; the schema checks types of the tables."""
    policy = draft.get("policy", {})
    if policy == {} and draft.get("model") == LOOKUP:
        policy = LOOKUP_POLICY
    if not isinstance(policy, dict) or not isinstance(name := policy.get("name", DEFAULT_POLICY), str):
        return {}
    if name not in POLICIES:
        unknown = f"{shown(name)} is not a policy{did_you_mean(name, POLICIES)}"
        return {(*key, "name"): POLICIES.broken.get(name, unknown)}
    given = {setting: value for setting, value in policy.items() if setting != "name"}
    try:
        settings = settings_model(name).model_validate(given).model_dump()
    except ValidationError as error:
        return _mistakes(error, given, key, lambda unknown: _unknown_setting(name, unknown[-1]))
    if wrong := list(_wrong_arms(settings.get("arms", ()))):
        return {(*key, "arms"): "; ".join(wrong)}
    try:
        POLICIES[name](**settings)
    except ValueError as error:
        return {key: str(error)}
    draft["policy"] = {"name": name, **settings}
    return {}


def _wrong_arms(arms: Iterable[str]) -> Iterator[str]:
    """The mistakes in policies that are named in one word each."""
    for arm in arms:
        try:
            mistakes = _complete_policy({"policy": policy_table(arm)}, ())
        except ValueError as error:
            mistakes = {(): str(error)}
        yield from (f"{shown(arm)}: {dotted(key)}{': ' if key else ''}{what}" for key, what in mistakes.items())


def _wrong_batches(draft: dict[str, Any], key: Key) -> Mistakes:
    """The mistakes in a draft's policies for several texts; the schema checks that they are words."""
    policies = draft.get("batch_policies")
    words = policies.values() if isinstance(policies, dict) else ()
    if wrong := list(_wrong_arms(word for word in words if isinstance(word, str))):
        return {key: "; ".join(wrong)}
    if words and draft.get("draft") is not None:
        return {key: "works with a single draft, and another drafts for this one"}
    if words and (alone := next((name for name in ("tree", "parallel") if draft.get(name)), None)):
        return {key: f"is for several texts at once, and with {alone} they are written one at a time: leave one out"}
    unread = (_unread({**draft, "policy": policy_table(word)}, key[:-1]) for word in words if isinstance(word, str))
    return next((each for each in unread if each), {})


def _unread(draft: dict[str, Any], key: Key) -> Mistakes:
    """The mistakes where a policy needs signals or a head that the draft lacks."""
    policy = draft.get("policy")
    name = policy.get("name") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or not isinstance(name, str) or name not in POLICIES:
        return {}
    settings = {setting: value for setting, value in policy.items() if setting != "name"}
    signals = POLICIES[name].signals_of(settings)
    if draft.get("model") == LOOKUP:
        return {(*key, "policy", "name"): unoffered(name)} if signals - LOOKUP_SIGNALS else {}
    if draft.get("head") is not None or signals.isdisjoint(TRAINED_SIGNALS):
        return {}
    kind = " --kind disco" if "own_accept_prob" in signals else ""
    what = f"is required by the policy {name}: the path or hub id of a head (`specctl train-head{kind}` makes one)"
    return {(*key, "head"): what}


def _mistakes(error: ValidationError, table: dict[str, Any], at: Key, unknown: Callable[[Key], str]) -> Mistakes:
    """One message for each wrong key.

    For a union pydantic reports an error of every alternative. The deepest error comes from the best-fitting
    alternative; the others are dropped.
    """
    messages: dict[Key, list[str]] = {}
    for detail in error.errors(include_url=False):
        key = tuple(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            message = unknown(key)
        elif detail["type"] == "missing":
            message = "is required"
        else:
            key = _known_part(detail, table)
            message = _value_message(detail)
        messages.setdefault((*at, *key), []).append(message)
    return {
        key: _joined(dict.fromkeys(alternatives))
        for key, alternatives in messages.items()
        if not any(other[: len(key)] == key and other != key for other in messages)
    }


def _known_part(detail: ErrorDetails, table: dict[str, Any]) -> Key:
    """The key of an error, without the names that pydantic adds for the alternatives of a union."""
    value: Any = table
    key: Key = ()
    for part in detail["loc"]:
        if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
            value = value[part]
            key = (*key, str(part))
    return key


def _value_message(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if "valid dictionary" in message:
        message = "must be a table"
    elif "valid tuple" in message:
        message = "must be a list"
    elif detail["type"] == "too_short":
        message = f"must have at least {detail['ctx']['min_length']} entries"
    value = detail["input"]
    if detail["type"] == "literal_error" and isinstance(value, str):
        expected = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        message += did_you_mean(value, expected).partition(" (known")[0]
    return f"{shown(value)} {message.replace('a valid integer', 'an integer').replace('a valid ', 'a ')}"


def _joined(messages: dict[str, None]) -> str:
    first, *rest = messages
    return " or ".join([first, *(message.partition("must be ")[2] or message for message in rest)])


def _unknown_key(key: Key) -> str:
    *around, word = key
    model = _model_at(tuple(around))
    known = list(model.model_fields) if model else []
    elsewhere = [dotted(other) for other in _all_keys(Profile) if other[-1] == word]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(elsewhere)}? (known here: {', '.join(known)})"
    return f"unknown key{did_you_mean(word, known)}"


def _unknown_setting(policy: str, word: str) -> str:
    others = [name for name in POLICIES if word in setting_names(name)]
    note = f"; it is a setting of {', '.join(others)}" if others else ""
    return f"unknown setting of {policy}{note}{did_you_mean(word, ['name', *setting_names(policy)])}"


def _table_of(annotation: Any) -> type[BaseModel] | None:
    alternatives = [annotation, *get_args(annotation)]
    return next((a for a in alternatives if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _model_at(key: Key) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Profile
    for part in key:
        model = _table_of(model.model_fields[part].annotation) if model and part in model.model_fields else None
    return model


def _all_keys(model: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        inner = _table_of(field.annotation)
        if inner is None:
            yield (*at, name)
        elif inner is not model:
            yield from _all_keys(inner, (*at, name))


def _listing(mistakes: Mistakes, place: Callable[[Key], str], name: str) -> str:
    lines = [": ".join(filter(None, (place(key), dotted(key), message))) for key, message in mistakes.items()]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{name}: {len(lines)} mistakes", *lines])
