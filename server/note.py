"""What the handlers leave on a request for the access log and the answer's headers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(slots=True)
class Note:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: tuple[int, int] | None = None  # prompt, completion
    error: str | None = None  # code of an error after a stream's first byte
    gone: bool = False  # the client went first


# aiohttp before 3.14 has no RequestKey and takes plain strings
_KEY: Any = web.RequestKey("note", Note) if hasattr(web, "RequestKey") else "lmjax.note"


def note(request: web.Request) -> Note:
    """The request's note, made at the first call."""
    found = request.get(_KEY)
    if found is None:
        found = request[_KEY] = Note()
    return found
