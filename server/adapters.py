"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's bodies and answers. For operators, as what is
in ``admin.py``; adapters are read from ``--lora-dir`` alone."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from aiohttp import web

from lmjax.protocol import EngineClient
from lmjax.types import AdapterError
from server.admin import check_query, for_operators
from server.body import read_body
from server.errors import ApiError, bad_request
from server.fields import LOAD_LORA, UNLOAD_LORA
from server.schema import LoadLoraRequest, UnloadLoraRequest, decode
from server.state import STATE, ServerState

log = logging.getLogger("lmjax.server")

# of a PEFT directory; a link among them must not lead out of the allowed folder either
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@for_operators
async def load_lora(request: web.Request) -> web.Response:
    """Answers when requests may name the adapter. A client that goes meanwhile does not stop it."""
    state = request.app[STATE]
    client = _client(state)
    if state.settings.lora_dir is None:
        raise ApiError(404, "this route is off: the server was started without --lora-dir", code="lora_off")
    check_query(request.query, set())
    asked = decode(await read_body(request), LOAD_LORA, LoadLoraRequest)
    name, path = _given("lora_name", asked.lora_name), _given("lora_path", asked.lora_path)
    if name in state.model_names:
        raise bad_request("lora_name", f"got {name[:100]!r}, which is the name of the model itself")
    found = await state.offload(True, inside, path, state.settings.lora_dir)
    began = time.monotonic()
    try:
        await client.load_lora(name, str(found))
    except AdapterError as error:
        raise ApiError(400, str(error), param=f"lora_{error.field}", code="invalid_adapter") from None
    log.info("adapter %s of %s loaded in %.2f s", name, found, time.monotonic() - began)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


@for_operators
async def unload_lora(request: web.Request) -> web.Response:
    """Requests that are there go on with it; new ones cannot name it."""
    state = request.app[STATE]
    client = _client(state)
    check_query(request.query, set())
    name = _given("lora_name", decode(await read_body(request), UNLOAD_LORA, UnloadLoraRequest).lora_name)
    try:
        await client.unload_lora(name)
    except AdapterError as error:
        raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
    log.info("adapter %s unloaded", name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _client(state: ServerState) -> EngineClient:
    client = state.engine()
    if not client.info.max_loras:
        raise ApiError(404, "this route is off: the server was started without --enable-lora", code="lora_off")
    return client


def _given(field: str, value: str | None) -> str:
    if not value:
        raise bad_request(field, "is missing", code="missing_field")
    return value


def inside(given: str, allowed: str) -> Path:
    """The directory that ``given`` (if relative, from ``allowed``) leads to, without links. Raises ``ApiError`` for one
    outside of ``allowed``, whether it is there or not, and for one whose files are links that lead outside."""

    def refused(why: str) -> ApiError:
        return bad_request("lora_path", f"got {given[:500]!r}{why}"[:1000])

    try:
        root = Path(allowed).resolve(strict=True)
        directory = (root / given).resolve()
        if not directory.is_relative_to(root):
            raise refused(", must lie inside the server's --lora-dir")
        if not directory.is_dir():
            raise refused(": there is no such directory in the server's --lora-dir")
        for name in _FILES:
            if not (directory / name).resolve().is_relative_to(root):
                raise refused(f", whose {name} leads out of the server's --lora-dir")
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle, no permission
        raise refused(f": {error}") from None
    return directory


ROUTES = (
    ("POST", "/v1/load_lora_adapter", load_lora),
    ("POST", "/v1/unload_lora_adapter", unload_lora),
)
