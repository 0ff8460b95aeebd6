"""How an operator ends when its streaming query is stopped in the middle of a batch.

Spark takes an error of `foreachBatch` for the stop that it is if the text of the Python trace fits a regular expression,
`py4j.protocol.Py4JJavaError: An error occurred while calling(anything)java.lang.InterruptedException`. It tries that by
recursion, once a character: over the trace of an interrupted job, thousands of lines of Java's, it overflows its stack.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from millpond.errors import QueryStopped
from millpond.ops import frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What Java raises in a thread that is interrupted.
_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
# Spark's words, as its expression has them; nothing long may follow.
_SAID = f"py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch: {_INTERRUPTIONS[0]}"


def ends_with_query(operator: Callable[_P, _R]) -> Callable[_P, _R]:
    """For what is called with the rows of an epoch: while the query they are of is being stopped, an interruption
    becomes `QueryStopped`, whose trace is short and fits. All other errors, and all at other times, stay what they are.
    """

    @functools.wraps(operator)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return operator(*args, **options)
        except QueryStopped:
            raise
        except Exception as error:
            frame = next((rows for rows in args if frames.is_frame(rows)), None)
            if frame is None or not _is_interruption(error, frame):
                raise
        # Outside of the handler, so that the trace of what it came from is not printed with it.
        raise QueryStopped(
            f"the query was stopped in the middle of a batch; it will go on from its checkpoint ({_SAID})"
        )

    return call


def _is_interruption(error: Exception, frame: DataFrame) -> bool:
    """Whether the query is being stopped, and the error, or what it came from, is Java's way to say so."""
    with suppress(Exception):  # Java may be gone: then the error says more than this could
        query = frames.running_query(frame)
        if query is None or query.isActive():
            return False
        trace = "".join(traceback.format_exception(error))
        cancelled = "cancelled" in trace and str(query.runId().toString()) in trace
        return cancelled or any(name in trace for name in _INTERRUPTIONS)
    return False
