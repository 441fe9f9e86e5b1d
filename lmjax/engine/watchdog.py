"""Ends a process whose step hangs: a device, a collective or a driver that never answers blocks the loop for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GPU_TIMEOUT, CPU_TIMEOUT = 60.0, 600.0  # seconds; a CPU may take minutes for a large model's chunk
HOSTS_TIMEOUT = 25.0  # GPUs of several hosts: where one of them hangs, all have ended after 30 s


def step_timeout(setting: float | None, platform: str, nnodes: int = 1) -> float:
    """``--step-timeout``, or the platform's own. 0: no watchdog."""
    if setting is not None:
        return setting
    if platform != "gpu":
        return CPU_TIMEOUT
    return GPU_TIMEOUT if nnodes == 1 else HOSTS_TIMEOUT


class Watchdog:
    """``on_hang(message)`` is called once, from the watchdog's thread, when a step takes more than ``timeout`` seconds.

    One store before and one after each step is all it costs the loop.
    """

    def __init__(self, timeout: float, on_hang: Callable[[str], None]):
        self._timeout, self._on_hang = timeout, on_hang
        self._since: float | None = None
        self._steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lmjax-watchdog")
        self._thread.start()

    def watched(self, step: Callable[[], bool]) -> Callable[[], bool]:
        """``step``, with the watchdog looking on."""

        def run() -> bool:
            self._steps += 1
            self._since = time.monotonic()
            try:
                return step()
            finally:
                self._since = None

        return run

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._timeout / 4, 1.0)):
            since, steps = self._since, self._steps
            if since is not None and time.monotonic() - since > self._timeout and steps == self._steps:
                self._on_hang(
                    f"step {steps} has not finished for {self._timeout:g} s (--step-timeout): the device, a collective "
                    "or the driver hangs"
                )
                return
