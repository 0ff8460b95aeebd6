"""Direct calls that write, in groups: each call gets its own error, and what is not known of a group hinders no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from program_graphs import store
from test_program_calls import failing

from millpond.errors import (
    BadOption,
    CodeTookTooLong,
    EpochOutOfOrder,
    MillpondError,
    NullKey,
    OutOfMemory,
    RuleFailed,
    Unavailable,
    WriteFailed,
)
from millpond.ops.direct_writes import DirectWrites, _Waiting
from millpond.runtime import Threads
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

Values = list[int]


class Pond:
    """Decides epochs by number, as a pond does; `script` may raise before or after."""

    resident, name, gives = "kv", "direct_put", False

    def __init__(self) -> None:
        self.decided: dict[tuple[str, int], Values] = {}
        self.before: Callable[[Values], None] = lambda values: None
        self.after: Callable[[Values], None] = lambda values: None

    def commit_in(self, query: str, epoch: int, table: pa.Table) -> None:
        values = table.column("given_key").to_pylist()
        own = [number for of, number in self.decided if of == query]
        if (query, epoch) not in self.decided:
            if epoch != len(own):
                raise EpochOutOfOrder("missing", epoch=epoch, expected=len(own))
            self.before(values)
            self.decided[query, epoch] = values
        assert self.decided[query, epoch] == values, "another group has that number"
        self.after(values)

    @property
    def rows(self) -> Values:
        return sorted(value for values in self.decided.values() for value in values)


def writes_to(pond: Pond) -> DirectWrites:
    client: Any = SimpleNamespace(runtime=Threads())
    call: Any = pond
    return DirectWrites(client, call, store().methods[0])


def given(writes: DirectWrites, key: int) -> _Waiting:
    return _Waiting(writes._row({"key": key, "value": "x"}, None), None)


@pytest.mark.parametrize("kind", [CodeTookTooLong, OutOfMemory, RuleFailed, NullKey])
def test_a_call_that_fails_fails_alone(kind: type[MillpondError]) -> None:
    pond = Pond()
    writes = writes_to(pond)

    def before(values: Values) -> None:
        if any(value < 0 for value in values):
            raise kind(f"refused {values}", **dict.fromkeys(kind.fields, 1))

    pond.before = before
    group = [given(writes, key) for key in (1, -2, 3, -4)]
    writes._commit(group)
    assert [each.error is None for each in group] == [True, False, True, False]
    assert "[-2]" in str(group[1].error)
    assert "[-4]" in str(group[3].error)
    writes.call({"key": 5, "value": "x"})
    assert pond.rows == [1, 3, 5]


@pytest.mark.parametrize("was_decided", [False, True])
@pytest.mark.parametrize("error", [Unavailable("away", address=""), WriteFailed("full", path=""), OSError()])
def test_a_group_of_which_nothing_is_known_keeps_its_number(was_decided: bool, error: Exception) -> None:
    pond = Pond()
    writes = writes_to(pond)
    writes.call({"key": 1, "value": "x"})

    def lose(values: Values) -> None:
        raise error

    setattr(pond, "after" if was_decided else "before", lose)
    for _ in range(2):
        with pytest.raises(type(error)):
            writes.call({"key": 2, "value": "x"})
    pond.before = pond.after = lambda values: None
    writes.call({"key": 3, "value": "x"})
    writes.call({"key": 4, "value": "x"})
    assert [values for _, values in sorted(pond.decided.items(), key=lambda each: each[0][1])] == [
        [1],
        [2],
        [3],
        [4],
    ]


def test_a_group_that_cannot_be_asked_about_any_more_is_not_sent_again() -> None:
    pond = Pond()
    writes = writes_to(pond)
    writes.call({"key": 1, "value": "x"})

    def lose(values: Values) -> None:
        raise Unavailable("away", address="")

    pond.after = lose
    with pytest.raises(Unavailable):
        writes.call({"key": 2, "value": "x"})
    pond.after = lambda values: None
    before = pond.rows
    pond.decided = {("gone", epoch): values for (_, epoch), values in pond.decided.items()}
    writes.call({"key": 3, "value": "x"})
    assert pond.rows == [*before, 3]


def test_who_waits_with_a_thread_that_is_interrupted_is_told() -> None:
    pond = Pond()
    writes = writes_to(pond)

    def interrupt(values: Values) -> None:
        raise KeyboardInterrupt

    pond.before = interrupt
    other = given(writes, 2)
    writes._waiting.append(other)
    with pytest.raises(KeyboardInterrupt):
        writes.call({"key": 1, "value": "x"})
    with pytest.raises(Unavailable, match="interrupted"):
        other.outcome()


def test_arguments_are_checked_before_a_call_joins_a_group() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=4) as pond:
        kept = pond.program("kv", store())
        refused = {"key": None, "value": "a"}, {"key": 1, "value": "\udc80"}, {"key": 1, "value": 7}
        for arguments, kind in zip(refused, (NullKey, BadOption, BadOption), strict=True):
            with pytest.raises(kind):
                kept.put(**arguments)
            kept.put(key=1, value="b")
        with pytest.raises(NullKey):
            kept.get(key=None)
        for key in ("", "\udc80", 7):
            with pytest.raises(BadOption):
                kept.put(key=1, value="c", idempotency_key=key)
        assert kept.entries("kept") == {1: "b"}
        program = pond.program("p", failing())
        with pytest.raises(MillpondError):
            program.put(key=1, value=None)
        program.put(key=1, value=1)
        assert program.entries("first") == {1: 1}


def test_calls_of_threads_come_in_groups() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=4) as pond:
        kept = pond.program("kv", store())
        kept.put(key=0, value="a", idempotency_key="0")
        writes = kept._direct["put", True]
        with writes._committing:
            threads = [
                threading.Thread(
                    target=kept.put, kwargs={"key": key, "value": "a", "idempotency_key": str(key % 20)}
                )
                for key in [*range(20), *range(20)]
            ]
            for thread in threads:
                thread.start()
            while len(writes._waiting) < len(threads):
                pass
        for thread in threads:
            thread.join()
        assert kept.entries("kept") == dict.fromkeys(range(20), "a")
        assert kept.progress().seen == 3, "one group, and one of those that came twice"
