"""Fetches of clients that do not see the pond's root: what waits is kept and read by the pond, under its root all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from elsewhere import put_elsewhere
from millpond.durable.arrow_files import table_content
from millpond.durable.crashpoints import ENVIRONMENT, WAITING_POINTS
from millpond.errors import BadMessage, CorruptFile, NotTrusted, Unauthorised, UnknownResident
from millpond.stores.waiting import WaitingRows
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import Turn
from millpond.wire.connection import SlicedBatch
from millpond.wire.waiting import CONTENT, KeepWaiting, ReadWaiting, TidyWaiting

TURN = Turn(0)
KILLED_AT = ("waiting.rename.before", "waiting.dirsync.after")
"""The others, one by one, in tests/stores/test_waiting.py, without a process."""
NAME = "0123456789abcdef-0123456789abcdef.arrow"


class Views:
    """A fetcher whose U is 10 until `finish`; what its sink was given, turn by turn."""

    def __init__(self, pond: mp.Pond, name: str = "views") -> None:
        self.state = pond.state("s", key="long", value="long")
        self.feed = self.state.update(key="k", at="t", value="v", name="feed")
        self.feed(pa.table({"k": [1, 1], "t": [5, 10], "v": [5, 10]}), 0)
        self.given: list[tuple[int, int, Any]] = []
        self.operator = self.state.fetch(key="k", at="t", into="v", name=name).to(self.take)

    def take(self, rows: pa.Table, epoch: int) -> None:
        self.given += [tuple(row.values()) for row in rows.to_pylist()]

    def ask(self, epoch: int, *times: int) -> None:
        self.operator(
            pa.table({"k": pa.array([1] * len(times), pa.int64()), "t": pa.array(times, pa.int64())}), epoch
        )


def files_in(root: Path | str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("waiting/**/*.arrow"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pond"


@pytest.fixture
def pond(root: Path) -> Iterator[mp.Pond]:
    with mp.open(root, containers=2, threads=1, slices=4, port=0) as opened:
        yield opened


def joined(pond: mp.Pond, root: Path, instead: Path | None = None) -> mp.Pond:
    """A client over TCP that does not see the root; it may take another directory for it."""
    token = (root / "token").read_text()
    return put_elsewhere(mp.connect(pond.address, token), str(instead) if instead else None)


@pytest.mark.parametrize("there", [False, True], ids=["nothing there", "another pond there"])
def test_what_waits_is_kept_under_the_ponds_root_and_nowhere_else(
    pond: mp.Pond, root: Path, tmp_path: Path, there: bool
) -> None:
    other = tmp_path / "other"
    if there:
        mp.open(other, threads=1, slices=2).close()
    before = sorted(other.rglob("*"))
    with joined(pond, root, other) as client:
        views = Views(client)
        views.ask(0, 7, 20, 30)
        assert (views.given, views.operator.pending().rows) == ([(1, 7, 5)], 2)
        rows, lists = files_in(root)
        assert rows.startswith("waiting/s/views/local/000000000000.0000/")
        assert "/list-" in lists
        views.ask(1)
        assert views.operator.pending().rows == 2
        views.state.finish("feed")
        assert views.operator.drain().rows == 0
    assert views.given == [(1, 7, 5), (1, 20, 10), (1, 30, 10)]
    assert sorted(other.rglob("*")) == before


def test_each_turn_may_go_its_own_way(pond: mp.Pond, root: Path) -> None:
    """A query that begins on one machine goes on at another, and the other way round."""
    with joined(pond, root) as away, mp.connect(pond.address, (root / "token").read_text()) as near:
        first = Views(away)
        second = Views(near)
        first.ask(0, 20)
        second.ask(1, 30)
        first.ask(2, 40)
        near.state("s").finish("feed")
        second.ask(3)
        assert (first.given, sorted(second.given)) == ([], [(1, 20, 10), (1, 30, 10), (1, 40, 10)])
        second.ask(4)
        first.ask(5)
        # What no turn asks for goes, whoever made it.
        assert files_in(root) == []


@pytest.mark.parametrize(
    "point",
    [
        point if point in KILLED_AT else pytest.param(point, marks=pytest.mark.long)
        for point in WAITING_POINTS
    ],
)
def test_a_container_that_is_killed_while_it_keeps_rows_loses_none(
    root: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step: the rows are then kept by another, or by the same one when it is back."""
    monkeypatch.setenv(ENVIRONMENT, point)
    with mp.open(root, threads=1, slices=2) as pond:
        monkeypatch.delenv(ENVIRONMENT)
        before = pond.containers()[0].pid
        views = Views(put_elsewhere(pond))
        views.ask(0, 20, 30)
        assert pond.containers()[0].pid != before, "it was to be killed"
        assert f"killed at crash point {point}" in (root / "container-0.log").read_text()
        views.state.finish("feed")
        views.ask(1)
        assert views.given == [(1, 20, 10), (1, 30, 10)]


@pytest.mark.long
def test_containers_that_are_killed_between_turns_and_a_pond_that_is_opened_anew(root: Path) -> None:
    with mp.open(root, containers=2, threads=1, slices=4) as pond:
        views = Views(put_elsewhere(pond))
        for epoch in range(4):
            views.ask(epoch, 20 + epoch)
            os.kill(pond.containers()[0].pid, signal.SIGKILL)
    with mp.open(root, threads=1) as pond:
        again = Views(put_elsewhere(pond))
        again.ask(3, 23)  # it may not have been noted that it was answered
        again.state.finish("feed")
        again.ask(4)
        assert sorted(again.given) == [(1, 20 + epoch, 10) for epoch in range(4)]
        again.ask(5)
        again.ask(6)
        assert files_in(root) == []


