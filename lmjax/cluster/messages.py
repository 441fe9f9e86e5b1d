"""What the ranks of an engine tell each other. MessagePack, typed; nothing that is received is ever executed."""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, tag="step", array_like=True):
    """Rank 0's calls of a step, in order: (key, shape, little-endian int32 bytes). See ``runtime/ranks.py``."""

    number: int
    calls: list[tuple[int | str, tuple[int, ...], bytes]]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The engine ends as it was asked to."""


class Load(msgspec.Struct, tag="load", array_like=True):
    """Read weights beside the steps, and say ``Loaded``. ``path`` None: the files of the start."""

    number: int
    path: str | None


class Swap(msgspec.Struct, tag="swap", array_like=True):
    """The steps after this one run with what was loaded; not ``use``: it is forgotten."""

    use: bool


class Sleep(msgspec.Struct, tag="sleep", array_like=True):
    level: int


class Wake(msgspec.Struct, tag="wake", array_like=True):
    pass


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """A follower has done ``Load``. ``error``: one line; ``files``: equal where the same files were read."""

    number: int
    error: str | None
    files: str


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The sender runs. Of a follower: steps that it has taken and steps that it has finished."""

    taken: int = 0
    done: int = 0


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """A rank cannot go on; ``message`` is one line that names it. ``config``: its settings are at fault."""

    message: str
    config: bool = False


Order = Step | Stop | Load | Swap | Sleep | Wake  # rank 0 -> others
Word = Beat | Failed | Loaded  # both ways
