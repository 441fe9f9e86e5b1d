"""What a program does with the engine beside asking it: its weights, their version, sleep and wake."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from lmjax.engine.live import Version, check_kv_cache, check_level, raise_failure
from lmjax.types import EngineDeadError, ParameterError

if TYPE_CHECKING:
    from lmjax.engine.engine import Engine

log = logging.getLogger("lmjax.engine")

R = TypeVar("R")
_PATIENCE = 0.005  # seconds between looks at what another thread does


class _Call:
    """Work for the thread that makes the steps."""

    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


class LiveControls:
    """Of ``LLM``. Every method may be called from any thread, also while another one generates: what it does happens
    between two steps, in the thread that makes them."""

    _engine: Engine
    _lock: threading.RLock
    _calls: deque[_Call]
    _dead: str | None
    _context: Callable[[], AbstractContextManager[None]]  # for what this thread does on the device
    _put_to_sleep_by: int  # the thread that did it
    _fail: Callable[[Exception], None]

    @property
    def params(self) -> Any:
        """The tree of weights that the next step reads, a ``lmjax.models.params.DecoderParams`` of jax arrays (see
        ``docs/live_weights.md`` for its layout). None while they are freed."""
        return self._engine.executor.params  # type: ignore[attr-defined]

    @property
    def functional(self) -> dict[str, Any]:
        """Keyword arguments with which ``lmjax.functional`` computes as this engine does, to the bit with
        ``deterministic``: ``functional.logprobs(llm.params, tokens, **llm.functional)``. Raises ``ValueError`` on
        several devices, whose layout is their own."""
        found: dict[str, Any] | None = self._engine.executor.functional  # type: ignore[attr-defined]
        if found is None:
            raise ValueError("functional: an engine on several devices has a layout of its own; give it a spec and env")
        return dict(found)

    @property
    def weight_version(self) -> Version:
        """Of ``params``; 0 are those of the start."""
        return self._engine.live.version

    @property
    def is_sleeping(self) -> bool:
        return self._engine.live.level > 0

    def set_params(self, params: Any, version: Version | None = None, kv_cache: str = "keep") -> Version:
        """Runs the steps from now on with ``params``; running requests go on. Returns the version of the new weights.

        ``params``: whatever ``LLM(params=...)`` takes. Arrays with the type, layout and sharding of ``self.params`` are
        used as they are: so they must not be donated or deleted while they are in use. Others are converted on the
        device, which the log tells with the time it took. ``version``: of the new weights, given with each of their
        tokens (``CompletionOutput.weight_versions``); None: the number after the present one. ``kv_cache``: "keep" what
        running requests have computed with the old weights (new requests never find it), or "recompute" it.
        Raises ``ValueError``, with the name of the leaf or the argument; then nothing has changed.
        """
        params = self._adapted(params)
        return self._between_steps(lambda: self._engine.live.set_params(params, version, kv_cache))

    def load_weights(self, path: str, version: Version | None = None, kv_cache: str = "keep") -> Version:
        """As ``set_params``, from a directory or a .gguf file of the same model. Requests that other threads have go on
        while it is read, for which there must be room beside the present weights. Raises ``ValueError``, with the
        file and the tensor at fault."""
        check_kv_cache(kv_cache)
        self._engine.live.next_version(version)
        loading = self._load(str(path))
        return self._between_steps(lambda: self._engine.live.set_params(loading, version, kv_cache))

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pool (level 1), or the weights and the host tier, too (level 2). Requests of other threads wait
        until ``wake_up`` and are computed again then; new ones are refused meanwhile. Arrays that somebody else holds,
        such as ``params`` of before, are not freed."""
        check_level(level)
        self._between_steps(lambda: self._engine.live.sleep(level))
        self._put_to_sleep_by = threading.get_ident()

    def wake_up(self, params: Any = None, version: Version | None = None) -> None:
        """Takes the memory again; nothing is compiled. ``params``, ``version``: as for ``set_params``. After level 2
        without them the weights are read again from the files that they came from, as the version that they were."""
        live, executor = self._engine.live, self._engine.executor
        if params is None and version is not None:
            raise ParameterError("version", "is given without params, whose it would be")
        if params is not None:
            params = self._adapted(params)
        elif live.level == 2 and not executor.has_params:
            loading = self._load(None)
            self._between_steps(lambda: executor.set_params(loading))
        self._between_steps(lambda: live.wake(params, version))

    # --- inside -----------------------------------------------------------------------------------------------

    def _adapted(self, tree: Any) -> Any:
        executor: Any = self._engine.executor
        with self._context():
            found = executor.adapt(tree)
            executor.check_params(found.params)
        if found.converted:
            log.info(
                "weights: %d arrays converted in %.3f s, %d as they are", found.converted, found.seconds, found.kept
            )
        return found.params

    def _load(self, path: str | None) -> Any:
        loading = self._between_steps(lambda: self._engine.executor.start_loading(path))
        while not self._between_steps(loading.done):
            time.sleep(_PATIENCE)
        raise_failure(loading)
        return loading

    def _between_steps(self, work: Callable[[], R]) -> R:
        """A lock alone would not do: the thread that steps takes it again before another one gets it."""
        call = _Call(work)
        self._calls.append(call)
        while not call.done.is_set():
            with interrupts_deferred():
                if self._lock.acquire(timeout=_PATIENCE):
                    try:
                        self._run_calls()
                    finally:
                        self._lock.release()
        if call.error is not None:
            raise call.error
        return call.result

    def _run_calls(self) -> None:
        """With the lock held."""
        while self._calls:
            call = self._calls.popleft()
            try:
                if self._dead is not None:
                    raise EngineDeadError(self._dead)
                with self._context():
                    call.result = call.work()
            except (ValueError, OSError, EngineDeadError) as error:  # the caller's fault: nothing has changed
                call.error = error
            except Exception as error:
                self._fail(error)
                call.error = error
            finally:
                call.done.set()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C in the block takes effect at its end. Only the main thread gets signals, so only there it matters."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught and callable(previous):
        previous(*caught[0])
