"""Direct calls of a program's methods that write: they are committed in groups, as epochs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import (
    BadOption,
    EpochChanged,
    EpochOutOfOrder,
    MillpondError,
    OtherQuery,
    Rejected,
    Unavailable,
    WriteFailed,
)
from millpond.ops.direct import checked
from millpond.ops.program import ProgramCall
from millpond.programs.graph import Method
from millpond.programs.rows import ERROR, ONCE, arrow_type, as_value, in_table
from millpond.wire.epochs import AskTurns
from millpond.wire.house import Forget

# Of clients that were not closed, so many are remembered at least.
CLIENTS_KEPT = 64
RESULT, CALL = "_result", "_call"
NAME_MAX = 64


class _Waiting:
    """A call that is to be committed, and what came of it."""

    def __init__(self, row: Mapping[str, pa.Array], key: str | None) -> None:
        self.row = row
        self.key = key
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        self.done, self.result, self.error = True, result, error

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class DirectWrites:
    """Calls of one method: while one group is committed, the next one gathers. Each client is a query of its own.

    Calls that come `once` bring an idempotency key: of those with the same one, the first alone takes effect.
    """

    def __init__(self, client: Client, call: ProgramCall, method: Method, *, once: bool = False) -> None:
        self._client = client
        self._call = call
        self._method = method
        self._once = once
        self._begin_query()
        self._lock = client.runtime.lock()
        self._committing = client.runtime.lock()
        self._waiting: list[_Waiting] = []
        # A group of which nobody knows whether it was decided: its number is its own until that is known.
        self._doubtful: pa.Table | None = None

    def call(self, arguments: Mapping[str, Any], key: str | None = None) -> Any:
        """When it returns, what it changed is durable."""
        own = _Waiting(self._row(checked(self._method, arguments), key), key)
        with self._lock:
            self._waiting.append(own)
        with self._committing:
            while not own.done:
                group = self._next_group()
                try:
                    self._commit(group)
                except BaseException:
                    for each in group:
                        if not each.done:
                            each.end(error=_interrupted())
                    raise
        return own.outcome()

    def _next_group(self) -> list[_Waiting]:
        """All calls that wait; of those with the same idempotency key, one."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            group: list[_Waiting] = []
            keys: set[str | None] = set()
            for each in waiting:
                if each.key is not None and each.key in keys:
                    self._waiting.append(each)
                else:
                    group.append(each)
                    keys.add(each.key)
        return group

    def _row(self, given: Mapping[str, Any], key: str | None) -> dict[str, pa.Array]:
        """The call as columns of one row: what cannot be sent fails here, and not in a group."""
        row = {}
        for parameter in self._method.parameters:
            try:
                value = in_table(given[parameter.name], parameter.type)
                row[column_of(parameter.name)] = pa.array([value], arrow_type(parameter.type))
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise BadOption(
                    f"{parameter.name} of {self._method.name}: {error}",
                    hint=f"give a {parameter.type}",
                    option=parameter.name,
                ) from None
        if self._once:
            try:
                if not isinstance(key, str) or not key:
                    raise ValueError(f"{key!r} is no text")
                row[ONCE] = pa.array([key], pa.string())
            except ValueError as error:
                raise BadOption(
                    f"idempotency_key: {error}",
                    hint="give a text that is the call's own",
                    option="idempotency_key",
                ) from None
        return row

    def _begin_query(self) -> None:
        self._query, self._epoch = f"direct-{self._client.runtime.bits(64):016x}", 0

    # Committing

    def _commit(self, group: list[_Waiting]) -> None:
        """One epoch for all; where it fails, each call has one of its own, and its own error."""
        table = self._table(group)
        try:
            if self._doubtful is not None:
                self._settle_doubtful(self._doubtful)
            query, epoch = self._send(table)
        except Exception as error:  # noqa: BLE001 - whoever called is told
            if len(group) > 1 and not _is_unknown(error):
                for each in group:
                    self._commit([each])
                return
            for each in group:
                each.end(error=error)
            return
        try:
            rows = self._call.returned_in(query, epoch, table.schema) if self._call.gives else None
        except Exception as error:  # noqa: BLE001 - the same
            for each in group:
                each.end(error=error)
            return
        self._settle(group, rows)

    def _settle_doubtful(self, table: pa.Table) -> None:
        """Finds out what became of a group, by sending it again: it is decided then, or refused."""
        try:
            self._send(table)
        except (EpochChanged, EpochOutOfOrder, OtherQuery):
            # Others needed the room that was kept for this client's queries.
            self._doubtful = None
            self._begin_query()
        except Exception as error:
            if _is_unknown(error):
                raise

    def _send(self, table: pa.Table) -> tuple[str, int]:
        """Commits a group under the next number: in which query, and which that is."""
        is_new = self._doubtful is None
        self._doubtful = table
        try:
            for attempt in range(3):
                try:
                    self._call.commit_in(self._query, self._epoch, table)
                    break
                except OtherQuery:
                    if attempt == 2 or not is_new:
                        raise
                    self._forget_oldest()
                except EpochOutOfOrder:
                    if attempt == 2 or not is_new:
                        raise
                    self._begin_query()
        except Exception as error:
            if not _is_unknown(error):
                self._doubtful = None
            raise
        self._doubtful, self._epoch = None, self._epoch + 1
        return self._query, self._epoch - 1

    def _forget_oldest(self) -> None:
        """Makes room: so many queries may share a name."""
        turns = self._client.call(AskTurns(self._call.resident, self._call.name)).last
        others = [query for query in turns if query != self._query]
        for query in others[: max(0, len(others) - CLIENTS_KEPT)]:
            self._client.call(Forget(self._call.resident, self._call.name, query, None))

    def _table(self, group: list[_Waiting]) -> pa.Table:
        # Without a column a table has no rows.
        columns = {CALL: pa.array(range(len(group)), pa.int64())}
        for name in group[0].row:
            columns[name] = pa.concat_arrays([each.row[name] for each in group])
        return pa.table(columns)

    def _settle(self, group: list[_Waiting], rows: pa.Table | None) -> None:
        kind = self._method.returns
        nothing = [None] * len(group)
        results = (
            nothing if rows is None or kind is None else [as_value(x, kind) for x in rows[RESULT].to_pylist()]
        )
        errors = rows[ERROR].to_pylist() if rows is not None and self._method.rejects else nothing
        for each, result, reason in zip(group, results, errors, strict=True):
            each.end(result, None if reason is None else Rejected(reason, reason=reason))

    def close(self) -> None:
        """What the pond remembers of this client's calls is let go of; not what it knows by idempotency keys."""
        if self._epoch:
            with suppress(MillpondError):
                self._client.call(Forget(self._call.resident, self._call.name, self._query, None))


def _is_unknown(error: Exception) -> bool:
    """Whether an epoch may have been decided that ended so: all other errors tell that it was refused."""
    return not isinstance(error, MillpondError) or isinstance(error, Unavailable | WriteFailed)


def _interrupted() -> Unavailable:
    return Unavailable(
        "the thread that committed the call with others was interrupted: it may or may not have taken effect",
        hint="call it again; with an idempotency_key= it takes effect once",
        address="",
    )


def operator_name(method: str) -> str:
    """Of direct calls of a method."""
    return as_name(f"direct_{method}")


def column_of(parameter: str) -> str:
    """Of a parameter of direct calls: no other column has its name, as `error`."""
    return f"given_{parameter}"


def as_name(method: str) -> str:
    """A method's name as one that an operator can have: another one for each method."""
    name = re.sub("[^a-z0-9_]", "_", method.lower())[:NAME_MAX]
    if name == method:
        return name
    mark = hashlib.blake2b(method.encode(), digest_size=4).hexdigest()
    return f"{name[: NAME_MAX - len(mark) - 1]}_{mark}"
