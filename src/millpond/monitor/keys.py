"""Keys from a terminal, one by one, as they are pressed."""

from __future__ import annotations

import os
import re
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

ESCAPE_S = 0.05
"""The rest of an arrow's sequence comes at once; what comes later is another key."""
_SEQUENCES = {
    **{f"\x1b{lead}{end}": key for lead in "[O" for end, key in zip("ABCDHF", ("up", "down", "right", "left", "home", "end"), strict=True)},
    "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[1~": "home", "\x1b[4~": "end", "\x1b": "escape",
    "\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip
_ONE_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


@contextmanager
def unbuffered(terminal: int) -> Iterator[None]:
    """Keys come without Enter and are not shown. Ctrl-C stays what it is."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def read_keys(terminal: int, seconds: float) -> list[str] | None:
    """The keys that come within so many seconds, if any do; None when the terminal is gone."""
    if not select.select([terminal], [], [], seconds)[0]:
        return []
    data = _read(terminal)
    if data.endswith(b"\x1b") and select.select([terminal], [], [], ESCAPE_S)[0]:
        data += _read(terminal)
    return keys_in(data.decode(errors="replace")) if data else None


def keys_in(typed: str) -> list[str]:
    """The names of keys: letters as they are, others such as "up" and "enter"."""
    return [_SEQUENCES.get(each, each) for each in _ONE_KEY.findall(typed)]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:
        return b""
