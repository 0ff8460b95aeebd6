"""What joins of two streams and deduplication must answer, in plain Python: every row is kept, every pair is looked at.

A result has the key's columns, then those of the left and of the right row; no other column may be on both sides. Whoever
wants the time of a row in the results has it among its values. Here a row is late if its time + lateness is below the watermark
of its source, as it was before the epoch; in windows, as for all windows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from millpond.errors import BadOption
from millpond.testing.watermarks import Watermarks
from millpond.testing.window_kinds import Entry, Kind, Progress, Window
from millpond.testing.windows import Fired, Result, Row, WindowOracle, key_columns, place_of

LEFT, RIGHT = "left", "right"


class WindowJoinOracle(WindowOracle):
    """All pairs of a left and a right row of one key in the same window, when it fires; each pair once.

    The sources are "left" and "right". Within the lateness, a window that fires again gives the pairs that are new. In
    sessions, rows of both sides make a session together.
    """

    def __init__(
        self,
        window: Kind,
        *,
        key: str | Sequence[str] = "key",
        left_delay: int = 0,
        right_delay: int = 0,
        lateness: int = 0,
    ) -> None:
        sources = {LEFT: left_delay, RIGHT: right_delay}
        super().__init__(window, {}, key=key, sources=sources, lateness=lateness)

    def _results(self, key: Hashable, window: Window) -> list[Result]:
        edges = {"window_start": window.start, "window_end": window.end}
        return [
            {**edges, **_pair(self.key, key, left.arrival.values, right.arrival.values)}
            for left in window.entries
            for right in window.entries
            if (left.arrival.source, right.arrival.source) == (LEFT, RIGHT)
            and not self._were_sent(left, right)
        ]

    def _were_sent(self, left: Entry, right: Entry) -> bool:
        """Together, in one window."""
        content = self.sent.get(place_of(left))
        return content is not None and place_of(right) in content


class _Kept(NamedTuple):
    key: Hashable
    time: int
    values: Mapping[str, object]


class RowOracle:
    """An operator that answers rows in the epoch in which they come, and asks the watermark only for what is late."""

    def __init__(
        self, sources: Mapping[str, int], key: str | Sequence[str] = "key", lateness: int = 0
    ) -> None:
        self.watermarks = Watermarks(sources)
        self.key = key
        self.lateness = lateness
        self.late = 0
        self.replies: dict[tuple[str, int], Fired] = {}

    @property
    def watermark(self) -> Progress:
        return self.watermarks.watermark

    def epoch(self, number: int, rows: Iterable[Row], source: str) -> Fired:
        """One epoch of one source, its rows by time and then by place. The same number again changes nothing."""
        if (source, number) in self.replies:
            return self.replies[source, number]._replace(replayed=True)
        rows = list(rows)
        before = self.watermarks.before(source, bool(rows))
        late_rows = [row for row in rows if row[1] + self.lateness < before]
        timely = [_Kept(*row) for row in rows if row[1] + self.lateness >= before]
        self.late += len(late_rows)
        results = [
            result for row in sorted(timely, key=lambda row: row.time) for result in self._take(row, source)
        ]
        self.watermarks.after(source, max((time for _, time, _ in rows), default=None))
        fired = Fired(results, late_rows, self.watermark)
        self.replies[source, number] = fired
        return fired

    def idle(self, source: str) -> Fired:
        self.watermarks.idle(source)
        return Fired([], [], self.watermark)

    def finish(self, source: str | None = None) -> Fired:
        """Nothing is left to be answered."""
        for name in [source] if source is not None else list(self.watermarks.sources):
            self.watermarks.finish(name)
        return Fired([], [], self.watermark)

    def validate(self) -> None:
        """Like other oracles; there is nothing here that could contradict itself."""

    def _take(self, row: _Kept, source: str) -> list[Result]:
        raise NotImplementedError


class IntervalJoinOracle(RowOracle):
    """Pairs of one key with left time + low <= right time <= left time + high, in the epoch of the later row to come.

    Two rows are a pair if neither was late, however long the first has waited. The sources are "left" and "right".
    """

    def __init__(
        self,
        low: int,
        high: int,
        *,
        key: str | Sequence[str] = "key",
        left_delay: int = 0,
        right_delay: int = 0,
        lateness: int = 0,
    ) -> None:
        if low > high:
            raise BadOption(f"low={low} is above high={high}", hint="swap them", option="low")
        super().__init__({LEFT: left_delay, RIGHT: right_delay}, key, lateness)
        self.low, self.high = low, high
        self.rows: dict[str, list[_Kept]] = {LEFT: [], RIGHT: []}

    def _take(self, row: _Kept, source: str) -> list[Result]:
        self.rows[source].append(row)
        if source == LEFT:
            pairs = [(row, other) for other in self.rows[RIGHT]]
        else:
            pairs = [(other, row) for other in self.rows[LEFT]]
        return [
            _pair(self.key, row.key, left.values, right.values)
            for left, right in pairs
            if left.key == right.key and self.low <= right.time - left.time <= self.high
        ]


class DedupOracle(RowOracle):
    """The first row of each key, in the epoch in which it comes; others of the key at less than `within` from it are dropped.

    First is what comes first, in an epoch by time and then by place: a row may be older than the first of its key. A row that
    is `within` or more from each row of its key that was let through is let through, too. Without `within`, none ever is.
    `dropped` counts; late rows are not among them.
    """

    def __init__(
        self,
        within: int | None = None,
        *,
        key: str | Sequence[str] = "key",
        sources: Mapping[str, int] | None = None,
        lateness: int = 0,
    ) -> None:
        if within is not None and within < 1:
            raise BadOption(f"within={within}", hint="make it 1 or more", option="within")
        super().__init__({"feed": 0} if sources is None else sources, key, lateness)
        self.within = within
        self.dropped = 0
        self.times: dict[Hashable, list[int]] = {}
        """Of the rows that were let through."""

    def epoch(self, number: int, rows: Iterable[Row], source: str = "feed") -> Fired:
        return super().epoch(number, rows, source)

    def _take(self, row: _Kept, source: str) -> list[Result]:
        times = self.times.setdefault(row.key, [])
        if any(self.within is None or abs(row.time - time) < self.within for time in times):
            self.dropped += 1
            return []
        times.append(row.time)
        return [{**key_columns(self.key, row.key), **row.values}]


def _pair(
    names: str | Sequence[str], key: Hashable, left: Mapping[str, object], right: Mapping[str, object]
) -> Result:
    of_key = key_columns(names, key)
    shared = (left.keys() & right.keys()) - of_key.keys()
    if shared:
        raise BadOption(f"both sides have {sorted(shared)}", hint="rename one", option=min(shared))
    return {**of_key, **left, **right}
