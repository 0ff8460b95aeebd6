"""The NEXMark demo: what it shows is right, and what is wrong it says."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

import millpond as mp
from millpond.apps import nexmark_demo, nexmark_truth
from millpond.apps.nexmark_demo import FORMS, SHOWN, Comparison, Stage, compare, run, show
from millpond.apps.nexmark_queries import QUERIES
from millpond.errors import BadOption


def test_every_query_has_its_form() -> None:
    assert set(FORMS) == set(QUERIES)
    assert set(SHOWN) <= set(FORMS)
    for form in FORMS.values():
        query = nexmark_truth.QUERIES[form.truth]
        assert form.sources == query.tables
        assert set(form.parameters) <= set(query.parameters)


def test_what_is_wrong_lost_or_twice_is_counted() -> None:
    expected = pa.table({"window": [1, 1, 2, 3], "bids": [5, 5, 6, 7]})
    assert compare(expected.take([3, 1, 0, 2]), expected) == Comparison(4, 0, 0, 0)
    assert compare(expected.take([3, 1, 0, 2]), expected).is_right
    for rows, comparison in (
        ([0, 1, 2], Comparison(3, 0, 1, 0)),
        ([0, 2, 3], Comparison(3, 0, 1, 0)),
        ([0, 1, 2, 3, 3], Comparison(5, 0, 0, 1)),
        ([0, 1, 1, 2, 3], Comparison(5, 0, 0, 1)),
    ):
        assert compare(expected.take(rows), expected) == comparison
        assert not comparison.is_right
    other = pa.table({"window": [1, 1, 2, 3], "bids": [5, 5, 6, 8]})
    assert compare(other, expected) == Comparison(4, 1, 1, 0)


def test_what_cannot_be_shown_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nexmark_demo, "spark_session")
    with pytest.raises(BadOption, match="there is no query 'q6'") as caught:
        run(["q8", "q6"])
    assert "q7-session" in (caught.value.hint or "")
    for events in (999, 5_000_001):
        with pytest.raises(BadOption, match="--events"):
            run(events=events)


def shown(stage: Stage, query: str) -> tuple[bool, str]:
    said = io.StringIO()
    right = show(stage, query, Console(file=said, width=200))
    return right, said.getvalue()


def test_a_query_is_shown_with_its_form_its_store_and_its_check(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nexmark_demo, "FILES", 2)
    stage = Stage(spark, pond, tmp_path, 20_000)
    right, said = shown(stage, "q11-median")
    assert right
    assert said.startswith("\nq11-median: the median price of each session of a bidder; the form of FlowKV\n")
    assert "2 of 2 files of bids; watermark" in said
    assert "store: AUR (append, unaligned read)" in said
    assert "20,000 events (0 rows late)" in said
    assert "0 wrong (0 lost, 0 twice;" in said
    pond.forget("q11_median")


@pytest.mark.long
@pytest.mark.parametrize("query", [each for each in FORMS if each != "q11-median"])
def test_all_queries(pond: mp.Pond, spark: SparkSession, tmp_path: Path, query: str) -> None:
    right, said = shown(Stage(spark, pond, tmp_path, 40_000), query)
    assert right, said
    assert " 0 rows answered," not in said
