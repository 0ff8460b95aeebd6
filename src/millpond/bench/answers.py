"""What the answers to views should be, as DuckDB has it."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pyarrow.compute as pc


def expected(versions: pa.Table, views: pa.Table) -> pa.Table:
    """By DuckDB's ASOF JOIN: view, campaign."""
    with duckdb.connect() as connection:
        connection.register("versions", versions)
        connection.register("views", views)
        return connection.sql(
            "SELECT q.view, v.campaign FROM views q ASOF LEFT JOIN versions v ON q.ad = v.ad AND q.ts >= v.ts"
        ).to_arrow_table()


def compare(system: str, answers: pa.Table, wanted: pa.Table) -> None:
    """Raises where a view was not answered, or more than once, or otherwise than it should be."""
    answers, wanted = (
        table.select(["view", "campaign"]).combine_chunks().sort_by("view") for table in (answers, wanted)
    )
    if answers["view"] != wanted["view"]:
        raise RuntimeError(f"{system} answered {len(answers)} views where {len(wanted)} were asked")
    if answers["campaign"] != wanted["campaign"]:
        same = pc.fill_null(pc.equal(answers["campaign"], wanted["campaign"]), False)
        neither = pc.and_(answers["campaign"].is_null(), wanted["campaign"].is_null())
        differing = len(answers) - pc.sum(pc.or_(same, neither)).as_py()
        raise RuntimeError(f"{differing} of {len(answers)} answers of {system} differ from DuckDB's")
