"""What a window operator must answer, in plain Python: it keeps rows as they came, and looks at all of them each time.

The oracle shares no code with what it checks, and knows no panes, logs, slices or processes. Windows are of
`window_kinds`, aggregates of `window_aggregates`, joins of `window_joins`.

After each epoch, of a source that is at `before` when it comes:

- A row is late for a window whose end + lateness <= `before`, and is not taken into it. Late for all of its windows, it is
  late: dropped and counted. A row of a session is late if its time + gap + lateness <= `before`. What a row would have
  belonged to and is gone, it does not bring back: its session is then made of the rows that are still there.
- The source's watermark is at its newest time - delay, and the window's where `Watermarks` says.
- A window with end <= watermark fires, once. With lateness it stays until end + lateness <= watermark, and fires again after
  each epoch in which its rows are others than when it fired last. A session that a row makes longer than the watermark
  fires again when its new end is reached.

With `emit="update"` a window also fires after each epoch that changed it, and no more when it closes. With
`emitting=False` an epoch is one between two updates: only windows that close fire in it, and those changed wait. Updates
of sessions have two columns more. `session_id` stays while a session grows; where sessions merge it is that of the one made
first (of one epoch: with the earlier start), and each other id that was seen before gives one more row, with `retracted`
true, its last start and end, and nulls for aggregates. Where `longest` or `ends_when` cut a session anew, its id
goes with its first row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from millpond.errors import BadOption, EpochChanged, EpochOutOfOrder
from millpond.testing.watermarks import Watermarks
from millpond.testing.window_aggregates import Aggregate
from millpond.testing.window_kinds import Arrival, Entry, Kind, Progress, Span, Window

Row: TypeAlias = tuple[Hashable, int, Mapping[str, Any]]
"""A key, a time and the values by column."""

Place: TypeAlias = tuple[int, Span]
"""An entry's row, by number, and where the row belongs."""

Result: TypeAlias = dict[str, Any]


class Fired(NamedTuple):
    """What one epoch gave: result rows by end, start and key, and rows that were late, as they came."""

    rows: list[Result]
    late_rows: list[Row]
    watermark: Progress
    replayed: bool = False


@dataclass
class KnownSession:
    """A session as those who read updates know it."""

    id: int
    first: Place
    sent_as: tuple[int | None, int | None] | None = None
    """Its start and end when it was last sent."""
    absorbed: list[KnownSession] = field(default_factory=list)
    """Those that merged into it, and were not yet retracted."""


