"""Every error in OpenAI's shape: which status, type and code it has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from qwenrt.plugins import QwenrtError, RequestError

from ..async_llm import QueueFullError, RequestTimeoutError, StepError, UnavailableError
from .protocol import ErrorDetail, ErrorResponse

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000


class ApiError(RequestError):
    """An error with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; what is our own fault is logged and stays unnamed."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case RequestTimeoutError():
            return ApiError(504, str(error), code="timeout")
        case UnavailableError():
            return ApiError(503, str(error), code="unavailable", retry_after=5)
        case StepError():
            return ApiError(500, str(error), code="step_failed")
        case RequestError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _of_validation(error.errors()[0])
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case QwenrtError():
            return ApiError(500, str(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


def error_body(error: ApiError) -> ErrorResponse:
    """The body of an error's response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    param = None if error.param is None else _printable(error.param)
    return ErrorResponse(error=ErrorDetail(message=_printable(message), type=kind, param=param, code=error.code))


def error_response(error: ApiError) -> Response:
    """The response to a request that failed."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error).model_dump(), error.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make the application answer every exception in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        response = error_response(as_api_error(error))
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        return response

    for kind in (RequestError, QwenrtError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _of_validation(error: Mapping[str, Any]) -> ApiError:
    """The first thing that is wrong with a body."""
    where = ""
    for part in error["loc"][1:]:
        # Beside names and indices, a location has the members of unions, such as `list[str]`.
        if isinstance(part, int) and not isinstance(part, bool):
            where += f"[{part}]"
        elif part.isidentifier():
            where += f".{part}" if where else part
    message = "the body is no JSON object" if error["type"] == "json_invalid" else error["msg"]
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None)


def _printable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot express."""
    return text.encode("utf-8", "backslashreplace").decode()
