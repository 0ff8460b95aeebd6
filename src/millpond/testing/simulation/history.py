"""What happened in a simulation: a line each, with its virtual time."""

from __future__ import annotations

import hashlib
from collections import deque

LINES_MAX = 4000
CHUNK = 500


class History:
    """Keeps the last lines. The digest is of all that there ever were: equal digests, equal histories."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self.count = 0
        self.lines: deque[str] = deque(maxlen=lines_max)
        self._hash = hashlib.blake2b(digest_size=8)
        self._unhashed: list[str] = []

    def add(self, now: float, who: str, what: str) -> None:
        line = f"{now:12.6f} {who}: {what}"
        self.count += 1
        self.lines.append(line)
        self._unhashed.append(line)
        if len(self._unhashed) == CHUNK:
            self._hash_lines()

    def _hash_lines(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()

    @property
    def digest(self) -> str:
        self._hash_lines()
        return self._hash.hexdigest()

    def tail(self, lines: int = 60) -> str:
        """The last lines, and how many came before them."""
        last = list(self.lines)[-lines:]
        return "\n".join([f"... {self.count - len(last)} lines before", *last])
