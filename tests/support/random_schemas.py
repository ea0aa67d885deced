"""Random JSON schemas with an end: what fits one is never long."""

from random import Random
from typing import Any

WORDS = ("name", "age", "city", "tags", "price", "ok", "ünï", "a b", 'quo"te', "$ref?")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of objects, arrays, unions, references and leaves, at most four deep."""
    rng = Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": _leaf(rng)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _any(rng: Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if depth == 0 or kind < 0.45:
        return _leaf(rng)
    if kind < 0.65:
        least = rng.randrange(3)
        return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randrange(3)}
    if kind < 0.8:
        return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return _object(rng, depth - 1)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _leaf(rng: Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(["red", "green", 1, 2.5, None, True, "ü"], rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 7, False, "two words"])},
        ]
    )
