"""Errors as OpenAI's clients read them."""

from typing import Any

from specctl.errors import ProfileError, RecordError, SpecctlError, UsageError
from specctl.serving.text_thread import BusyError, ClosedError

RETRY_SECONDS = 1
"""What a client that comes when too many wait is told to wait."""
_OURS = frozenset({"failed_pass", "out_of_memory", "not_a_number", "worker_died"})
"""Kinds of a `RecordError` that are no mistake of the request."""
_NO_TEXT = frozenset({"grammar_failed", "unfit_text"})
"""Those of a text that was begun and cannot keep to its grammar. After a 500 clients would ask again by themselves."""


class ApiError(Exception):
    """An answer that is no text.

    Args:
        status: of HTTP.
        message: what is wrong, and how to mend it.
        param: the parameter that is wrong; None where it is none.
        code: a stable identifier for programs, if there is one.
        kind: OpenAI's ``type``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind

    @property
    def body(self) -> dict[str, Any]:
        """The document that tells it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def told(error: Exception) -> ApiError:
    """What a client hears of an error in writing its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(429, f"{error.message}; try again later", code="too_many_requests", kind="rate_limit_error")
    if isinstance(error, ClosedError):
        return ApiError(503, error.message, code="unavailable", kind="server_error")
    if isinstance(error, RecordError):
        if error.kind in _OURS:
            status = 503 if error.kind in ("out_of_memory", "worker_died") else 500
            return ApiError(status, error.message, code=error.kind, kind="server_error")
        if error.kind in ("invalid_grammar", "no_grammars"):
            return ApiError(400, error.message, "response_format", error.kind)
        if error.kind in _NO_TEXT:
            return ApiError(422, error.message, "response_format", error.kind)
        code = "context_length_exceeded" if error.kind == "prompt_too_long" else error.kind
        return ApiError(400, error.message, "prompt", code)
    if isinstance(error, ProfileError | UsageError):
        return ApiError(400, error.told, "specctl.policy", "invalid_policy")
    message = error.told if isinstance(error, SpecctlError) else f"{type(error).__name__} while the text was written"
    return ApiError(500, message, kind="server_error")


def too_late() -> ApiError:
    """What a client hears whose text has not ended in time."""
    return ApiError(504, "the text took too long", code="timeout", kind="server_error")
