"""``/v1/models`` and ``/v1/models/{id}``: the model under each of its names, and its adapters."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from server.body import json_response
from server.state import STATE, ServerState


def _card(state: ServerState, name: str) -> dict[str, Any]:
    client = state.engine()
    lora = state.lora_of(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "lmjax",
        "root": client.info.model if lora is None else client.loras[lora].path,
        "parent": None if lora is None else state.model_names[0],
        "max_model_len": client.info.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    names = (*state.model_names, *state.engine().loras)
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.engine()
    return json_response(_card(state, state.model_name(request.match_info["id"])))
