"""The bar of loading: in a terminal (a pseudo-terminal here) it moves and goes away; elsewhere nothing is written."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import time
from lmjax.runtime.progress import loading_bar
with loading_bar(shown={shown}) as listen:
    for done in (100_000_000, 250_000_000, 500_000_000):
        time.sleep(0.15)
        listen(done, 500_000_000)
"""


def run(shown: bool, terminal: bool) -> str:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", CODE.format(shown=shown)]
    done = subprocess.run(command, cwd=ROOT, stderr=theirs, stdout=subprocess.PIPE, timeout=60)
    os.close(theirs)
    assert done.returncode == 0 and done.stdout == b""
    written = b""
    try:
        while part := os.read(ours, 10_000):
            written += part
    except OSError:  # a pseudo-terminal's way to say that it is at its end
        pass
    os.close(ours)
    return written.decode()


def test_a_bar_in_a_terminal():
    written = run(shown=True, terminal=True)
    assert "loading weights:  20%" in written and "100M/500M" in written and "loading weights:  50%" in written
    assert "\n" not in written and written.endswith("\r")
    assert written.rstrip("\r").rpartition("\r")[2].strip() == ""  # the line was wiped


def test_silence_elsewhere():
    assert run(shown=True, terminal=False) == ""
    assert run(shown=False, terminal=True) == ""
