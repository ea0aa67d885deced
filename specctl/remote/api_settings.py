"""Settings of the sampling table, in the words of OpenAI's interface."""

from typing import Any

from specctl.errors import UsageError

API_NAMES = {"max_new_tokens": "max_tokens"}
"""Keys of the sampling table that the interface calls otherwise."""


def api_settings(settings: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Keys of the sampling table in the words of OpenAI's interface.

    Raises:
        UsageError: there is no word for one.
    """
    found = {API_NAMES.get(key, key): value for key, value in settings.items() if value is not None}
    for key in ("regex", "grammar"):
        if key in found:
            raise UsageError(f"{key} is not a setting of OpenAI's interface", "leave it out")
    if "json_schema" in found:
        schema = {"name": "answer", "schema": found.pop("json_schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if chat and "logprobs" in found:
        found |= {"top_logprobs": found["logprobs"], "logprobs": True}
    return found
