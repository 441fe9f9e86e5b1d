"""Errors as clients see them: ``{"error": {message, type, param, code}}``, never longer than 8 kB."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from lmjax.types import AdapterError, EngineDeadError, OrderError, ParameterError, QueueFullError

log = logging.getLogger("lmjax.server")

MAX_MESSAGE = 2000  # characters
MAX_PARAM = 200

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An answer that is an error. ``param``: the request's field at fault; ``code``: a stable short word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = _shorten(message, MAX_MESSAGE)
        self.param = param if param is None else _shorten(param, MAX_PARAM)
        self.code = code or _code(status)
        self.headers = headers or {}

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400; the message starts with the field's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def no_model(name: str) -> ApiError:
    shown = name if len(name) <= 100 else name[:97] + "..."
    return ApiError(404, f"model: there is no model '{shown}' here", param="model", code="model_not_found")


def unavailable(message: str, code: str = "unavailable", retry_after: int = 5) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def to_api_error(exc: BaseException, renames: dict[str, str] | None = None) -> ApiError:
    """Any exception as an answer. ``renames``: SamplingParams' field names -> the request's own."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, ParameterError):
        return _parameter_error(exc, renames or {})
    if isinstance(exc, QueueFullError):
        return ApiError(429, str(exc), code="queue_full", headers={"Retry-After": str(exc.retry_after)})
    if isinstance(exc, AdapterError):
        if exc.unknown:
            return ApiError(404, f"model: {exc}", param="model", code="model_not_found")
        return ApiError(400, str(exc), code="invalid_adapter")
    if isinstance(exc, OrderError):
        return ApiError(500 if exc.internal else 400, str(exc), code="internal_error" if exc.internal else "refused")
    if isinstance(exc, EngineDeadError):
        retry = {} if exc.retry_after is None else {"Retry-After": str(exc.retry_after)}
        return ApiError(503, f"the engine cannot answer: {exc}", code="engine_dead", headers=retry)
    if isinstance(exc, web.HTTPException):
        return _http_error(exc)
    log.error("internal error", exc_info=exc)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _parameter_error(exc: ParameterError, renames: dict[str, str]) -> ApiError:
    name = renames.get(exc.field, exc.field)
    message = str(exc)
    if name != exc.field:
        message = name + message.removeprefix(exc.field)
    too_long = exc.field in ("prompt", "max_tokens") and "context" in message
    return ApiError(400, message, param=name, code="context_length_exceeded" if too_long else "invalid_value")


def _http_error(exc: web.HTTPException) -> ApiError:
    if exc.status == 413:
        return ApiError(413, "the request's body is larger than the server allows", code="body_too_large")
    if exc.status == 405:
        allow = exc.headers.get("Allow", "")
        return ApiError(405, f"this route does not take the method; it takes {allow}", headers={"Allow": allow})
    if exc.status == 404:
        return ApiError(404, "there is no such route", code="unknown_route")
    return ApiError(exc.status, exc.reason)


def _code(status: int) -> str:
    return {
        401: "invalid_api_key",
        404: "not_found",
        405: "method_not_allowed",
        413: "body_too_large",
        415: "unsupported_media_type",
        429: "rate_limited",
        503: "unavailable",
    }.get(status, "internal_error" if status >= 500 else "invalid_request")


def _shorten(text: Any, limit: int) -> str:
    text = str(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
