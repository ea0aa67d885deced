"""What messages for the command line say, in the words of a Python program."""

import re

NAMES = {"set": "overrides", "max-new-tokens": "max_new_tokens", "trust-remote-code": "trust_remote_code=True"}


def in_python(text: str) -> str:
    """A message with arguments of `load` in place of flags: ``target=MODEL`` for ``--target MODEL``."""

    def argument(found: re.Match[str]) -> str:
        name = NAMES.get(found["name"], found["name"].replace("-", "_"))
        return f"{name}={found['value']}" if found["value"] and "=" not in name else name

    return re.sub(r"(?:flag )?--(?P<name>[a-z][a-z-]*)(?: (?P<value>[A-Z][A-Z=|]+))?", argument, text)
