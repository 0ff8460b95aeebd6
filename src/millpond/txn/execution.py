"""One epoch on its way through a program: keys, rows, kernels or the interpreter, and the outputs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.txn import codegen, grouping, plans
from millpond.txn._code import COMMITTED, FIRST_ABORT, FIRST_MISSING, REASONS, RETURNED, Type
from millpond.txn._threads import in_parts
from millpond.txn.events import Epoch, one
from millpond.txn.facts import Analysis
from millpond.txn.interpreter import Interpreted, ResultTypes
from millpond.txn.tables import TableStore

if TYPE_CHECKING:
    from millpond.txn.program import Prepared, Program

Longs = NDArray[np.int64]
Touched = tuple[Longs, NDArray[np.uint8]]
_NO_LONGS: Longs = np.empty(0, np.int64)
_DTYPE: dict[Type, Any] = {"long": np.int64, "double": np.float64, "bool": np.int64, "string": np.int64}
ARROW: dict[Type, pa.DataType] = {
    "long": pa.int64(), "double": pa.float64(), "bool": pa.bool_(), "string": pa.string()
}  # fmt: skip
_OTHER = FIRST_ABORT + codegen.ABORTS_PER_KIND * 10_000  # statuses of interpreted aborts


class Run:
    """All state of one run."""

    def __init__(
        self,
        program: Program,
        prepared: Prepared,
        epoch: Epoch,
        stores: Mapping[str, TableStore],
        threads: int,
    ) -> None:
        self.program = program
        self.prepared = prepared
        self.epoch = epoch
        self.stores = [stores[name] for name in program.tables]
        self.threads = max(1, threads)
        self.strings = self.stores[0].strings if self.stores else None
        count = len(epoch.order)
        self.status = np.zeros(count, np.int32)
        self.detail = np.zeros(count, np.int64)
        self.kinds = list(program.kinds)
        self.results: dict[int, list[NDArray[Any]]] = {}
        self.result_types: dict[str, Type] = dict(prepared.results)
        self.spoken: dict[int, str] = {}  # reasons that only the interpreter knows
        self._touches: list[tuple[int, Longs | None, Longs, Callable[[], Touched]]] = []

    def execute(self, plan: str | None) -> dict[str, Any]:
        compiled = self.prepared.compiled
        numbers = {kind: number for number, kind in enumerate(self.prepared.functions)}
        args = self._arguments(numbers) if compiled is not None else {}
        slow = [
            k for k, kind in enumerate(self.kinds) if kind not in numbers and len(self.epoch.kinds[k].numbers)
        ]
        if slow:
            self._interleaved(args, numbers)
            return {
                **plans.Figures("serial", len(self.status)).as_dict(),
                "interpreted": dict(self.prepared.slow),
            }
        if compiled is None:
            return plans.Figures("serial", len(self.status)).as_dict()
        return {**plans.run(self._work(compiled, args), plan).as_dict(), "interpreted": {}}

    # Compiled

    def _arguments(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """The arguments of the body kernel. Row numbers are given out first: cells move as tables grow."""
        compiled = self.prepared.compiled
        assert compiled is not None
        assert self.strings is not None
        places = np.full(len(self.kinds), -1, np.int64)
        for kind, number in numbers.items():
            places[self.kinds.index(kind)] = number
        args: dict[str, Any] = {
            "kinds": places[self.epoch.kind_of],
            "index": self.epoch.place_of,
            "status": self.status,
            "detail": self.detail,
            "strings": np.array([self.strings.number(text) for text in compiled.strings] or [0], np.int64),
        }
        for kind, number in numbers.items():
            k = self.kinds.index(kind)
            fields = list(self.prepared.functions[kind].fields.values())
            arrays = self.epoch.kinds[k].arrays(number, fields, self.strings)
            self._resolve(k, number, {**args, **arrays}, args)
            args |= arrays
            types = compiled.results[number]
            self.results[k] = [np.zeros(len(self.epoch.kinds[k].numbers), _DTYPE[type_]) for type_ in types]
            args |= {f"out{number}_{place}": array for place, array in enumerate(self.results[k])}
        return args | self._cells()

    def _cells(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for number, store in enumerate(self.stores):
            out |= {f"c_{number}": store.cells, f"d_{number}": store.doubles}
        return out

    def _resolve(self, k: int, number: int, given: Mapping[str, Any], args: dict[str, Any]) -> None:
        """The rows of all keys that the events of a kind may touch, in their places."""
        compiled = self.prepared.compiled
        assert compiled is not None
        keys = compiled.keys[number]
        function = codegen.kernel(keys.source, "keys")
        count = len(self.epoch.kinds[k].numbers)
        facts = self.prepared.functions[self.kinds[k]].found
        fields = self.prepared.functions[self.kinds[k]].fields.values()
        lists = [given[f"o{number}_{field.name}"] for field in fields if field.is_list]

        def part(lo: int, hi: int) -> Any:
            room = _room(facts, lo, hi, lists)
            return function(lo, hi, room, *(given[name] for name in keys.parameters[3:]))

        found = in_parts(part, count, self.threads)
        ends = [int(out[1]) for out in found]
        starts = np.concatenate([[0], np.cumsum(ends)])
        flats = [out[0][:end] for out, end in zip(found, ends, strict=True)]
        flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
        offsets = np.concatenate([out[2] + start for out, start in zip(found, starts[:-1], strict=True)])
        size = facts.frame_sizes[0]
        where = np.flatnonzero(self.epoch.kind_of == k) if len(self.kinds) > 1 else None
        if keys.dense:
            flat = self.stores[keys.tables[0]].resolve(flat, self.threads)
            self._note(keys.tables[0], where, flat, partial(_touched_densely, facts, len(flat)))
        else:
            for place, table in enumerate(keys.tables):
                columns = [out[3 + 3 * place : 6 + 3 * place] for out in found]
                wanted = np.concatenate([c[0][: c[2]] for c in columns])
                places = np.concatenate(
                    [c[1][: c[2]] + 2 * start for c, start in zip(columns, starts[:-1], strict=True)]
                )
                rows = self.stores[table].resolve(wanted, self.threads)
                grouping.spread_rows(places, rows, flat)
                self._note(table, where, rows, partial(_touched, places, offsets, size))
        args |= {f"flat_{number}": flat, f"events_{number}": offsets}

    def _note(self, table: int, where: Longs | None, rows: Longs, events: Callable[[], Touched]) -> None:
        """Keeps what is needed to tell, should a plan ask, which event touches which row."""
        if len(rows):
            self._touches.append((table, where, rows, events))

    def _all_touches(self) -> plans.Touches:
        base = np.concatenate([[0], np.cumsum([len(store.index) for store in self.stores])])
        events, rows, writes = [_NO_LONGS], [_NO_LONGS], [np.empty(0, np.uint8)]
        for table, where, found, touched in self._touches:
            event, write = touched()
            events.append(event if where is None else where[event])
            writes.append(write)
            rows.append(found + base[table])
        return plans.Touches(
            np.concatenate(events), np.concatenate(rows), np.concatenate(writes), int(base[-1])
        )

    def _work(self, compiled: codegen.Compiled, args: Mapping[str, Any]) -> plans.Work:
        found = [self.prepared.functions[kind].found for kind in self.prepared.functions]
        tables = list(self.program.tables)
        written = {f.slots[use.slot].table for f in found for use in f.writes}
        count = len(self.status)
        return plans.Work(
            events=count,
            body=compiled.body,
            apart=compiled.apart,
            single=tuple(f.single for f in found),
            weight=float(np.mean([_weight(f.tree) for f in found])),
            args=args,
            stores=self.stores,
            written=[name in written for name in tables],
            touches=self._all_touches,
            touch_count=sum(len(touch[2]) for touch in self._touches),
            kind_of=np.asarray(args["kinds"]),
            threads=self.threads if count else 1,
        )

    # Interpreted

    def _interleaved(self, args: dict[str, Any], numbers: Mapping[str, int]) -> None:
        """In time order: compiled events in runs, the others one by one."""
        stores = dict(zip(self.program.tables, self.stores, strict=True))
        functions: dict[int, Interpreted] = {}
        results = ResultTypes(self.prepared.results)
        columns: dict[int, list[list[Any]]] = {}
        values: dict[int, list[tuple[Any, ...] | None]] = {}
        for k, kind in enumerate(self.kinds):
            if kind not in numbers and len(self.epoch.kinds[k].numbers):
                found = self.program.found[kind]
                functions[k] = Interpreted(self.program.kinds[kind], found, stores, results)
                columns[k] = [_plain(self.epoch.kinds[k].field(name)) for name in found.fields]
                values[k] = [None] * len(self.epoch.kinds[k].numbers)
        if self.prepared.compiled is not None:
            self._call(args, np.arange(0))  # compiles, before anything has changed
        is_slow = np.isin(self.epoch.kind_of, list(functions))
        done = 0
        for e in np.flatnonzero(is_slow):
            self._compiled_run(args, done, int(e))
            done = int(e) + 1
            k, i = int(self.epoch.kind_of[e]), int(self.epoch.place_of[e])
            names = self.program.found[self.kinds[k]].fields
            fields = dict(zip(names, (column[i] for column in columns[k]), strict=True))
            reason, out = functions[k].run(fields)
            if reason is not None:
                self.status[e] = _OTHER
                self.spoken[int(e)] = reason
            elif out is not None:
                self.status[e] = RETURNED
                values[k][i] = out
        self._compiled_run(args, done, len(self.status))
        self.result_types = results.types
        for k, rows in values.items():
            self._keep_results(k, rows)

    def _compiled_run(self, args: dict[str, Any], start: int, stop: int) -> None:
        if stop > start:
            self._call(args, np.arange(start, stop))

    def _call(self, args: dict[str, Any], todo: Longs) -> None:
        assert self.prepared.compiled is not None
        body = self.prepared.compiled.body
        given = {**args, **self._cells(), "todo": todo, "parts": 1, "part": 0}
        codegen.kernel(body.source, "body")(*(given[name] for name in body.parameters))

    def _keep_results(self, k: int, rows: list[tuple[Any, ...] | None]) -> None:
        """Results of the interpreter as arrays, of the types that it found."""
        self.results[k] = []
        assert self.strings is not None
        for place, name in enumerate(self.program.kinds[self.kinds[k]].result_names):
            given = [None if row is None else row[place] for row in rows]
            type_ = self.result_types.get(name, "long")
            if type_ == "string":
                array = self.strings.intern(pa.array(["" if value is None else value for value in given]))
            else:
                array = np.array([0 if value is None else value for value in given], _DTYPE[type_])
            self.results[k].append(array)

    # Outputs

    def outputs(self) -> pa.Table:
        count = self.epoch.count
        reasons = self._reasons()
        columns = {
            "event": pa.array(np.arange(count)),
            "committed": pa.array(np.asarray(reasons.is_null())),
            "reason": reasons,
        }
        return pa.table(columns | self._result_columns())

    def _reasons(self) -> pa.Array:
        """The reason of each event, null where it committed. Most share a few texts."""
        known = {**REASONS, **(self.prepared.compiled.reasons if self.prepared.compiled is not None else {})}
        texts = list(known.values())
        code = np.full(self.epoch.count, -1, np.int64)
        failed = np.flatnonzero(self.status > COMMITTED)
        if len(failed):
            status = self.status[failed]
            place_of = np.full(max(*known, int(status.max())) + 1, -1, np.int64)
            place_of[list(known)] = np.arange(len(known))
            code[self.epoch.order[failed]] = place_of[status]
            missing = failed[_is_missing(status)]
            texts += self._missing_keys(missing, len(texts), code)
        said = {int(self.epoch.order[e]): text for e, text in self.spoken.items()} | self.epoch.reasons
        for event, text in said.items():
            code[event] = len(texts)
            texts.append(text)
        return pa.array(texts, pa.string()).take(pa.array(code, mask=code < 0))

    def _missing_keys(self, missing: Longs, first: int, code: Longs) -> list[str]:
        """Reasons that name a key, a text for each key; the codes of their events are set."""
        tables = self.status[missing].astype(np.int64) - FIRST_MISSING
        pairs, which = np.unique(tables << 48 | self.detail[missing], return_inverse=True)
        code[self.epoch.order[missing]] = first + which
        names = list(self.program.tables)
        found = [(pair >> 48, pair & ((1 << 48) - 1)) for pair in pairs.tolist()]
        return [f"no such key {self.stores[t].key_of(row)!r} in {names[t]}" for t, row in found]

    def _result_columns(self) -> dict[str, pa.Array]:
        """Results by name. Kinds that use one name agree on its type: long and double make double."""
        found: dict[str, list[tuple[int, int]]] = {}
        for k, kind in enumerate(self.kinds):
            for place, name in enumerate(self.program.kinds[kind].result_names):
                found.setdefault(name, []).append((k, place))
        return {name: self._result_column(name, uses) for name, uses in found.items()}

    def _result_column(self, name: str, uses: list[tuple[int, int]]) -> pa.Array:
        type_ = self.result_types.get(name, "long")
        declared = [self.program.kinds[self.kinds[k]].result_types[place] for k, place in uses]
        values = np.zeros(self.epoch.count, _DTYPE[type_])
        valid = np.zeros(self.epoch.count, np.bool_)
        returned = self.status == RETURNED
        for k, place in uses:
            if k in self.results:
                mine = self.epoch.kinds[k].numbers
                values[mine] = self.results[k][place]
                here = self.epoch.order[returned & (self.epoch.kind_of == k)]
                valid[here] = True
        if type_ == "string":
            assert self.strings is not None
            out = self.strings.take(np.where(valid, values, 0)).take(
                pa.array(np.arange(self.epoch.count), mask=~valid)
            )
        else:
            out = pa.array(values != 0 if type_ == "bool" else values, mask=~valid)
        return out.cast(next((found for found in declared if found is not None), ARROW[type_]))


def _room(facts: Analysis, lo: int, hi: int, lists: list[Longs]) -> int:
    """Places for the keys of events: enough where each loop goes over a list once, a guess where not."""
    items = max((int(offsets[hi] - offsets[lo]) for offsets in lists), default=0)
    return (hi - lo) * facts.frame_sizes[0] + max(items, hi - lo) * sum(facts.frame_sizes[1:])


def _touched_densely(facts: Analysis, count: int) -> Touched:
    """The events of rows that lie in the same places for each, and whether they may write to them."""
    size = facts.frame_sizes[0]
    writes = np.zeros(size, np.uint8)
    for use in facts.writes:
        writes[facts.slots[use.slot].place] = 1
    return np.arange(count) // size, np.tile(writes, count // size)


def _touched(places: Longs, offsets: Longs, size: int) -> Touched:
    """As above, for rows that lie at `places`, whose last bit says whether they may be written to."""
    if len(offsets):
        event = np.empty(len(places), np.int64)
        grouping.events_of(places, offsets, event)
    else:
        event = (places >> 1) // size
    return event, (places & 1).astype(np.uint8)


def _is_missing(status: NDArray[np.int32]) -> NDArray[np.bool_]:
    return (status >= FIRST_MISSING) & (status < FIRST_ABORT)


def _plain(column: pa.Array) -> list[Any]:
    """Values as the interpreter gives them to user code: timestamps and dates as numbers."""
    type_ = column.type
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = type_.value_type
        if pa.types.is_timestamp(inner) or pa.types.is_date32(inner):
            column = column.cast(pa.list_(pa.int64() if pa.types.is_timestamp(inner) else pa.int32()))
    elif pa.types.is_timestamp(type_):
        column = column.cast(pa.timestamp("us", tz=type_.tz)).cast(pa.int64())
    elif pa.types.is_date32(type_):
        column = column.cast(pa.int32())
    found: list[Any] = one(column).to_pylist()
    return found


def _weight(tree: ast.FunctionDef) -> float:
    """Steps of a function beyond its touches of rows, in nanoseconds, roughly."""
    cost = {ast.BinOp: 1.0, ast.Compare: 1.0, ast.Div: 8.0, ast.FloorDiv: 8.0, ast.Mod: 8.0, ast.Call: 10.0}
    return sum(cost.get(type(node), 0.0) for node in ast.walk(tree))
