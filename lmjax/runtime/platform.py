"""JAX and XLA settings, in one place and with their reasons, and what the process runs on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime import gpu_settings

log = logging.getLogger(__name__)

_THREADS_PER_DEVICE = 8


def configure_jax(config: EngineConfig) -> None:
    """Settings that must hold before the first program is built. Safe to call again."""
    if nvidia_card_present() and os.environ.get("JAX_PLATFORMS") != "cpu":
        gpu_settings.apply(config.gpu_memory_utilization, nnodes=config.nnodes)
    elif config.num_devices > 1:
        _set_cpu_devices(config.num_devices // config.nnodes)
        if config.nnodes > 1:
            _let_cpus_wait()
    # weights + pool above 80 % of a card is our normal state; XLA would recompute activations to save memory there
    jax.config.update("jax_compiler_enable_remat_pass", False)


def _set_cpu_devices(count: int) -> None:
    """A CPU is as many devices as asked for, if that is said before its first use and nobody has said otherwise."""
    # A collective holds a thread of XLA:CPU's pool until the other devices' are there, and a program may have several
    # at once: with a thread a device, as is usual, they come to wait for each other for ever. XLA reads this variable.
    os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * count))
    if jax.config.values["jax_num_cpu_devices"] >= count:
        return
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # it was used already
            jax.config.update("jax_num_cpu_devices", count)


def _let_cpus_wait() -> None:
    """XLA ends a process in which one device waits 40 s for another's collective; one that waits for a slow host
    may, and a lost host is found out by the heartbeat."""
    name, flags = "xla_cpu_collective_call_terminate_timeout_seconds", os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}=3600".strip()


def no_context_mesh() -> AbstractContextManager[Any]:
    """Without the mesh that a caller may have set (``jax.set_mesh``): ours are named in every sharding, and what is
    traced under another whose axes are ``Explicit``, or called with arrays of other devices, would be refused."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def own_context() -> Iterator[None]:
    """JAX's settings of this thread as a step needs them, whatever a caller has set around it (15 us)."""
    with no_context_mesh(), jax.transfer_guard("allow"), jax.disable_jit(False):
        yield


def use_compilation_cache(config: EngineConfig) -> Path:
    """Points JAX's persistent cache to a private directory and returns it."""
    path = compilation_cache_dir(config)
    if config.node_rank:  # the hosts may share a file system, and two writers of one entry could spoil it
        path = path / f"rank{config.node_rank}"
    make_private_dir(path)
    if jax.config.values["jax_compilation_cache_dir"] != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        # the cache object is made at its first use and would keep the directory it had then
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
    # every program counts at a start: the sample programs are many, small and quick to compile
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """For programs that are to be serialized: what was loaded from a cache has lost its code. And for a card that
    isn't there: the cache would store what this process can never load, and warn."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is used is decided once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def writing_to_own_cache() -> Iterator[None]:
    """Of several processes JAX lets the first alone write its cache. The others have directories of their own here
    (``use_compilation_cache``), and would compile anew at every start."""
    from jax._src.distributed import global_state

    before, global_state.process_id = global_state.process_id, 0
    try:
        yield
    finally:
        global_state.process_id = before


def compilation_cache_dir(config: EngineConfig) -> Path:
    """``--compilation-cache-dir``, else JAX_COMPILATION_CACHE_DIR, else under LMJAX_CACHE or ~/.cache/lmjax.

    Ours has a folder per kind of host CPU: XLA:CPU programs use its instructions and may not run on another.
    """
    chosen = config.compilation_cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    root = Path(os.environ.get("LMJAX_CACHE") or "~/.cache/lmjax").expanduser()
    return root / "programs" / f"jax-{jax.__version__}-{cpu_id()}"


def cpu_id() -> str:
    """Differs where the host CPUs' instruction sets do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "any"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.blake2b(flags.encode(), digest_size=6).hexdigest()


def make_private_dir(path: Path) -> None:
    """Makes ``path`` with mode 0700: what lies in it is executed.

    A directory that is there already keeps its mode; one that anybody may write to is refused, and one that others
    may write to (a volume of another user, say) is warned about.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = path.stat()
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        raise ConfigError(f"--compilation-cache-dir: cannot use {path}: {error}") from error
    if info.st_mode & stat.S_IWOTH:
        raise ConfigError(f"--compilation-cache-dir: anybody may write to {path}, and its content would be executed")
    if info.st_mode & stat.S_IWGRP or (hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0)):
        log.warning("others may write to the compile cache %s, and its content is executed", path)


def nvidia_card_present() -> bool:
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def describe_platform() -> tuple[str, int]:
    """Platform ("cpu", "gpu") and number of devices; logs them, loudly where an NVIDIA card stays unused."""
    devices = jax.local_devices()
    platform = "gpu" if devices[0].platform in ("gpu", "cuda", "rocm") else devices[0].platform
    log.info("running on %s: %s (jax %s)", platform, devices[0].device_kind, jax.__version__)
    if platform == "cpu" and nvidia_card_present():
        log.warning(
            "*** This machine has an NVIDIA card, but JAX sees only the CPU: lmjax will run on the CPU, many times "
            "slower. Install the CUDA build of JAX (pip install 'lmjax[cuda12]' or 'lmjax[cuda13]') and check that "
            "JAX_PLATFORMS is not set to cpu (it is %r). ***",
            os.environ.get("JAX_PLATFORMS"),
        )
    return platform, jax.device_count()


def give_back_memory() -> None:
    """What was freed goes back to the system: glibc keeps small pieces of it. Cycles may hold arrays."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
