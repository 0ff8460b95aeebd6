"""Flink's side of the adcamp benchmark: a program for an environment that has PyFlink and need not have Millpond.

python -I flink_job.py bench FOLDER PARALLELISM    answers the views that `adcamp_flink` has laid out in FOLDER
python -I flink_job.py late                        shows what a version that comes late does to the answers
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyflink.table.expressions import col  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from millpond.bench.flink_cluster import (
        POLL_S,
        Job,
        Patience,
        cpu_seconds,
        files_of,
        free_port,
        table_environment,
    )
else:  # where Millpond need not be: last, so that no other module of this folder is taken for one of Flink's
    sys.path.append(str(Path(__file__).parent))
    from flink_cluster import POLL_S, Job, Patience, cpu_seconds, files_of, free_port, table_environment

SILENT_S_MAX = 900.0
SETTINGS = {
    # Mini-batches are left out: they serve aggregations and regular joins, and a temporal join takes its rows one by one.
    # No checkpoint is made while views are answered.
    "taskmanager.memory.managed.size": "4g",
    # A watermark goes out with the row that raises it, not with the next tick of a clock.
    "pipeline.auto-watermark-interval": "0 ms",
}
ANSWERS = """
    SELECT q.`view`, v.campaign, CURRENT_ROW_TIMESTAMP() AS said
    FROM asked AS q LEFT JOIN versions FOR SYSTEM_TIME AS OF q.at_time AS v ON q.ad = v.ad
"""


# The benchmark


def bench(folder: Path, parallelism: int) -> None:
    """Loads the versions, then answers the views, round by round; the first round warms up.

    A round is a folder of files, one for each reader. It is asked when the round before has been answered, as the last
    row of each file lets the watermark pass all of its views. `began_ms` is when it was handed to Flink; when each
    answer was given is in the answers. So what is measured is reading a round, the join and writing its answers: not
    the start of Flink, not the compilation of the query, and not the versions, which are in RocksDB by then.
    """
    port = free_port()
    tables = opened(folder, port, parallelism)
    # Held back until the files end: no view is answered before all versions are there.
    tables.execute_sql(f"""
        CREATE TABLE versions (
            ad BIGINT, ts BIGINT, campaign BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time - INTERVAL '99' DAY, PRIMARY KEY (ad) NOT ENFORCED
        ) WITH ({files_of(folder / "versions")})
    """)
    # Each row tells up to which time its file is complete with it.
    tables.execute_sql(f"""
        CREATE TABLE asked (
            `view` BIGINT, ad BIGINT, ts BIGINT, complete BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS TO_TIMESTAMP_LTZ(complete, 3)
        ) WITH ({files_of(folder / "asked", watched=True)})
    """)
    tables.execute_sql(f"""
        CREATE TABLE answers (`view` BIGINT, campaign BIGINT, said TIMESTAMP_LTZ(3))
        WITH ({files_of(folder / "answers")})
    """)
    running = tables.sql_query(ANSWERS).execute_insert("answers")
    job = Job(port, running.get_job_client())
    rounds = []
    wanted = 0
    for staged in sorted((folder / "rounds").iterdir()):
        wanted += sum(file.read_bytes().count(b"\n") for file in staged.iterdir())
        began, cpu = time.time(), cpu_seconds()
        # All files of a round at once, so that every reader gets one of them.
        staged.rename(folder / "asked" / staged.name)
        wait_for_answers(job, wanted)
        rounds.append({"began_ms": began * 1e3, "cpu_s": cpu_seconds() - cpu})
    job.stop(folder / "savepoint")
    (folder / "rounds.json").write_text(json.dumps(rounds))


def opened(folder: Path, port: int, parallelism: int) -> Any:
    for table in ("asked", "versions"):
        (folder / table).mkdir(exist_ok=True)
    return table_environment(folder, port, parallelism, SETTINGS)


def wait_for_answers(job: Job, wanted: int) -> None:
    """Returns when the join has given so many answers in all."""
    join = next(vertex["id"] for vertex in job.look()["vertices"] if "TemporalJoin" in vertex["name"])
    patience = Patience(SILENT_S_MAX)
    seen = 0
    while seen < wanted:
        time.sleep(POLL_S)
        sums = job.metrics(join, (".numRecordsOut",))
        seen = next((sum_ for name, sum_ in sums.items() if "TemporalJoin" in name), 0)
        patience.see(seen)
        job.look()


# A version that comes late


class Version(NamedTuple):
    ad: str
    ts: int
    campaign: str


class View(NamedTuple):
    view: int
    ad: str
    ts: int


# What comes in two steps. The second step's first version is behind the watermark, which the first step took to 40.
VERSIONS = (
    (Version("shoe", 10, "spring"), Version("hat", 40, "sale")),
    (Version("shoe", 20, "winter"), Version("hat", 60, "sale")),
)
VIEWS = (
    (View(1, "shoe", 30), View(2, "hat", 40)),
    (View(3, "shoe", 30), View(4, "shoe", 50), View(5, "hat", 60)),
)


def late(folder: Path) -> None:
    """Prints Flink's answers beside the right ones."""
    tables = opened(folder, free_port(), 1)
    tables.execute_sql(f"""
        CREATE TABLE versions (
            ad STRING, ts BIGINT, campaign STRING, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time, PRIMARY KEY (ad) NOT ENFORCED
        ) WITH ({files_of(folder / "versions", watched=True)})
    """)
    tables.execute_sql(f"""
        CREATE TABLE asked (
            `view` BIGINT, ad STRING, ts BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time
        ) WITH ({files_of(folder / "asked", watched=True)})
    """)
    running = tables.sql_query(ANSWERS).select(col("view"), col("campaign")).execute()
    answers: dict[int, str | None] = {}
    with running.collect() as rows:
        for step, (versions, views) in enumerate(zip(VERSIONS, VIEWS, strict=True)):
            hand_over(folder, "versions", step, versions)
            hand_over(folder, "asked", step, views)
            answers.update(take(rows, len(views)))
    running.get_job_client().cancel().result()
    print_answers(answers)


def hand_over(folder: Path, table: str, step: int, rows: tuple[NamedTuple, ...]) -> None:
    """A file that is there with all its rows at once."""
    staged = folder / f"{table}-{step}.csv"
    staged.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    staged.rename(folder / table / staged.name)


def take(rows: Iterator[Any], count: int) -> dict[int, str | None]:
    return {row[0]: row[1] for row in (next(rows) for _ in range(count))}


def print_answers(answers: dict[int, str | None]) -> None:
    print(f"{'':32}{'Flink':9}right")
    for versions, views in zip(VERSIONS, VIEWS, strict=True):
        for version in versions:
            print(f"version of {version.ad} at {version.ts}: {version.campaign}")
        for view in views:
            asked = f"view {view.view} of {view.ad} at {view.ts}"
            found, right = answers[view.view], right_answer(view)
            print(f"{asked:32}{found!s:9}{right!s:9}{'' if found == right else 'wrong'}".rstrip())


def right_answer(view: View) -> str | None:
    """The newest of all versions of the ad up to the view's time, whenever they came."""
    known = [
        version for step in VERSIONS for version in step if version.ad == view.ad and version.ts <= view.ts
    ]
    return max(known, key=lambda version: version.ts).campaign if known else None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bench", folder, parallelism]:
            bench(Path(folder), int(parallelism))
        case ["late"]:
            with tempfile.TemporaryDirectory(prefix="millpond-flink-") as folder:
                late(Path(folder))
        case _:
            sys.exit(__doc__)
