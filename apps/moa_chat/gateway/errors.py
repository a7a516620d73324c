"""Refusals in the form that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from moa_runtime.chat import ContextFullError
from moa_runtime.connect_error import ConnectError
from moa_runtime.errors import MoaError
from moa_runtime.tokenizer import ChatTemplateError

RETRY_SECONDS = 5


class ApiError(MoaError):
    """What a request is refused with.

    Args:
        param: the field of the request that is at fault.
        code: a word that programs can tell the case by.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def verifier_away(text: str) -> ApiError:
    """The verifier cannot be reached, and the device cannot answer without it."""
    return ApiError(503, text, code="verifier_unavailable", headers={"Retry-After": str(RETRY_SECONDS)})


def as_api_error(error: MoaError, asked_in: str | None = None) -> ApiError:
    """What an error of the runtime means for a request, whose question is in this field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), param=asked_in, code="context_length_exceeded")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param=asked_in)
    if isinstance(error, ConnectError) and not error.final:
        return verifier_away(str(error))
    return ApiError(502, str(error), code="verifier_refused")
