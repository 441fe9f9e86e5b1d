"""Two processes of one rank, the front end's and the engine's, look after each other over pipes: where one is stopped,
the other would wait for ever, and with it the other hosts."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

PERIOD = 2.0  # seconds
SILENCE = 18.0  # seconds; longer than between ranks, so that what is told of a stopped rank is the same everywhere


class VitalSigns:
    """Writes to the pipe ``out`` every ``PERIOD`` and reads from ``incoming``, from threads.

    ``on_silence`` is called once nothing has come for ``SILENCE`` seconds, ``on_end`` at end of file, or when ``alive``
    says no. None for ``out`` and ``on_silence``: only the end is watched for.
    """

    def __init__(
        self,
        out: int | None,
        incoming: int,
        on_silence: Callable[[], None] | None,
        on_end: Callable[[], None],
        alive: Callable[[], bool] = lambda: True,
    ):
        self._in, self._on_silence, self._on_end, self._alive = incoming, on_silence, on_end, alive
        self._stopped = threading.Event()
        threading.Thread(target=self._read, daemon=True, name="lmjax-signs-in").start()
        if out is not None:
            os.set_blocking(out, False)  # a stopped reader takes nothing
            threading.Thread(target=self._write, args=(out,), daemon=True, name="lmjax-signs-out").start()

    def stop(self) -> None:
        self._stopped.set()

    def _write(self, out: int) -> None:
        # the reader has gone: whoever waits for it knows; or its pipe is full, and it will be found silent
        with contextlib.suppress(OSError):
            while not self._stopped.is_set():
                os.write(out, b".")
                self._stopped.wait(PERIOD)

    def _read(self) -> None:
        heard = time.monotonic()
        while not self._stopped.is_set():
            readable, _, _ = select.select([self._in], [], [], 1.0)
            if self._stopped.is_set():
                return
            if readable and os.read(self._in, 4096):
                heard = time.monotonic()
            elif readable or not self._alive():
                self._on_end()
                return
            elif self._on_silence is not None and time.monotonic() - heard > SILENCE:
                self._on_silence()
                return
