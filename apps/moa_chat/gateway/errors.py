"""Errors as OpenAI's clients understand them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from moa_runtime.chat_template import ChatTemplateError
from moa_runtime.errors import ContextFullError, MoaError
from moa_runtime.transport import ConnectError

RETRY_LATER = {"Retry-After": "5"}  # seconds
#: Codes of errors that a request's grammar causes, if it has one; the verifier's is ``protocol``.
_OF_GRAMMARS = ("protocol", "unsupported_grammar", "invalid_grammar", "too_large")
#: A place in a grammar that the gateway wrote.
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")


class ApiError(MoaError):
    """An error as OpenAI's clients understand it: an HTTP status, a code, and the field that is at fault."""

    def __init__(
        self, status: int, text: str, *, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(text, code=code)
        self.status, self.param, self.headers = status, param, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def verifier_away(text: str) -> ApiError:
    """Return the error for a verifier that is away, if the device cannot answer without it."""
    return ApiError(503, text, code="verifier_unavailable", headers=RETRY_LATER)


def as_api_error(error: MoaError, asked_in: str | None = None, constrained_in: str | None = None) -> ApiError:
    """Convert an error of the runtime into one of the API; ``asked_in`` is the field of the question, and
    ``constrained_in`` that of what its answer was to conform to."""
    if isinstance(error, ApiError):
        return error
    if constrained_in is not None and error.code in _OF_GRAMMARS:
        text = str(error) if constrained_in.startswith("guided") else _PLACE.sub("", str(error))
        return ApiError(400, f"{constrained_in}: {text}", param=constrained_in, code="invalid_value")
    if error.code == "unsupported_logprobs":
        return ApiError(400, str(error), param="logprobs", code="unsupported_parameter")
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), param=asked_in, code="context_length_exceeded")
    if error.code == "no_thinking":
        return ApiError(400, str(error), param="chat_template_kwargs.enable_thinking", code="template_refused")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param=asked_in, code="template_refused")
    if isinstance(error, ConnectError) and not error.final:
        return verifier_away(str(error))
    return ApiError(502, str(error), code="verifier_refused")


def unsupported(name: str) -> ApiError:
    """Return the error for a field that is not supported."""
    return ApiError(400, f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")
