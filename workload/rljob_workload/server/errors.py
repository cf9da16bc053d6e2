"""Refusals, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}


class ServerError(Exception):
    """The server cannot be started; the message says what would do."""


class ApiError(Exception):
    """A request that is not served. `param`: which of its fields is to blame."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }


def bad(message: str, param: str | None = None) -> ApiError:
    """What the request says cannot be done."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param)


def busy(message: str) -> ApiError:
    """Come again in a second."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, headers={"Retry-After": "1"})
