"""Events are what they are said to be in any cut, and DuckDB's answers are those of plain Python."""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpond.apps import nexmark_draws as draws
from millpond.apps.nexmark import (
    AUCTION_COLUMNS,
    BID_COLUMNS,
    FIRST_ID,
    HOT_EVERY,
    LEAD,
    PERSON_COLUMNS,
    Nexmark,
)
from millpond.apps.nexmark_truth import QUERIES, truth
from millpond.errors import BadDuration, BadOption
from millpond.schema.ddl import parse_ddl
from millpond.times import time_of

KINDS = ("persons", "auctions", "bids", "events")
Row = dict[str, Any]


def micros(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    return column.cast(pa.int64()).to_numpy()


# Chance


@pytest.mark.long
def test_what_is_drawn_is_even_and_each_draw_is_independent_of_the_others() -> None:
    events = np.arange(100_000)
    for bound in (2, 111, 1_010):
        counts = np.bincount(draws.below(7, draws.Draw.BIDDER, events, bound), minlength=bound)
        assert len(counts) == bound
        expected = len(events) / bound
        assert ((counts - expected) ** 2 / expected).sum() < bound + 6 * (2 * bound) ** 0.5
    columns = [draws.unit(seed, draw, events) for seed in (1, 2) for draw in draws.Draw]
    columns.append(draws.unit(1, draws.Draw.BIDDER, events + 1))
    assert all(((column >= 0) & (column < 1)).all() for column in columns)
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 0.02


def test_letters_are_spread_over_lengths() -> None:
    several = draws.texts(3, 9)
    counts = Counter(len(text) for text in several.to_pylist())
    assert sorted(counts) == list(range(3, 10))
    assert len(set(counts.values())) == 1
    assert draws.texts(5, 5).equals(draws.texts(5, 5))


# Events


def test_kinds_are_one_to_three_to_forty_six_in_one_stream() -> None:
    events = Nexmark().events(150, 5_000)
    assert events["event_id"].to_pylist() == list(range(150, 5_150))
    assert Counter(events["event_type"].to_pylist()) == {0: 100, 1: 300, 2: 4_600}
    assert events["event_type"].to_pylist()[:50] == [0] + 3 * [1] + 46 * [2]


@pytest.mark.parametrize("disorder", [1, 1_000])
def test_the_stream_of_all_has_the_rows_of_each_kind(disorder: int) -> None:
    stream = Nexmark(disorder=disorder, extra=True)
    events = stream.events(1_234, 2_345)
    for number, kind in enumerate(KINDS[:3]):
        rows = events.filter(pc.equal(events["event_type"], number))
        structs = rows[kind.removesuffix("s")].combine_chunks()
        assert structs.null_count == 0
        assert pa.Table.from_struct_array(structs).equals(getattr(stream, kind)(1_234, 2_345))
        assert pa.Table.from_struct_array(structs)["date_time"].equals(rows["date_time"])
        assert events[kind.removesuffix("s")].null_count == len(events) - len(rows)


@pytest.mark.parametrize("disorder", [1, 7, 1_000])
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_make_no_difference(kind: str, disorder: int) -> None:
    part = getattr(Nexmark(seed=5, disorder=disorder, extra=True), kind)
    whole = part(990, 4_321)
    cuts = [0, 1, 2, 51, 999, 1_010, 3_000, 4_320, 4_321]
    pieces = [part(990 + a, b - a) for a, b in pairwise(cuts)]
    assert pa.concat_tables(pieces).combine_chunks().equals(whole.combine_chunks())
    assert part(990, 4_321).equals(whole)
    assert len(part(990, 0)) == 0
    assert part(990, 0).schema.equals(whole.schema)
    assert not getattr(Nexmark(seed=6, disorder=disorder, extra=True), kind)(990, 4_321).equals(whole)


def test_a_stream_stays_what_it_is() -> None:
    bids = Nexmark(seed=3, disorder=1_000, extra=True).bids(10_000, 5)
    assert bids["auction"].to_pylist() == [1600, 1540, 1589, 1621, 1555]
    assert bids["bidder"].to_pylist() == [1201, 1201, 1201, 1048, 1201]
    assert bids["price"].to_pylist() == [8617769, 31694550, 1177, 8568, 24095]
    assert bids["extra"].to_pylist()[3] == "hnkwzplblgqidhkgaiapqawygutteofkzdvokpntufzsxitabbxynzc"


def test_half_of_the_bids_are_for_hot_auctions_and_three_quarters_by_hot_bidders() -> None:
    bids = Nexmark().bids(500_000, 100_000)
    # Auctions that are hot are also drawn evenly, by one in 111; bidders by one in 1,010.
    hot_auctions = (bids["auction"].to_numpy() - FIRST_ID) % HOT_EVERY == 0
    hot_bidders = (bids["bidder"].to_numpy() - FIRST_ID) % HOT_EVERY == 1
    assert abs(hot_auctions.mean() - (1 / 2 + 1 / 2 / HOT_EVERY)) < 0.01
    assert abs(hot_bidders.mean() - (3 / 4 + 1 / 4 / HOT_EVERY)) < 0.01
    assert abs((hot_auctions & hot_bidders).mean() - hot_auctions.mean() * hot_bidders.mean()) < 0.01


def test_three_quarters_of_the_auctions_are_of_hot_sellers() -> None:
    auctions = Nexmark().auctions(500_000, 500_000)
    hot = (auctions["seller"].to_numpy() - FIRST_ID) % HOT_EVERY == 0
    assert abs(hot.mean() - (3 / 4 + 1 / 4 / HOT_EVERY)) < 0.01
    assert set(auctions["category"].to_pylist()) == {10, 11, 12, 13, 14}


@pytest.mark.parametrize("active_people", [10, 1_000, 30_000])
def test_who_is_drawn_evenly_is_active(active_people: int) -> None:
    first = 1_000_000  # after 20,000 people and 60,000 auctions
    bids = Nexmark(active_people=active_people).bids(first, 50)
    assert len(bids) == 46
    rows = pa.concat_tables(
        Nexmark(active_people=active_people, seed=seed).bids(first, 50) for seed in range(300)
    )
    cold = rows.filter(pa.array((rows["bidder"].to_numpy() - FIRST_ID) % HOT_EVERY != 1))
    bidders, newest = cold["bidder"].to_numpy() - FIRST_ID, first // 50
    oldest = max(newest - active_people, -1) + 1
    assert bidders.min() >= oldest
    assert bidders.max() <= newest + LEAD
    assert np.ptp(bidders) > 0.99 * (newest - oldest + LEAD) - 2
    cold = rows.filter(pa.array((rows["auction"].to_numpy() - FIRST_ID) % HOT_EVERY != 0))
    auctions, newest = cold["auction"].to_numpy() - FIRST_ID, 3 * (first // 50) + 2
    assert set(auctions.tolist()) == {
        auction for auction in range(newest - 100, newest + LEAD + 1) if auction % HOT_EVERY
    }


def test_ids_begin_at_a_thousand_without_gaps_and_the_first_events_refer_to_the_first() -> None:
    stream = Nexmark()
    assert stream.persons(0, 5_000)["id"].to_pylist() == list(range(FIRST_ID, FIRST_ID + 100))
    assert stream.auctions(0, 5_000)["id"].to_pylist() == list(range(FIRST_ID, FIRST_ID + 300))
    early = stream.bids(0, 50)
    assert FIRST_ID <= min(early["auction"].to_pylist()) <= max(early["auction"].to_pylist()) <= FIRST_ID + 12
    assert FIRST_ID <= min(early["bidder"].to_pylist()) <= max(early["bidder"].to_pylist()) <= FIRST_ID + 10
    assert min(stream.auctions(0, 50)["seller"].to_pylist()) >= FIRST_ID


def test_there_are_no_more_keys_than_keys_max() -> None:
    stream = Nexmark(keys_max=150)
    bids, auctions = stream.bids(0, 40_000), stream.auctions(0, 40_000)
    ids = set(range(FIRST_ID, FIRST_ID + 150))
    for column in (bids["auction"], bids["bidder"], auctions["id"]):
        assert set(column.to_pylist()) == ids
    for column in (auctions["seller"], stream.persons(0, 40_000)["id"]):
        assert set(column.to_pylist()) <= ids


def test_prices_are_log_uniform() -> None:
    price = Nexmark().bids(0, 100_000)["price"].to_numpy()
    assert price.min() >= 100
    assert price.max() <= 100_000_000
    share, _ = np.histogram(np.log10(price), bins=np.arange(2, 9))
    assert np.abs(share / len(price) - 1 / 6).max() < 0.01


def test_rows_have_their_sizes_in_the_mean_and_extra_can_be_left_out() -> None:
    for kind, size in (("persons", 200), ("auctions", 500), ("bids", 100)):
        rows = getattr(Nexmark(extra=True), kind)(0, 300_000)
        total = 0
        for column in rows.columns:
            is_text = pa.types.is_string(column.type)
            total += pc.sum(pc.utf8_length(column)).as_py() if is_text else 8 * len(column)
        assert abs(total / len(rows) / size - 1) < 0.01
        lengths = pc.utf8_length(rows["extra"]).to_numpy()
        assert lengths.std() > 0.1 * lengths.mean()
        without = getattr(Nexmark(), kind)(0, 300_000)
        assert without.equals(rows.drop_columns(["extra"]))


@pytest.mark.parametrize(
    ("kind", "ddl"), [("persons", PERSON_COLUMNS), ("auctions", AUCTION_COLUMNS), ("bids", BID_COLUMNS)]
)
def test_columns_are_as_spark_has_them(kind: str, ddl: str) -> None:
    rows = getattr(Nexmark(), kind)(0, 500)
    assert [(each.name, each.type) for each in rows.schema] == [
        (each.name, each.type) for each in parse_ddl(ddl, "value")
    ]
    assert all(column.null_count == 0 for column in rows.columns)


def test_people_are_described() -> None:
    person = Nexmark().persons(0, 50).to_pylist()[0]
    assert person["email_address"].count("@") == 1
    assert person["email_address"].endswith(".com")
    assert [len(part) for part in person["credit_card"].split()] == [4, 4, 4, 4]


def test_times_follow_from_numbers_and_the_rate() -> None:
    start = datetime(2020, 1, 1, tzinfo=UTC)
    times = micros(Nexmark(events_per_s=3_000, start=start).events(0, 9_001)["date_time"]) - time_of(start)
    assert times[[0, 1, 2, 3, 3_000, 9_000]].tolist() == [0, 333, 666, 1_000, 1_000_000, 3_000_000]
    assert (np.diff(times) >= 333).all()


def test_auctions_last_until_those_in_flight_have_been_opened() -> None:
    auctions = Nexmark(events_per_s=1_000).auctions(0, 300_000)
    lasts = micros(auctions["expires"]) - micros(auctions["date_time"])
    horizon = 100 * 50 / 3 / 1_000 * 1e6
    assert lasts.min() > 0
    assert lasts.max() <= 2 * horizon + 1
    assert abs(lasts.mean() / horizon - 1) < 0.02


@pytest.mark.parametrize("disorder", [2, 1_000])
def test_disorder_stays_within_groups_and_is_another_in_each(disorder: int) -> None:
    stream = Nexmark(disorder=disorder, events_per_s=7_000)
    events = stream.events(0, 10 * disorder)
    groups = events["event_id"].to_numpy().reshape(10, disorder)
    assert (np.sort(groups, axis=1) == np.arange(10 * disorder).reshape(10, disorder)).all()
    within = {tuple(group) for group in (groups % disorder).tolist()}
    assert len(within) == (2 if disorder == 2 else 10)
    times = micros(events["date_time"])
    behind = np.maximum.accumulate(times) - times
    assert 0 < behind.max() <= stream.disorder_us
    in_order = Nexmark(events_per_s=7_000).events(0, 10 * disorder)
    assert events.sort_by("event_id").combine_chunks().equals(in_order.combine_chunks())
    other = Nexmark(disorder=disorder, seed=2).events(0, 10 * disorder)
    assert other["event_id"].to_pylist() != events["event_id"].to_pylist()


def test_without_disorder_nothing_is_behind() -> None:
    assert Nexmark().disorder_us == 0


@pytest.mark.parametrize(
    "option", ["seed", "events_per_s", "active_people", "auctions_in_flight", "keys_max", "disorder"]
)
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadOption, match=f"{option} is -1") as caught:
        Nexmark(**{option: -1})
    assert caught.value.option == option
    with pytest.raises(BadOption, match="no 5 events from -1 on"):
        Nexmark().bids(-1, 5)


# The truth beside plain Python. Times are integers there.


def plain(table: pa.Table) -> list[Row]:
    """Rows whose times are microseconds."""
    for place, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            table = table.set_column(place, column.name, table[column.name].cast(pa.int64()))
    return table.to_pylist()


def naive_sliding(bids: Iterable[Row], size: int, slide: int) -> list[tuple[Any, ...]]:
    windows: dict[int, Counter[int]] = defaultdict(Counter)
    for bid in bids:
        start = bid["date_time"] // slide * slide
        while start + size > bid["date_time"]:
            windows[start][bid["auction"]] += 1
            start -= slide
    return sorted(
        (start, start + size, auction, count)
        for start, counts in windows.items()
        for auction, count in counts.items()
        if count == max(counts.values())
    )


def naive_highest(bids: Iterable[Row], size: int, per_bidder: bool) -> list[tuple[Any, ...]]:
    windows: dict[tuple[int, int | None], list[Row]] = defaultdict(list)
    for bid in bids:
        windows[bid["date_time"] // size, bid["bidder"] if per_bidder else None].append(bid)
    return sorted(
        (number * size, (number + 1) * size, bid["auction"], bid["bidder"], bid["price"], bid["date_time"])
        for (number, _), rows in windows.items()
        for bid in rows
        if bid["price"] == max(row["price"] for row in rows)
    )


def naive_sessions(bids: Iterable[Row], gap: int, touching: bool) -> list[tuple[int, int, int, list[Row]]]:
    """start, end, bidder, rows"""
    open_ones: dict[int, list[Row]] = {}
    closed: list[tuple[int, int, int, list[Row]]] = []

    def close(bidder: int) -> None:
        rows = open_ones.pop(bidder)
        closed.append((rows[0]["date_time"], rows[-1]["date_time"] + gap, bidder, rows))

    for bid in sorted(bids, key=lambda bid: bid["date_time"]):
        rows = open_ones.get(bid["bidder"])
        if rows is not None:
            silence = bid["date_time"] - rows[-1]["date_time"]
            if silence > gap or (silence == gap and not touching):
                close(bid["bidder"])
        open_ones.setdefault(bid["bidder"], []).append(bid)
    for bidder in list(open_ones):
        close(bidder)
    return closed


def naive_session_highest(bids: Iterable[Row], gap: int, touching: bool) -> list[tuple[Any, ...]]:
    return sorted(
        (start, end, bidder, bid["auction"], bid["price"], bid["date_time"])
        for start, end, bidder, rows in naive_sessions(bids, gap, touching)
        for bid in rows
        if bid["price"] == max(row["price"] for row in rows)
    )


def naive_session_of(
    bids: Iterable[Row], gap: int, touching: bool, what: Callable[[list[Row]], float]
) -> list[tuple[Any, ...]]:
    return sorted(
        (start, end, bidder, what(rows)) for start, end, bidder, rows in naive_sessions(bids, gap, touching)
    )


def median_price(rows: list[Row]) -> float:
    return float(statistics.median(row["price"] for row in rows))


def naive_new_sellers(
    persons: Iterable[Row], auctions: list[Row], size: int, each_auction: bool
) -> list[tuple[Any, ...]]:
    rows = []
    for person in persons:
        number = person["date_time"] // size
        same = [
            auction
            for auction in auctions
            if auction["seller"] == person["id"] and auction["date_time"] // size == number
        ]
        head = (number * size, (number + 1) * size, person["id"], person["name"])
        rows += (
            [(*head, auction["id"], auction["reserve"]) for auction in same]
            if each_auction
            else [head] * bool(same)
        )
    return sorted(rows)


def naive_arrivals(bids: Iterable[Row], size: int) -> list[tuple[Any, ...]]:
    counts = Counter((bid["arrival"] // size, bid["bidder"]) for bid in bids)
    return sorted((number * size, (number + 1) * size, bidder, n) for (number, bidder), n in counts.items())


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in plain(table)]


STREAM = Nexmark(
    events_per_s=100, active_people=20, keys_max=40, disorder=100, start=datetime(1970, 1, 1, tzinfo=UTC)
)
"""20 seconds, with keys that come back."""
COUNT = 2_000
BIDS, AUCTIONS, PEOPLE = (part(0, COUNT) for part in (STREAM.bids, STREAM.auctions, STREAM.persons))
S = 1_000_000


@pytest.mark.parametrize("query", ["q5", "q5-append"])
@pytest.mark.parametrize(("size", "slide"), [(10, 2), (4, 4), (3, 2), (2, 3), (60, 1)])
def test_hot_items(query: str, size: int, slide: int) -> None:
    answer = truth(query, bids=BIDS, size=f"{size} seconds", slide=f"{slide} seconds")
    assert rows_of(answer) == naive_sliding(plain(BIDS), size * S, slide * S)
    assert answer.column_names == ["window_start", "window_end", "auction", "bids"]


@pytest.mark.parametrize("per_bidder", [False, True])
def test_highest_bids(per_bidder: bool) -> None:
    answer = truth("q7", bids=BIDS, size="3 seconds", per_bidder=per_bidder)
    assert rows_of(answer) == naive_highest(plain(BIDS), 3 * S, per_bidder)
    assert len(answer) >= 7 * (10 if per_bidder else 1)


@pytest.mark.parametrize("touching", [False, True])
@pytest.mark.parametrize("gap_ms", [50, 200, 1_000, 100_000])
def test_sessions(gap_ms: int, touching: bool) -> None:
    bids, gap = plain(BIDS), gap_ms * 1_000
    given = {"bids": BIDS, "gap": f"{gap_ms} ms", "touching": touching}
    assert rows_of(truth("q7-session", **given)) == naive_session_highest(bids, gap, touching)
    assert rows_of(truth("q11", **given)) == naive_session_of(bids, gap, touching, len)
    assert rows_of(truth("q11-median", **given)) == naive_session_of(bids, gap, touching, median_price)


@pytest.mark.parametrize("each_auction", [False, True])
def test_new_sellers(each_auction: bool) -> None:
    answer = truth("q8", auctions=AUCTIONS, persons=PEOPLE, size="4 seconds", each_auction=each_auction)
    assert rows_of(answer) == naive_new_sellers(plain(PEOPLE), plain(AUCTIONS), 4 * S, each_auction)
    assert len(answer) >= 8


def test_bids_by_their_arrival() -> None:
    rng = np.random.default_rng(1)
    arrived = pa.array(micros(BIDS["date_time"]) + rng.integers(0, 3 * S, len(BIDS)))
    bids = BIDS.append_column("seen", arrived.cast(pa.timestamp("us", tz="UTC")))
    answer = truth("q12", bids=bids, size="2 seconds", arrival="seen")
    assert rows_of(answer) == naive_arrivals(
        plain(bids.rename_columns([*BIDS.column_names, "arrival"])), 2 * S
    )
    assert answer["window_start"].type == BIDS["date_time"].type


# By hand


def bids_of(*rows: tuple[int, int, int, int]) -> pa.Table:
    """auction, bidder, price, time; times are logical."""
    return pa.Table.from_pylist(
        [{"auction": a, "bidder": b, "price": p, "date_time": t} for a, b, p, t in rows],
        pa.schema([(name, pa.int64()) for name in ("auction", "bidder", "price", "date_time")]),
    )


def test_ties_are_all_answers() -> None:
    bids = bids_of((1, 7, 5, 0), (2, 8, 5, 1), (1, 9, 3, 2), (2, 7, 4, 3), (3, 7, 5, 4), (3, 7, 5, 4))
    for query in ("q5", "q5-append"):
        assert rows_of(truth(query, bids=bids, size=10, slide=10)) == [(0, 10, a, 2) for a in (1, 2, 3)]
    assert rows_of(truth("q7", bids=bids, size=10)) == [
        (0, 10, 1, 7, 5, 0),
        (0, 10, 2, 8, 5, 1),
        (0, 10, 3, 7, 5, 4),
        (0, 10, 3, 7, 5, 4),  # two bids alike are two
    ]
    assert [row[2:] for row in rows_of(truth("q7-session", bids=bids, gap=10))] == [
        (7, 1, 5, 0),
        (7, 3, 5, 4),
        (7, 3, 5, 4),
        (8, 2, 5, 1),
        (9, 1, 3, 2),
    ]


def test_windows_are_half_open_also_before_zero_and_empty_ones_have_no_row() -> None:
    bids = bids_of((1, 7, 5, -1), (1, 7, 6, 0), (1, 7, 6, 9), (2, 7, 6, 10), (1, 7, 4, 35))
    assert [row[:2] for row in rows_of(truth("q7", bids=bids, size=10))] == [
        (-10, 0),
        (0, 10),
        (0, 10),
        (10, 20),
        (30, 40),
    ]
    assert [row[0] for row in rows_of(truth("q5", bids=bids, size=10, slide=5))] == [
        -10,
        -5,
        0,
        5,
        5,
        10,
        30,
        35,
    ]
    arrived = bids.append_column("arrival", bids["date_time"])
    assert rows_of(truth("q12", bids=arrived, size=10)) == [
        (-10, 0, 7, 1),
        (0, 10, 7, 2),
        (10, 20, 7, 1),
        (30, 40, 7, 1),
    ]


def test_a_bid_exactly_a_gap_later_begins_a_session_unless_they_touch() -> None:
    bids = bids_of((1, 7, 5, 0), (1, 7, 8, 10), (1, 7, 2, 10), (1, 7, 3, 19), (1, 8, 3, 5), (1, 7, 1, 30))
    assert rows_of(truth("q11", bids=bids, gap=10)) == [
        (0, 10, 7, 1),
        (5, 15, 8, 1),
        (10, 29, 7, 3),
        (30, 40, 7, 1),
    ]
    assert rows_of(truth("q11", bids=bids, gap=10, touching=True)) == [
        (0, 29, 7, 4),
        (5, 15, 8, 1),
        (30, 40, 7, 1),
    ]
    assert rows_of(truth("q11-median", bids=bids, gap=10, touching=True)) == [
        (0, 29, 7, 4.0),  # of 2, 3, 5, 8
        (5, 15, 8, 3.0),
        (30, 40, 7, 1.0),
    ]


def test_who_opens_two_auctions_is_told_once_and_in_another_window_not_at_all() -> None:
    persons = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"], "date_time": [1, 9, 12]})
    auctions = pa.table(
        {"id": [5, 6, 7, 8], "seller": [1, 1, 2, 3], "reserve": [50, 60, 70, 80], "date_time": [0, 9, 10, 19]}
    )
    given = {"persons": persons, "auctions": auctions, "size": 10}
    assert rows_of(truth("q8", **given)) == [(0, 10, 1, "a"), (10, 20, 3, "c")]
    assert rows_of(truth("q8", each_auction=True, **given)) == [
        (0, 10, 1, "a", 5, 50),
        (0, 10, 1, "a", 6, 60),
        (10, 20, 3, "c", 8, 80),
    ]


@pytest.mark.parametrize("query", QUERIES)
def test_nothing_comes_of_nothing(query: str) -> None:
    bids = BIDS.slice(0, 0).append_column("arrival", BIDS.slice(0, 0)["date_time"])
    answer = truth(query, bids=bids, auctions=AUCTIONS.slice(0, 0), persons=PEOPLE.slice(0, 0))
    assert len(answer) == 0
    assert answer["window_end"].type == BIDS["date_time"].type


def test_the_order_of_rows_makes_no_difference() -> None:
    turned = BIDS.take(pa.array(np.arange(len(BIDS))[::-1]))
    for query in ("q5", "q7", "q7-session", "q11", "q11-median"):
        assert truth(query, bids=turned).equals(truth(query, bids=BIDS))


def test_what_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, message, query, given in (
        (BadOption, "no query 'q6'", "q6", {}),
        (BadOption, "q7 has no gap and no slide", "q7", {"bids": BIDS, "slide": 1, "gap": 2}),
        (BadOption, "q8 needs persons", "q8", {"auctions": AUCTIONS}),
        (BadOption, "q11 needs bids", "q11", {}),
        (BadOption, "no column 'arrival'", "q12", {"bids": BIDS}),
        (BadOption, "q7 with a size of 0", "q7", {"bids": BIDS, "size": 0}),
        (BadDuration, "negative", "q5", {"bids": BIDS, "slide": -1}),
    ):
        with pytest.raises(error, match=message) as caught:
            truth(query, **given)
        assert caught.value.hint
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(BadOption, match="needs duckdb"):
        truth("q7", bids=BIDS)
