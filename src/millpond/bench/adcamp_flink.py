"""A peer of the adcamp benchmark: Flink SQL's temporal join on RocksDB, in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from millpond.bench.flink_environment import NO_HEADER, run_job

JOB = Path(__file__).with_name("flink_job.py")
ANSWER_TYPES = {"view": pa.int64(), "campaign": pa.int64(), "said": pa.timestamp("ms", "UTC")}


class FlinkRun(NamedTuple):
    rows_per_s: float
    rows_per_cpu_s: float
    answers: pa.Table  # view, campaign


# The run


def run_flink(python: Path, versions: pa.Table, views: pa.Table, rounds: int, batch_rows: int) -> FlinkRun:
    """Loads versions (ad, ts, campaign), then answers views (view, ad, ts) in so many rounds of equal size.

    Views go to Flink in the order of their times, with a watermark after each `batch_rows` of them: a temporal join
    forgets versions that a watermark has left behind. The first round warms up, the best of the others counts.
    """
    parallelism = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="millpond-flink-") as name:
        folder = Path(name)
        write_versions(folder / "versions", versions, parallelism)
        ordered = views.sort_by("ts")
        step = len(ordered) // rounds
        for number in range(rounds):
            write_round(
                folder / "rounds" / f"{number:03}",
                ordered.slice(number * step, step),
                parallelism,
                batch_rows,
            )
        run_job(python, JOB, folder, ["bench", str(folder), str(parallelism)])
        found = read_answers(folder / "answers")
        taken = json.loads((folder / "rounds.json").read_text())
    # A round is handed over when the one before has been answered, so its answers are the next ones by time.
    said_ms = np.sort(found["said"].to_numpy().astype("int64"))
    seconds = [(said_ms[(number + 1) * step - 1] - one["began_ms"]) / 1e3 for number, one in enumerate(taken)]
    return FlinkRun(
        rows_per_s=step / min(seconds[1:]),
        rows_per_cpu_s=step / max(min(one["cpu_s"] for one in taken[1:]), 1e-9),
        answers=found.select(["view", "campaign"]),
    )


def late_example(python: Path) -> str:
    """What Flink answers where a version comes late, beside the right answers: lines to show."""
    with tempfile.TemporaryDirectory(prefix="millpond-flink-") as name:
        return run_job(python, JOB, Path(name), ["late"])


# Files


def write_versions(folder: Path, versions: pa.Table, files: int) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        part = versions.select(["ad", "ts", "campaign"]).take(np.arange(number, len(versions), files))
        csv.write_csv(part, folder / f"{number}.csv", NO_HEADER)


def write_round(folder: Path, views: pa.Table, files: int, batch_rows: int) -> None:
    """Views in time order, dealt out to the files, each row with the time that its file is complete up to."""
    folder.mkdir(parents=True)
    times = views["ts"].to_numpy()
    ends = times[[*range(batch_rows - 1, len(times) - 1, batch_rows), len(times) - 1]]
    for number in range(files):
        part = views.select(["view", "ad", "ts"]).take(np.arange(number, len(views), files))
        complete = complete_up_to(part["ts"].to_numpy(), ends)
        csv.write_csv(part.append_column("complete", pa.array(complete)), folder / f"{number}.csv", NO_HEADER)


def complete_up_to(times: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row of a file in time order: the last of `ends` that no later row is at or before; -1 for none."""
    rows_needed = np.searchsorted(times, ends, side="right")
    passed = np.searchsorted(rows_needed, np.arange(1, len(times) + 1), side="right")
    return np.concatenate([np.array([-1], np.int64), ends])[passed]


def read_answers(folder: Path) -> pa.Table:
    """All answers: view, campaign, and when it was said."""
    reading = csv.ReadOptions(column_names=list(ANSWER_TYPES))
    converting = csv.ConvertOptions(column_types=ANSWER_TYPES)
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    return pa.concat_tables(
        csv.read_csv(file, reading, convert_options=converting) for file in files if file.stat().st_size
    )
