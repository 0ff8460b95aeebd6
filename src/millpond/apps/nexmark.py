"""NEXMark's events: people who register, auctions that they open, and bids on these, in one interleaved stream.

Of every 50 events in a row one is a person, three are auctions and 46 are bids. Half of the bids are for a hot auction,
three quarters are by a hot bidder, three quarters of the auctions are of a hot seller: hot is one of every hundred, and
who comes later takes its place. All others are drawn evenly from those who are active. Prices are log-uniform.

The figures are those of Apache Beam's generator; the rows are not: here they follow from the seed and the event's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.apps.nexmark_draws import Draw, Longs, below, bits, pick, texts, unit
from millpond.errors import BadOption
from millpond.times import MICROS, time_of

PERSONS, AUCTIONS, BIDS = 1, 3, 46
ROUND = PERSONS + AUCTIONS + BIDS
"""After so many events the kinds repeat."""
PERSON, AUCTION, BID = 0, 1, 2
"""Values of `event_type`."""
FIRST_ID = 1_000
"""Of people and of auctions."""
FIRST_CATEGORY, CATEGORIES = 10, 5
HOT_EVERY = 100
"""Of so many people or auctions in a row one is hot."""
NOT_HOT_AUCTION, NOT_HOT_SELLER, NOT_HOT_BIDDER = 2, 4, 4
"""Of so many one is drawn evenly, the others are hot."""
LEAD = 10
"""So many people and auctions are referred to before they are there."""
PRICE_MIN, PRICE_DECADES = 100, 6
"""In cents: up to 100 million."""
PERSON_BYTES, AUCTION_BYTES, BID_BYTES = 200, 500, 100
"""With `extra`, in the mean: 8 for a number or a time, 1 for a letter."""
START = datetime(2015, 7, 15, tzinfo=UTC)

TIMESTAMP = pa.timestamp("us", tz="UTC")
NAMES = pa.array(
    f"{first} {last}"
    for first, last in product(
        ("Ada", "Boris", "Clara", "Dmitri", "Edith", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kim"),
        ("Abel", "Berger", "Castro", "Dahl", "Evans", "Fischer", "Grant", "Haddad", "Ito"),
    )
)
CITIES = pa.array(["Salem", "Fresno", "Tucson", "Tacoma", "Eugene", "Oakland", "Spokane", "Casper", "Nampa"])
STATES = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
ITEM_NAME, DESCRIPTION, MAILBOX, HOST = (3, 20), (3, 100), (7, 7), (5, 5)  # shortest and longest
FOUR_DIGITS = pa.array(f"{number:04d}" for number in range(10_000))

PERSON_COLUMNS = "id long, name string, email_address string, credit_card string, city string, state string, date_time timestamp"
AUCTION_COLUMNS = (
    "id long, item_name string, description string, initial_bid long, reserve long, date_time timestamp,"
    " expires timestamp, seller long, category long"
)
BID_COLUMNS = "auction long, bidder long, price long, date_time timestamp"
"""As Spark has them; with `extra` there is a string of that name behind them."""


@dataclass(frozen=True)
class Nexmark:
    """A stream of events without end; any part of it can be had, again and again the same.

    `first` and `count` say which part: places in the order of arrival, of events of all kinds. Cuts make no difference.

    The event with the number n is at `start` + n / `events_per_s`. It arrives at the place n, or, with a `disorder` of
    more than 1, anywhere among the events of its group: those are so many in a row, and they come shuffled.

    `active_people` is how many, of all who have registered, still bid and sell: it bounds the keys that are in use at any
    time, not those of a long window, as every 50 events one takes the place of another. With `keys_max` the ids of people
    and of auctions begin again after so many, and there are no more of either. For many people from the beginning, `first`
    is a high number.
    """

    seed: int = 1
    events_per_s: int = 10_000
    active_people: int = 1_000
    auctions_in_flight: int = 100
    keys_max: int | None = None
    disorder: int = 1
    extra: bool = False
    """With a column that brings rows to their sizes."""
    start: datetime = START

    def __post_init__(self) -> None:
        for option, least, most in (
            ("seed", 0, 2**63 - 1),
            ("events_per_s", 1, 10**9),
            ("active_people", 1, 10**9),
            ("auctions_in_flight", 1, 10**9),
            ("disorder", 1, 10**7),
            ("keys_max", 1, 2**62),
        ):
            value = getattr(self, option)
            if value is not None and not least <= value <= most:
                raise BadOption(f"{option} is {value}, and not within {least} and {most:,}", option=option)

    @property
    def disorder_us(self) -> int:
        """By how much an event's time may be below one that came before it, at most."""
        return -((1 - self.disorder) * MICROS // self.events_per_s)

    def events(self, first: int, count: int) -> pa.Table:
        """One row for each event: `event_id`, `event_type`, `date_time`, and its columns in `person`, `auction` or `bid`."""
        numbers = self._arriving(first, count)
        place = numbers % ROUND
        kind = np.where(place < PERSONS, PERSON, np.where(place < PERSONS + AUCTIONS, AUCTION, BID))
        columns = {
            "event_id": pa.array(numbers),
            "event_type": pa.array(kind.astype(np.int32)),
            "date_time": self._times(numbers),
        }
        for name, value, rows_of in (
            ("person", PERSON, self._persons),
            ("auction", AUCTION, self._auctions),
            ("bid", BID, self._bids),
        ):
            is_one = kind == value
            rows = rows_of(numbers[is_one]).to_struct_array().combine_chunks()
            columns[name] = rows.take(pa.array(np.cumsum(is_one) - 1, mask=~is_one))
        return pa.table(columns)

    def persons(self, first: int, count: int) -> pa.Table:
        """The people among these events; columns as in `PERSON_COLUMNS`."""
        numbers = self._arriving(first, count)
        return self._persons(numbers[numbers % ROUND < PERSONS])

    def auctions(self, first: int, count: int) -> pa.Table:
        """The auctions among these events; columns as in `AUCTION_COLUMNS`."""
        numbers = self._arriving(first, count)
        place = numbers % ROUND
        return self._auctions(numbers[(place >= PERSONS) & (place < PERSONS + AUCTIONS)])

    def bids(self, first: int, count: int) -> pa.Table:
        """The bids among these events; columns as in `BID_COLUMNS`."""
        numbers = self._arriving(first, count)
        return self._bids(numbers[numbers % ROUND >= PERSONS + AUCTIONS])

    # Which events

    def _arriving(self, first: int, count: int) -> Longs:
        """The numbers of the events at these places."""
        if first < 0 or count < 0:
            raise BadOption(f"there are no {count} events from {first} on", option="first")
        if self.disorder == 1:
            return np.arange(first, first + count)
        group_first = first // self.disorder
        groups = -(-(first + count) // self.disorder) - group_first
        numbers = np.arange(group_first * self.disorder, (group_first + groups) * self.disorder)
        order = np.argsort(bits(self.seed, Draw.ARRIVAL, numbers).reshape(groups, self.disorder), axis=1)
        order += self.disorder * np.arange(group_first, group_first + groups)[:, None]
        skipped = first - group_first * self.disorder
        return order.ravel()[skipped : skipped + count]

    def _times(self, numbers: Longs) -> pa.Array:
        since = numbers * MICROS
        since //= self.events_per_s
        return pa.array(since + time_of(self.start)).view(TIMESTAMP)

    # Their rows

    def _persons(self, numbers: Longs) -> pa.Table:
        mailbox, host = (
            pick(self.seed, draw, numbers, texts(*lengths))
            for draw, lengths in ((Draw.MAILBOX, MAILBOX), (Draw.HOST, HOST))
        )
        cards = (Draw.CARD_1, Draw.CARD_2, Draw.CARD_3, Draw.CARD_4)
        digits = [pick(self.seed, draw, numbers, FOUR_DIGITS) for draw in cards]
        columns = {
            "id": self._ids(last_person(numbers)),
            "name": pick(self.seed, Draw.NAME, numbers, NAMES),
            "email_address": pc.binary_join_element_wise(
                mailbox, "@", pc.binary_join_element_wise(host, "com", "."), ""
            ),
            "credit_card": pc.binary_join_element_wise(*digits, " "),
            "city": pick(self.seed, Draw.CITY, numbers, CITIES),
            "state": pick(self.seed, Draw.STATE, numbers, STATES),
            "date_time": self._times(numbers),
        }
        lengths = _mean_length(NAMES) + _mean_length(CITIES) + 17 + 19 + 2
        return self._table(columns, numbers, PERSON_BYTES - lengths)

    def _auctions(self, numbers: Longs) -> pa.Table:
        seed = self.seed
        is_hot = below(seed, Draw.HOT_SELLER, numbers, NOT_HOT_SELLER) > 0
        hot = last_person(numbers) // HOT_EVERY * HOT_EVERY
        seller = np.where(is_hot, hot, self._active_person(Draw.SELLER, numbers))
        initial_bid = prices(seed, Draw.INITIAL_BID, numbers)
        # In the mean an auction lasts until so many others are open.
        horizon = self.auctions_in_flight * ROUND * MICROS // (AUCTIONS * self.events_per_s)
        opened = self._times(numbers)
        lasts = 1 + (2 * horizon * unit(seed, Draw.DURATION, numbers)).astype(np.int64)
        columns = {
            "id": self._ids(last_auction(numbers)),
            "item_name": pick(seed, Draw.ITEM_NAME, numbers, texts(*ITEM_NAME)),
            "description": pick(seed, Draw.DESCRIPTION, numbers, texts(*DESCRIPTION)),
            "initial_bid": pa.array(initial_bid),
            "reserve": pa.array(initial_bid + prices(seed, Draw.RESERVE, numbers)),
            "date_time": opened,
            "expires": pa.array(opened.view(pa.int64()).to_numpy() + lasts).view(TIMESTAMP),
            "seller": self._ids(seller),
            "category": pa.array(FIRST_CATEGORY + below(seed, Draw.CATEGORY, numbers, CATEGORIES)),
        }
        return self._table(columns, numbers, AUCTION_BYTES - (sum(ITEM_NAME) + sum(DESCRIPTION)) / 2)

    def _bids(self, numbers: Longs) -> pa.Table:
        seed = self.seed
        is_hot = below(seed, Draw.HOT_AUCTION, numbers, NOT_HOT_AUCTION) > 0
        newest = last_auction(numbers)
        oldest = np.maximum(newest - self.auctions_in_flight, 0)
        auction = oldest + below(seed, Draw.AUCTION, numbers, newest - oldest + 1 + LEAD)
        auction = np.where(is_hot, newest // HOT_EVERY * HOT_EVERY, auction)
        is_hot = below(seed, Draw.HOT_BIDDER, numbers, NOT_HOT_BIDDER) > 0
        hot = last_person(numbers) // HOT_EVERY * HOT_EVERY + 1  # hot sellers are others
        columns = {
            "auction": self._ids(auction),
            "bidder": self._ids(np.where(is_hot, hot, self._active_person(Draw.BIDDER, numbers))),
            "price": pa.array(prices(seed, Draw.PRICE, numbers)),
            "date_time": self._times(numbers),
        }
        return self._table(columns, numbers, BID_BYTES)

    def _ids(self, which: Longs) -> pa.Array:
        return pa.array(FIRST_ID + (which if self.keys_max is None else which % self.keys_max))

    def _active_person(self, draw: Draw, numbers: Longs) -> Longs:
        people = last_person(numbers) + 1
        active = np.minimum(people, self.active_people)
        return people - active + below(self.seed, draw, numbers, active + LEAD)

    def _table(self, columns: dict[str, pa.Array], numbers: Longs, bytes_left: float) -> pa.Table:
        """With `extra` where it is wanted: what is left when numbers and times have taken theirs, give or take a fifth."""
        if self.extra:
            mean = round(bytes_left - 8 * sum(not pa.types.is_string(each.type) for each in columns.values()))
            columns["extra"] = pick(
                self.seed, Draw.EXTRA, numbers, texts(mean - round(mean / 5), mean + round(mean / 5))
            )
        return pa.table(columns)


def last_person(numbers: Longs) -> Longs:
    """The newest of all people, from 0 on, when this event happens; an event that is a person counts itself."""
    return numbers // ROUND


def last_auction(numbers: Longs) -> Longs:
    """The same of auctions, for events that are auctions or bids."""
    open_of_round = np.minimum(numbers % ROUND - PERSONS, AUCTIONS - 1)
    return AUCTIONS * (numbers // ROUND) + open_of_round


def prices(seed: int, draw: Draw, numbers: Longs) -> Longs:
    """Log-uniform: each decade has as many as any other."""
    decades = PRICE_DECADES * unit(seed, draw, numbers)
    cents: Longs = np.rint(PRICE_MIN * np.power(10.0, decades)).astype(np.int64)
    return cents


def _mean_length(strings: pa.Array) -> float:
    return float(pc.mean(pc.utf8_length(strings)).as_py())
