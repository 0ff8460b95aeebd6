"""What compiled code has of fields and vectors: which types they are, and how elements come in from Python.

MATRIX, ROW and the maps are cells with what is read of them: the row, and `limit`, which is NOW, or the number of a record for
what decided epochs left. VECTOR is a vector that is nobody's part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import extending, types
from numba.core import cgutils
from numba.experimental import structref

from millpond.kernels._jit import part
from millpond.kernels.cells import CELLS

# They have no types themselves.
_structs: Any = structref
_extending: Any = extending
_code: Any = cgutils


class View(types.Type):
    """Cells as one kind of element has them."""


class MatrixType(View):
    pass


class RowType(View):
    """A row in a matrix, or a vector field."""


class MapType(View):
    """A map from longs to `value`."""

    def __init__(self, name: str, value: Any) -> None:
        self.value = value
        super().__init__(name)


MATRIX = MatrixType("millpond.Matrix")
ROW = RowType("millpond.Row")
MAP_LONG = MapType("millpond.MapLong", types.int64)
MAP_DOUBLE = MapType("millpond.MapDouble", types.float64)
MAP_BOOLEAN = MapType("millpond.MapBoolean", types.boolean)
MAPS = {"long": MAP_LONG, "double": MAP_DOUBLE, "boolean": MAP_BOOLEAN}


class _ViewModel(extending.models.StructModel):
    def __init__(self, manager: Any, view: Any) -> None:
        members = [("cells", CELLS), ("limit", types.int64), ("row", types.int64)]
        base: Any = super()
        base.__init__(manager, view, members)


for _type in (MatrixType, RowType, MapType):
    _extending.register_model(_type)(_ViewModel)
    for _member in ("cells", "limit", "row"):
        _extending.make_attribute_wrapper(_type, _member, _member)


def _unboxed(view: Any, element: Any, c: Any) -> Any:
    made = _code.create_struct_proxy(view)(c.context, c.builder)
    fields = [("cells", "_cells", CELLS), ("limit", "_limit", types.int64)]
    if isinstance(view, RowType):
        fields.append(("row", "_row", types.int64))
    for member, attribute, kind in fields:
        found = c.pyapi.object_getattr_string(element, attribute)
        setattr(made, member, c.unbox(kind, found).value)
        c.pyapi.decref(found)
    if not isinstance(view, RowType):
        made.row = c.context.get_constant(types.int64, 0)
    value = made._getvalue()  # noqa: SLF001 - as numba has it
    return _extending.NativeValue(value, is_error=_code.is_not_null(c.builder, c.pyapi.err_occurred()))


for _type in (MatrixType, RowType, MapType):
    _extending.unbox(_type)(_unboxed)


def _row_of(typing_context: Any, cells: Any, limit: Any, row: Any) -> Any:
    """A row of cells."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = _code.create_struct_proxy(ROW)(context, builder)
        made.cells, made.limit, made.row = arguments
        context.nrt.incref(builder, CELLS, arguments[0])
        return made._getvalue()  # noqa: SLF001 - as numba has it

    return ROW(CELLS, types.int64, types.int64), code


row_of: Any = _extending.intrinsic(_row_of)


class Vector(structref.StructRefProxy):
    """What Python holds of a VECTOR."""


@_structs.register
class VectorType(types.StructRef):
    """Keys, ascending, and values; of both, so many are `used`."""


_structs.define_boxing(VectorType, Vector)
_vector_type: Any = VectorType
VECTOR = _vector_type([("keys_", types.int64[::1]), ("values_", types.float64[::1]), ("used", types.int64)])


@part
def vector_of(keys: Any, values: Any) -> Any:
    """A VECTOR that has these arrays for its own."""
    made = _structs.new(VECTOR)
    made.keys_ = keys
    made.values_ = values
    made.used = np.int64(keys.shape[0])
    return made
