"""What the handlers of one server share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from lmjax.protocol import EngineClient
from server.errors import ApiError, no_model, unavailable
from server.metrics import ServerMetrics
from server.settings import ServerSettings

R = TypeVar("R")


@dataclass
class ServerState:
    """``client`` is None while the engine loads. ``active``: the tasks of requests that use the engine."""

    settings: ServerSettings
    metrics: ServerMetrics
    client: EngineClient | None = None
    draining: bool = False
    aborting: str | None = None  # why running requests are being ended by the server
    active: set[asyncio.Task[Any]] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="request")
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        if self.settings.served_model_names:
            return self.settings.served_model_names
        return (self.client.info.model,) if self.client else ()

    def engine(self) -> EngineClient:
        """The engine, if a request may use it now; else raises ``ApiError`` 503."""
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        if self.client is not None and self.client.dead:
            raise unavailable(f"the engine is dead: {self.client.dead}", "engine_dead")
        if self.client is None:
            raise unavailable("the model is still loading", "loading")
        if not self.client.ready:
            raise unavailable("no engine is alive; one is being started anew", "engine_dead")
        return self.client

    def admit(self) -> EngineClient:
        """As ``engine``, for a request that generates: one that is turned away is counted."""
        try:
            return self.engine()
        except ApiError as error:
            self.metrics.rejected(error.code)
            raise

    def model_name(self, requested: str | None) -> str:
        """The name to answer with: of the model or of an adapter. Raises ``ApiError`` 404 for others."""
        names = self.model_names
        if requested is None:
            return names[0]
        if requested not in names and not (self.client and requested in self.client.loras):
            raise no_model(requested)
        return requested

    def lora_of(self, model: str) -> str | None:
        """The adapter that a name of ``model_name`` means; None: the model itself."""
        return None if model in self.model_names else model

    async def offload(self, heavy: bool, work: Callable[..., R], *args: Any) -> R:
        """Runs ``work`` at once if it is light, else in a thread, so that other requests go on meanwhile."""
        if not heavy:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)


STATE = web.AppKey("state", ServerState)


def new_id(prefix: str, given: str | None = None) -> str:
    return f"{prefix}-{given or uuid.uuid4().hex}"
