"""Reading bodies and writing JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from server.errors import ApiError
from server.state import STATE

_encode = msgspec.json.Encoder().encode


async def read_body(request: web.Request) -> bytes:
    """The request's body; raises ``ApiError`` 400, 413 or 415. A body without a content type counts as JSON."""
    kind = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the content type must be application/json, not {kind[:100]}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"the body must not be compressed (Content-Encoding: {encoding[:100]})")
    limit = request.app[STATE].settings.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise ApiError(413, f"the body has {request.content_length} bytes, at most {limit} are allowed")
    try:
        return await request.read()
    except web.RequestPayloadError as exc:
        raise ApiError(400, f"the body does not follow HTTP: {exc}", code="invalid_body") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the body is too large, at most {limit} bytes are allowed") from None


def json_response(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
