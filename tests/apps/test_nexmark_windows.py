"""NEXMark's queries as windows of a pond, by Arrow tables and out of order: every row is DuckDB's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from millpond.apps.nexmark import Nexmark
from millpond.apps.nexmark_demo import FORMS, compare
from millpond.apps.nexmark_queries import QUERIES
from millpond.apps.nexmark_truth import truth
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

EVENTS, BATCHES = 4_000, 5
# A second has a hundred events: windows of ten seconds fire all along.
EVENTS_PER_S = 100


@pytest.fixture(scope="module")
def pond() -> Iterator[LocalPond]:
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    yield pond
    pond.close()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_answers_as_duckdb(pond: LocalPond, query: str) -> None:
    form = FORMS[query]
    events = Nexmark(events_per_s=EVENTS_PER_S, disorder=100, active_people=40, seed=3)
    tables = {source: getattr(events, source)(0, EVENTS) for source in form.sources}
    if query == "q12":
        arrivals = np.arange(len(tables["bids"])) * 2_000
        tables["bids"] = tables["bids"].append_column(
            "arrival", pa.array(arrivals).cast(pa.timestamp("us", "UTC"))
        )
    answers: dict[int, pa.Table] = {}
    name = query.replace("-", "_")
    delay = f"{events.disorder_us} microseconds"
    batches = QUERIES[query](
        pond, name, form.parameters, delay, lambda rows, epoch: answers.__setitem__(epoch, rows)
    )
    early = 0
    for epoch in range(BATCHES):
        for source, rows in tables.items():
            first, end = (len(rows) * at // BATCHES for at in (epoch, epoch + 1))
            batches[source](rows.slice(first, end - first), epoch)
        early += sum(map(len, answers.values()))
    batches.finish()
    expected = truth(form.truth, **tables, **form.parameters)
    given = pa.concat_tables(
        [each.select(expected.column_names).cast(expected.schema) for each in answers.values()]
    )
    assert compare(given, expected).is_right, compare(given, expected)
    assert early > 0, "windows fire before the end"
    assert len(expected) >= 4
