"""Around every handler: request ids, errors as JSON, the access log, API keys, CORS."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from server.errors import ApiError, to_api_error
from server.note import note
from server.params import is_label
from server.settings import ServerSettings

access_log = logging.getLogger("lmjax.access")

OPEN_PATHS = ("/health", "/ready", "/ping")
ADMIN_PATHS = (
    *("/v1/weights", "/sleep", "/wake_up", "/is_sleeping"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
CLIENT_CLOSED = 499  # for the log only: the client went away first


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost layer: whatever happens inside becomes an answer and a line in the access log."""
    given = request.headers.get("X-Request-Id", "")
    if is_label(given):
        note(request).id = given
    start, status = time.monotonic(), CLIENT_CLOSED
    try:
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            raise
        except ConnectionError as exc:
            note(request).gone = True
            response = ApiError(400, f"the connection broke: {exc}").response()
        except Exception as exc:
            response = to_api_error(exc).response()
        status = CLIENT_CLOSED if note(request).gone else response.status
        return response
    finally:
        _log(request, status, time.monotonic() - start)


def _log(request: web.Request, status: int, seconds: float) -> None:
    level = logging.DEBUG if request.path in (*OPEN_PATHS, "/metrics") else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    about = note(request)
    line = {
        "time": round(time.time(), 3),
        "method": request.method,
        "path": request.path[:200],
        "status": status,
        "ms": round(seconds * 1000, 1),
        "request_id": about.id,
    }
    if about.tokens is not None:
        line["prompt_tokens"], line["completion_tokens"] = about.tokens
    if about.error is not None:
        line["error"] = about.error
    access_log.log(level, "%s", msgspec.json.encode(line).decode())


def make_guard(settings: ServerSettings) -> Middleware:
    """Every route needs a key, whatever its path looks like, but for the few open ones."""
    keys = [key.encode() for key in settings.api_keys]
    admin_keys = [key.encode() for key in settings.admin_api_keys]
    open_paths = {prefix + path for prefix in {"", settings.root_path} for path in OPEN_PATHS}
    admin_paths = {prefix + path for prefix in {"", settings.root_path} for path in ADMIN_PATHS}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_preflight(request) and allowed_origin(request, settings):
            return web.Response(status=204, headers=_preflight_headers(request))
        # who has the admin key needs no other; whatever this looks at, these routes' handlers look again
        wanted = admin_keys if admin_keys and request.path in admin_paths else keys
        if wanted and request.path not in open_paths and not has_key(request, wanted):
            raise needs_key("API" if wanted is keys else "admin")
        return await handler(request)

    return guard


def needs_key(kind: str) -> ApiError:
    return ApiError(
        401,
        f"a valid {kind} key is needed: 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        headers={"WWW-Authenticate": "Bearer"},
    )


def has_key(request: web.Request, keys: list[bytes]) -> bool:
    """Each given header must be the only one of its name. Comparing takes the same time for every key."""
    given: list[str] = []
    authorization = request.headers.getall("Authorization", [])
    api_key = request.headers.getall("x-api-key", [])
    if len(authorization) > 1 or len(api_key) > 1:
        return False
    if authorization:
        scheme, _, value = authorization[0].partition(" ")
        if scheme.lower() == "bearer":
            given.append(value.strip())
    given += api_key
    # headers that are not UTF-8 come with surrogates, which only "surrogateescape" can encode
    values = [value.encode("utf-8", "surrogateescape") for value in given]
    matches = [hmac.compare_digest(value, key) for value in values for key in keys]
    return any(matches)


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def allowed_origin(request: web.Request, settings: ServerSettings) -> str | None:
    origin = request.headers.get("Origin")
    if origin is not None and ("*" in settings.allowed_origins or origin in settings.allowed_origins):
        return origin
    return None


def _preflight_headers(request: web.Request) -> dict[str, str]:
    asked = request.headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": asked if asked.isascii() and asked.isprintable() else "",
        "Access-Control-Max-Age": "600",
    }


def make_headers(settings: ServerSettings) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal that puts the headers on which every answer has, also streams."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "lmjax"
        response.headers["X-Request-Id"] = note(request).id
        if not settings.allowed_origins:
            return
        response.headers["Vary"] = "Origin"
        origin = allowed_origin(request, settings)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id"

    return add_headers
