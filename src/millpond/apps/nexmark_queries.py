"""NEXMark's queries as windows of a pond: what goes into `foreachBatch` for each source of a query, or takes Arrow tables.

`docs/windows.md` tells whose form each of them is; `nexmark_truth` what they should answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millpond.pond import Pond

Rows: TypeAlias = Any
"""A lazy DataFrame on a stream, an Arrow table where tables are handed over."""
Sink = Callable[[Rows, int], Any]


class Batches(dict[str, Callable[[Any, int], Any]]):
    """What takes the batches of each source, by its name."""

    def __init__(self, operators: Mapping[str, Any], sinks: Sequence[Sink]) -> None:
        super().__init__(
            {source: each.to(sink) for (source, each), sink in zip(operators.items(), sinks, strict=True)}
        )
        self._operators = operators

    def finish(self) -> None:
        """When all batches have been taken: fires what is open. What is on its way to a sink has come there, too."""
        for operator in self._operators.values():
            operator.finish()


Build = Callable[["Pond", str, Mapping[str, Any], Any, Sink], Batches]
"""Of a pond, a name that is not taken, the parameters and the delay of its rows, and a sink of answers."""
BID = ("auction", "bidder", "price", "date_time")


def _q5(pattern: Any) -> Build:
    def build(pond: Pond, name: str, of: Mapping[str, Any], delay: Any, sink: Sink) -> Batches:
        counts = pond.window(
            f"{name}_counts",
            key="auction long",
            window=mp.sliding(of["size"], of["slide"]),
            aggregate={"bids": mp.count()},
            pattern=pattern,
        )
        # Of all windows only one ends within a slide.
        tops = pond.window(
            f"{name}_tops",
            window=mp.tumbling(of["slide"]),
            aggregate={"top": mp.where_largest("bids", "auction"), "began": mp.latest("window_start")},
        )
        counting = counts.over(key="auction", at="date_time", delay=delay, name="bids")
        ranking = tops.over(at="window_time", name="counts")

        def ranked(fired: Rows, epoch: int) -> None:
            sink(
                _each({"began": "window_start", "window_end": "window_end"}, fired, ("auction", "bids")),
                epoch,
            )

        return Batches({"bids": counting.then(ranking)}, [ranked])

    return build


def _highest(window: Callable[[Mapping[str, Any]], Any], key: str | None, *more: str) -> Build:
    def build(pond: Pond, name: str, of: Mapping[str, Any], delay: Any, sink: Sink) -> Batches:
        bids = pond.window(
            name,
            key=None if key is None else f"{key} long",
            window=window(of),
            aggregate={
                "top": mp.where_largest("price", "auction", *([] if key else ["bidder"]), "date_time", *more)
            },
        )
        own = {name: name for name in ("window_start", "window_end", *([key] if key else []))}
        answered = (*(BID if key is None else ("auction", "price", "date_time")), *more)

        def exploded(fired: Rows, epoch: int) -> None:
            sink(_each(own, fired, answered), epoch)

        taking = bids.over(key=key and [key], at="date_time", delay=delay, name="bids")
        return Batches({"bids": taking}, [exploded])

    return build


def _sessions(aggregate: Mapping[str, Any]) -> Build:
    def build(pond: Pond, name: str, of: Mapping[str, Any], delay: Any, sink: Sink) -> Batches:
        bids = pond.window(name, key="bidder long", window=_session(of), aggregate=aggregate)
        return Batches({"bids": bids.over(key="bidder", at="date_time", delay=delay, name="bids")}, [sink])

    return build


def _session(of: Mapping[str, Any]) -> Any:
    return mp.session(of["gap"], touching=bool(of.get("touching", False)))


def _tumbling(of: Mapping[str, Any]) -> Any:
    return mp.tumbling(of["size"])


def _q12(pond: Pond, name: str, of: Mapping[str, Any], delay: Any, sink: Sink) -> Batches:
    bids = pond.window(name, key="bidder long", window=_tumbling(of), aggregate={"bids": mp.count()})
    return Batches({"bids": bids.over(key="bidder", at="arrival", name="bids")}, [sink])


def _q8(pond: Pond, name: str, of: Mapping[str, Any], delay: Any, sink: Sink) -> Batches:
    sellers = pond.join(name, key="id long", left="name string", right="", window=_tumbling(of))

    def side(number: int) -> Sink:
        def once(fired: Rows, epoch: int) -> None:
            # All pairs of a window come out in one epoch, whichever side's: here a seller's auctions become one row.
            names = ["window_start", "window_end", "id", "name"]
            is_table = isinstance(fired, pa.Table)
            rows = fired.group_by(names).aggregate([]) if is_table else fired.select(*names).distinct()
            # Both sides number their epochs from 0 on, and are two queries with one sink.
            sink(rows, 2 * epoch + number)

        return once

    sides = {
        "persons": sellers.left(at="date_time", delay=delay),
        "auctions": sellers.right(key="seller", at="date_time", delay=delay),
    }
    return Batches(sides, [side(0), side(1)])


def _each(own: Mapping[str, str], fired: Rows, of_top: Sequence[str]) -> Rows:
    """A row for each of the list `top`: columns of the window's row, by their new names, then those of the list."""
    if not isinstance(fired, pa.Table):
        renamed = (f"{name} AS {new}" for name, new in own.items())
        return fired.selectExpr(*renamed, "inline(top)").select(*own.values(), *of_top)
    top = fired["top"].combine_chunks()
    rows = fired.select(list(own)).take(pc.list_parent_indices(top))
    listed = pc.list_flatten(top)
    columns = [listed.field(listed.type.get_field_index(name)) for name in of_top]
    return pa.table([*rows.columns, *columns], names=[*own.values(), *of_top])


def stream_of(query: str, stream: DataFrame) -> DataFrame:
    """A stream as its query takes it: Q12 goes by the time of arrival, which Spark takes once for each micro-batch."""
    from pyspark.sql import functions as f

    return stream.withColumn("arrival", f.current_timestamp()) if query == "q12" else stream


QUERIES: dict[str, Build] = {
    "q5": _q5(""),
    "q5-append": _q5("aar"),
    "q7": _highest(_tumbling, None),
    "q7-bidder": _highest(_tumbling, "bidder"),
    "q7-session": _highest(_session, "bidder"),
    "q8": _q8,
    "q11": _sessions({"bids": mp.count()}),
    "q11-median": _sessions({"median": mp.median("price")}),
    "q12": _q12,
}
WHOLE: dict[str, Build] = {
    "q7-bidder-whole": _highest(_tumbling, "bidder", "extra"),
    "q7-session-whole": _highest(_session, "bidder", "extra"),
}
"""The same of bids as large as NEXMark has them, with their column `extra`: for benchmarks of much that is open."""
