"""The systems of the streams benchmark: what each does with a micro-batch, and whether it did it rightly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import millpond as mp
from millpond.bench.answers import compare, expected
from millpond.bench.frames import AddColumn, noop
from millpond.bench.streams_rows import START_US, WINDOW_US, Rows, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

UPDATER = "updates"
LOADED_AT_ONCE = 1_000_000
WAITING_SHARE = 10  # the newest tenth of a batch waits
CHECKED_KEYS = 20  # updates of every twentieth key are compared


class Setting(NamedTuple):
    """What the systems have in common."""

    pond: mp.Pond
    rows: Rows
    cores: int


class Stream:
    """A function for `foreachBatch`. Its file numbers are its epochs, where it takes part in all rounds."""

    def __init__(self, setting: Setting, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.collects = False  # the answers, which are dropped otherwise
        self._setting = setting

    def load(self) -> None:
        """Before the first epoch."""

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        if epoch == 0:
            tasks = frame.rdd.getNumPartitions()
            if tasks != self._setting.cores:
                raise RuntimeError(f"{tasks} tasks for a file of {self.name}, on {self._setting.cores} cores")
        self.step(frame, epoch)

    def step(self, frame: DataFrame, epoch: int) -> None:
        raise NotImplementedError

    def check(self, files: Sequence[Path], collected: int) -> None:
        """Raises where what it did with these files is not right. The answers to the last `collected` were collected."""


class Reach(NamedTuple):
    """Beside which stream that asks nobody, and how near it should come: in rows a second, and in p50 of small batches."""

    identity: str
    rate: float | None = None
    small_p50: float | None = None


class System(NamedTuple):
    """One stream, or several at the same time."""

    name: str
    reach: Reach
    streams: list[Stream]

    @property
    def takes_small(self) -> bool:
        return self.name in SMALL


REACHES = {
    "millpond-fetch": Reach("spark-identity", 0.85, 1.5),
    "millpond-waiting": Reach("spark-identity", 0.75),
    "millpond-update": Reach("spark-identity-in", 0.8, 1.4),
    "millpond-fetch-strings": Reach("spark-identity-strings", 0.85),
    "millpond-waiting-strings": Reach("spark-identity-strings", 0.75),
    "millpond-update-strings": Reach("spark-identity-in-strings", 0.8),
    "millpond-both": Reach("spark-identity-both", 0.7),
}
SMALL = ("spark-identity", "millpond-fetch", "millpond-waiting", "spark-identity-in", "millpond-update")
NAMES = (
    *SMALL,
    *("spark-identity-strings", "millpond-fetch-strings", "millpond-waiting-strings"),
    *("spark-identity-in-strings", "millpond-update-strings"),
    *("spark-identity-both", "millpond-both"),
)


def systems(setting: Setting) -> list[System]:
    """All of them, in the order in which they are shown."""

    def one(kind: type[Stream], of: str, name: str, strings: bool = False) -> list[Stream]:
        return [kind(setting, name, Source(of, strings))]

    streams = {
        "spark-identity": one(Identity, "views", "identity"),
        "millpond-fetch": one(Fetching, "views", "fetch"),
        "millpond-waiting": one(FetchingWithWaiting, "views", "waiting"),
        "spark-identity-in": one(IdentityIn, "updates", "identity-in"),
        "millpond-update": one(Updating, "updates", "update"),
        "spark-identity-strings": one(Identity, "views", "identity-strings", strings=True),
        "millpond-fetch-strings": one(Fetching, "views", "fetch-strings", strings=True),
        "millpond-waiting-strings": one(FetchingWithWaiting, "views", "waiting-strings", strings=True),
        "spark-identity-in-strings": one(IdentityIn, "updates", "identity-in-strings", strings=True),
        "millpond-update-strings": one(Updating, "updates", "update-strings", strings=True),
        "spark-identity-both": [
            *one(IdentityIn, "updates", "both-identity-in"),
            *one(Identity, "views", "both-identity"),
        ],
        "millpond-both": [  # the updater first: it holds U back while the feed is loaded
            Updating(setting, "both-updates", Source("updates"), state="both"),
            Fetching(setting, "both-views", Source("views"), state="both", alone=False),
        ],
    }
    return [System(name, REACHES.get(name, Reach(name)), streams[name]) for name in NAMES]


class Identity(Stream):
    """Adds a column, and asks nobody."""

    def step(self, frame: DataFrame, epoch: int) -> None:
        copied, kind = ("ad", "string") if self.source.strings else ("view", "long")
        noop(frame.mapInArrow(AddColumn("campaign", copied), f"{self.source.schema}, campaign {kind}"))


class IdentityIn(Stream):
    """Counts its rows in Python."""

    _counted = 0

    def step(self, frame: DataFrame, epoch: int) -> None:
        self._counted += sum(row[0] for row in frame.mapInArrow(count_rows, "rows long").collect())

    def check(self, files: Sequence[Path], collected: int) -> None:
        _check_count(self.name, self._counted, files)


class Fetching(Stream):
    """Asks a loaded State; U is beyond all that it asks for, and moves only if others update it, too."""

    def __init__(
        self, setting: Setting, name: str, source: Source, state: str | None = None, alone: bool = True
    ) -> None:
        super().__init__(setting, name, source)
        self._state_name = state or name.replace("-", "_")
        self._alone = alone
        self._answers: list[pa.Table] = []

    def load(self) -> None:
        kind = "string" if self.source.strings else "long"
        self._state = self._setting.pond.state(self._state_name, key=kind, value=kind)
        # So late may its rows be: U is where it is reported to be, and nowhere else.
        delay = timedelta(microseconds=self._setting.rows.end_us - START_US)
        feed = self._state.update(key="ad", at="ts", value="campaign", delay=delay, name="feed")
        versions = self._setting.rows.versions(self.source.strings)
        for epoch, first in enumerate(range(0, len(versions), LOADED_AT_ONCE)):
            feed(versions.slice(first, LOADED_AT_ONCE), epoch)
        self._report()
        self._operator = self._state.fetch(key="ad", at="ts", into="campaign", name="views").to(self._sink)

    def _report(self) -> None:
        self._state.report("feed" if self._alone else UPDATER, update=self._setting.rows.end_us)
        if not self._alone:
            self._state.finish("feed")

    def _sink(self, frame: DataFrame, epoch: int) -> None:
        if self.collects:
            self._answers.append(frame.select("view", "campaign").toArrow())
        else:
            noop(frame)

    def step(self, frame: DataFrame, epoch: int) -> None:
        self._operator(frame, epoch)

    def check(self, files: Sequence[Path], collected: int) -> None:
        self._compare(pa.concat_tables(pq.read_table(file) for file in files[-collected:]))

    def _compare(self, views: pa.Table) -> None:
        pending = self._operator.pending()
        if pending.rows or pending.late:
            raise RuntimeError(
                f"{pending.rows} rows of {self.name} wait at the end, {pending.late} were late"
            )
        versions = self._setting.rows.versions(self.source.strings)
        compare(self.name, pa.concat_tables(self._answers), expected(versions, views))


class FetchingWithWaiting(Fetching):
    """U moves before each batch: to where the batch's newest tenth begins."""

    def _report(self) -> None:
        """Nothing, before there is a batch."""

    def _newest_tenth_us(self, number: int) -> int:
        return self._setting.rows.window_us(number) + WINDOW_US - WINDOW_US // WAITING_SHARE

    def step(self, frame: DataFrame, epoch: int) -> None:
        self._state.report("feed", update=self._newest_tenth_us(epoch))
        self._operator(frame, epoch)
        if self.collects and not self._operator.pending().rows:
            raise RuntimeError(f"no row of {self.name} waits after epoch {epoch}")

    def check(self, files: Sequence[Path], collected: int) -> None:
        """The batch before left a tenth to the first of those collected; what waits after the last is answered here."""
        self._state.report("feed", update=self._setting.rows.end_us)
        self._operator.drain()
        before = len(files) - collected - 1
        left = pq.read_table(files[before])
        since = pa.scalar(self._newest_tenth_us(before), pa.int64()).cast(left.schema.field("ts").type)
        left = left.filter(pc.greater_equal(left["ts"], since))
        self._compare(pa.concat_tables([left, *(pq.read_table(file) for file in files[-collected:])]))


