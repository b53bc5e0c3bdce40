"""Errors in OpenAI's shape, whatever the endpoint."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from mamba_checkpoint_cache.serving.request import Finish

RETRY_SECONDS = 2


class ApiError(Exception):
    """What the client is told instead of a result. ``param`` names the field that is at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.param = param
        self.code = code


def bad_request(message: str, param: str | None = None) -> ApiError:
    """The client's mistake: 400."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param)


def of_finish(finish: Finish) -> ApiError:
    """Why a request has no result."""
    return ApiError(finish.status, finish.message)


def error_body(error: ApiError) -> dict[str, Any]:
    """The error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def api_error(_request: Request, error: Exception) -> JSONResponse:
    """Handler of :class:`ApiError`, and of what the framework itself refuses (no such path, wrong method)."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
        error = ApiError(error.status_code, error.detail)
    if not isinstance(error, ApiError):
        error = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed to handle this request")
    if error.status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(error_body(error), error.status, headers)