# What is asked of the pond directly


def content_of(**metadata: str) -> bytes:
    batch = pa.record_batch({"k": [1]})
    buffers = table_content(batch.schema, [batch], metadata)
    return b"".join(memoryview(buffer).cast("B") for buffer in buffers)


def kept(*content: bytes | None, schema: pa.Schema = CONTENT) -> list[SlicedBatch]:
    batch = pa.record_batch([pa.array(content, schema.field(0).type)], schema=schema)
    return [SlicedBatch(batch, np.array([len(content)], np.int32))]


@pytest.fixture
def local() -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=2) as pond:
        Views(pond)
        yield pond
        pond.validate()


def test_what_is_no_file_is_refused_and_nothing_is_written(local: LocalPond) -> None:
    whole = content_of()
    keep = KeepWaiting("s", "views", "local", TURN, NAME)
    binary = pa.schema([("content", pa.binary())])
    bad = [kept(whole[:-1]), kept(b""), kept(whole + b"x"), kept(None), kept(), kept(whole, whole)]
    bad += [kept(whole, schema=binary), [], [*kept(whole), *kept(whole)]]
    for batches in bad:
        with pytest.raises(BadMessage):
            local._client.ask_any(0, lambda connection, batches=batches: connection.exchange(keep, batches))
    files = local.coordinator._files
    assert files.list("/pond/waiting/s/views/local") == []
    for service in local.hosting.services.values():
        assert service._room.nbytes == 0
    unknown = KeepWaiting("other", "views", "local", TURN, NAME)
    with pytest.raises(UnknownResident):
        local._client.ask_any(0, lambda connection: connection.exchange(unknown, kept(whole)))
    assert files.list("/pond/waiting/other") == []


def test_to_keep_or_read_again_does_no_harm(local: LocalPond) -> None:
    """As late as it may come, at whichever container: a file is whole at any time, and there is one of each name."""
    whole = content_of()
    keep, read = (kind("s", "views", "local", TURN, NAME) for kind in (KeepWaiting, ReadWaiting))
    for container in range(4):
        local._client.ask_any(container, lambda connection: connection.exchange(keep, kept(whole)))
        table = local._client.ask_any(container, lambda connection: connection.read(read))
        assert table.column(0).to_pylist() == [whole]
    assert local.coordinator._files.list("/pond/waiting/s/views/local/000000000000.0000") == [NAME]
    missing = ReadWaiting("s", "views", "local", TURN, NAME.replace("0", "f"))
    with pytest.raises(CorruptFile, match="it is missing"):
        local._client.ask_any(0, lambda connection: connection.read(missing))
    for service in local.hosting.services.values():
        assert service._room.nbytes == 0


def test_word_that_turns_are_over_may_come_late(local: LocalPond) -> None:
    """It does not say which: a query of the same name that began anew since then keeps what it needs."""
    files = local.coordinator._files
    put_elsewhere(local)
    views = Views(local)
    for epoch in range(5):
        views.ask(epoch, 20)
    tidy = TidyWaiting("s", "views", "local")
    turns = files.list("/pond/waiting/s/views/local")
    assert turns == ["000000000003.0000", "000000000004.0000"]
    rows = WaitingRows("/pond", "s", "views", "local", files)
    rows.write(TURN, "0" * 16, [pa.record_batch({"k": [1]})])  # of a task that wakes up late
    local._client.call(tidy)
    assert files.list("/pond/waiting/s/views/local") == turns
    local.forget("s", name="views")
    assert files.list("/pond/waiting/s/views/local") == []
    again = Views(local)
    again.ask(0, 20)
    local._client.call(tidy)
    assert files.list("/pond/waiting/s/views/local") == ["000000000000.0000"]
    again.state.finish("feed")
    again.ask(1)
    assert again.given == [(1, 20, 10)]
    for unknown in (TidyWaiting("s", "others", "local"), TidyWaiting("gone", "views", "local")):
        local._client.call(unknown)


def test_a_read_only_token_neither_keeps_nor_reads_nor_tidies(pond: mp.Pond, root: Path) -> None:
    views = Views(put_elsewhere(pond))
    views.ask(0, 20)
    before = files_in(root)
    with mp.connect(pond.address, (root / "token.read").read_text()) as reader:
        client = reader._client
        name = os.path.basename(before[0])
        for ask in (
            lambda: client.ask_any(
                0,
                lambda to: to.exchange(KeepWaiting("s", "views", "local", TURN, NAME), kept(content_of())),
            ),
            lambda: client.ask_any(0, lambda to: to.read(ReadWaiting("s", "views", "local", TURN, name))),
            lambda: client.call(TidyWaiting("s", "views", "local")),
        ):
            with pytest.raises(Unauthorised, match="read-only token cannot"):
                ask()
    assert files_in(root) == before


def test_where_the_root_is_not_trusted_nothing_is_kept() -> None:
    files = LossyFiles()
    with LocalPond(files) as pond:
        Views(pond)
    with LocalPond(files, trust="data") as pond:
        keep = KeepWaiting("s", "views", "local", TURN, NAME)
        with pytest.raises(NotTrusted):
            pond._client.ask_any(0, lambda connection: connection.exchange(keep, kept(content_of())))
        with pytest.raises(NotTrusted):
            pond._client.call(TidyWaiting("s", "views", "local"))
        assert files.list("/pond/waiting/s") == []
