"""Windows, one behind the other, as one operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from millpond.ops import frames
from millpond.ops.committing import check_sink, turn_of
from millpond.ops.interruptions import ends_with_query
from millpond.stores.windows.shape import WINDOW_END
from millpond.wire.base import LOCAL_QUERY, Turn

if TYPE_CHECKING:
    from millpond.ops.window import WindowSource

WINDOW_TIME = "window_time"


class Chain:
    """Windows, one behind the other, as one operator `(rows, epoch)`. Of what one fires nothing is lost or doubled: the next
    takes the same turns.
    """

    def __init__(self, sources: Sequence[WindowSource]) -> None:
        self._sources = list(sources)
        for source in self._sources[:-1]:
            source.check_followed()

    def then(self, following: WindowSource) -> Chain:
        """One more window behind these."""
        return Chain([*self._sources, following])

    @ends_with_query
    def __call__(self, rows: Any, epoch: int) -> Any:
        """Commits one epoch in all windows, one after the other; what the last one fired."""
        self._sources[0](rows, epoch)
        if not frames.is_frame(rows):
            return self._go_on(LOCAL_QUERY, turn_of(epoch))
        query = frames.query_of(rows) or LOCAL_QUERY
        self._go_on(query, turn_of(epoch))
        return self._sources[-1].frame(query, turn_of(epoch), rows.sparkSession)

    def to(self, function: Callable[[Any, int], Any]) -> Callable[[Any, int], None]:
        """For `foreachBatch`, as `WindowSource.to`. What the first fires without a batch goes on, too; and once that is over,
        so is what is open in the others.
        """
        check_sink(function)

        def hand_on(fired: Any, number: int) -> None:
            turn = turn_of(number)
            results = self._go_on(_query_of(fired), turn)
            if frames.is_frame(fired):
                results = self._sources[-1].frame(_query_of(fired), turn, fired.sparkSession)
            function(results, number)

        self._sources[0].followed_by(self._waits_behind, self._sources[-1].owes_update)
        return self._sources[0].to(hand_on)

    def finish(self, query: str | None = None) -> pa.Table | None:
        """Fires all that is left in the first, which the others take in; then what is left in those. Exactly once.

        As `WindowSource.finish`: what the last one fires goes to the function of `to`. Where there is none, all that it fired
        since the last epoch comes back, each time until something comes again.
        """
        first, *others = self._sources
        first.followed_by(self._waits_behind, self._sources[-1].owes_update)
        if first.has_sink:
            self._finish_each(query)
            return None
        name = first.query_named(query)
        handed: dict[Turn, pa.Table] = {}

        def keep(fired: Any, number: int) -> None:
            handed[turn_of(number)] = self._go_on(_query_of(fired), turn_of(number))

        with first.handing_to(keep):
            self._finish_each(query)
        last = first.last_turn(name)
        for drain in range(1, 1 + (0 if last is None else last.drain)):
            assert last is not None
            turn = Turn(last.epoch, drain)
            if turn not in handed:
                handed[turn] = others[-1].fired_in(name, turn)
        return pa.concat_tables(handed.values()) if handed else others[-1].nothing()

    def _finish_each(self, query: str | None) -> None:
        """A turn ends one of them at least."""
        for _ in self._sources:
            self._sources[0].finish(query)
        for source in self._sources[1:]:
            source.rest()

    def _waits_behind(self) -> bool:
        """Whether what is open behind the first could go on by a turn of it."""
        waiting = next((source for source in self._sources[1:] if source.has_open()), None)
        return waiting is not None and waiting.may_close()

    def _go_on(self, query: str, turn: Turn, is_belated: bool = False) -> pa.Table:
        """What a turn of the first fired goes through the others; what comes out. A belated one has others behind it."""
        before, *others = self._sources
        epoch = Turn(turn.epoch)
        last = [source.last_turn(query) for source in others] if turn.drain else []
        if any(each is None or each < epoch for each in last):
            # It was interrupted between two windows.
            self._go_on(query, epoch, is_belated=True)
        fired = before.fired_in(query, turn)
        for source in others:
            if turn.drain and not fired.num_rows and before.is_over():
                fired = source.close(query, turn)
            else:
                watermark = -math.inf if is_belated else before.fired_upto()
                fired = source.feed(with_window_time(fired), query, turn, watermark)
            before = source
        return fired


def _query_of(fired: Any) -> str:
    return (frames.query_of(fired) if frames.is_frame(fired) else None) or LOCAL_QUERY


def with_window_time(fired: pa.Table) -> pa.Table:
    """Fired rows with the last instant of their windows."""
    ends = fired.column(WINDOW_END)
    last = pc.subtract(ends.cast(pa.int64()), 1).cast(ends.type)
    return fired.append_column(WINDOW_TIME, last)
