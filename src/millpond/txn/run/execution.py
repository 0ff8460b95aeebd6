"""One epoch on its way through its transactions: keys, rows, kernels or the interpreter, and the outputs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.tables import Type, units_of
from millpond.kernels import slot_hashing
from millpond.stores.tables import TableStore, arrow_of
from millpond.stores.threads import in_parts, in_threads, parts_of
from millpond.stores.undo import Undo
from millpond.txn.compiler import arguments, codegen
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.values import (
    COMMITTED,
    FIRST_ABORT,
    FIRST_MISSING,
    REASONS,
    RETURNED,
    is_decimal,
    scale_of,
)
from millpond.txn.run import grouping, plans
from millpond.txn.run.events import EpochEvents
from millpond.txn.run.interpreter import InterpretedFunction, ResultTypes
from millpond.txn.run.watch import NOT_BEGUN, Watch

if TYPE_CHECKING:
    from millpond.txn.run.transaction_set import PreparedSet, TransactionSet

Longs = NDArray[np.int64]
Touched = tuple[Longs, NDArray[np.uint8]]
_NO_LONGS: Longs = np.empty(0, np.int64)
_ARROW: dict[Type, pa.DataType] = {
    "long": pa.int64(), "double": pa.float64(), "bool": pa.bool_(), "string": pa.string()
}  # fmt: skip
_LONG_DIGITS = 19
_OTHER = FIRST_ABORT + codegen.ABORTS_PER_KIND * 10_000  # statuses of interpreted aborts


def _dtype(type_: Type) -> Any:
    return np.float64 if type_ == "double" else np.int64


def _arrow_type(type_: Type) -> pa.DataType:
    """Of results that were not said to be of another."""
    if is_decimal(type_):
        scale = scale_of(type_)
        return pa.decimal128(_LONG_DIGITS if scale <= _LONG_DIGITS else 38, scale)
    return _ARROW[type_]


class EpochRun:
    """All state of one run."""

    def __init__(
        self,
        transactions: TransactionSet,
        prepared: PreparedSet,
        epoch: EpochEvents,
        stores: Mapping[str, TableStore],
        threads: int,
        watch: Watch | None = None,
    ) -> None:
        self.transactions = transactions
        self.prepared = prepared
        self.epoch = epoch
        self.stores = [stores[name] for name in transactions.tables]
        self.threads = max(1, threads)
        self.strings = self.stores[0].strings
        self.undo = Undo({name: stores[name] for name in transactions.tables})
        count = len(epoch.order)
        self.watch = watch
        self.status = np.full(count, NOT_BEGUN, np.int32)
        self.detail = np.zeros(count, np.int64)
        self.kinds = list(transactions.kinds)
        self.results: dict[int, list[NDArray[Any]]] = {}
        self.nulls: dict[tuple[int, int], NDArray[np.uint8]] = {}  # of results, where some are None
        self.result_types: dict[str, Type] = dict(prepared.results)
        self.spoken: dict[int, str] = {}  # reasons that only the interpreter knows
        self._touch_count = 0

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
        work = self._work(compiled, args)
        self._compile(args)
        with self._running():
            figures = plans.run(work, plan)
        self._take_in()
        return {**figures.as_dict(), "interpreted": {}}

    def _take_in(self) -> None:
        for store in self.stores:
            store.take_in()

    def _running(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.running(self)

    # Compiled

    def _compile(self, args: Mapping[str, Any]) -> None:
        """Before anything has changed; and where time is limited, before it counts."""
        compiled = self.prepared.compiled
        if compiled is not None and self.watch is not None and self.watch.limited:
            for body in (compiled.body, *(() if compiled.apart is None else (compiled.apart,))):
                codegen.run_body(body, {**args, "parts": 1, "part": 0}, np.arange(0))

    def work(self) -> plans.CompiledEpoch:
        """The epoch with its keys resolved, where all its kinds are compiled."""
        assert self.prepared.compiled is not None
        numbers = {kind: number for number, kind in enumerate(self.prepared.functions)}
        return self._work(self.prepared.compiled, self._arguments(numbers))

    def _arguments(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """The arguments of the body kernel. Row numbers are given out first: cells move as tables grow."""
        compiled = self.prepared.compiled
        assert compiled is not None
        for store in self.stores:
            store.settle()
        own, places = np.arange(len(self.kinds)), np.full(len(self.kinds), -1, np.int64)
        for kind, number in numbers.items():
            places[self.kinds.index(kind)] = number
        args: dict[str, Any] = {
            "kinds": self.epoch.kind_of if (places == own).all() else places[self.epoch.kind_of],
            "index": self.epoch.place_of,
            "status": self.status,
            "detail": self.detail,
            "strings": np.array([self.strings.number(text) for text in compiled.strings] or [0], np.int64),
        }
        for kind, number in numbers.items():
            k = self.kinds.index(kind)
            fields = list(self.prepared.functions[kind].fields.values())
            args |= self.epoch.kinds[k].arrays(number, fields, self.strings)
            if compiled.keys[number] is not None:
                self._resolve(k, number, args)
            types = compiled.results[number]
            self.results[k] = [np.zeros(len(self.epoch.kinds[k].numbers), _dtype(type_)) for type_ in types]
            for place, array in enumerate(self.results[k]):
                args[arguments.result(number, place)] = array
                null = arguments.null_result(number, place)
                if null in compiled.body.parameters:
                    args[null] = self.nulls[k, place] = np.zeros(len(array), np.uint8)
        self._keep_written(numbers, args)
        return args | self._cells()

    def _keep_written(self, numbers: Mapping[str, int], args: Mapping[str, Any]) -> None:
        """Keeps the rows that compiled events may write to."""
        written: dict[str, set[tuple[int, int, int]]] = {name: set() for name in self.transactions.tables}
        for kind, number in numbers.items():
            facts = self.prepared.functions[kind].found
            if facts.is_late:
                continue  # it keeps the rows that it comes to
            # Among the frames of loops, rows have no fixed places: there, every number is taken for a row.
            for slot in {facts.slots[use.slot] for use in facts.writes}:
                place = (0, 1) if facts.has_frames else (slot.place, facts.frame_sizes[0])
                written[slot.table].add((number, *place))
        for name, store in zip(self.transactions.tables, self.stores, strict=True):
            if written[name]:
                rows = [(args[arguments.slots(number)], start, step) for number, start, step in written[name]]
                self.undo.tables[name].keep(store, rows)

    def _cells(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for number, store in enumerate(self.stores):
            out |= {
                arguments.cells(number): store.cells,
                arguments.doubles(number): store.doubles,
                arguments.first_row(number): store.first,
                arguments.known_rows(number): store.known,
                arguments.row_slots(number): store.index.slots,
                arguments.row_keys(number): store.index.room,
                arguments.row_count(number): store.index.control,
            }
            undo = self.undo.tables[list(self.transactions.tables)[number]]
            out |= dict(zip(arguments.kept(number), undo.late, strict=True))
        return {**out, "secret": slot_hashing.SECRET}

    def _more(self) -> dict[str, Any]:
        """Room for rows that events come to as they run."""
        for name, store in zip(self.transactions.tables, self.stores, strict=True):
            store.make_room()
            self.undo.tables[name].make_room()
        return self._cells()

    def _resolve(self, k: int, number: int, args: dict[str, Any]) -> None:
        """The rows of all keys that the events of a kind may touch, in their places."""
        known = [store.known for store in self.stores]
        found = self._keys(k, number, args, known)
        for table, keys, places in found.asked:
            if len(keys):
                rows = self.stores[table].resolve(keys, self.threads)
                grouping.spread_rows(places, rows, found.flat)
        args |= {arguments.slots(number): found.flat, arguments.first_slots(number): found.offsets}
        self._touch_count += found.touches

    def _keys(self, k: int, number: int, given: Mapping[str, Any], known: list[Longs]) -> _Keys:
        compiled = self.prepared.compiled
        assert compiled is not None
        keys = compiled.keys[number]
        assert keys is not None
        kernel = codegen.kernel(keys.source, "keys")
        count = len(self.epoch.kinds[k].numbers)
        facts = self.prepared.functions[self.kinds[k]].found
        fields = self.prepared.functions[self.kinds[k]].fields.values()
        sizes = [given[arguments.list_offsets(number, field.name)] for field in fields if field.is_list]
        rows = given[arguments.event_rows(number)]
        items = [offsets[rows + 1] - offsets[rows] for offsets in sizes]
        given = {**given, **{arguments.known_rows(table): rows for table, rows in enumerate(known)}}
        bounds = np.linspace(0, count, parts_of(count, self.threads) + 1).astype(np.int64)
        ahead = 1
        while True:
            rooms = [ahead * _room(facts, int(lo), int(hi), items) for lo, hi in pairwise(bounds)]
            starts = np.concatenate([[0], np.cumsum(rooms)])
            flat = np.empty(starts[-1], np.int64)
            offsets = np.empty(count if facts.has_frames else 0, np.int64)

            def part(lo: int, hi: int, start: int, stop: int) -> Any:
                own = {"lo": lo, "hi": hi, "flat": flat[start:stop], "offsets": offsets[lo:hi]}  # noqa: B023
                return kernel(*({**given, **own}[name] for name in keys.parameters))

            spans = zip(pairwise(bounds), pairwise(starts), strict=True)
            tasks = [partial(part, int(lo), int(hi), int(a), int(b)) for (lo, hi), (a, b) in spans]
            if self.watch is not None and self.watch.limited:
                part(0, 0, 0, 0)  # compiles, before time counts
                marks = offsets if facts.has_frames else flat
                marks.fill(NOT_BEGUN)
                size = 1 if facts.has_frames else max(1, facts.frame_sizes[0])
                at = partial(_last_begun, marks, [(int(lo), int(hi)) for lo, hi in pairwise(bounds)], size)
                running: AbstractContextManager[None] = self.watch.finding_keys(self, k, at)
            else:
                running = self._running()
            with running:
                found = in_threads(tasks)
            if all(out[0] >= 0 for out in found):
                break
            ahead *= 4
        for lo, hi, start in zip(bounds, bounds[1:], starts, strict=False):
            offsets[lo:hi] += start
        asked = []
        for place, table in enumerate(keys.tables):
            columns = [out[2 + 3 * place : 5 + 3 * place] for out in found]
            wanted = np.concatenate([c[0][: c[2]] for c in columns])
            ats = [c[1][: c[2]] + 2 * start for c, start in zip(columns, starts, strict=False)]
            asked.append((table, wanted, np.concatenate(ats)))
        return _Keys(flat, offsets, sum(int(out[1]) for out in found), asked)

    def _all_touches(self, args: Mapping[str, Any]) -> plans.Touches:
        """Which event touches which row: all keys are asked for once more, as if none were known."""
        base = np.concatenate([[0], np.cumsum([len(store.index) for store in self.stores])])
        events, rows, writes = [_NO_LONGS], [_NO_LONGS], [np.empty(0, np.uint8)]
        for number, kind in enumerate(self.prepared.functions):
            if self.prepared.functions[kind].found.is_late:
                continue
            k = self.kinds.index(kind)
            where = np.flatnonzero(self.epoch.kind_of == k)
            found = self._keys(k, number, args, [_NO_LONGS] * len(self.stores))
            size = self.prepared.functions[kind].found.frame_sizes[0]
            for table, _, places in found.asked:
                event, write = _touched(places, found.offsets, size)
                events.append(where[event])
                writes.append(write)
                rows.append(args[arguments.slots(number)][places >> 1] + base[table])
        return plans.Touches(
            np.concatenate(events), np.concatenate(rows), np.concatenate(writes), int(base[-1])
        )

    def _work(self, compiled: codegen.CompiledSet, args: Mapping[str, Any]) -> plans.CompiledEpoch:
        found = [self.prepared.functions[kind].found for kind in self.prepared.functions]
        count = len(self.status)
        return plans.CompiledEpoch(
            events=count,
            body=compiled.body,
            apart=compiled.apart,
            single=tuple(f.single for f in found),
            weight=float(np.mean([_weight(f.tree) for f in found])),
            args=args,
            stores=self.stores,
            put_back=self.put_back,
            touches=partial(self._all_touches, args),
            touch_count=self._touch_count,
            kind_of=np.asarray(args["kinds"]),
            threads=self.threads if count else 1,
            is_late=self._is_late(),
            more=self._more,
            watch=self.watch,
        )

    def _is_late(self) -> bool:
        """Whether some of the compiled events find their rows as they run."""
        return any(
            function.found.is_late and len(self.epoch.kinds[self.kinds.index(kind)].numbers)
            for kind, function in self.prepared.functions.items()
        )

    def put_back(self) -> None:
        self.undo.put_back(dict(zip(self.transactions.tables, self.stores, strict=True)))

    # Interpreted

    def _interleaved(self, args: dict[str, Any], numbers: Mapping[str, int]) -> None:
        """In time order: compiled events in runs, the others one by one."""
        stores = dict(zip(self.transactions.tables, self.stores, strict=True))
        functions: dict[int, InterpretedFunction] = {}
        results = ResultTypes(self.prepared.results, self.transactions.declared)
        columns: dict[int, list[list[Any]]] = {}
        values: dict[int, list[tuple[Any, ...] | None]] = {}
        for k, kind in enumerate(self.kinds):
            if kind not in numbers and len(self.epoch.kinds[k].numbers):
                found = self.transactions.found[kind]
                functions[k] = InterpretedFunction(
                    self.transactions.kinds[kind], found, stores, self.undo, results
                )
                columns[k] = [self.epoch.kinds[k].values(name) for name in found.fields]
                values[k] = [None] * len(self.epoch.kinds[k].numbers)
        if self.prepared.compiled is not None:
            self._call(args, np.arange(0))  # compiles, before anything has changed
        with self._running():
            self._in_order(args, functions, columns, values)
        self.result_types = results.types
        for k, rows in values.items():
            self._keep_results(k, rows)

    def _in_order(
        self,
        args: dict[str, Any],
        functions: Mapping[int, InterpretedFunction],
        columns: Mapping[int, list[list[Any]]],
        values: Mapping[int, list[tuple[Any, ...] | None]],
    ) -> None:
        is_slow = np.isin(self.epoch.kind_of, list(functions))
        done = 0
        for e in np.flatnonzero(is_slow):
            self._compiled_run(args, done, int(e))
            done = int(e) + 1
            k, i = int(self.epoch.kind_of[e]), int(self.epoch.place_of[e])
            names = self.transactions.found[self.kinds[k]].fields
            fields = dict(zip(names, (column[i] for column in columns[k]), strict=True))
            self.status[e] = COMMITTED
            with self._passing(np.array([e])):
                reason, out = functions[k].run(fields)
            if reason is not None:
                self.status[e] = _OTHER
                self.spoken[int(e)] = reason
            elif out is not None:
                self.status[e] = RETURNED
                values[k][i] = out
        self._compiled_run(args, done, len(self.status))

    def _passing(self, todo: Longs) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.passing(todo, self.status)

    def _compiled_run(self, args: dict[str, Any], start: int, stop: int) -> None:
        if stop > start:
            self._call(args, np.arange(start, stop))

    def _call(self, args: dict[str, Any], todo: Longs) -> None:
        assert self.prepared.compiled is not None
        given = {**args, **self._cells(), "parts": 1, "part": 0}
        with self._passing(todo):
            codegen.run_body(self.prepared.compiled.body, given, todo, self._more)
        self._take_in()

    def _keep_results(self, k: int, rows: list[tuple[Any, ...] | None]) -> None:
        """Results of the interpreter as arrays, of the types that it found."""
        self.results[k] = []
        for place, name in enumerate(self.transactions.kinds[self.kinds[k]].result_names):
            given = [None if row is None else row[place] for row in rows]
            type_ = self.result_types.get(name, "long")
            self.nulls[k, place] = np.array([value is None for value in given], np.uint8)
            if is_decimal(type_):
                units = [0 if value is None else units_of(value, scale_of(type_)) for value in given]
                array = np.array(units, np.int64)
            elif type_ == "string":
                array = self.strings.intern(pa.array(["" if value is None else value for value in given]))
            else:
                array = np.array([0 if value is None else value for value in given], _dtype(type_))
            self.results[k].append(array)

    # Outputs

    def outputs(self) -> pa.Table:
        count = self.epoch.count
        reasons = self._reasons()
        columns = {
            "event": pa.array(np.arange(count)),
            "committed": reasons.is_null(),
            "reason": reasons,
        }
        return pa.table(columns | self._result_columns())

    def _reasons(self) -> pa.Array:
        """The reason of each event, null where it committed. Most share a few texts."""
        known = {**REASONS, **(self.prepared.compiled.reasons if self.prepared.compiled is not None else {})}
        texts = list(known.values())
        failed = np.flatnonzero(self.status > COMMITTED)
        if not len(failed) and not self.spoken and not self.epoch.reasons:
            return pa.nulls(self.epoch.count, pa.string())
        code = np.full(self.epoch.count, -1, np.int32)
        if len(failed):
            status = self.status[failed]
            beyond = max(known) + 1  # what the interpreter found is told below
            place_of = np.full(beyond + 1, -1, np.int64)
            place_of[list(known)] = np.arange(len(known))
            code[self.epoch.order[failed]] = place_of[np.minimum(status, beyond)]
            missing = failed[_is_missing(status)]
            texts += self._missing_keys(missing, len(texts), code)
        said = {int(self.epoch.order[e]): text for e, text in self.spoken.items()} | self.epoch.reasons
        for event, text in said.items():
            code[event] = len(texts)
            texts.append(text)
        # User code may have put into a reason what is no text.
        texts = [text.encode(errors="backslashreplace").decode() for text in texts]
        return pa.array(texts, pa.string()).take(arrow_of(code, pa.int32(), (code >= 0).view(np.uint8)))

    def _missing_keys(self, missing: Longs, first: int, code: NDArray[np.int32]) -> list[str]:
        """Reasons that name a key, a text for each key; the codes of their events are set."""
        tables = self.status[missing].astype(np.int64) - FIRST_MISSING
        pairs, which = np.unique(tables << 48 | self.detail[missing], return_inverse=True)
        code[self.epoch.order[missing]] = first + which
        names = list(self.transactions.tables)
        found = [(pair >> 48, pair & ((1 << 48) - 1)) for pair in pairs.tolist()]
        return [f"no such key {self.stores[t].key_of(row)!r} in {names[t]}" for t, row in found]

    def _result_columns(self) -> dict[str, pa.Array]:
        """Results by name. Kinds that use one name agree on its type: long and double make double."""
        found: dict[str, list[tuple[int, int]]] = {}
        for k, kind in enumerate(self.kinds):
            for place, name in enumerate(self.transactions.kinds[kind].result_names):
                found.setdefault(name, []).append((k, place))
        return {name: self._result_column(name, uses) for name, uses in found.items()}

    def _result_column(self, name: str, uses: list[tuple[int, int]]) -> pa.Array:
        type_ = self.result_types.get(name, "long")
        declared = [self.transactions.kinds[self.kinds[k]].result_types[place] for k, place in uses]
        count, epoch = self.epoch.count, self.epoch
        values, valid = np.zeros(count, _dtype(type_)), np.zeros(count, np.uint8)
        for k, place in uses:
            if k in self.results:
                put = partial(
                    grouping.put_results,
                    epoch.order,
                    epoch.kind_of,
                    epoch.place_of,
                    self.status,
                    k,
                    RETURNED,
                    self.results[k][place],
                    values,
                    valid,
                )
                in_parts(put, len(epoch.order), self.threads)
            if (k, place) in self.nulls:
                valid[epoch.kinds[k].numbers[self.nulls[k, place] != 0]] = 0
        arrow = next((found for found in declared if found is not None), _arrow_type(type_))
        if type_ != "string":
            return arrow_of(values, arrow, valid)
        rows = pa.array(np.arange(count), mask=valid == 0)
        return self.strings.take(values).take(rows).cast(arrow)


class _Keys(NamedTuple):
    """The keys of a kind's events: rows in their places, and by table the keys whose rows are not known, with places."""

    flat: Longs
    offsets: Longs
    touches: int
    asked: list[tuple[int, Longs, Longs]]


