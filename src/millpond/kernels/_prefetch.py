"""Ask for a cache line before it is needed. Random reads of neighbouring rows then overlap instead of queueing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from millpond.kernels._jit import JIT_ENABLED

# Rows ahead: far enough for memory to answer, near enough that the line is still cached when its turn comes.
AHEAD = 8
FAR_AHEAD = 24

_tools: Any = cgutils


def _interpreted(array: Any, row: int) -> None:
    """Nothing to do without the compiler."""


def _compiled(_typing: Any, array: Any, _row: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        stride = _tools.unpack_tuple(builder, struct.strides)[0]
        address = builder.add(builder.ptrtoint(struct.data, stride.type), builder.mul(args[1], stride))
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        call = _tools.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, keep in every cache level, data.
        builder.call(call, [builder.inttoptr(address, pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


# prefetch(array, row): a hint for the line where array[row] starts. Never faults, whatever the row.
prefetch = cast(Callable[[Any, int], None], intrinsic(_compiled) if JIT_ENABLED else _interpreted)
