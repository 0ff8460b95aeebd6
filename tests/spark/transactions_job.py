"""A streaming job of transactions, in a process of its own: `transactions_job.py ROOT`.

At each place of `DEATHS`, in an epoch of its own, the driver kills itself with SIGKILL, if it has not died there
before: a file under ROOT remembers.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs import die_once, is_due, start
from pyspark.sql import DataFrame

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.wire.epochs import CommitEpoch

DEATHS = {"after stage": 0, "after commit": 1, "during the sink's write": 2}
SCHEMA = "ts timestamp, seq long, src string, dst string, amount long, parts array<long>"
START = 100


@mp.transaction(results="left long, at timestamp")
def transfer(accounts, src, dst, amount, parts, ts):
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    for part in parts:
        accounts[dst].parts += part
    accounts[dst].seen = ts
    if accounts[src].balance < 0:
        mp.abort("poor")
    return accounts[src].balance, accounts[src].seen


def operator_of(pond: mp.Pond, **options: Any) -> Any:
    pond.table(
        "accounts",
        key="name string",
        value="balance long, parts double, seen timestamp",
        default={"balance": START, "parts": 0.5, "seen": datetime(1970, 1, 1, tzinfo=UTC)},
    )
    return pond.transactions("ledger", ["accounts"], {"transfer": transfer}, seq="seq", **options)


def main(root: Path) -> None:
    with (
        spark_session("transactions-job", master="local[2]", compiled=False) as spark,
        mp.open(root / "pond", spark=spark, containers=2, threads=1) as pond,
    ):
        ledger = operator_of(pond)
        call = ledger._client.call

        def watched_call(message: Any) -> Any:
            if not isinstance(message, CommitEpoch):
                return call(message)
            die_once(root, "after stage", message.turn.epoch, DEATHS)
            answer = call(message)
            die_once(root, "after commit", message.turn.epoch, DEATHS)
            return answer

        ledger._client.call = watched_call

        def sink(outcomes: DataFrame, epoch: int) -> None:
            target = str(root / "out" / f"epoch={epoch}")
            if is_due(root, "during the sink's write", epoch, DEATHS):
                outcomes.limit(3).write.mode("overwrite").parquet(target)
                die_once(root, "during the sink's write", epoch, DEATHS)
            outcomes.write.mode("overwrite").parquet(target)

        into = ledger.to(sink)
        start(
            spark, root, "events", SCHEMA, lambda frame, epoch: into(frame.repartition(3), epoch)
        ).awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