class WindowOracle:
    """One window operator. `sources` are its inputs, with the delay of each; without, there is one, "feed".

    An epoch that is refused has changed nothing. After an aggregate that cannot be given (a user's error)
    the oracle is of no more use. `key` names the key's column, or the columns of a key that is a tuple. `emit` is as told above.
    """

    def __init__(
        self,
        window: Kind,
        aggregate: Mapping[str, Aggregate],
        *,
        key: str | Sequence[str] = "key",
        sources: Mapping[str, int] | None = None,
        lateness: int = 0,
        emit: Literal["close", "update"] = "close",
    ) -> None:
        if emit not in ("close", "update"):
            raise BadOption(f"emit={emit!r}", hint='"close" or "update"', option="emit")
        if lateness < 0 or (lateness and not window.has_lateness):
            raise BadOption(f"lateness={lateness}", hint="0 or more; 0 for counted", option="lateness")
        self.window = window
        self.aggregate = dict(aggregate)
        self.key = key
        self.lateness = lateness
        self.emit = emit
        self.watermarks = Watermarks({"feed": 0} if sources is None else sources)
        self.late = 0
        """How many rows were late."""
        self.outside = 0
        """How many rows belong to no window."""
        self.rows_seen = 0
        self.entries: dict[Hashable, list[Entry]] = {}
        self.sent: dict[Place, frozenset[Place]] = {}
        """Of each entry still there: all of the window that it was last sent in."""
        self.known: dict[Hashable, list[KnownSession]] = {}
        self.ids = 0
        self.epochs: dict[str, dict[int, tuple[list[str], Fired]]] = {}
        """Of each source: the epochs, their rows and what they gave."""

    @property
    def watermark(self) -> Progress:
        return self.watermarks.watermark

    # What happens

    def epoch(
        self, number: int, rows: Iterable[Row], source: str = "feed", *, emitting: bool = True
    ) -> Fired:
        """One epoch of one source. The same number again gives the same, and changes nothing."""
        rows = list(rows)
        epochs = self.epochs.get(source, {})
        fingerprint = sorted(repr(row) for row in rows)
        if number in epochs:
            seen, fired = epochs[number]
            if fingerprint != seen:
                raise EpochChanged(f"epoch {number} of {source!r} came again with other rows", epoch=number)
            return fired._replace(replayed=True)
        if epochs and number != max(epochs) + 1:
            raise EpochOutOfOrder(
                f"epoch {number}, not {max(epochs) + 1}", epoch=number, expected=max(epochs) + 1
            )
        # All that can fail is done before the first change.
        ordered = sorted(range(len(rows)), key=lambda place: (rows[place][1], place))
        arrivals = [Arrival(self.rows_seen + n, *rows[place], source) for n, place in enumerate(ordered)]
        spans = [self.window.spans(arrival) for arrival in arrivals]

        before = self.watermarks.before(source, bool(rows))
        late_numbers = set()
        for arrival, places in zip(arrivals, spans, strict=True):
            timely = [span for span in places if span[1] + self.lateness > before]
            if not places:
                self.outside += 1
            elif not timely:
                late_numbers.add(arrival.number)
            for span in timely:
                self.entries.setdefault(arrival.key, []).append(Entry(arrival, span))
        self.rows_seen += len(rows)
        self.late += len(late_numbers)
        late_places = sorted(ordered[number - (self.rows_seen - len(rows))] for number in late_numbers)
        self.watermarks.after(source, max((time for _, time, _ in rows), default=None))
        fired = self._fire([rows[place] for place in late_places], emitting)
        self.epochs.setdefault(source, {})[number] = (fingerprint, fired)
        return fired

    def idle(self, source: str) -> Fired:
        """The source is left out until rows of it come."""
        self.watermarks.idle(source)
        return self._fire()

    def advance(self, watermark: Progress) -> Fired:
        """The watermark goes there without rows, as on a turn of the operator's own; it does not go back."""
        self.watermarks.advance(watermark)
        return self._fire()

    def finish(self, source: str | None = None) -> Fired:
        """The source sends no more; without one, none does, and all windows that are left fire."""
        for name in [source] if source is not None else list(self.watermarks.sources):
            self.watermarks.finish(name)
        return self._fire()

    # What is there

    def now(self, keys: Iterable[Hashable] | None = None) -> list[Result]:
        """The windows that are not due, as they would fire now. Nothing changes."""
        chosen = list(self.entries) if keys is None else list(dict.fromkeys(keys))
        results = [
            result
            for key in chosen
            for window in self.window.windows(self.entries.get(key, []))
            if window.closes_at > self.watermark
            for result in self._results(key, window)
        ]
        return sorted(results, key=_by_window)

    def copy(self) -> WindowOracle:
        """An oracle of its own, equal to this one now."""
        return copy.deepcopy(self)

    def validate(self) -> None:
        """Raises AssertionError where the oracle itself is broken."""
        places = [place_of(entry) for entries in self.entries.values() for entry in entries]
        assert len(places) == len(set(places)), "an entry is there twice"
        assert set(self.sent) <= set(places), "an entry that is gone is remembered"
        for key, entries in self.entries.items():
            windows = self.window.windows(entries)
            assert entries, f"nothing is left of {key!r}"
            assert sum(len(window.entries) for window in windows) == len(entries), f"{key!r} has {windows}"
            for window in windows:
                assert window.closes_at + self.lateness > self.watermark, (
                    f"{window} of {key!r} is still there"
                )
                assert window.start is None or window.end is None or window.start <= window.end, window

    # Firing

    def _fire(self, late_rows: Sequence[Row] = (), emitting: bool = True) -> Fired:
        results: list[Result] = []
        emits = emitting and self.emit == "update"
        for key in list(self.entries):
            windows = self.window.windows(self.entries[key])
            over: list[Window] = []
            for window, session in zip(windows, self._sessions(key, windows), strict=True):
                is_due = window.closes_at <= self.watermark
                if (is_due or emits) and self._is_new(window):
                    results += self._results(key, window)
                    if session is not None:
                        results[-1] |= {"session_id": session.id, "retracted": False}
                        results += self._retractions(key, session)
                        session.sent_as = (window.start, window.end)
                    self.sent.update(dict.fromkeys(window.content, window.content))
                if window.closes_at + self.lateness <= self.watermark:
                    over.append(window)
                    if session is not None:
                        self.known[key].remove(session)
            self._drop(key, over)
        return Fired(sorted(results, key=_by_window), list(late_rows), self.watermark)

    def _is_new(self, window: Window) -> bool:
        """Whether these rows were not the last to be sent together."""
        return {self.sent.get(place) for place in window.content} != {window.content}

    def _drop(self, key: Hashable, windows: list[Window]) -> None:
        places = {place for window in windows for place in window.content}
        for place in places:
            self.sent.pop(place, None)
        if places:
            self.entries[key] = [entry for entry in self.entries[key] if place_of(entry) not in places]
        if not self.entries[key]:
            del self.entries[key]
            self.known.pop(key, None)

    def _results(self, key: Hashable, window: Window) -> list[Result]:
        rows = [entry.arrival.values for entry in window.entries]
        values = {name: compute(rows) for name, compute in self.aggregate.items()}
        edges = {"window_start": window.start, "window_end": window.end}
        return [{**edges, **key_columns(self.key, key), **values}]

    # Sessions with ids

    def _sessions(self, key: Hashable, windows: list[Window]) -> Sequence[KnownSession | None]:
        """Each window's session, made, grown or merged."""
        if self.emit == "close" or not self.window.has_sessions:
            return [None] * len(windows)
        before = self.known.get(key, [])
        after = []
        for window in windows:
            places = {place_of(entry) for entry in window.entries}
            merged = sorted(
                (session for session in before if session.first in places), key=lambda session: session.id
            )
            if merged:
                session = merged[0]
                for other in merged[1:]:
                    session.absorbed += [other, *other.absorbed]
            else:
                session = KnownSession(self.ids, place_of(window.entries[0]))
                self.ids += 1
            session.first = place_of(window.entries[0])
            after.append(session)
        self.known[key] = list(after)
        return after

    def _retractions(self, key: Hashable, session: KnownSession) -> list[Result]:
        rows = []
        for other in session.absorbed:
            if other.sent_as is not None:
                start, end = other.sent_as
                rows.append(
                    {"window_start": start, "window_end": end, **key_columns(self.key, key)}
                    | dict.fromkeys(self.aggregate)
                    | {"session_id": other.id, "retracted": True}
                )
        session.absorbed = []
        return rows


def place_of(entry: Entry) -> Place:
    return entry.arrival.number, entry.span


def key_columns(names: str | Sequence[str], key: Hashable) -> Result:
    """A key by column. Of several columns, it is a tuple."""
    if isinstance(names, str):
        return {names: key}
    assert isinstance(key, tuple)
    return dict(zip(names, key, strict=True))


def _by_window(result: Result) -> tuple[Progress, Progress, str]:
    start, end = result["window_start"], result["window_end"]
    return (
        math.inf if end is None else end,
        -math.inf if start is None else start,
        repr(result),
    )
