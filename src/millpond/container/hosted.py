"""A container process that a Spark task keeps, `python -m millpond.container.hosted PARENT ...`, the rest as in `process`.

It ends with the task's process at once, however that ends: on Linux by a signal of the system's. PARENT is that process's
id, as it may have ended before this one could look.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

from millpond.container import process

_PR_SET_PDEATHSIG = 1


def bind_to(parent: int) -> None:
    """From now on this process ends with the thread that started it, which must be the parent's main one."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    bind_to(int(sys.argv[1]))
    process.run(sys.argv[2:])
