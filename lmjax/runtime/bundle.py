"""A directory of executables that a server can start from, with a manifest that says what they are for.

JAX's own cache can't be filled for a card that isn't there: its keys hold the driver's version and the card's clock. A
bundle goes by a manifest of ours (``identity``), and holds one file a program. What it holds is executed, so it must be
a private directory, and is read only while it is one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from lmjax.runtime.compiler import Program
from lmjax.runtime.identity import arguments_digest, digest, identity
from lmjax.runtime.resolve import Resolved

FORMAT = 1
MANIFEST = "manifest.json"


class BundleError(Exception):
    """A bundle, or a program of it, cannot be used; one line that says why."""


@dataclass(frozen=True)
class PoolFacts:
    """What sizing the pool came to. ``program_bytes``: see ``resolve.program_bytes``."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    program_bytes: int


@dataclass
class Bundle:
    """``identity``: what must be equal (see there). ``programs``: {name: {file, sha256, arguments, result}}.

    ``made_with``: what else the programs were made with; another run adds to the bundle only with the same.
    """

    path: Path
    identity: dict[str, str]
    pool: PoolFacts
    made_with: dict[str, str] = field(default_factory=dict)
    programs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: str | Path) -> Bundle:
        """Raises ``BundleError`` where there is none, or others may write to it."""
        folder = Path(path).expanduser()
        check_private(folder)
        manifest = _read_manifest(folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise BundleError(f"{folder}: format {manifest.get('format')!r}, this lmjax reads {FORMAT}")
        try:
            pool = PoolFacts(**manifest["pool"] | {"num_blocks": tuple(manifest["pool"]["num_blocks"])})
            made_with = dict(manifest["made_with"])
            return Bundle(folder, dict(manifest["identity"]), pool, made_with, dict(manifest["programs"]))
        except (KeyError, TypeError) as error:
            raise BundleError(f"{folder / MANIFEST}: not a bundle's manifest ({error!r})") from error

    def difference(self, identity: dict[str, str]) -> str | None:
        """The first field that differs, with both values; None where all are equal."""
        return _difference(self.identity, identity)

    def load(self, program: Program, devices: list[jax.Device]) -> Any:
        """The executable, ready to be called. Raises ``BundleError``; nothing is executed whose digest differs."""
        from jax.experimental import serialize_executable

        entry = self.programs.get(program.name)
        if entry is None:
            raise BundleError("not in the bundle")
        if entry["arguments"] != arguments_digest(program):
            raise BundleError("its arguments differ")
        try:
            blob = _read_private(self._file(entry))
            if hashlib.sha256(blob).hexdigest() != entry["sha256"]:
                raise BundleError("its file is damaged")
            takes = jax.tree.structure((program.arguments, {}))
            gives = jax.tree.structure(_tuples(entry["result"]))
            return serialize_executable.deserialize_and_load(blob, takes, gives, execution_devices=devices)
        except BundleError:
            raise
        except Exception as error:  # a foreign format, a driver that refuses: whatever it is, compiling helps
            raise BundleError((str(error).strip() or type(error).__name__).splitlines()[0]) from error

    def has(self, program: Program) -> bool:
        """Whether a finished executable of this program is there."""
        entry = self.programs.get(program.name)
        if entry is None or entry["arguments"] != arguments_digest(program):
            return False
        path = self._file(entry)
        return path.is_file() and path.stat().st_size == entry["bytes"]

    def _file(self, entry: dict[str, Any]) -> Path:
        return self.path / Path(entry["file"]).name

    def add(self, program: Program, executable: Any) -> None:
        """Serializes an executable that this process has compiled (one loaded from a cache cannot be: it lacks its
        code) and writes it, then the manifest."""
        from jax.experimental import serialize_executable

        blob, _, gives = serialize_executable.serialize(executable)
        name = f"{digest(program.name)}.bin"
        _write(self.path / name, blob)
        self.programs[program.name] = {
            "file": name,
            "bytes": len(blob),
            "sha256": hashlib.sha256(blob).hexdigest(),
            "arguments": arguments_digest(program),
            "result": jax.tree.unflatten(gives, range(gives.num_leaves)),
        }
        self.write_manifest()

    def write_manifest(self) -> None:
        manifest = {
            "format": FORMAT,
            "identity": self.identity,
            "pool": {
                "num_blocks": self.pool.num_blocks,
                "max_model_len": self.pool.max_model_len,
                "program_bytes": self.pool.program_bytes,
            },
            "made_with": self.made_with,
            "programs": self.programs,
        }
        _write(self.path / MANIFEST, json.dumps(manifest, indent=1).encode())


def _difference(ours: dict[str, str], here: dict[str, str]) -> str | None:
    for name in dict.fromkeys((*ours, *here)):
        if ours.get(name) != here.get(name):
            return f"{name}: {here.get(name) or 'none'} here, {ours.get(name) or 'none'} in the bundle"
    return None


def open_for_writing(
    path: str | Path, identity: dict[str, str], pool: PoolFacts, made_with: dict[str, str]
) -> tuple[Bundle, str | None]:
    """The bundle at ``path`` with what is finished of it; a new one where there is none, or another one's.

    Second: which field of the old bundle differed, where there was one to be replaced. Raises ``BundleError`` for a
    directory that others may write to, or that holds something else.
    """
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(folder)
    reason = None
    if (folder / MANIFEST).exists():
        old = Bundle.read(folder)
        reason = old.difference(identity) or _difference(old.made_with, made_with)
        if reason is None and old.pool != pool:
            reason = f"the KV pool: {pool} here, {old.pool} there"
        if reason is None:
            return old, None
        for file in folder.glob("*.bin"):
            file.unlink()
    elif any(folder.iterdir()):
        raise BundleError(f"{folder} holds something else than a bundle")
    made = Bundle(folder, identity, pool, made_with)
    made.write_manifest()
    return made, reason


def check_private(path: Path) -> None:
    """Raises ``BundleError`` unless ``path`` is ours (or root's) and nobody else may write to it."""
    try:
        info = path.stat()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    _check_owner(path, info)


def _check_owner(path: Path, info: os.stat_result) -> None:
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BundleError(f"others may write to {path}, and what it holds is executed (chmod go-w helps)")
    if hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0):
        raise BundleError(f"{path} belongs to another user, and what it holds is executed")


