"""Hashes are a format: they route rows on every machine and in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.kernels import hashing
from millpond.kernels.partition import inverse, slice_places

MASK = 2**64 - 1
PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & MASK


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, from its specification, in plain Python."""
    p1, p2, p3, p4, p5 = PRIMES

    def scramble(lane: int, word: int) -> int:
        return rotate((lane + word * p2) & MASK, 31) * p1 & MASK

    rest = data
    if len(data) >= 32:
        lanes = [(p1 + p2) & MASK, p2, 0, -p1 & MASK]
        while len(rest) >= 32:
            for i in range(4):
                lanes[i] = scramble(lanes[i], int.from_bytes(rest[8 * i : 8 * i + 8], "little"))
            rest = rest[32:]
        h = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            h = ((h ^ scramble(0, lane)) * p1 + p4) & MASK
    else:
        h = p5
    h = (h + len(data)) & MASK
    while len(rest) >= 8:
        h = (rotate(h ^ scramble(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        h = (rotate(h ^ (int.from_bytes(rest[:4], "little") * p1 & MASK), 23) * p2 + p3) & MASK
        rest = rest[4:]
    for byte in rest:
        h = rotate(h ^ (byte * p5 & MASK), 11) * p1 & MASK
    h = (h ^ (h >> 33)) * p2 & MASK
    h = (h ^ (h >> 29)) * p3 & MASK
    return h ^ (h >> 32)


def hashes_of(strings: list[bytes]) -> list[int]:
    offsets = np.zeros(len(strings) + 1, np.int64)
    offsets[1:] = np.cumsum([len(s) for s in strings])
    data = np.frombuffer(bytearray(b"".join(strings) or b"\0"), np.uint8)
    return hashing.hash_bytes(offsets, data).tolist()


def test_bytes_hash_to_the_published_xxh64_values() -> None:
    # Published test vectors, seed 0.
    assert hashes_of([b"", b"a", b"abc"]) == [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999]


def test_longs_hash_to_golden_values() -> None:
    keys = np.array([0, 1, -1, 42, 2**63 - 1, -(2**63)])
    assert hashing.hash_longs(keys).tolist() == [
        0x34C96ACDCADB1BBB,
        0x9F29CB17A2A49995,
        0x85D136ADB773C6C9,
        0xB556806FB6D14353,
        0xFF70CC60366E770C,
        0x3F425EACF01544E0,
    ]


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_bytes_hash_as_the_specification_says(strings: list[bytes]) -> None:
    assert hashes_of(strings) == [xxh64(s) for s in strings]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_a_long_hashes_as_its_eight_bytes(keys: list[int]) -> None:
    expected = [xxh64(key.to_bytes(8, "little", signed=True)) for key in keys]
    assert hashing.hash_longs(np.array(keys, np.int64)).tolist() == expected


@given(st.lists(st.integers(0, MASK), max_size=20), st.integers(1, 65535))
def test_slices_are_the_upper_half_scaled(hashes: list[int], slices: int) -> None:
    found = hashing.slices_of(np.array(hashes, np.uint64), slices)
    assert found.tolist() == [((h >> 32) * slices) >> 32 for h in hashes]
    assert found.dtype == np.int32


def test_consecutive_keys_spread_evenly_over_slices() -> None:
    counts = np.bincount(hashing.slices_of(hashing.hash_longs(np.arange(64_000)), 64), minlength=64)
    assert counts.min() > 850
    assert counts.max() < 1150


@given(st.lists(st.integers(0, 6), max_size=40))
def test_partition_is_a_stable_counting_sort(ids: list[int]) -> None:
    places, starts = slice_places(np.array(ids, np.int32), 7)
    order = inverse(places)
    assert order.tolist() == sorted(range(len(ids)), key=lambda i: ids[i])
    assert starts.tolist() == [sum(i < s for i in ids) for s in range(8)]
    back = inverse(order)
    assert order[back].tolist() == list(range(len(ids)))


@pytest.mark.parametrize("slices", [1, 2, 65535])
def test_partition_of_nothing(slices: int) -> None:
    places, starts = slice_places(np.empty(0, np.int32), slices)
    order = inverse(places)
    assert len(order) == 0
    assert starts.tolist() == [0] * (slices + 1)
