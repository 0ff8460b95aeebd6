"""The rows of the streams benchmark: versions to load, and Parquet files for the streams.

Event time goes on from file to file: each has a window of its own, its rows in random order within it. Views ask for
times after half of the loaded versions; updates come after all of them. No two updates have the same time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.times import MICROS

CAMPAIGNS = 1_000
START_US = 1_767_225_600 * MICROS  # event time begins at 2026-01-01T00:00:00Z
WINDOW_US = 1_000 * MICROS
ROW_GROUPS = 16  # a file is split into tasks between them
TIME = pa.timestamp("us", tz="UTC")
SCHEMAS = {"views": "view long, ad {key}, ts timestamp", "updates": "ad {key}, ts timestamp, campaign {key}"}


class Source(NamedTuple):
    """What the files of a stream hold: views or updates, with longs or strings for ads and campaigns."""

    kind: str
    strings: bool = False

    @property
    def folder(self) -> str:
        return self.kind + "-strings" * self.strings

    @property
    def schema(self) -> str:
        return SCHEMAS[self.kind].format(key="string" if self.strings else "long")


class Rows:
    """Makes everything, always the same for the same sizes. `files` is how many files there will be."""

    def __init__(self, keys: int, versions: int, files: int) -> None:
        self._keys = keys
        self._versions = versions
        self._files = files

    @property
    def end_us(self) -> int:
        """No view and no loaded version has this time or a later one; all updates have."""
        return START_US + 2 * self._files * WINDOW_US

    def window_us(self, number: int) -> int:
        """Where the views of a file begin."""
        return START_US + (self._files + number) * WINDOW_US

    def first_keys(self, share: int, strings: bool) -> pa.Scalar:
        """Above one in `share` of the keys, and below all others."""
        key = self._keys // share
        return pa.scalar(_key(key) if strings else key)

    def versions(self, strings: bool) -> pa.Table:
        """In time order, no two at one time."""
        chance = np.random.default_rng(0)
        step = (self.end_us - START_US) // self._versions
        longs = pa.table(
            {
                "ad": chance.integers(0, self._keys, self._versions),
                "ts": _times(START_US + np.arange(self._versions) * step),
                "campaign": chance.integers(0, CAMPAIGNS, self._versions),
            }
        )
        return _named(longs) if strings else longs

    def table(self, source: Source, number: int, rows: int) -> pa.Table:
        """The rows of one file. A view's number tells it from all others."""
        chance = np.random.default_rng([1 + (source.kind == "updates"), number])
        ads = chance.integers(0, self._keys, rows)
        offsets = chance.permutation(rows) * (WINDOW_US // rows)
        if source.kind == "views":
            ids = number * 10_000_000 + np.arange(rows)
            table = pa.table({"view": ids, "ad": ads, "ts": _times(self.window_us(number) + offsets)})
        else:
            times = _times(self.end_us + number * WINDOW_US + offsets)
            table = pa.table({"ad": ads, "ts": times, "campaign": chance.integers(0, CAMPAIGNS, rows)})
        return _named(table) if source.strings else table

    def write(self, file: Path, source: Source, number: int, rows: int) -> None:
        pq.write_table(self.table(source, number, rows), file, row_group_size=max(1, rows // ROW_GROUPS))


def _times(micros: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(micros).cast(TIME)


def _key(number: int) -> str:
    return f"ad-{number:09}"


def _named(table: pa.Table) -> pa.Table:
    """The same rows with strings for ads, of 12 characters, and campaigns."""
    for name, prefix, digits in (("ad", "ad-", 9), ("campaign", "campaign-", 3)):
        if name in table.column_names:
            number = pc.utf8_lpad(table[name].cast(pa.string()), digits, "0")
            place = table.column_names.index(name)
            table = table.set_column(place, name, pc.binary_join_element_wise(prefix, number, ""))
    return table
