"""Texts and words are what they are said to be, the model counts rightly, and the pond tells the same tops."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import millpond as mp
from millpond.apps import topk, words
from millpond.apps.topk import TopK
from millpond.apps.windows import DISORDER, Comparison, Driver, Streaming, compare
from millpond.errors import BadOption, Unavailable

# Words


def strings(*texts: str) -> pa.DictionaryArray:
    return pa.array(texts, pa.string()).dictionary_encode()


def test_numbers_are_ordered_as_their_words_and_give_them_back() -> None:
    known = words.vocabulary(3_000)
    assert len(set(known.to_pylist())) == 3_000
    assert not set(known.to_pylist()) & set(words.STOP_WORDS)
    several = strings("a", "aa", "ab", "b", "zz", "z" * words.LETTERS_MAX, *known.to_pylist())
    codes = words.encode(several).to_numpy()
    assert words.decode(codes).to_pylist() == several.to_pylist()
    order = np.argsort(codes, kind="stable")
    assert [several[i].as_py() for i in order.tolist()] == sorted(several.to_pylist())
    assert len(words.encode(strings())) == 0


@pytest.mark.parametrize("word", ["Word", "w0rd", "wörd", "w" * (words.LETTERS_MAX + 1), "a`"])
def test_what_is_no_word_is_refused_by_name(word: str) -> None:
    with pytest.raises(BadOption, match="is no word of 1 to 13 letters") as caught:
        words.encode(strings("fine", word))
    assert repr(word) in str(caught.value)
    assert caught.value.hint


def test_texts_are_split_at_any_blanks() -> None:
    rows, places, every = words.split(pa.chunked_array([[" a  b\tc ", ""], ["d", " ", "a\nb"]]))
    assert rows.tolist() == [0, 0, 0, 2, 4, 4]
    assert places.tolist() == [0, 1, 2, 0, 0, 1]
    assert every.to_pylist() == ["a", "b", "c", "d", "a", "b"]


# Entries


def test_entries_are_those_of_the_paper_and_out_of_order() -> None:
    app = TopK()
    entries = app.events(3_000, first=5_000)
    assert entries.equals(app.events(3_000, first=5_000))
    assert not entries.equals(app.events(3_000, first=5_000, seed=2))
    lengths = [len(text) for text in entries["text"].to_pylist()]
    assert abs(np.mean(lengths) / 474 - 1) < 0.02
    assert set(entries["category"].to_pylist()) == set(range(100))
    numbers = entries["number"].to_numpy()
    assert sorted(numbers.tolist()) == list(range(5_000, 8_000))
    assert (numbers > np.maximum.accumulate(numbers) - DISORDER).all()
    assert (np.diff(numbers) < 0).sum() > 1_000


def entry(number: int, category: int, text: str) -> dict[str, Any]:
    return {"number": number, "category": category, "text": text}


BY_HAND = [
    entry(2, 0, "the sun of may"),
    entry(0, 0, "rain and rain"),
    entry(1, 1, "snow"),
    entry(3, 0, "sun is rain"),
]


def test_the_model_counts_the_last_words_and_ranks_equals_by_the_alphabet() -> None:
    app = TopK(window=4, k=2, categories=2, every=1)
    tops = {(category, ts // app.step): top for (category, ts), top in app.model(BY_HAND).items()}
    assert tops == {
        (0, 0): [("rain", 2)],
        (1, 0): [],
        (0, 1): [("rain", 2)],
        (1, 1): [("snow", 1)],
        (0, 2): [("rain", 2), ("may", 1)],
        (1, 2): [("snow", 1)],
        (0, 3): [("sun", 2), ("may", 1)],  # both of the first entry have left the window
        (1, 3): [("snow", 1)],
    }


def test_the_comparison_sees_what_is_wrong_lost_and_told_twice() -> None:
    right = {"a": 1, "b": 2}
    assert compare([("a", 1), ("b", 2)], right) == Comparison(2, wrong=0, lost=0, twice=0)
    assert compare([("a", 1), ("b", 1)], right) == Comparison(2, wrong=1, lost=0, twice=0)
    assert compare([("a", 1), ("a", 1)], right) == Comparison(2, wrong=0, lost=1, twice=1)
    assert compare([("a", 1), ("b", 2), ("c", 3)], right) == Comparison(3, wrong=1, lost=0, twice=0)
    assert not Comparison(2, wrong=0, lost=0, twice=1).is_right


# On a pond


APP = TopK(window=250, k=5, categories=7, every=40, vocabulary=500)
"""One window for all tests: for each, containers compile a rule."""


def test_every_top_is_right_though_a_container_is_killed_and_the_state_stays_small(
    shared_pond: tuple[mp.Pond, Path],
) -> None:
    pond, _ = shared_pond
    app = APP
    entries = app.events(3_000)
    driver = Driver(app, pond)
    parts = []
    try:
        for epoch in range(10):
            if epoch == 5:
                os.kill(pond.containers()[1].pid, signal.SIGKILL)
            parts.append(driver.epoch(entries.slice(300 * epoch, 300), epoch))
        versions = pond.metrics()["states"]["words"]["versions"]
        parts.append(driver.finish())
        assert len(driver.finish()) == 0, "each answer is given once"
    finally:
        pond.forget(driver.state)
    assert pond.metrics()["coordinator"]["container_restarts"] == 1
    tops = compare(app.pairs(pa.concat_tables(parts)), app.model(entries.to_pylist()))
    assert tops == Comparison(75 * 7, wrong=0, lost=0, twice=0)
    assert versions < len(app.updates(entries)) / 2


def test_an_epoch_that_failed_is_tried_again(
    shared_pond: tuple[mp.Pond, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pond, _ = shared_pond
    app = replace(APP, k=2, categories=3, every=10)
    entries = app.events(600)
    driver = Driver(app, pond)
    parts = []
    try:
        for epoch in range(2):
            part = entries.slice(300 * epoch, 300)
            for method in ("progress", "report"):
                with monkeypatch.context() as patched:

                    def fail(*_: Any, **__: Any) -> None:
                        raise Unavailable("the network is down")

                    patched.setattr(mp.State, method, fail)
                    with pytest.raises(Unavailable):
                        driver.epoch(part, epoch)
            parts.append(driver.epoch(part, epoch))
        parts.append(driver.finish())
    finally:
        pond.forget(driver.state)
    tops = compare(app.pairs(pa.concat_tables(parts)), app.model(entries.to_pylist()))
    assert tops == Comparison(60 * 3, wrong=0, lost=0, twice=0)


def test_windows_can_be_filled() -> None:
    app = TopK(window=100, categories=20, vocabulary=1_000)
    entries = app.events(app.entries_to_fill)
    counts = Counter(app.updates(entries)["category"].to_pylist())
    assert sorted(counts) == list(range(20))
    assert np.median(list(counts.values())) > 100


def test_too_long_a_text_is_refused() -> None:
    with pytest.raises(BadOption, match="more than 1,024 words") as caught:
        TopK().updates(pa.Table.from_pylist([entry(0, 0, "word " * 1_025)]))
    assert "several entries" in caught.value.hint


@pytest.mark.parametrize("option", ["seconds", "rate", "keys", "window"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadOption, match=f"--{option} 0"):
        topk.run(**{option: 0})


def test_the_flow_tells_the_same(spark: SparkSession, pond: mp.Pond, tmp_path: Path) -> None:
    app = APP
    entries = app.events(1_500)
    streaming = Streaming(spark, pond, app, str(tmp_path))
    try:
        for part in range(2):
            streaming.send(entries.slice(750 * part, 750))
            streaming.query.processAllAvailable()
        assert streaming.state.progress().fetch > 0
        assert streaming.finish() == 0
    finally:
        streaming.query.stop()
    tops = compare(app.pairs(streaming.answers()), app.model(entries.to_pylist()))
    assert tops == Comparison(38 * 7, wrong=0, lost=0, twice=0)


@pytest.mark.long
def test_it_runs_to_its_end(
    spark: SparkSession,  # it takes the session that there is, and stops it at its end
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert topk.run(seconds=2, rate=300, keys=5)
    printed = capsys.readouterr().out
    assert "600 entries (0 late), 15 answers, 0 wrong (0 lost, 0 twice;" in printed.splitlines()[-1]
    assert not list(tmp_path.glob("millpond-topk-*"))
