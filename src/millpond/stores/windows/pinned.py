"""Scratch files that somebody still reads who looks at an earlier state: they go when nobody does any more."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable

from millpond.durable.files import Files, remove_tree
from millpond.private import AnyPath


class PinnedFiles:
    """The files of one directory, as far as they go. Safe to use from several threads."""

    def __init__(self, files: Files, directory: AnyPath) -> None:
        self._files = files
        self._directory = os.fspath(directory)
        # Pins end with the garbage, which may be collected anywhere: also where this lock is held.
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._unwanted: set[str] = set()
        self._is_closed = False

    def pin(self, paths: Iterable[str]) -> Pin:
        """These files stay as long as the pin does, whatever is removed."""
        own = set(paths)
        with self._lock:
            self._pins.update(own)
        return Pin(self, own)

    def remove(self, path: str) -> None:
        with self._lock:
            if path in self._pins:
                self._unwanted.add(path)
                return
        self._files.remove(path)

    def close(self) -> None:
        """All files go, and the directory with them."""
        with self._lock:
            self._is_closed = True
            if self._pins:
                return
        remove_tree(self._files, self._directory)

    def unpin(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                self._pins[path] -= 1
                if not self._pins[path]:
                    del self._pins[path]
            free = {path for path in self._unwanted if path not in self._pins}
            self._unwanted -= free
            is_last = self._is_closed and not self._pins
        for path in free:
            self._files.remove(path)
        if is_last:
            remove_tree(self._files, self._directory)


class Pin:
    """Ends when it is released, or when nobody refers to it any more."""

    def __init__(self, files: PinnedFiles, paths: set[str]) -> None:
        self._end = weakref.finalize(self, files.unpin, paths)
        self._end.atexit = False

    def release(self) -> None:
        self._end()
