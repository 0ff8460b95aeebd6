"""Batches of several schemas go in one exchange, and come out as they were; what is wrong in one is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from millpond.container.parcels import PARCEL, packed, unpacked
from millpond.errors import BadMessage, WrongType
from millpond.wire.base import Term
from millpond.wire.connection import SlicedBatch, check_alike, checked
from millpond.wire.rounds import RoundRows

MESSAGE = RoundRows("p", 1, 0, 0, Term(1))


def batch(counts: Sequence[int], **columns: pa.Array) -> SlicedBatch:
    return SlicedBatch(pa.record_batch(columns), np.array(counts, np.int32))


LONGS = batch([1, 2], n=pa.array([1, None, 3], pa.int64()))
LISTS = batch([0, 2], l=pa.array([[1.0], None], pa.list_(pa.float64())), s=pa.array(["a", "b"]))
NOTHING = batch([0, 0], s=pa.array([], pa.string()))


@pytest.mark.parametrize("batches", [[], [LONGS], [LONGS, LONGS], [LONGS, LISTS], [NOTHING, LISTS, LONGS]])
def test_what_is_packed_comes_out_as_it_was(batches: list[SlicedBatch]) -> None:
    sent = packed(batches)
    check_alike(sent)
    came = list(unpacked(MESSAGE, checked(MESSAGE, sent)))
    assert len(came) == len(batches)
    for one, other in zip(came, batches, strict=True):
        assert one.batch.equals(other.batch)
        assert one.counts.tolist() == other.counts.tolist()


def test_nothing_is_packed_that_need_not_be() -> None:
    assert packed([LONGS, LONGS])[0] is LONGS
    with pytest.raises(BadMessage, match="several schemas"):
        check_alike([LONGS, LISTS])


def test_what_is_wrong_in_a_parcel_is_told() -> None:
    good = packed([LONGS, LISTS])[0]
    content = good.batch.column(0)[0].as_py()
    counts = good.batch.column(1)[0].as_py()
    for wrong in ((b"", counts), (content[:40], counts), (None, counts), (content, b"123"), (content, None)):
        parcel = pa.record_batch([pa.array([one], pa.large_binary()) for one in wrong], schema=PARCEL)
        with pytest.raises(BadMessage):
            list(unpacked(MESSAGE, [SlicedBatch(parcel, np.ones(1, np.int32))]))
    few = SlicedBatch(LONGS.batch, np.array([1, 1], np.int32))
    with pytest.raises(BadMessage, match="add up"):
        list(unpacked(MESSAGE, packed([few, LISTS])))
    union = batch([1], u=pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]))
    with pytest.raises(WrongType):
        list(unpacked(MESSAGE, packed([union, LISTS])))
