"""Runs the shell blocks of the docs, and looks at the commands in them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lmjax import cli
from lmjax.flags import engine_options
from tests.docs.blocks import PAGES, ROOT, Block

READY = "curl -sf --retry 600 --retry-delay 1 --retry-all-errors -o /dev/null localhost:{port}/ready"
_INLINE = re.compile(r"`((?:lmjax (?:serve|generate|plan|compile)|python -m|scripts/)[^`]*)`")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def run_shell(script: str, cwd: Path, timeout: float) -> str:
    """What the script prints. Whatever it started is gone afterwards; asserts that it went well."""
    output = cwd / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-eu", "-c", script],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process.pid)
    text = output.read_text()
    assert code == 0, f"exit code {code}\n{text[-4000:]}"
    return text


def _end_group(leader: int) -> None:
    """Servers get time to end in order."""
    for number, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        try:
            os.killpg(leader, number)
            while time.monotonic() < end:
                os.killpg(leader, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


# --- looking only -----------------------------------------------------------------------------------------------------


def inline_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of the commands within the text, outside of blocks."""
    for path in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for found in _INLINE.finditer(text):
            yield path.relative_to(ROOT).as_posix(), " ".join(found[1].split())


def block_commands(block: Block) -> Iterator[str]:
    yield from (line for line in block.commands if re.search(r"\b(lmjax [a-z]|python -m |scripts/)", line))


def unknown_flags(command: str) -> list[str]:
    """Flags that the program which ``command`` starts does not have."""
    words = shlex.split(command.replace("…", ""), comments=True)
    for index, word in enumerate(words):
        flags = [w.partition("=")[0] for w in words[index + 1 :] if w.startswith("--")]
        following = words[index + 1] if index + 1 < len(words) else ""
        if word == "lmjax":
            return [f for f in flags if f not in lmjax_flags(following)]
        if word == "-m" and index and words[index - 1] == "python":
            return [f for f in flags if f not in module_flags(following)]
        if word.startswith("scripts/"):
            assert (ROOT / word).exists(), f"there is no {word}"
            return [f for f in flags if f not in lmjax_flags("serve")]
    return []


@functools.cache
def lmjax_flags(command: str) -> frozenset[str]:
    commands = next(a for a in cli._parser()._actions if a.dest == "command").choices
    assert command in commands, f"lmjax has no command {command!r}"
    return frozenset(option for action in commands[command]._actions for option in action.option_strings)


@functools.cache
def module_flags(module: str) -> frozenset[str]:
    """The literals in a program's source, and the engine's where it adds them."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, f"there is no module {module}"
    main = Path(found.origin).with_name("__main__.py")
    source = (main if found.submodule_search_locations and main.exists() else Path(found.origin)).read_text()
    flags = set(re.findall(r'"(--[a-z][a-z-]*)"', source))
    names = set(re.findall(r'Option\(\s*"([a-z_]+)"', source))
    if "engine_options()" in source:
        names |= {option.name for option in engine_options()}
    flags |= {"--" + name.replace("_", "-") for name in names}
    return frozenset(flags)
