"""Words as columns: made-up texts from a seed, and words as longs, so that rules beside the state can be compiled."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import BadOption

Longs: TypeAlias = npt.NDArray[np.int64]

LETTERS_MAX = 13
"""27 ** 13 is the highest power of 27 that a long holds."""
_BEFORE_A = ord("a") - 1
_PLACES = 27 ** np.arange(LETTERS_MAX - 1, -1, -1)

STOP_WORDS = (
    "a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "has", "he", "in", "is", "it", "its", "of", "on",
    "or", "that", "the", "to", "was", "were", "which", "will", "with",
)  # fmt: skip


def encode(words: pa.DictionaryArray) -> pa.Array:
    """Each word as a number in base 27, filled up from the right: numbers are ordered as their words are.

    Words are of letters from a to z, `LETTERS_MAX` of them at most.
    """
    different = words.dictionary
    unfit = pc.invert(pc.match_substring_regex(different, f"^[a-z]{{1,{LETTERS_MAX}}}$"))
    if pc.any(unfit).as_py():
        raise BadOption(
            f"{different.filter(unfit)[0].as_py()!r} is no word of 1 to {LETTERS_MAX} letters from a to z",
            hint="filter such words out, or write them otherwise",
            option="text",
        )
    padded = pc.utf8_rpad(different, LETTERS_MAX, chr(_BEFORE_A))
    letters = np.array(padded.to_pylist(), f"S{LETTERS_MAX}").view(np.uint8).reshape(-1, LETTERS_MAX)
    return pa.array((letters.astype(np.int64) - _BEFORE_A) @ _PLACES).take(words.indices)


def decode(codes: Longs) -> pa.Array:
    """What `encode` was given."""
    letters = (codes[:, None] // _PLACES % 27 + _BEFORE_A).astype(np.uint8)
    padded = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(LETTERS_MAX), len(codes), [None, pa.py_buffer(np.ascontiguousarray(letters))]
    )
    return pc.utf8_rtrim(padded.cast(pa.binary()).cast(pa.string()), chr(_BEFORE_A))


def split(texts: pa.ChunkedArray) -> tuple[Longs, Longs, pa.DictionaryArray]:
    """The words of all texts, one after the other: for each the row of its text, its place in it, and itself."""
    lists = pa.concat_arrays(pc.ascii_split_whitespace(texts.cast(pa.string())).chunks)
    rows, every = pc.list_parent_indices(lists).to_numpy(), lists.flatten()
    is_word = pc.not_equal(every, "")  # what is before a first blank, and behind a last one
    rows = rows[is_word.to_numpy(False)]
    return rows, places_of(rows), every.filter(is_word).dictionary_encode()


def places_of(rows: Longs) -> Longs:
    """Of each item its place among those of the same row; items of a row come one after the other."""
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))


# What is made up


@cache
def vocabulary(size: int) -> pa.Array:
    """So many words of 3 to 10 letters, all different, none of them a stop word; always the same."""
    rng = np.random.default_rng(size)
    words: dict[str, None] = {}
    while len(words) < size:
        letters = rng.integers(ord("a"), ord("z") + 1, (size, 10), np.uint8)
        lengths = rng.integers(3, 11, size)
        words.update((row[:n].tobytes().decode(), None) for row, n in zip(letters, lengths, strict=True))
        for stop_word in STOP_WORDS:
            words.pop(stop_word, None)
    return pa.array(list(words)[:size])


def ranks(rng: np.random.Generator, count: int, size: int) -> Longs:
    """Numbers from 0 on and below `size`; r comes with a probability of about 1 / (r + 1): Zipf's law."""
    return np.minimum(size ** rng.random(count), size).astype(np.int64) - 1


def joined(words: pa.Array, lengths: Longs) -> pa.Array:
    """Texts of so many words each, with blanks between them."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), words), " ")


def arrival(rng: np.random.Generator, count: int, disorder: int) -> pa.Array:
    """An order of arrival: nobody comes after one who is behind by `disorder` places or more."""
    return pa.array(np.argsort(np.arange(count) + disorder * rng.random(count), kind="stable"))
