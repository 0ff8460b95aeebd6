"""Which States and tables a pond has: what opening one decides. No I/O; a function that refuses raises."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from millpond.code.rules import CompactRule, UpdateRule
from millpond.code.tables import TableSpec
from millpond.coordinator.records import PondRecord, StateRecord
from millpond.errors import BadMessage, BadType, SchemaMismatch
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.stores.ruleset import check_rules
from millpond.txn import Strings, TableStore
from millpond.wire.messages import GroupSpec, OpenTable, StateSpec


def open_state(pond: PondRecord, spec: StateSpec) -> PondRecord:
    """The pond with that state. A state that exists must be the same."""
    existing = pond.states.get(spec.name)
    if existing is None:
        _check_spec(spec)
        return pond.with_state(StateRecord(spec))
    if isinstance(existing.spec, GroupSpec):
        raise _taken(spec.name, "a group of tables")
    if existing.spec != spec:
        raise SchemaMismatch(
            f"state {spec.name!r} exists with another schema\n"
            f"  existing:  {describe(existing.spec)}\n"
            f"  requested: {describe(spec)}",
            hint="open it with the existing schema, or choose another name",
            state=spec.name,
            existing=describe(existing.spec),
            requested=describe(spec),
        )
    return pond


def open_table(pond: PondRecord, message: OpenTable, owners: Sequence[int]) -> PondRecord:
    """The pond with that table. A new group gets a home where there are fewest; `owners` of slices say where that is."""
    groups = [state.spec for state in pond.states.values() if isinstance(state.spec, GroupSpec)]
    for group in groups:
        existing = group.tables.get(message.name)
        if existing is None:
            continue
        if existing != message.spec or group.name != message.group:
            was, wanted = describe_table(existing, group.name), describe_table(message.spec, message.group)
            raise SchemaMismatch(
                f"table {message.name!r} exists otherwise\n  existing:  {was}\n  requested: {wanted}",
                hint="open it as it is, or choose another name",
                state=message.name,
                existing=was,
                requested=wanted,
            )
        return pond
    _check_table(message)
    record = pond.states.get(message.group)
    if record is None:
        home = _new_home([group.home for group in groups], owners)
        spec = GroupSpec(message.group, home, {message.name: message.spec})
        return pond.with_state(StateRecord(spec))
    if not isinstance(record.spec, GroupSpec):
        raise _taken(message.group, "a state")
    tables = {**record.spec.tables, message.name: message.spec}
    return pond.with_state(replace(record, spec=replace(record.spec, tables=tables)))


def _new_home(homes: Sequence[int], owners: Sequence[int]) -> int:
    """A slice of the container that is home to the fewest groups; one that is no home yet, if there is."""
    per_container = Counter(owners[home] for home in homes)
    container = min(dict.fromkeys(owners), key=lambda owner: per_container[owner])
    slices = [number for number, owner in enumerate(owners) if owner == container]
    return min(slices, key=homes.count)


def _check_table(message: OpenTable) -> None:
    spec = message.spec
    key, columns = pa.schema([spec.key_field]), spec.columns
    if (format_ddl(key), format_ddl(columns)) != (spec.key, spec.value):
        raise BadMessage(f"the types of table {message.name!r} are not in their canonical form")
    if spec.key_field.name in columns.names:
        raise BadType(
            f"key and value of table {message.name!r} both have a column {spec.key_field.name!r}",
            hint="give one of them another name",
            ddl=spec.key_field.name,
        )
    TableStore(spec, Strings())  # a default that does not fit raises


def describe_table(spec: TableSpec, group: str) -> str:
    return f"key={spec.key!r}, value={spec.value!r}, default={spec.default!r}, group={group!r}"


def _taken(name: str, what: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{name!r} is {what}", hint="choose another name", state=name, existing=what, requested=name
    )


def _check_spec(spec: StateSpec) -> None:
    """A spec that containers could not read must never get into the journal."""
    key, value = parse_ddl(spec.key, "key"), parse_ddl(spec.value, "value")
    check_key_types(key)
    check_rules(value, spec.update, spec.compact)
    if (format_ddl(key), format_ddl(value)) != (spec.key, spec.value):
        raise BadMessage(f"the types of state {spec.name!r} are not in their canonical form")
    shared = sorted(set(key.names) & set(value.names))
    if shared:
        raise BadType(
            f"key and value of state {spec.name!r} both have a column {shared[0]!r}",
            hint="give one of them another name",
            ddl=shared[0],
        )


def describe(spec: StateSpec) -> str:
    rules = ", ".join(f"{kind}={_describe_rule(getattr(spec, kind))}" for kind in ("update", "compact"))
    return f"key={spec.key!r}, value={spec.value!r}, {rules}"


def _describe_rule(rule: UpdateRule | CompactRule) -> str:
    if rule.code is not None:
        return f"{rule.code.name} ({zlib.crc32(msgspec.msgpack.encode(rule.code)):08x})"
    span = rule.span if isinstance(rule, CompactRule) and rule.span else ""
    return f"{rule.name}({span})"
