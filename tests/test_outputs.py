"""Outputs of an epoch, kept by slice and read from the owner of each."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import OutputsGone
from millpond.ops import outputs
from millpond.ops.outputs import EpochOutputs
from millpond.runtime import Serial
from millpond.stores.outputs import Outputs
from millpond.stores.parts import Part, pack, unpack
from millpond.wire.base import SliceId, Turn

WRITER, TURN = "op@query", Turn(3)


class Owners:
    """A client of containers that keep the outputs of some slices."""

    def __init__(self, rows: dict[int, int]) -> None:
        self.runtime = Serial()
        self.reads = 0
        self.stores: dict[int, Outputs] = {}
        for number, count in rows.items():
            self.stores[number] = Outputs()
            values = [1000 * number + i for i in range(count)]
            self.stores[number].keep(WRITER, TURN, pa.table({"v": pa.array(values, pa.int64())}))

    def read_home(self, message: Any, home: SliceId) -> pa.Table:
        assert message.slice == home, "a slice is asked of its owner"
        self.reads += 1
        return self.stores[message.slice].read(message.writer, message.turn, message.start, message.stop)

    def expected(self) -> list[int]:
        return [
            value for store in self.stores.values() for value in store.find(WRITER, TURN)["v"].to_pylist()
        ]


@pytest.mark.parametrize("rows", [{2: 0}, {2: 7}, {0: 4, 3: 9, 5: 0, 6: 8}])
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_every_owner_is_asked_and_every_row_read_once(
    monkeypatch: pytest.MonkeyPatch, rows: dict[int, int], tasks: int
) -> None:
    monkeypatch.setattr(outputs, "PIECE_ROWS", 4)
    client: Any = Owners(rows)
    epoch = EpochOutputs("r", tuple(map(SliceId, rows)), WRITER, TURN)
    assert epoch.read(client)["v"].to_pylist() == client.expected()
    assert client.reads == len(rows)
    shares = [list(epoch.share(client, task, tasks)) for task in range(tasks)]
    assert all(len(piece) <= 4 for pieces in shares for piece in pieces)
    read = [value for pieces in shares for piece in pieces for value in piece["v"].to_pylist()]
    assert sorted(read) == client.expected()


def test_what_is_exported_is_loaded() -> None:
    store, other = Outputs(), Outputs()
    store.keep(WRITER, TURN, pa.table({"v": [1, 2, 3]}))
    store.keep(WRITER, Turn(4), pa.table({"w": ["a"]}))
    for kind, name, rows in unpack(pack([Part("outputs", name, rows) for name, rows in store.export()])):
        assert kind == "outputs"
        other.load(name, rows)
    assert other.read(WRITER, TURN, 1, 9)["v"].to_pylist() == [2, 3]
    assert other.read(WRITER, Turn(4), 0, 0).schema.names == ["w"]
    assert other.read(WRITER, TURN, 2, 1).num_rows == 0
    with pytest.raises(OutputsGone):
        other.read(WRITER, Turn(5), 0, 1)
