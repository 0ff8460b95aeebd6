"""A task's kernel, made of its plan: compiled when it is first needed, and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from millpond.kernels._jit import NO_C_ENTRY, NO_ENTRY, compiled
from millpond.kernels._memory_at import bytes_at, doubles_at, longs_at
from millpond.kernels.cell_overloads import arrays_in, average_of, increase, increase_at, total_of
from millpond.kernels.cell_types import MAPS, MATRIX, ROW, vector_of
from millpond.kernels.grown import GROWN, put_doubles, put_entries, put_longs
from millpond.programs.machine import checked
from millpond.programs.machine.cache import OPTIONS, directory, part
from millpond.programs.machine.plan import Plan
from millpond.txn.compiler.cache import digest, kept_in


@part
def mp_Vector() -> Any:  # noqa: N802 - as it is called
    return vector_of(np.empty(0, np.int64), np.empty(0, np.float64))


_NAMES: dict[str, Any] = {
    **checked.NAMES,
    **{
        function.__name__: function
        for function in (
            *(bytes_at, doubles_at, longs_at, put_longs, put_doubles, put_entries),
            *(arrays_in, average_of, increase, increase_at, mp_Vector, total_of, vector_of),
        )
    },
}
STATES: dict[str, Any] = {
    "": types.int64,
    "matrix": MATRIX,
    "row": ROW,
    "map<long>": MAPS["long"],
    "map<double>": MAPS["double"],
    "map<boolean>": MAPS["boolean"],
}
Drive = Callable[..., int]
"""See `Plan`."""


def kernel_of(plan: Plan) -> Drive:
    """The kernel, compiled if it is not kept. Raises what numba raises, if it cannot be."""
    above = directory()
    file = None if above is None else kept_in(above, plan.source)
    names = {**_NAMES, "__name__": __name__}
    exec(compile(plan.source, file or "<kernel of a task>", "exec"), names)  # noqa: S102 - our own text
    own = {name: each for name, each in names.items() if getattr(each, "__globals__", None) is names}
    for name, function in own.items():
        # Numba links what functions refer to by their names and a number that counts per process: of two that were
        # compiled by two processes and are loaded into a third, one would get the other's constants.
        function.__qualname__ = f"{name}_{digest(plan.source)}"
        if name != "drive":
            names[name] = numba.njit(**OPTIONS, **NO_ENTRY)(function)
    longs, long = types.int64[::1], types.int64
    signature = STATES[plan.state], longs, long, long, longs, longs, types.int32[::1], longs
    kept = None if file is None else os.path.dirname(file)
    drive: Any = compiled(names["drive"], kept, **OPTIONS, **NO_C_ENTRY)
    entry: Drive = drive.compile((*signature, *[GROWN] * plan.grown))
    return entry
