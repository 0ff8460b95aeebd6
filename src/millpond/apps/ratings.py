"""Ratings of items by users: read from files, or drawn in the shape of well-known sets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from millpond.errors import BadOption

Longs = npt.NDArray[np.int64]

COLUMNS = {"user": pa.int64(), "item": pa.int64(), "rating": pa.float64(), "at": pa.int64()}
NAMES = {
    "user": ("userid", "user_id", "user"),
    "item": ("movieid", "item_id", "item", "itemid"),
    "rating": ("rating",),
    "at": ("timestamp", "at"),
}
HOW = "pip install --no-deps recbole"
RECBOLE = Path("dataset_example", "ml-100k", "ml-100k.inter")


class Shape(NamedTuple):
    """Of a set of ratings."""

    users: int
    items: int
    per_user: int
    """The mean."""
    least: int
    """No user has fewer."""


MOVIELENS = Shape(users=943, items=1_682, per_user=106, least=20)
NETFLIX = Shape(users=480_189, items=17_770, per_user=209, least=1)


def read_ratings(file: Path) -> pa.Table:
    """`user`, `item`, `rating` in the order of time; of those given at one time in the order of the file.

    As MovieLens has them: `u.data`, by tabs and without a header, or `ratings.csv`, by commas and with one.
    """
    try:
        with file.open() as opened:
            first = opened.readline().rstrip("\n")
        delimiter = "\t" if "\t" in first else ","
        words = first.split(delimiter)
        has_names = not words[0].strip().isdigit()
        # Names may have a type behind them, as in user_id:token.
        names = [_column_of(word) for word in words] if has_names else list(COLUMNS)
        table = csv.read_csv(
            file,
            read_options=csv.ReadOptions(column_names=names, skip_rows=int(has_names)),
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(column_types=COLUMNS, include_columns=list(COLUMNS)),
        )
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise BadOption(
            f"{file} could not be read as ratings: {error}",
            hint="expected are MovieLens' u.data (user, item, rating, timestamp by tabs) or ratings.csv",
            option="--data",
        ) from None
    return table.sort_by("at").drop_columns(["at"]).combine_chunks()


def _column_of(word: str) -> str:
    name = word.partition(":")[0].strip().lower()
    return next((column for column, names in NAMES.items() if name in names), name)


def movielens_file() -> Path | None:
    """MovieLens-100K as the package recbole has it, where that is installed."""
    found = importlib.util.find_spec("recbole")
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder, RECBOLE)
        if file.exists():
            return file
    return None


def drawn_ratings(count: int, shape: Shape = MOVIELENS, *, seed: int = 1) -> pa.Table:
    """So many ratings of as many users of the shape as that takes, shuffled. Nobody rates an item twice.

    Some users rate much more than others, and few items are rated by many; the ratings themselves are drawn evenly.
    """
    rng = np.random.default_rng(seed)
    weights = -1.1 * np.log(np.arange(shape.items) + 30.0)
    users: list[Longs] = []
    items: list[Longs] = []
    drawn = 0
    spread = 1.0
    while drawn < count:
        more = rng.lognormal(np.log(shape.per_user - shape.least) - spread**2 / 2, spread)
        number = min(int(shape.least + more), shape.items)
        # The largest of what each item draws: items by their weights, none of them twice.
        chosen = np.argpartition(weights + rng.gumbel(size=shape.items), -number)[-number:]
        users.append(np.full(number, len(users) % shape.users))
        items.append(chosen)
        drawn += number
    order = rng.permutation(drawn)[:count]
    return pa.table(
        {
            "user": np.concatenate(users)[order].astype(np.int64),
            "item": np.concatenate(items)[order].astype(np.int64),
            "rating": rng.integers(1, 6, count).astype(np.float64),
        }
    )
