"""The JSON document that a request sends."""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from specctl.errors import json_fault, too_deep
from specctl.serving.api_errors import ApiError


async def json_body(request: Request, most: int, seconds: float) -> tuple[Any, int]:
    """The JSON of a body and its size in bytes; raises ApiError if it is none, too large or too slow."""
    # Browsers let any page send what names no type, or a plain one, without asking this server first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        given = f"is {kind[:100]!r}" if kind else "has no content-type"
        raise ApiError(415, f"the body {given}; send application/json")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None
    try:
        data = json.loads(b"".join(parts), parse_constant=_no_number)
        if too_deep(data):
            raise RecursionError
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({json_fault(error)})", code="invalid_json") from None
    return data, size


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number that JSON can hold")
