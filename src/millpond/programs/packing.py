"""Values as bytes, by their types: for the way from task to task, and for maps whose values are no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from millpond.programs.elements import DenseMatrix, Matrix, Vector
from millpond.programs.values import fit, inner_of

_encoder = msgspec.msgpack.Encoder()


def pack(values: Sequence[Any], types: Sequence[str]) -> bytes:
    """TypeError or OverflowError if a value is not of its type."""
    return _encoder.encode([_plain(value, kind) for value, kind in zip(values, types, strict=True)])


def unpack(data: bytes, types: Sequence[str]) -> list[Any]:
    plain = msgspec.msgpack.decode(data)
    return [_value(value, kind) for value, kind in zip(plain, types, strict=True)]


def _plain(value: Any, kind: str) -> Any:
    if value is None:
        return None
    match kind:
        case "vector":
            entries = _of(Vector, value).items()
            return [_longs([i for i, _ in entries]), _doubles([x for _, x in entries])]
        case "matrix":
            found = _of(Matrix, value).entries()
            rows, columns = [r for r, _ in found], [c for _, c in found]
            return [_longs(rows), _longs(columns), _doubles(list(found.values()))]
        case "dense":
            return [[row, _doubles(values)] for row, values in _of(DenseMatrix, value).entries().items()]
        case "map":
            raise TypeError("a map does not travel")
    if kind.startswith("collection<"):
        return [_plain(each, inner_of(kind)) for each in value]
    return fit(value, kind)


def _value(plain: Any, kind: str) -> Any:
    if plain is None:
        return None
    match kind:
        case "vector":
            return Vector.of(dict(zip(_of_longs(plain[0]), _of_doubles(plain[1]), strict=True)))
        case "matrix":
            places = zip(_of_longs(plain[0]), _of_longs(plain[1]), strict=True)
            return Matrix(dict(zip(places, _of_doubles(plain[2]), strict=True)))
        case "dense":
            return DenseMatrix({row: _of_doubles(values) for row, values in plain})
    if kind.startswith("collection<"):
        return [_value(each, inner_of(kind)) for each in plain]
    return plain


def _of(element: type[Any], value: Any) -> Any:
    if not isinstance(value, element):
        raise TypeError(f"{value!r} is no {element.__name__}")
    return value


def _longs(values: list[int]) -> bytes:
    return np.array(values, np.int64).tobytes()


def _doubles(values: list[float]) -> bytes:
    return np.array(values, np.float64).tobytes()


def _of_longs(data: bytes) -> list[int]:
    longs: list[int] = np.frombuffer(data, np.int64).tolist()
    return longs


def _of_doubles(data: bytes) -> list[float]:
    doubles: list[float] = np.frombuffer(data, np.float64).tolist()
    return doubles
