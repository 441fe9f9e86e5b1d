"""JAX's CUDA plugin as a mere compiler, on a machine without a card.

Installed beside jax, the plugin would be tried (and fail, loudly) at every start on such a machine. So it lies in a
folder of its own, which only a process that compiles for cards puts on its path.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from lmjax.config import ConfigError

ENV = "LMJAX_CUDA_PLUGIN"
_NAMES = ("xla_cuda13", "xla_cuda12")


def plugin_dir() -> Path:
    """LMJAX_CUDA_PLUGIN, else ``cuda-plugin/jax-<version>`` under LMJAX_CACHE or ~/.cache/lmjax."""
    if chosen := os.environ.get(ENV):
        return Path(chosen).expanduser()
    root = Path(os.environ.get("LMJAX_CACHE") or "~/.cache/lmjax").expanduser()
    return root / "cuda-plugin" / f"jax-{jax.__version__}"


def install_command() -> str:
    return (
        f"{Path(sys.executable).name} -m pip install --no-deps --target {plugin_dir()} "
        f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}"
    )


def cuda_topology(target_config: str, shape: str) -> Any:
    """XLA's description of cards that need not be there. shape: "slices x hosts x cards", as in ``1x1x8``.

    The plugin is looked for among the installed packages (a machine with a card has it there), then in
    ``plugin_dir()``. Raises ``ConfigError`` that says how to install it.
    """
    from jax.experimental import topologies

    def describe() -> Any:
        return topologies.get_topology_desc("", "cuda", target_config=target_config, topology=shape)

    with _no_driver_needed():
        try:
            return describe()
        except NotImplementedError:  # no plugin is registered
            _register_plugin()
            return describe()


@contextlib.contextmanager
def _no_driver_needed() -> Iterator[None]:
    """The plugin's start ends in cuInit otherwise."""
    # its compiler takes stack traces that nobody sees; an installed llvm-symbolizer makes that 25 s a program
    os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _register_plugin() -> None:
    folder = plugin_dir()
    if (folder / "jax_plugins").is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
        # jax looks for it when Mosaic is first imported, which may have been before
        for library in folder.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"):
            os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))
        for name in _NAMES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"jax_plugins.{name}").initialize()
                return
    raise ConfigError(
        "--device: compiling for a card needs JAX's CUDA plugin (but no card and no driver); "
        f"to install it: {install_command()}"
    )
