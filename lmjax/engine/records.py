"""What crosses between a front end and the engine's loop: msgspec structs, columns as bytes of little-endian arrays.

One ``StepRecord`` a step carries everything that is new, so the cost of the channel is per step and not per token.
"""

from __future__ import annotations

import msgspec

from lmjax.core.output import Finished, PromptRows, Started
from lmjax.protocol import EngineInfo, EngineStats
from lmjax.types import LoraInfo, SamplingParams


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """Choice ``i`` of the request has the handle ``handle + i``. ``prompt``: int32 bytes."""

    handle: int
    prompt: bytes
    params: SamplingParams  # max_tokens resolved
    stop_ids: tuple[int, ...] = ()  # eos (unless ignored) and stop_token_ids, deduplicated
    bad_words_ids: list[list[int]] | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival: float = 0.0  # time.monotonic(): the same clock in every process of a host
    after: int = -1  # one more token to score, after the prompt
    entropy: bool = False
    pooling: str = ""  # see core.request.NewRequest
    split: int = 0
    lora: str | None = None  # name of an adapter


class AbortRequest(msgspec.Struct, tag="abort", array_like=True):
    """Handles of single choices (all of them, to abort a request)."""

    handles: list[int]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    pass


class LoadWeights(msgspec.Struct, tag="load_weights", array_like=True):
    """``path``: a directory or a .gguf file of the model that is served. See ``engine/live.py``."""

    id: int
    path: str
    version: int | str | None = None
    kv_cache: str = "keep"


class Sleep(msgspec.Struct, tag="sleep", array_like=True):
    id: int
    level: int = 1


class WakeUp(msgspec.Struct, tag="wake_up", array_like=True):
    id: int


class LoadLora(msgspec.Struct, tag="load_lora", array_like=True):
    """``path``: a PEFT directory. The name must not be taken."""

    id: int
    name: str
    path: str


class UnloadLora(msgspec.Struct, tag="unload_lora", array_like=True):
    """Requests that came before are still answered with it."""

    id: int
    name: str


Inbound = AddRequest | AbortRequest | Shutdown | LoadWeights | Sleep | WakeUp | LoadLora | UnloadLora


class StepRecord(msgspec.Struct, tag="step", array_like=True):
    """The fields of ``core.output.StepOutput``, in its order, and statistics."""

    handles: bytes = b""  # int64 [n]
    width: int = 1
    rows: bytes = b""  # int32 [n, width], token rows (see core.plan.row_width)
    prompt_rows: list[PromptRows] = []
    started: list[Started] = []
    finished: list[Finished] = []
    stats: EngineStats | None = None
    version: int | str = 0  # of the weights that drew the tokens


class ControlReply(msgspec.Struct, tag="reply", array_like=True):
    """To the order of that id. ``error``: why nothing was changed; ``internal``: the order is not at fault."""

    id: int
    version: int | str
    level: int  # of sleep
    seconds: float
    error: str | None = None
    internal: bool = False
    loras: list[LoraInfo] = []  # all that are loaded now


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """While starting: what is being done, for logs and for /ready."""

    message: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: EngineInfo
    loras: list[LoraInfo] = []


class Following(msgspec.Struct, tag="following", array_like=True):
    """This process, a rank beside the first, is ready."""


class Dead(msgspec.Struct, tag="dead", array_like=True):
    """The engine could not start or its loop failed; ``message`` is one line. ``config``: the settings are at fault;
    ``model``: the model's files are."""

    message: str
    config: bool = False
    model: bool = False


Outbound = StepRecord | ControlReply | Progress | Ready | Following | Dead
