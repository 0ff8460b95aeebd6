"""User code that runs where rows are read, in a driver or in a task: it has a time to end in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from millpond.errors import CodeTookTooLong, Interrupted

SECONDS = 60.0
"""What the functions of one part of an epoch's rows may take."""


@contextmanager
def limited(what: str, seconds: float | None = None) -> Iterator[None]:
    """What is done within ends by then, or with CodeTookTooLong. A call into C that never comes back is not ended."""
    seconds = SECONDS if seconds is None else seconds
    thread = threading.get_ident()
    lock = threading.Lock()
    state = {"within": True, "over": False}

    def interrupt() -> None:
        with lock:
            if state["within"]:
                state["over"] = True
                _raise_in(thread, ctypes.py_object(Interrupted))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            # From here on no interrupt comes; one that has come, and is not raised yet, is taken back.
            with suppress(Interrupted):
                with lock:
                    state["within"] = False
                _raise_in(thread, ctypes.py_object())
            timer.cancel()
    except Interrupted:
        if not state["over"]:
            raise
    if state["over"]:
        raise CodeTookTooLong(
            f"{what} ran longer than {seconds:g} s",
            hint="mend what never ends, or send smaller batches",
            what=what,
            seconds=seconds,
        )


def _raise_in(thread: int, error: ctypes.py_object[type[BaseException]]) -> None:
    """Python raises the error in the thread before its next step; null takes back what is not yet raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
