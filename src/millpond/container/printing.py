"""What a container process prints, user code included: a file with a bound."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from typing import Any

from millpond import private

PART_BYTES_MAX = 16 << 20
PRINT_BYTES_MAX = 1 << 20


def log_path(root: str, container: int) -> str:
    return os.path.join(root, f"container-{container}.log")


class Printed(io.RawIOBase):
    """Standard output and standard error of this process: the end of the file `path`.

    When that is full it becomes `path`.1, in place of the one before. Printing never fails: user code must not run
    otherwise when the disk is full. What cannot be written is lost, and of one long text all but the end.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._lock = threading.Lock()

    def take_over(self) -> None:
        """`print` comes here, and tracebacks do. What compiled code says goes to the same file."""
        text = io.TextIOWrapper(io.BufferedWriter(self), "utf-8", "backslashreplace", line_buffering=True)
        sys.stdout = sys.stderr = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            self.turn_over()
            os.write(2, data[-PRINT_BYTES_MAX:])
        return len(data)

    def turn_over(self) -> None:
        """Begins a new file if this one is full."""
        with self._lock:
            if os.fstat(2).st_size < PART_BYTES_MAX:
                return
            try:
                os.replace(self._path, f"{self._path}.1")
                file = private.append_to(self._path)
            except OSError:
                os.ftruncate(2, 0)
                return
            with file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
