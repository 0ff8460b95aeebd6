"""Chance for NEXMark: what is drawn for an event depends on the seed and on the event's number alone.

So any part of a stream can be generated for itself, in any cut, and on any machine of a cluster.
"""

from __future__ import annotations

from enum import IntEnum, auto, unique
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_POOL_BYTES = 1 << 22


@unique
class Draw(IntEnum):
    """What is drawn for an event: each is independent of the others. The order is part of every stream."""

    ARRIVAL = auto()
    HOT_AUCTION = auto()
    AUCTION = auto()
    HOT_BIDDER = auto()
    BIDDER = auto()
    PRICE = auto()
    HOT_SELLER = auto()
    SELLER = auto()
    CATEGORY = auto()
    INITIAL_BID = auto()
    RESERVE = auto()
    DURATION = auto()
    ITEM_NAME = auto()
    DESCRIPTION = auto()
    NAME = auto()
    MAILBOX = auto()
    HOST = auto()
    CARD_1 = auto()
    CARD_2 = auto()
    CARD_3 = auto()
    CARD_4 = auto()
    CITY = auto()
    STATE = auto()
    EXTRA = auto()


def bits(seed: int, draw: Draw, events: Longs) -> Bits:
    """64 random bits for each event number."""
    mixed = events.astype(np.uint64)
    mixed *= _STEP
    mixed += np.random.SeedSequence((seed, draw)).generate_state(1, np.uint64)
    for shift, factor in _MIX:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return mixed


def below(seed: int, draw: Draw, events: Longs, bound: Longs | int) -> Longs:
    """For each event a number from 0 on and below `bound`, which is at most 2**31; all are equally likely."""
    high = bits(seed, draw, events) >> np.uint64(32)
    high *= np.asarray(bound, np.uint64)
    high >>= np.uint64(32)
    return high.view(np.int64)


def unit(seed: int, draw: Draw, events: Longs) -> npt.NDArray[np.float64]:
    """For each event a number from 0.0 on and below 1.0."""
    return (bits(seed, draw, events) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(seed: int, draw: Draw, events: Longs, choices: pa.Array) -> pa.Array:
    """For each event one of the choices."""
    return choices.take(pa.array(below(seed, draw, events, len(choices))))


@cache
def texts(shortest: int, longest: int) -> pa.Array:
    """Some megabytes of strings of random letters, which no compressor sees through; always the same.

    All lengths from `shortest` to `longest` are equally frequent.
    """
    rounds = max(1, _POOL_BYTES // (sum(range(shortest, longest + 1)) + longest + 1))
    lengths = np.tile(np.arange(shortest, longest + 1), rounds)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    letters = np.random.default_rng((shortest, longest)).integers(
        ord("a"), ord("z") + 1, offsets[-1], np.uint8
    )
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))
