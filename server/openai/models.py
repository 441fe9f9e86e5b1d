"""``/v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from server.body import json_response
from server.state import STATE, ServerState


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.engine().info
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "lmjax",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.engine()
    return json_response({"object": "list", "data": [_card(state, name) for name in state.model_names]})


async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.engine()
    return json_response(_card(state, state.model_name(request.match_info["id"])))