def _last_begun(marks: Longs, spans: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Of each span of events, the last whose keys a kernel has begun to find, but for spans that are surely done.

    Each event has `size` marks.
    """
    lasts = []
    for lo, hi in spans:
        begun = np.flatnonzero(marks[lo * size : hi * size : size] != NOT_BEGUN)
        lasts += [(lo + int(begun[-1]), hi)] if len(begun) else []
    amid = [last for last, end in lasts if last < end - 1]
    return amid or [last for last, _ in lasts]


def _room(facts: Analysis, lo: int, hi: int, sizes: list[Longs]) -> int:
    """Places for the keys of events: enough where each loop goes over a list once, a guess where not."""
    items = max((int(size[lo:hi].sum()) for size in sizes), default=0)
    return (hi - lo) * facts.frame_sizes[0] + max(items, hi - lo) * sum(facts.frame_sizes[1:])


def _touched(places: Longs, offsets: Longs, size: int) -> Touched:
    """The events of rows that lie at `places`, whose last bit says whether they may be written to."""
    if len(offsets):
        event = np.empty(len(places), np.int64)
        grouping.events_of(places, offsets, event)
    else:
        event = (places >> 1) // size
    return event, (places & 1).astype(np.uint8)


def _is_missing(status: NDArray[np.int32]) -> NDArray[np.bool_]:
    return (status >= FIRST_MISSING) & (status < FIRST_ABORT)


def _weight(tree: ast.FunctionDef) -> float:
    """Steps of a function beyond its touches of rows, in nanoseconds, roughly."""
    cost = {ast.BinOp: 1.0, ast.Compare: 1.0, ast.Div: 8.0, ast.FloorDiv: 8.0, ast.Mod: 8.0, ast.Call: 10.0}
    return sum(cost.get(type(node), 0.0) for node in ast.walk(tree))
