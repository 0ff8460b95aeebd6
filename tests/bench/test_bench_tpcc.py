"""The TPC-C benchmark's peers give what plain Python gives, its systems agree, and a wrong table ends it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.apps.spark_session import spark_session
from millpond.apps.tpcc_conditions import CONDITIONS, violations
from millpond.apps.tpcc_inputs import Scale, events, population
from millpond.apps.tpcc_serial import Answer, Interpreter
from millpond.bench import tpcc, tpcc_peers, tpcc_postgres
from millpond.bench.transactions_peers import find_postgres, postgres_server

SMALL = Scale(warehouses=2, items=80, customers=20)
TINY = tpcc.Work(SMALL, checked=300, batch=500, warm_ups=1, rounds=1, per_commit=20)


def plain(answers: list[Answer]) -> list[tuple[Any, ...]]:
    return [(None, *results.values()) if reason is None else (reason,) for reason, results in answers]


def test_sqlite_gives_what_plain_python_gives() -> None:
    before, happening = population(SMALL), events(2_000, SMALL)
    serial, sqlite = Interpreter(before), tpcc_peers.Sqlite(before)
    assert sqlite.run(happening) == plain(serial.run(happening))
    for name in before:
        assert sqlite.table(name) == serial.table(name), name
    sqlite.close()


def test_postgresql_gives_what_plain_python_gives() -> None:
    programs = find_postgres(lambda _: None)
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    before, happening = population(SMALL), events(1_000, SMALL)
    serial = Interpreter(before)
    wanted = plain(serial.run(happening))
    with postgres_server(programs) as address:
        server = tpcc_postgres.Postgres(address, before)
        answers = server.run(happening, 50)
        assert [answer if answer[0] is None else answer[:1] for answer in answers] == wanted
        for name in before:
            assert server.table(name) == serial.table(name), name
        server = tpcc_postgres.Postgres(address, before)
        server.run_at_once(happening, 2)
        after = {name: server.table(name) for name in before}
    assert violations(after, SMALL.delivered) == dict.fromkeys(CONDITIONS, 0)
    assert len(after["orders"]) == len(serial.table("orders"))


@pytest.mark.long
def test_all_systems_run_the_same_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpcc, "spark_session", partial(spark_session, compiled=False))
    said: list[str] = []
    has_postgres = find_postgres(said.append) is not None
    results = tpcc.run(True, said.append, TINY)
    systems = [
        *("spark-identity", "millpond", "sqlite"),
        *(["postgresql", "postgresql-batched"] if has_postgres else []),
    ]
    assert [result["system"] for result in results] == systems
    ours = results[1]["new_orders_per_s"]
    for result in results:
        assert 0 < result["new_orders_per_s"] < result["events_per_s"]
        assert result["millpond_is"] == pytest.approx(ours / result["new_orders_per_s"])
    assert [result["events"] for result in results[:3]] == [500, 500, 300]
    tpcc.print_table("tpcc", results)
    printed = capsys.readouterr().out
    assert all(system in printed for system in systems)
    files = tpcc.plot(tmp_path / "out", "tpcc", results)
    assert [file.name for file in files] == ["out.png", "out.svg"]


def test_wrong_answers_and_tables_are_errors() -> None:
    before, happening = population(SMALL), events(200, SMALL)
    answers = plain(Interpreter(before).run(happening))
    rows = [
        dict(zip(tpcc.ANSWERS[kind], answer, strict=False))
        for kind, answer in zip(happening["kind"].to_pylist(), answers, strict=True)
    ]
    names = dict.fromkeys(name for kind in tpcc.ANSWERS.values() for name in kind)
    types = {name: pa.string() if name in ("reason", "credit") else pa.int64() for name in names}
    outputs = pa.table({name: pa.array([row.get(name) for row in rows], types[name]) for name in names})
    outputs = outputs.append_column("ts", happening["ts"]).append_column("kind", happening["kind"])
    given = tpcc.answers_in(outputs.take(np.arange(len(outputs))[::-1]))
    tpcc._same_answers("millpond", happening, given, answers)
    with pytest.raises(RuntimeError, match="millpond gives other"):
        tpcc._same_answers("millpond", happening, given, [*answers[:-1], ("sold out",)])
    with pytest.raises(RuntimeError, match="199 answers where sqlite gives 200"):
        tpcc._same_answers("postgresql-batched", happening, given[1:], answers)
    tpcc._same_tables("millpond", before, before)
    with pytest.raises(RuntimeError, match="table 'stock' of millpond differs from sqlite's"):
        tpcc._same_tables("millpond", before, {**before, "stock": before["stock"].slice(1)})
    with pytest.raises(RuntimeError, match="break consistency conditions"):
        tpcc._consistent("millpond", {**before, "new_order": before["new_order"].slice(1)}, SMALL)
