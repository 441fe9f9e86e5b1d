"""A directory of executables that a server can start from, with a manifest that says what they are for.

JAX's own cache can't be filled for a card that isn't there: its keys hold the driver's version and the card's clock. A
bundle goes by a manifest of ours (``identity``), and holds one file a program. What it holds is executed, so it must be
a private directory, and is read only while it is one.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import jax
import msgspec

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

    num_blocks: tuple[Annotated[int, msgspec.Meta(ge=2)], ...]
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    program_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Entry(TypedDict):
    """A program. ``arguments``: a digest; ``result``: the tree of what it returns, leaves numbered."""

    file: str
    bytes: int
    sha256: str
    arguments: str
    result: Any


@dataclass(frozen=True)
class _Manifest:
    format: int
    identity: dict[str, str]
    pool: PoolFacts
    made_with: dict[str, str]
    programs: dict[str, Entry]


@dataclass
class Bundle:
    """``identity``: what must be equal (see there). ``programs``: by name.

    ``made_with``: what else the programs were made with; another run adds to the bundle only with the same.
    """

    path: Path
    identity: dict[str, str]
    pool: PoolFacts
    made_with: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Entry] = field(default_factory=dict)

    @staticmethod
    def read(path: str | Path) -> Bundle:
        """Raises ``BundleError`` where there is none, or others may write to it."""
        folder = Path(path).expanduser()
        check_private(folder)
        found = _read_manifest(folder / MANIFEST)
        return Bundle(folder, found.identity, found.pool, found.made_with, found.programs)

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
        try:
            blob = _read_private(self._file(entry))
        except (OSError, BundleError):
            return False
        return hashlib.sha256(blob).hexdigest() == entry["sha256"]

    def _file(self, entry: Entry) -> Path:
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
        manifest = _Manifest(FORMAT, self.identity, self.pool, self.made_with, self.programs)
        _write(self.path / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


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
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BundleError(f"{folder}: {error.strerror}") from error
    check_private(folder)
    reason = None
    if (folder / MANIFEST).exists():
        old, reason = _earlier(folder, identity, pool, made_with)
        if old is not None:
            return old, None
        for file in folder.glob("*.bin"):
            file.unlink()
    elif any(file.suffix != ".tmp" for file in folder.iterdir()):  # drafts: a run was cut as it began
        raise BundleError(f"{folder} holds something else than a bundle")
    made = Bundle(folder, identity, pool, made_with)
    made.write_manifest()
    return made, reason


def _earlier(
    folder: Path, identity: dict[str, str], pool: PoolFacts, made_with: dict[str, str]
) -> tuple[Bundle | None, str | None]:
    """The bundle that is there if it is for the same, else why it is of no use."""
    try:
        old = Bundle.read(folder)
    except BundleError as error:
        return None, str(error)
    reason = old.difference(identity) or _difference(old.made_with, made_with)
    if reason is None and old.pool != pool:
        reason = f"the KV pool: {pool} here, {old.pool} there"
    return (old, None) if reason is None else (None, reason)


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


def _read_manifest(path: Path) -> _Manifest:
    try:
        content = msgspec.json.decode(_read_private(path))
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise BundleError(f"{path}: format {content['format']!r}, this lmjax reads {FORMAT}")
        return msgspec.convert(content, _Manifest)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BundleError(f"{path}: not a bundle's manifest: {error}") from error


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a run that is ended leaves no half file behind."""
    draft = path.with_suffix(".tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
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
    if len(bundle.pool.num_blocks) != len(resolved.kv_specs):
        tell(not_used(bundle, f"{len(bundle.pool.num_blocks)} KV groups, the model has {len(resolved.kv_specs)}"))
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
