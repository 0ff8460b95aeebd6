"""Changes a program's fields and lanes: an epoch of its own, which every container makes of what it holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from millpond.client.client import Client
from millpond.code.capture import Code, capture
from millpond.errors import BadOption
from millpond.ops.committing import commit_staged
from millpond.programs.migrating import Function, Migration, changed_fields, exists_otherwise
from millpond.wire.base import Epoch, KindOfTime, Turn
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.house import Register
from millpond.wire.programs import FieldMigration, FieldSpec, MigrationWork, ProgramSpec

OPERATOR = "migrating_fields"
"""In whose name migrations are epochs; each is a query of its own."""


class _NothingToDo(Exception):
    pass


class _NoRows(NamedTuple):
    """What an epoch without rows is staged by: nothing."""

    resident: str
    name: str = OPERATOR
    at: None = None

    @property
    def columns(self) -> list[str]:
        return []

    def delay(self, kind: KindOfTime) -> int:
        return 0

    def stage(self, client: Client, table: Any, plan: EpochPlan, part: Any) -> Receipt:
        raise NotImplementedError("no rows come")


def migrate_program(
    client: Client,
    wanted: ProgramSpec,
    migrate: bool | Mapping[str, bool | Function | Migration],
    merges: Mapping[str, Code],
) -> None:
    """On return the program is as wanted, but for new fields that are empty. One that there is not yet needs no migration.

    `merges` are how fields of the user's own classes merge, where `migrate` does not say it.
    """
    given = _given(migrate)
    existing = client.specs(ProgramSpec).get(wanted.name)
    if existing is None or plan_of(existing, wanted, given, merges) is None:
        return

    def work(plan: EpochPlan, receipts: list[Receipt]) -> MigrationWork:
        # Each time anew: somebody else may have changed the program.
        planned = plan_of(client.specs(ProgramSpec).get(wanted.name, existing), wanted, given, merges)
        if planned is None:
            raise _NothingToDo
        return planned

    client.call(Register(wanted.name, OPERATOR, "updater"))
    query = f"migration-{client.runtime.bits(64):016x}"
    with suppress(_NothingToDo):
        commit_staged(
            client, _NoRows(wanted.name), query, Turn(Epoch(0)), lambda plan: [], "", work, history="new"
        )


def plan_of(
    existing: ProgramSpec,
    wanted: ProgramSpec,
    given: Mapping[str, Migration] | None,
    merges: Mapping[str, Code] = MappingProxyType({}),
) -> MigrationWork | None:
    """What is to be done to `existing`; None if nothing is. `given` is None where all that differs stays as far as it fits."""
    known = {**existing.fields, **wanted.fields}
    for name, migration in (given or {}).items():
        source = name if migration.source is None else migration.source
        if name not in known or source not in known:
            raise BadOption(
                f"program {wanted.name!r} has no field {name if name not in known else source!r}",
                hint=f"it has: {', '.join(known)}",
                option="migrate",
            )
    changed = changed_fields(wanted, existing)
    unsaid = [name for name in changed if given is not None and name not in given]
    if unsaid:
        raise exists_otherwise(wanted, existing, unsaid)
    fields = {name: wanted.fields[name] for name in changed}
    if wanted.lanes != existing.lanes:
        fields |= {n: f for n, f in known.items() if f.kind == "partial" and n in existing.fields}
    fields |= {n: f for n, f in wanted.fields.items() if n in (given or {}) and n not in existing.fields}
    if not fields and wanted.lanes == existing.lanes:
        return None
    return _planned(existing, wanted, fields, given or {}, merges)


def _planned(
    existing: ProgramSpec,
    wanted: ProgramSpec,
    fields: Mapping[str, FieldSpec],
    given: Mapping[str, Migration],
    merges: Mapping[str, Code],
) -> MigrationWork:
    revision = existing.revision + 1
    migrations = {}
    for name in fields:
        migration = given.get(name, Migration())
        source = name if migration.source is None else migration.source
        if source not in existing.fields:
            raise BadOption(
                f"the field {source!r} of program {existing.name!r} is new: nothing can be made of it",
                hint=f"say of which it is made, as in mp.Migration(function, source=...):"
                f" there are {', '.join(existing.fields)}",
                option="migrate",
            )
        merge = _captured(migration.merge, name) or merges.get(name)
        migrations[name] = FieldMigration(source, _captured(migration.function, name), merge)
    made = {name: replace(field, since=revision) for name, field in fields.items()}
    after = replace(
        existing, lanes=wanted.lanes, fields={**wanted.fields, **existing.fields, **made}, revision=revision
    )
    return MigrationWork(existing, after, migrations)


def _given(migrate: Any) -> dict[str, Migration] | None:
    if migrate is True:
        return None
    if not isinstance(migrate, Mapping):
        raise _bad(migrate)
    return {name: _migration(name, found) for name, found in migrate.items()}


def _migration(name: str, found: Any) -> Migration:
    migration = found if isinstance(found, Migration) else Migration() if found is True else Migration(found)
    for function in (migration.function, migration.merge):
        if function is not None and not _takes_two(function):
            raise _bad(found, name)
    return migration


def _takes_two(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _bad(found: Any, name: str = "field") -> BadOption:
    return BadOption(
        f"migrate={found!r} does not say what comes of the entries of a field",
        hint=f"True, or by field what comes of its entries, as in migrate={{{name!r}: lambda key, value: (key, float(value))}}:"
        " a plain Python function of two arguments, True, or mp.Migration(...)",
        option="migrate",
    )


def _captured(function: Function | None, name: str) -> Code | None:
    return None if function is None else capture(function, f"migration of {name!r}", "migrate")
