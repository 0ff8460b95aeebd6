"""Tweets are what they are said to be, the model compares rightly, and the pond finds the same pairs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import millpond as mp
from millpond.apps import tweets
from millpond.apps.tweets import Tweets
from millpond.apps.windows import DISORDER, Comparison, Driver, Streaming, compare
from millpond.errors import BadOption
from patience import wait_until


def tweet(number: int, location: int, text: str) -> dict[str, Any]:
    return {"number": number, "location": location, "text": text}


BY_HAND = [
    tweet(0, 7, "sun and sea"),
    tweet(2, 7, "sea sun sea sun"),
    tweet(1, 7, "sun sand"),
    tweet(3, 8, "sun and sea"),
    tweet(4, 7, " "),
    tweet(5, 7, "sand and sun"),
    tweet(6, 7, "winter"),
    tweet(7, 7, "sea and sand"),
]
RIGHT = {
    0: (None, 0),
    1: (0, 1),
    2: (0, 2),  # a word that comes twice counts once
    3: (None, 0),  # another place
    5: (1, 2),
    6: (None, 0),
    7: (5, 2),
}


def test_the_model_finds_the_most_similar_of_the_last_ones() -> None:
    assert Tweets(window=3).model(BY_HAND) == RIGHT
    # Of two that share as many, the newest.
    assert Tweets(window=3).model([*BY_HAND, tweet(8, 7, "sea sand snow")])[8] == (7, 2)
    assert Tweets(window=3).model([*BY_HAND, tweet(8, 7, "and so")])[8] == (7, 1)
    assert Tweets(window=1).model(BY_HAND)[7] == (None, 0), "number 5 is not in a window of one"


def test_tweets_are_out_of_order_and_some_are_alike() -> None:
    app = Tweets(window=50, locations=20)
    arriving = app.events(3_000, first=9_000)
    assert arriving.equals(app.events(3_000, first=9_000))
    assert not arriving.equals(app.events(3_000, first=9_000, seed=2))
    numbers = arriving["number"].to_numpy()
    assert sorted(numbers.tolist()) == list(range(9_000, 12_000))
    assert (numbers > np.maximum.accumulate(numbers) - DISORDER).all()
    assert (np.diff(numbers) < 0).sum() > 1_000
    lengths = [len(text.split()) for text in arriving["text"].to_pylist()]
    assert (min(lengths), max(lengths)) == (tweets.WORDS_MIN, tweets.WORDS_MAX)
    shared = np.array([shared for _, shared in app.model(arriving.to_pylist()).values()])
    assert 0.05 < (shared >= 4).mean() < 0.3


# On a pond

APP = Tweets(window=30, locations=6, vocabulary=500)
"""One window for all tests: for each, containers compile two rules."""


def test_by_hand(shared_pond: tuple[mp.Pond, Path]) -> None:
    pond, _ = shared_pond
    app = APP
    driver = Driver(app, pond)
    try:
        driver.epoch(pa.Table.from_pylist(BY_HAND[:2]), 0)
        driver.epoch(pa.Table.from_pylist(BY_HAND[2:]), 1)
        answers = driver.finish()
    finally:
        pond.forget(driver.state)
    assert compare(app.pairs(answers), app.model(BY_HAND)) == Comparison(7, wrong=0, lost=0, twice=0)


def test_every_pair_is_right_and_the_state_stays_small(
    shared_pond: tuple[mp.Pond, Path], recwarn: pytest.WarningsRecorder
) -> None:
    pond, _ = shared_pond
    app = APP
    arriving = app.events(4_000)
    driver = Driver(app, pond)
    assert not [each for each in recwarn if each.category is mp.RuleInterpreted], "both rules are compiled"
    try:
        parts = [driver.epoch(arriving.slice(400 * epoch, 400), epoch) for epoch in range(10)]
        few = len(app.updates(arriving)) / 2
        # What no fetch will ask for any more goes in the background, as soon as there is time for it.
        wait_until(lambda: pond.metrics()["states"]["tweets"]["versions"] < few)
        parts.append(driver.finish())
    finally:
        pond.forget(driver.state)
    answers = pa.concat_tables(parts)
    expected = app.model(arriving.to_pylist())
    assert compare(app.pairs(answers), expected) == Comparison(4_000, wrong=0, lost=0, twice=0)
    best = app.most_similar_pairs(app.told(answers), every=1_000)
    assert {(row["period"], row["location"]): row for row in best.to_pylist()} == by_period(
        expected, {row["number"]: row["location"] for row in arriving.to_pylist()}, 1_000
    )


def by_period(expected: Any, locations: dict[int, int], every: int) -> dict[Any, Any]:
    best: dict[Any, Any] = {}
    for number, (other, shared) in sorted(expected.items()):
        place = (number // every, locations[number])
        if other is not None and (place not in best or shared >= best[place]["shared"]):
            names = ("period", "location", "number", "other", "shared")
            best[place] = dict(zip(names, (*place, number, other, shared), strict=True))
    return best


def test_too_long_a_tweet_is_refused() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = " ".join([*letters, *(f"a{letter}" for letter in letters)])
    with pytest.raises(BadOption, match="more than 32 different words"):
        Tweets().updates(pa.Table.from_pylist([tweet(0, 0, text)]))
    assert len(Tweets().updates(pa.Table.from_pylist([tweet(0, 0, "word " * 100)]))) == 1


@pytest.mark.parametrize("option", ["seconds", "rate", "keys", "window"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadOption, match=f"--{option} 0"):
        tweets.run(**{option: 0})


def test_the_flow_finds_the_same(spark: SparkSession, pond: mp.Pond, tmp_path: Path) -> None:
    app = APP
    arriving = app.events(1_500)
    blank = pa.Table.from_pylist([tweet(1_500, 0, " \t ")], arriving.schema)
    streaming = Streaming(spark, pond, app, str(tmp_path))
    try:
        streaming.send(arriving.slice(0, 750))
        streaming.query.processAllAvailable()
        streaming.send(pa.concat_tables([arriving.slice(750), blank]))
        assert streaming.finish() == 0
    finally:
        streaming.query.stop()
    expected = app.model(pa.concat_tables([arriving, blank]).to_pylist())
    assert compare(app.pairs(streaming.answers()), expected) == Comparison(1_500, wrong=0, lost=0, twice=0)


@pytest.mark.long
def test_it_runs_to_its_end(
    spark: SparkSession,  # it takes the session that there is, and stops it at its end
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tweets.run(seconds=2, rate=300, keys=5)
    printed = capsys.readouterr().out
    assert "600 tweets (0 late), 600 answers, 0 wrong (0 lost, 0 twice;" in printed.splitlines()[-1]
    assert not list(tmp_path.glob("millpond-tweets-*"))
