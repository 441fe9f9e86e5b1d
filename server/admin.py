"""Routes for who runs the server: ``/v1/weights``, ``/sleep``, ``/wake_up``, ``/is_sleeping`` (and those of
``adapters.py``). Off without ``--admin-api-key``."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from server.body import json_response, read_body
from server.errors import ApiError, bad_request
from server.fields import WEIGHTS
from server.middleware import has_key, needs_key
from server.schema import WeightsRequest, decode
from server.state import STATE

log = logging.getLogger("lmjax.server")

_TAGS = "weights and KV pool wake together; there are no tags"


def for_operators(handler: Handler) -> Handler:
    """Looks at the key itself, however the path was written that led here."""

    async def checked(request: web.Request) -> web.StreamResponse:
        keys = request.app[STATE].settings.admin_api_keys
        if not keys:
            raise ApiError(404, "this route is off: the server was started without --admin-api-key", code="admin_off")
        if not has_key(request, [key.encode() for key in keys]):
            raise needs_key("admin")
        return await handler(request)

    return checked


@for_operators
async def get_weights(request: web.Request) -> web.Response:
    check_query(request.query, set())
    return json_response({"version": request.app[STATE].engine().weight_version})


@for_operators
async def load_weights(request: web.Request) -> web.Response:
    """Answers when the next step runs with them. A client that goes meanwhile does not stop it."""
    client = request.app[STATE].engine()
    check_query(request.query, set())
    asked = decode(await read_body(request), WEIGHTS, WeightsRequest)
    if not asked.path:
        raise bad_request("path", "is missing; it is a directory or a .gguf file that the server can read")
    began = time.monotonic()
    await client.load_weights(asked.path, asked.version, asked.kv_cache)
    seconds = round(time.monotonic() - began, 3)
    log.info("weights of %s, version %s, loaded in %.1f s", asked.path, client.weight_version, seconds)
    return json_response({"version": client.weight_version, "seconds": seconds})


@for_operators
async def sleep(request: web.Request) -> web.Response:
    client = request.app[STATE].engine()
    given = (await _query(request, {"level"})).get("level", "1")
    if given not in ("1", "2"):
        raise bad_request("level", f"got {given[:20]!r}, must be 1 (frees the KV pool) or 2 (the weights, too)")
    await client.sleep(int(given))
    return json_response({"is_sleeping": True})


@for_operators
async def wake_up(request: web.Request) -> web.Response:
    client = request.app[STATE].engine()
    await _query(request, set())
    await client.wake_up()
    return json_response({"is_sleeping": False})


@for_operators
async def is_sleeping(request: web.Request) -> web.Response:
    check_query(request.query, set())
    return json_response({"is_sleeping": request.app[STATE].engine().sleep_level > 0})


async def _query(request: web.Request, known: set[str]) -> Mapping[str, str]:
    """Of a route that takes no body, whose content would otherwise be ignored."""
    if (await request.read()).strip() not in (b"", b"{}"):
        instead = f"parameters of the query: {', '.join(known)}" if known else "nothing"
        raise bad_request("body", f"has content, but this route takes {instead}")
    check_query(request.query, known)
    return request.query


def check_query(query: Mapping[str, str], known: set[str]) -> None:
    for name in query:
        if name not in known:
            why = _TAGS if name == "tags" else "unknown parameter"
            raise bad_request(name[:100], why, code="unsupported" if name == "tags" else "unknown_field")


ROUTES = (
    ("GET", "/v1/weights", get_weights),
    ("POST", "/v1/weights", load_weights),
    ("POST", "/sleep", sleep),
    ("POST", "/wake_up", wake_up),
    ("GET", "/is_sleeping", is_sleeping),
)
