"""What the ranks of an engine tell each other. MessagePack, typed; nothing that is received is ever executed."""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, tag="step", array_like=True):
    """Rank 0's calls of a step, in order: (key, shape, little-endian int32 bytes). See ``runtime/ranks.py``."""

    number: int
    calls: list[tuple[int | str, tuple[int, ...], bytes]]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The engine ends as it was asked to."""


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The sender runs. Of a follower: steps that it has taken and steps that it has finished."""

    taken: int = 0
    done: int = 0


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """A rank cannot go on; ``message`` is one line that names it. ``config``: its settings are at fault."""

    message: str
    config: bool = False


Order = Step | Stop  # rank 0 -> others
Word = Beat | Failed  # both ways