class Updating(Stream):
    """Updates a State, durably."""

    def __init__(self, setting: Setting, name: str, source: Source, state: str | None = None) -> None:
        super().__init__(setting, name, source)
        self._state_name = state or name.replace("-", "_")
        self._counted = 0

    def load(self) -> None:
        kind = "string" if self.source.strings else "long"
        self._state = self._setting.pond.state(self._state_name, key=kind, value=kind)
        self._operator = self._state.update(key="ad", at="ts", value="campaign", name=UPDATER)

    def step(self, frame: DataFrame, epoch: int) -> None:
        self._counted += self._operator(frame, epoch).rows

    def check(self, files: Sequence[Path], collected: int) -> None:
        """All rows, none late; and what the State says of some keys."""
        _check_count(self.name, self._counted, files)
        late = self._state.progress().late
        if any(late.values()):
            raise RuntimeError(f"late rows of {self.name}: {late}")
        keys = self._setting.rows.first_keys(CHECKED_KEYS, self.source.strings)
        updates = pq.read_table(list(files), filters=pc.field("ad") < keys)
        chance = np.random.default_rng(3)
        picked = updates.take(chance.integers(0, len(updates), len(updates)))
        # Some time after an update of the same key, and before U.
        times = picked["ts"].cast(pa.int64()).to_numpy() + chance.integers(0, 3 * WINDOW_US, len(picked))
        newest = pc.max(pq.read_table(files[-1], columns=["ts"])["ts"]).cast(pa.int64()).as_py()
        asked = pa.table(
            {
                "view": np.arange(len(picked)),
                "ad": picked["ad"],
                "ts": pa.array(np.minimum(times, newest - 1)).cast(updates.schema.field("ts").type),
            }
        )
        answers = self._state.fetch(key="ad", at="ts", into="campaign").now(asked)
        compare(self.name, answers, expected(updates, asked))


def count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: one row a partition."""
    yield pa.record_batch({"rows": [sum(batch.num_rows for batch in batches)]})


def _check_count(name: str, counted: int, files: Sequence[Path]) -> None:
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    if counted != rows:
        raise RuntimeError(f"{name} took {counted:,} rows where there were {rows:,}")
