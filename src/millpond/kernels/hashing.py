"""XXH64 of keys, and the slice a hash falls in. The same on every machine and in every version.

A slice id comes from the upper 32 bits of the hash. Anyone can make keys that share a hash, or any part of it: what
must not become slow by chosen keys goes by `slot_hashing`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
LONG_SEED = np.uint64(0x27D4EB2F165667C5 + 8)


@inlined
def rotate(x: np.uint64, bits: int) -> np.uint64:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@inlined
def avalanche(h: np.uint64) -> np.uint64:
    h = (h ^ (h >> np.uint64(33))) * P2
    h = (h ^ (h >> np.uint64(29))) * P3
    return h ^ (h >> np.uint64(32))


@inlined
def scramble(lane: np.uint64, word: np.uint64) -> np.uint64:
    return rotate(lane + word * P2, 31) * P1


@inlined
def hash_word(word: np.uint64) -> np.uint64:
    """XXH64 of the 8 little-endian bytes of `word`."""
    h = LONG_SEED ^ (rotate(word * P2, 31) * P1)
    return avalanche(rotate(h, 27) * P1 + P4)


@inlined
def load64(data: NDArray[np.uint8], at: int) -> np.uint64:
    """8 bytes, little-endian, at any alignment.

    An unsigned index cannot count from the end, which lets the compiler make it one load.
    """
    word = np.uint64(0)
    for j in range(8):
        word |= np.uint64(data[np.uint64(at) + np.uint64(j)]) << np.uint64(8 * j)
    return word


@inlined
def load32(data: NDArray[np.uint8], at: int) -> np.uint64:
    word = np.uint64(0)
    for j in range(4):
        word |= np.uint64(data[np.uint64(at) + np.uint64(j)]) << np.uint64(8 * j)
    return word


@inlined
def hash_range(data: NDArray[np.uint8], start: int, stop: int) -> np.uint64:
    """XXH64 (seed 0) of data[start:stop]."""
    at = start
    if stop - start >= 32:
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while stop - at >= 32:
            a = scramble(a, load64(data, at))
            b = scramble(b, load64(data, at + 8))
            c = scramble(c, load64(data, at + 16))
            d = scramble(d, load64(data, at + 24))
            at += 32
        h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ (rotate(lane * P2, 31) * P1)) * P1 + P4
    else:
        h = P5
    h += np.uint64(stop - start)
    while stop - at >= 8:
        h = rotate(h ^ (rotate(load64(data, at) * P2, 31) * P1), 27) * P1 + P4
        at += 8
    if stop - at >= 4:
        h = rotate(h ^ (load32(data, at) * P1), 23) * P2 + P3
        at += 4
    while at < stop:
        h = rotate(h ^ (np.uint64(data[at]) * P5), 11) * P1
        at += 1
    return avalanche(h)


@jit
def _hash_longs(words: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    for i in range(words.shape[0]):
        out[i] = hash_word(words[i])


@jit
def _hash_bytes(offsets: NDArray[np.int64], data: NDArray[np.uint8], out: NDArray[np.uint64]) -> None:
    for i in range(out.shape[0]):
        out[i] = hash_range(data, offsets[i], offsets[i + 1])


@jit
def _slices_of(hashes: NDArray[np.uint64], slices: int, out: NDArray[np.int32]) -> None:
    count = np.uint64(slices)
    for i in range(hashes.shape[0]):
        out[i] = np.int32(((hashes[i] >> np.uint64(32)) * count) >> np.uint64(32))


def hash_longs(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    out = np.empty(len(keys), np.uint64)
    _hash_longs(keys.view(np.uint64), out)
    return out


def hash_bytes(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hash of data[offsets[i]:offsets[i + 1]] for each i."""
    out = np.empty(len(offsets) - 1, np.uint64)
    _hash_bytes(offsets, data, out)
    return out


def slices_of(hashes: NDArray[np.uint64], slices: int) -> NDArray[np.int32]:
    """The slice of each hash, `0 <= id < slices`, for 1 <= slices <= 65535."""
    out = np.empty(len(hashes), np.int32)
    _slices_of(hashes, slices, out)
    return out
