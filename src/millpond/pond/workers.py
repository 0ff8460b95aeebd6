"""Whether Spark's Python workers can do a pond's work: they must have millpond, the same as here."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from millpond.errors import WorkersUnfit

# The Python of each session's workers that were looked at, and were fit.
_fit: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class Look(NamedTuple):
    """What one worker said of itself: its millpond, or why it has none."""

    python: str
    millpond: str
    error: str


def check_workers(session: Any) -> None:
    """Runs a task of one row in the session, the first time, and raises `WorkersUnfit` if it could not do a pond's work.

    On this machine, where nobody chose their Python, the workers are made to run this one. Of a cluster it sees the one
    worker that has the task.
    """
    context = session.sparkContext
    _use_this_python(context)
    if _fit.get(context) == context.pythonExec:
        return
    here = Look(*_look()(0))
    try:
        (answer,) = context.parallelize([0], 1).map(_look()).collect()
        look = Look(*answer)
    except Exception as error:  # noqa: BLE001 - Spark has many errors for a task that failed
        raise unfit(context, _reason(str(error))) from None
    if look.error:
        raise unfit(context, look.error, look.python)
    if look.millpond != here.millpond:
        raise unfit(context, f"they have millpond {look.millpond}, and here is {here.millpond}", look.python)
    _fit[context] = context.pythonExec


def unfit(context: Any, why: str, python: str = "") -> WorkersUnfit:
    python = python or context.pythonExec
    mend = f"set PYSPARK_PYTHON={sys.executable} before the session is started"
    if not context.master.startswith("local"):
        mend = (
            "install the same millpond as here in that Python on all machines, or set PYSPARK_PYTHON (spark-submit:"
            " spark.pyspark.python) to one there that has it, before the session is started"
        )
    return WorkersUnfit(f"Spark's workers run {python}: {why}", hint=mend, python=python)


def _use_this_python(context: Any) -> None:
    """PySpark takes the `python3` of PATH where none was chosen: not this one, in an environment that is not active."""
    if not context.master.startswith("local") or "PYSPARK_PYTHON" in os.environ or not sys.executable:
        return
    chosen = shutil.which(context.pythonExec)
    if context.pythonExec == "python3" and os.path.dirname(chosen or "") != os.path.dirname(sys.executable):
        # Every function takes it along from here, so those that are made from now on run there.
        context.pythonExec = sys.executable


def _look() -> Callable[[int], tuple[str, str, str]]:
    """Made inside a function, so that Spark sends its code: by its name, only a worker with millpond could run it."""

    def look(_: int) -> tuple[str, str, str]:
        import sys
        from importlib import import_module

        try:
            version = str(import_module("millpond").__version__)
            import_module(
                "millpond.ops.tasks"
            )  # with all that tasks need; the worker serves on, and has it then
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            return sys.executable, "", f"{type(error).__name__}: {error}"
        return sys.executable, version, ""

    return look


def _reason(trace: str) -> str:
    """What a task ended with, out of the pages that Spark makes of it."""
    for pattern in (
        r"\[PYTHON_VERSION_MISMATCH\] (.*)",
        r"java\.io\.IOException: (Cannot run program .*)",
        r"^(?:\w+\.)*(\w+(?:Error|Exception): .*)",
    ):
        if found := re.findall(pattern, trace, re.MULTILINE):
            return str(found[0]).strip()
    return trace.strip().partition("\n")[0]
