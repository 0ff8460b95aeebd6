"""Secret hashes of keys: where a key lies in a hash table. They differ from process to process.

`kernels.hashing` is public, so that whoever chooses keys could put them all in one place, and each new one would pass
all those before it. What a table makes of a key depends on a secret instead, which is made when this module is first
imported and is neither written nor sent: nothing that lasts or leaves the process may depend on these hashes.

Byte strings have SipHash-1-3. Longs have a bijection, so that equal hashes mean equal longs: three times, a product with
a secret odd number, whose upper half is then folded into the lower. Such a product keeps pairs of keys apart, whatever
they are; linear probing wants more: one or two leave patterns in longs that have one, and runs of taken slots with them.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels.hashing import load32, load64, rotate

Secret = NDArray[np.uint64]
"""Four words for longs, of which all but the first are odd; two for bytes."""


def make_secret(random: bytes) -> Secret:
    """A secret of 48 random bytes."""
    secret = np.frombuffer(random, np.uint64).copy()
    secret[1:4] |= np.uint64(1)
    return secret


# Kernels take it as an argument: a global would be compiled into them, and written to numba's cache.
SECRET = make_secret(os.urandom(48))

_LENGTH_SHIFT = np.uint64(56)
_FOLD = np.uint64(32)


@inlined
def mix(word: np.uint64, start: np.uint64, a: np.uint64, b: np.uint64, c: np.uint64) -> np.uint64:
    h = (word ^ start) * a
    h = (h ^ (h >> _FOLD)) * b
    h = (h ^ (h >> _FOLD)) * c
    return h ^ (h >> _FOLD)


@inlined
def sip_round(
    a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    a += b
    c += d
    b = rotate(b, 13) ^ a
    d = rotate(d, 16) ^ c
    a = rotate(a, 32) + d
    c += b
    b = rotate(b, 17) ^ c
    d = rotate(d, 21) ^ a
    return a, b, rotate(c, 32), d


@inlined
def last_word(data: NDArray[np.uint8], start: int, stop: int) -> np.uint64:
    """The bytes that are left of data[start:stop] behind its last whole word, and its length in the top byte."""
    size = stop - start
    left = size & 7
    word = np.uint64(size) << _LENGTH_SHIFT
    if left == 0:
        return word
    # Words that overlap what comes before take no loop.
    if size >= 8:
        return word | (load64(data, stop - 8) >> np.uint64(64 - 8 * left))
    if left >= 4:
        return word | load32(data, start) | (load32(data, stop - 4) << np.uint64(8 * left - 32))
    for j in range(left):
        word |= np.uint64(data[start + j]) << np.uint64(8 * j)
    return word


@inlined
def sip_range(data: NDArray[np.uint8], start: int, stop: int, key: np.uint64, other: np.uint64) -> np.uint64:
    """SipHash-1-3 of data[start:stop]."""
    a = key ^ np.uint64(0x736F6D6570736575)
    b = other ^ np.uint64(0x646F72616E646F6D)
    c = key ^ np.uint64(0x6C7967656E657261)
    d = other ^ np.uint64(0x7465646279746573)
    at = start
    while stop - at >= 8:
        word = load64(data, at)
        a, b, c, d = sip_round(a, b, c, d ^ word)
        a ^= word
        at += 8
    word = last_word(data, start, stop)
    a, b, c, d = sip_round(a, b, c, d ^ word)
    a ^= word
    c ^= np.uint64(0xFF)
    a, b, c, d = sip_round(a, b, c, d)
    a, b, c, d = sip_round(a, b, c, d)
    a, b, c, d = sip_round(a, b, c, d)
    return a ^ b ^ c ^ d


@jit
def write_longs(words: NDArray[np.uint64], secret: Secret, out: NDArray[np.uint64]) -> None:
    start, a, b, c = secret[0], secret[1], secret[2], secret[3]
    for i in range(words.shape[0]):
        out[i] = mix(words[i], start, a, b, c)


@jit
def write_bytes(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], secret: Secret, out: NDArray[np.uint64]
) -> None:
    key, other = secret[4], secret[5]
    for i in range(out.shape[0]):
        out[i] = sip_range(data, offsets[i], offsets[i + 1], key, other)


def hash_longs(longs: NDArray[np.int64], secret: Secret = SECRET) -> NDArray[np.int64]:
    out = np.empty(len(longs), np.uint64)
    write_longs(longs.view(np.uint64), secret, out)
    return out.view(np.int64)


def hash_bytes(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], secret: Secret = SECRET
) -> NDArray[np.int64]:
    """Hash of data[offsets[i]:offsets[i + 1]] for each i."""
    out = np.empty(len(offsets) - 1, np.uint64)
    write_bytes(offsets, data, secret, out)
    return out.view(np.int64)
