"""Routes for operators: ``/health``, ``/ready``, ``/ping``, ``/version``, ``/metrics``."""

from __future__ import annotations

from aiohttp import web

from lmjax import __version__
from server.body import json_response
from server.errors import unavailable
from server.state import STATE


async def health(request: web.Request) -> web.Response:
    """Live: 200 also while the model loads and while the server drains; 503 when the engine is dead."""
    client = request.app[STATE].client
    if client is not None and client.dead:
        raise unavailable(f"the engine is dead: {client.dead}", "engine_dead")
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when every program is compiled and requests are taken, else 503; also while the engine sleeps."""
    if request.app[STATE].engine().sleep_level:
        raise unavailable("the engine sleeps", "sleeping")
    return json_response({"status": "ready"})


async def version(_: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    text = request.app[STATE].metrics.render()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
