"""Transaction functions bound to tables, and the running of an epoch of events."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from numba.core.errors import NumbaError

from millpond.code.tables import TableSpec, TransactionSetCode, Type, type_of
from millpond.errors import BadTransaction, RuleInterpreted, WrongColumn
from millpond.schema import describe_type
from millpond.stores.tables import Column, TableStore, column_of, layout_of, new_stores
from millpond.stores.undo import Undo
from millpond.txn.compiler import codegen
from millpond.txn.compiler.facts import WHOLE, Analysis
from millpond.txn.compiler.values import EventField
from millpond.txn.functions import TransactionFunction, load
from millpond.txn.run.events import EpochEvents, field_of, take_apart
from millpond.txn.run.execution import EpochRun
from millpond.txn.run.watch import Watch


class NotPutBack(Exception):
    """An epoch failed, and so did putting back what it had changed: nothing may look at the tables any more."""


@dataclass(frozen=True)
class Outcome:
    """What an epoch gave.

    `outputs` has a row for each event, in the order in which they came: `event` (its number), `committed`, `reason`
    (null where committed), and the result columns, null where a transaction aborted or gave none. `figures` say
    how it ran. `undo.put_back(stores)` makes the tables, or copies of them, hold what they held before.
    """

    outputs: pa.Table
    figures: dict[str, Any]
    undo: Undo


@dataclass(frozen=True)
class PreparedSet:
    """The functions for events of certain types. `slow` says why a kind is interpreted."""

    functions: Mapping[str, codegen.TypedFunction]
    slow: Mapping[str, str]
    compiled: codegen.CompiledSet | None
    results: Mapping[str, Type]  # of result columns, as far as they are known


class ArrangedEpoch(NamedTuple):
    """The events of an epoch, in order, and the functions for their types."""

    epoch: EpochEvents
    prepared: PreparedSet


class TransactionSet:
    """Transaction functions by kind, over tables by name.

    A parameter of a function that names a table is that table; every other is a field of the event. `run` is
    deterministic, and changes nothing but the stores.
    """

    def __init__(self, kinds: Mapping[str, TransactionFunction], tables: Mapping[str, TableSpec]) -> None:
        if not tables:
            raise BadTransaction(
                "transactions need a table", hint='as in TransactionSet(kinds, {"accounts": TableSpec(...)})'
            )
        self.kinds = dict(kinds)
        self.tables = dict(tables)
        self.layouts = {
            name: layout_of(spec, number, name) for number, (name, spec) in enumerate(tables.items())
        }
        self.found: dict[str, Analysis] = {}
        for kind, function in self.kinds.items():
            guessed = set(function.analysis.tables) - set(self.tables)
            if guessed:
                raise BadTransaction(
                    f"transaction {function.name!r} uses {min(guessed)!r} as a table, and there is none of that name",
                    hint=f"the tables are {', '.join(self.tables)}",
                    transaction=function.name,
                    line=function.tree.lineno,
                )
            found = function.bound(self.tables)
            _check_columns(found, self.tables)
            self.found[kind] = found
        self.declared = self._declared()
        self._prepared: dict[Any, PreparedSet] = {}

    @property
    def prepared(self) -> list[PreparedSet]:
        """What it was prepared for so far."""
        return list(self._prepared.values())

    @property
    def message(self) -> TransactionSetCode:
        """All of it as text, from which `load_transactions` makes it again."""
        return TransactionSetCode({kind: f.message for kind, f in self.kinds.items()}, self.tables)

    @property
    def output_names(self) -> list[str]:
        """The columns that outputs have beyond the events'."""
        results = [name for function in self.kinds.values() for name in function.result_names]
        return ["committed", "reason", *dict.fromkeys(results)]

    def check_events(self, names: Sequence[str]) -> None:
        """The events' columns must leave room for the outputs'."""
        for name in self.output_names:
            if name in names:
                raise WrongColumn(
                    f"the events have a column {name!r}, which the outputs need",
                    hint='rename it, or name results otherwise: @mp.transaction(results="balance")',
                    column=name,
                    available=list(names)[:50],
                )

    def stores(self) -> dict[str, TableStore]:
        """Empty tables for it to run over."""
        return new_stores(self.tables)

    def explain(self) -> str:
        """What each kind reads and writes, what depends on what, and how it runs."""
        from millpond.txn.explain import explain_set  # noqa: PLC0415 - it describes sets

        return explain_set(self)

    def run(
        self,
        events: pa.Table | Mapping[str, pa.Table],
        stores: Mapping[str, TableStore],
        *,
        kind: str = "kind",
        at: str = "time",
        seq: str | None = None,
        threads: int = 1,
        plan: str | None = None,
    ) -> Outcome:
        """Run an epoch: all its events, as if one after the other in the order of `(at, seq, row)`.

        `events` is one table whose column `kind` names the kind of each event, or a table for each kind, whose rows
        are numbered through in the order of `kinds`. An event with a null in a field that its function
        takes aborts. `plan` forces one of `plans.PLANS`, where it is correct for the functions; the outcome is the
        same. Bad events raise an error before anything has changed.
        """
        return self.execute(self.arrange(events, kind=kind, at=at, seq=seq), stores, threads, plan)

    def arrange(
        self,
        events: pa.Table | Mapping[str, pa.Table],
        *,
        kind: str = "kind",
        at: str = "time",
        seq: str | None = None,
    ) -> ArrangedEpoch:
        """The first half of `run`, which needs no tables: bad events raise an error here."""
        fields = {name: found.fields for name, found in self.found.items()}
        epoch = take_apart(events, fields, kind, at, seq)
        schemas = {name: e.table.schema for name, e in zip(self.kinds, epoch.kinds, strict=True)}
        prepared = self.prepare(schemas)
        for name, of_kind in zip(self.kinds, epoch.kinds, strict=True):
            if name in prepared.slow and len(of_kind.numbers):
                for wanted in fields[name]:
                    of_kind.values(wanted)
        return ArrangedEpoch(epoch, prepared)

    def execute(
        self,
        arranged: ArrangedEpoch,
        stores: Mapping[str, TableStore],
        threads: int = 1,
        plan: str | None = None,
        watch: Watch | None = None,
    ) -> Outcome:
        """The second half of `run`. Where it raises an error, the tables hold what they held before.

        `NotPutBack` is for tables that do not.
        """
        epoch, prepared = arranged
        try:
            return self._execute(EpochRun(self, prepared, epoch, stores, threads, watch), plan)
        except NumbaError as error:
            why = f"line 0: {str(error).splitlines()[0][:200]}"
            prepared = PreparedSet({}, self._warned(dict.fromkeys(prepared.functions, why)), None, {})
            return self._execute(EpochRun(self, prepared, epoch, stores, threads, watch), plan)

    def _execute(self, run: EpochRun, plan: str | None) -> Outcome:
        try:
            figures = run.execute(plan)
            return Outcome(run.outputs(), figures, run.undo)
        except BaseException as error:
            _let_go(error)
            try:
                run.put_back()
            except BaseException as failure:
                raise NotPutBack(type(failure).__name__) from failure
            raise

    def prepare(self, schemas: Mapping[str, pa.Schema]) -> PreparedSet:
        """The functions for events of these types. A kind whose schema lacks its fields has no events, and waits."""
        present = {
            kind: schemas[kind]
            for kind, found in self.found.items()
            if kind in schemas and set(found.fields) <= set(schemas[kind].names)
        }
        key = tuple(
            (kind, tuple(str(schema.field(name).type) for name in self.found[kind].fields))
            for kind, schema in present.items()
        )
        if key not in self._prepared:
            self._prepared[key] = self._prepare(present)
        return self._prepared[key]

    def _prepare(self, schemas: Mapping[str, pa.Schema]) -> PreparedSet:
        functions: dict[str, codegen.TypedFunction] = {}
        slow: dict[str, str] = {}
        for kind, schema in schemas.items():
            found, code = self.found[kind], self.kinds[kind].code
            fields: dict[str, EventField] = {}
            for name in found.fields:
                field = field_of(name, schema.field(name).type)
                if field is None:
                    slow[kind] = f"line {found.tree.lineno}: field {name!r} is {schema.field(name).type}"
                    break
                fields[name] = field
            if kind in slow:
                continue
            names = self.kinds[kind].result_names
            function = codegen.TypedFunction(found, code, fields, tuple(map(self.declared.get, names)))
            finding = codegen.check(function, self.layouts)
            if finding is not None:
                slow[kind] = f"line {finding.line}: {finding.why}"
            else:
                functions[kind] = function
        compiled = self._compiled(functions, slow)
        self._warned(slow)
        return PreparedSet(functions, slow, compiled, self._result_types(functions, compiled))

    def _result_types(
        self, functions: Mapping[str, codegen.TypedFunction], compiled: codegen.CompiledSet | None
    ) -> dict[str, Type]:
        """The types of result columns. Kinds that share a name agree: long and double make double."""
        out: dict[str, Type] = {}
        for number, kind in enumerate(functions):
            assert compiled is not None
            for name, given in zip(self.kinds[kind].result_names, compiled.results[number], strict=True):
                before = out.setdefault(name, given)
                if {before, given} == {"long", "double"}:
                    out[name] = "double"
                elif before != given:
                    raise self._bad_result(name, given, f"{before}, as in another kind")
        declared = {name: column.type for name, column in self.declared.items()}
        for name, wanted in declared.items():
            if out.get(name, wanted) != wanted and (out[name], wanted) != ("long", "double"):
                raise self._bad_result(name, out[name], wanted)
        return out | declared

    def _declared(self) -> dict[str, Column]:
        """What results were said to be, by name."""
        out: dict[str, Column] = {}
        for function in self.kinds.values():
            for name, type_ in zip(function.result_names, function.result_types, strict=True):
                if type_ is None:
                    continue
                if type_of(type_) is None:
                    raise self._bad_result(
                        name, describe_type(type_), "type that a column of a table may have"
                    )
                column = column_of(type_)
                if out.setdefault(name, column) != column:
                    raise self._bad_result(name, column.ddl, f"{out[name].ddl}, as in another kind")
        return out

    def _bad_result(self, name: str, given: str, wanted: str) -> BadTransaction:
        return BadTransaction(
            f"the result {name!r} is a {given}, not a {wanted}",
            hint='results are named and typed as in @transaction(results="balance long, fee double")',
        )

    def _warned(self, slow: dict[str, str]) -> dict[str, str]:
        for kind, why in slow.items():
            text = f"transaction {self.kinds[kind].name!r} runs interpreted: {why}"
            warnings.warn(text, RuleInterpreted, stacklevel=5)
        return slow

    def _compiled(
        self, functions: dict[str, codegen.TypedFunction], slow: dict[str, str]
    ) -> codegen.CompiledSet | None:
        if not functions:
            return None
        decoupled = not slow and all(not self.found[kind].coupling() for kind in functions)
        return codegen.generate(list(functions.values()), self.layouts, decoupled, alone=len(self.kinds) == 1)


def load_transactions(message: TransactionSetCode) -> TransactionSet:
    """A set of transactions that came as text."""
    return TransactionSet({kind: load(code) for kind, code in message.kinds.items()}, message.tables)


def _check_columns(found: Analysis, tables: Mapping[str, TableSpec]) -> None:
    for use in sorted(found.reads | found.writes, key=lambda use: use.line):
        table = found.slots[use.slot].table
        names = tables[table].columns.names
        if use.column not in (*names, WHOLE):
            raise BadTransaction(
                f"transaction {found.name!r}, line {use.line}: table {table!r} has no column {use.column!r}",
                hint=f"its columns are {', '.join(names)}",
                transaction=found.name,
                line=use.line,
            )


def _let_go(error: BaseException | None) -> None:
    """Of what user code held when memory ran out, which is in the frames of its error: to put tables back takes some."""
    if isinstance(error, MemoryError | SystemError):
        traceback.clear_frames(error.__traceback__)
        _let_go(error.__context__)