def _read_private(path: Path) -> bytes:
    with path.open("rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        return file.read()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(_read_private(path))
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise BundleError(f"{path}: not a bundle's manifest")
    return manifest


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a run that is ended leaves no half file behind."""
    draft = path.with_suffix(".tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(draft, path)


def _tuples(tree: Any) -> Any:
    """JSON has made lists of the tuples."""
    return tuple(_tuples(x) for x in tree) if isinstance(tree, list) else tree


def usable_bundle(resolved: Resolved, devices: list[jax.Device], tell: Callable[[str], None]) -> Bundle | None:
    """The bundle of ``--bundle``, if it is for these settings and this machine; else a line says why not."""
    path = resolved.config.bundle
    if path is None:
        return None
    try:
        bundle = Bundle.read(path)
    except BundleError as error:
        tell(f"bundle not used, programs are compiled: {error}")
        return None
    facts = identity(resolved, devices)
    if difference := bundle.difference(facts):
        tell(not_used(bundle, difference))
        return None
    return bundle


def not_used(bundle: Bundle, reason: str) -> str:
    return f"bundle {bundle.path} not used, programs are compiled: {reason}"


def load_programs(
    bundle: Bundle, programs: dict[Hashable, Program], devices: list[jax.Device]
) -> tuple[dict[Hashable, Any], dict[str, str]]:
    """The executables that could be loaded, and of each other program (by name) why not."""
    loaded, failed = {}, {}
    for key, program in programs.items():
        try:
            loaded[key] = bundle.load(program, devices)
        except BundleError as error:
            failed[program.name] = str(error)
    return loaded, failed
