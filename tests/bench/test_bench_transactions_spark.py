"""The transactions benchmark through Spark runs on a tiny work, its systems agree, and a wrong outcome ends it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("duckdb")
pytest.importorskip("redis")
from millpond.apps import bidding
from millpond.apps.spark_session import spark_session
from millpond.bench import transactions, transactions_peers, transactions_spark
from millpond.txn import TransactionSet

TINY = transactions_spark.Work(
    batch=2_000, redis=400, postgres=100, postgres_1000=1_200, sqlite=400, checked=300
)


@pytest.mark.long
def test_all_systems_run_the_same_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transactions_spark, "WARM_UPS", 1)
    monkeypatch.setattr(transactions_spark, "ROUNDS", 1)
    monkeypatch.setattr(transactions_spark, "KEYS", 100)
    monkeypatch.setattr(transactions_spark, "APPS", {"bidding": bidding})
    monkeypatch.setattr(transactions_spark, "spark_session", partial(spark_session, compiled=False))
    # A test installs nothing.
    monkeypatch.setattr(transactions_spark, "find_redis", lambda progress: shutil.which("redis-server"))
    said: list[str] = []
    has_redis = shutil.which("redis-server") is not None
    has_postgres = transactions_peers.find_postgres(said.append) is not None
    results = transactions_spark.run_spark(True, said.append, TINY)
    systems = [
        *("spark-identity", "millpond"),
        *(["redis"] if has_redis else []),
        *(["postgresql", "postgresql-1000"] if has_postgres else []),
        "sqlite",
    ]
    assert [(r["app"], r["system"]) for r in results] == [("bidding", system) for system in systems]
    for result in results:
        assert result["events_per_s"] > 0
        assert result["of_identity"] == pytest.approx(result["events_per_s"] / results[0]["events_per_s"])
        assert result["through"] == "spark"
    assert {r["events"] for r in results if r["system"] == "sqlite"} == {400}

    kernel = [
        {
            **dict.fromkeys(("events_per_s", "execution_events_per_s"), 1.0),
            **dict.fromkeys(("vs_best_scheme", "execution_vs_best_scheme"), 1.0),
            **dict.fromkeys(("vs_no_lock", "execution_vs_no_lock"), 1.0),
            "app": "bidding",
            "system": "serial",
        }
    ]
    transactions.print_table("transactions", kernel + results)
    printed = capsys.readouterr().out
    assert all(system in printed for system in systems)
    files = transactions.plot(tmp_path / "out", "transactions", kernel + results)
    assert [file.name for file in files] == ["out.png", "out.svg", "out-spark.png", "out-spark.svg"]


@pytest.mark.parametrize(("name", "options"), [("ledger", {"transfer_ratio": 0.98}), ("bidding", {})])
def test_sqlite_gives_what_serial_execution_gives(name: str, options: dict[str, float]) -> None:
    app = transactions_spark.APPS[name]
    events = app.events(4_000, keys=50, **options).combine_chunks()
    program = TransactionSet(app.KINDS, app.TABLES)
    stores = program.stores()
    wanted = program.run(events, stores, at="ts", plan="serial").outputs.drop_columns(["event"])
    task = transactions_peers.SqliteTask(name, 50)
    database = task.database()
    (found,) = task.run(database, iter(events.to_batches()))
    assert found.select(wanted.column_names).to_pylist() == wanted.to_pylist()
    assert {*found["reason"].to_pylist()} - {None}
    for table, rows in task.tables(database).items():
        written = stores[table].snapshot().to_pylist()
        assert [rows[row["key"]] for row in written] == [tuple(row.values())[1:] for row in written]


def test_a_wrong_outcome_is_an_error() -> None:
    wanted = pa.table({"committed": [True, False], "reason": [None, "sold out"]})
    transactions_spark._compare("they", wanted, wanted)
    with pytest.raises(RuntimeError, match="they differ from serial execution's in 1 rows of 'reason'"):
        wrong = pa.table({"committed": [True, False], "reason": ["sold out", "sold out"]})
        transactions_spark._compare("they", wrong, wanted)
    with pytest.raises(RuntimeError, match="they have 1 rows where serial execution gives 2"):
        transactions_spark._compare("they", wanted.slice(1), wanted)


def test_postgresql_that_is_not_there_is_skipped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions_peers.shutil, "which", lambda name: None)
    monkeypatch.setattr(transactions_peers, "DEBIAN", Path("/nowhere"))
    said: list[str] = []
    assert transactions_peers.find_postgres(said.append) is None
    assert said == ["postgresql: skipped, it is not installed (Debian: apt-get install postgresql)"]
