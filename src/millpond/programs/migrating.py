"""What becomes of a field's entries when the field changes: what a user says of it, and the rules that it follows.

An entry of the old field gives any number of entries of the new one. Those that come to one place are merged, in the order of
lanes and of old places in them: so the result does not depend on where anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.errors import SchemaMismatch
from millpond.programs.decided import Place
from millpond.programs.elements import Element
from millpond.programs.elements.element import index_of
from millpond.programs.graph import BY_COLUMN
from millpond.programs.merging import plus
from millpond.programs.values import fit, inner_of
from millpond.wire.programs import FieldSpec, ProgramSpec

Function = Callable[[Any, Any], Any]


class Migration(NamedTuple):
    """Of a field of a program that changes: `pond.program(name, Class, migrate={"field": mp.Migration(...)})`.

    `function` is called with the key and the value of each old entry, of a matrix with `(row, column)` and the number. It returns
    the new key and value, a list of such pairs, or None for an entry that goes; without it entries stay as they are. `source` is
    the field that the old entries are of, if it is another one. `merge` is called with two values that come to the same key of
    the same lane, and returns one; without it they are added.
    """

    function: Function | None = None
    source: str | None = None
    merge: Function | None = None


def made_of(function: Function | None, source: FieldSpec, place: Place, value: Any) -> list[tuple[Any, Any]]:
    """The keys and values that come of an entry, as the user gives them. What the user gets is a copy."""
    shown = value.tolist() if source.element == "dense" else fit(value, source.value)
    if function is None:
        return [(_told(source, place), shown)]
    given = function(_told(source, place), shown)
    if given is None:
        return []
    pairs = given if isinstance(given, list) else [given]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"{pair!r} is no key with its value: a tuple of two is expected, a list of them, or None"
            )
    return pairs


def _told(spec: FieldSpec, place: Place) -> Place:
    """A place as the user has it; of a matrix by column, which has the column first, the row is first there. And back."""
    return (place[1], place[0]) if spec.key == BY_COLUMN else place


def fitted_place(spec: FieldSpec, key: Any) -> Place:
    """The key as a place in the field. TypeError if it is none."""
    if spec.element == "map":
        place = fit(key, spec.key)
        if place is None:
            raise TypeError("None is no key")
        return place
    if spec.element != "matrix":
        return index_of(key)
    if not isinstance(key, tuple) or len(key) != 2:
        raise TypeError(f"{key!r} is no place in a matrix: (row, column) is expected")
    return _told(spec, (index_of(key[0]), index_of(key[1])))


def fitted_value(spec: FieldSpec, value: Any) -> Any:
    """The value as the field has it. TypeError if it is none."""
    if spec.element == "map":
        return fit(value, spec.value)
    if value is None:
        raise TypeError(f"a {spec.element} holds no None")
    if spec.element == "dense":
        return np.array(fit(value, "array<double>"), np.float64)
    return fit(value, "double")


def merged(merge: Function | None, spec: FieldSpec, old: Any, new: Any) -> Any:
    """Two values of a field as one."""
    if spec.element == "dense":
        old, new = old.tolist(), new.tolist()
    return fitted_value(spec, added(spec, old, new) if merge is None else merge(old, new))


def added(spec: FieldSpec, old: Any, new: Any) -> Any:
    """The sum of two values: of lists item by item. TypeError where there is none."""
    if old is None or new is None:
        return new if old is None else old
    numbers = ("long", "double")
    if spec.element != "map" or spec.value in numbers or inner_of(spec.value) in numbers:
        return plus(old, new)
    if isinstance(old, Element):
        return plus(old, new)
    raise TypeError(
        f"two entries come to one place, and values of type {spec.value} are not added: give merge="
    )


def order_of(place: Place) -> bytes:
    """Bytes that are in the order of places, of one field."""
    if isinstance(place, tuple):
        return b"".join(map(order_of, place))
    return place.encode() if isinstance(place, str) else (int(place) + (1 << 63)).to_bytes(8, "big")


def changed_fields(spec: ProgramSpec, existing: ProgramSpec) -> list[str]:
    """The fields that are there otherwise than a class has them."""
    return [
        name
        for name, field in spec.fields.items()
        if name in existing.fields and not field.is_like(existing.fields[name])
    ]


def _example(changed: Sequence[str]) -> str:
    name = changed[0] if changed else "field"
    return f"migrate={{{name!r}: function of key and value}}"


def _described(spec: ProgramSpec, names: Sequence[str]) -> str:
    def field(name: str) -> str:
        return f"{name}: {spec.fields[name].words if name in spec.fields else 'none'}"

    return ", ".join([f"lanes={spec.lanes}", *map(field, names)])


def exists_otherwise(spec: ProgramSpec, existing: ProgramSpec, changed: Sequence[str]) -> SchemaMismatch:
    was, wanted = _described(existing, changed), _described(spec, changed)
    return SchemaMismatch(
        f"program {spec.name!r} exists otherwise\n  existing:  {was}\n  requested: {wanted}",
        hint="open it with migrate=, which changes what there is: migrate=True where entries stay and are added, or"
        f" {_example(changed)}; or give the field, or the program, another name",
        resident=spec.name,
        existing=was,
        requested=wanted,
    )
