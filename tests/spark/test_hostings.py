"""One suite for all hostings: wherever its containers run, a pond does the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hosting_checks import CHECKS, is_gone, wait_until
from pyspark.sql import SparkSession

import millpond as mp
from millpond.coordinator import spark_cluster
from millpond.coordinator.spark_cluster import Cluster, Executor
from millpond.errors import BadOption, FewTaskSlots, NoTaskSlots
from millpond.pond.opening import Where

SERVE = [sys.executable, "-c", "from millpond.cli import main; main()", "serve"]


@pytest.fixture(scope="module", params=get_args(Where))
def hosted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mp.Pond]:
    root = tmp_path_factory.mktemp("hosted") / "pond"
    if request.param == "standalone":
        command = [*SERVE, "--root", str(root), "--containers", "2", "--backups", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
            assert served.stdout is not None
            address = served.stdout.readline().split(" at ")[1].partition(",")[0]
            with mp.connect(address, (root / "token").read_text()) as pond:
                yield pond
            served.terminate()
        return
    spark = None
    if request.param == "spark":
        from millpond.apps.spark_session import start_spark

        active = SparkSession.getActiveSession()
        if active is not None:
            active.stop()
        spark = start_spark("millpond-tests", master="local[4,4]", compiled=False)
        pond = mp.open(root, spark=spark, hosting="spark", containers=2, backups=1)
    else:
        pond = mp.open(root, containers=2, backups=1)
    pids = [container.pid for container in pond.containers()]
    with pond:
        yield pond
        pids += [container.pid for container in pond.containers()]
    if spark is not None:
        spark.stop()  # other tests count the slots of another one
    assert all(map(is_gone, pids))
    assert not (root / "grants").exists()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_pond_does_the_same_wherever_its_containers_run(
    check: Callable[[mp.Pond], None], hosted: mp.Pond
) -> None:
    check(hosted)


@pytest.mark.long  # what `test_cluster.py` shows on a cluster, in a session that tests share
def test_rows_of_spark_meet_containers_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", spark=spark, hosting="spark") as pond:
        (container,) = pond.containers()
        state = pond.state("counts", key="long", value="long")
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(spark.createDataFrame([(1, 4, 40), (2, 5, 50), (2, 6, 60)], "k long, t long, v long"), 0)
        asked = spark.createDataFrame([(1, 5), (3, 5)], "k long, t long")
        got = state.fetch(key="k", at="t", into="v").now(asked)
        assert sorted(map(tuple, got.collect())) == [(1, 5, 40), (3, 5, None)]
        jobs = spark.sparkContext.statusTracker().getActiveJobsIds()
        assert len(jobs) == 1, "the container's own"
        assert pond.metrics()["task_slots"] == {"wanted": 1, "had": 1}
        with pytest.raises(NoTaskSlots, match="leaves 0 for queries"):
            pond.scale(containers=2)
        with pytest.raises(NoTaskSlots, match=r"beside 1 that containers of other ponds take.*leaves 0"):
            mp.open(tmp_path / "another", spark=spark, hosting="spark")
        assert len(pond.containers()) == 1
    wait_until(lambda: is_gone(container.pid), 5)
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), 5)
    with mp.open(tmp_path / "pond", spark=spark) as pond:  # what one hosting wrote, another reads
        assert pond.state("counts").snapshot().num_rows == 2
        assert pond.metrics()["task_slots"] == {}


def test_what_would_leave_no_slot_is_told_at_open(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NoTaskSlots) as raised:
        mp.open(tmp_path / "pond", spark=spark, hosting="spark", containers=2)
    error = raised.value
    assert (error.slots, error.taken, error.left) == (2, 2, 0)
    assert re.search(r"2 tasks at a time.*2 containers take one each.*leaves 0", str(error))
    assert "containers=1" in error.hint
    assert not (tmp_path / "pond").exists(), "nothing was made"


class Numbers(Cluster):
    """A cluster with given settings."""

    def __init__(self, master: str, slots: int, sizes: Sequence[int] = (), **settings: str) -> None:
        self._sizes_of_executors = sizes
        self.context = SimpleNamespace(master=master)
        self._slots = slots
        self._settings = {key.replace("_", "."): value for key, value in settings.items()}
        manager = SimpleNamespace(defaultResourceProfile=lambda: None)
        self._spark = SimpleNamespace(
            resourceProfileManager=lambda: manager, maxNumConcurrentTasks=lambda profile: slots
        )

    def setting(self, key: str, default: str = "") -> str:
        return self._settings.get(key, default)

    def executors(self) -> list[Executor]:
        return [Executor(str(n), "here", size, size) for n, size in enumerate(self._sizes_of_executors)]


def test_slots_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_cluster, "SLOTS_S", 0.0)
    there = "spark://there:7077"
    assert Numbers("local[4]", 4).check_slots(2, threads=8) == (4, 2)
    assert Numbers(there, 8).check_slots(2, threads=2) == (8, 4)
    assert Numbers(there, 4, spark_task_cpus="2").check_slots(2, threads=2) == (4, 2)
    dynamic = {"spark_dynamicAllocation_enabled": "true", "spark_executor_cores": "2"}
    assert Numbers(there, 2, **dynamic).check_slots(5, threads=2).left > 1000
    bounded = Numbers(there, 2, **dynamic, spark_dynamicAllocation_maxExecutors="3")
    assert bounded.check_slots(5, threads=2) == (6, 5)
    twice = {"spark_speculation": "true", "spark_speculation_task_duration_threshold": "1s"}
    assert Numbers(there, 8, **twice).check_slots(3, threads=1) == (8, 6)
    with pytest.raises(NoTaskSlots, match=r"take 2, for its threads, each.*leaves 0") as raised:
        Numbers(there, 4).check_slots(3, threads=2)
    assert (raised.value.slots, raised.value.taken, raised.value.left) == (4, 6, -2)
    assert "containers=1" in raised.value.hint
    assert "3 more cores" in raised.value.hint
    with pytest.raises(NoTaskSlots) as raised:
        Numbers("local[1]", 1).check_slots(1, threads=1)
    assert "embedded" in raised.value.hint
    assert raised.value.hint.endswith("at least 1 more core")


def test_a_container_takes_the_slots_of_one_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three executors of three cores have nine slots, and room for three containers of two threads."""
    monkeypatch.setattr(spark_cluster, "SLOTS_S", 0.0)
    there = "spark://there:7077"
    nine = Numbers(there, 9, [3, 3, 3])
    assert nine.check_slots(3, threads=2) == (9, 6)
    assert nine.check_slots(8, threads=1) == (9, 8)
    with pytest.raises(
        NoTaskSlots, match=r"3 executors of 3 slots.*4 containers take 2 slots each"
    ) as raised:
        nine.check_slots(4, threads=2)
    assert (raised.value.slots, raised.value.taken, raised.value.left) == (9, 8, 1)
    assert "room for 3 of them" in str(raised.value)
    assert "containers=3," in raised.value.hint
    with pytest.raises(NoTaskSlots, match=r"executors of 3, 2 slots.*threads=4.*room for 0") as raised:
        Numbers(there, 5, [2, 3]).check_slots(1, threads=4)
    assert "threads=3 at most" in raised.value.hint
    with pytest.raises(NoTaskSlots, match=r"one executor of 2 slots.*room for 0") as raised:
        Numbers(there, 2, [2], spark_task_cpus="2").check_slots(1, threads=6)
    assert "threads=4 at most" in raised.value.hint
    twice = {"spark_speculation": "true", "spark_speculation_task_duration_threshold": "1s"}
    assert Numbers(there, 12, [3] * 4, **twice).check_slots(2, threads=2) == (12, 8)
    with pytest.raises(NoTaskSlots, match=r"second attempts.*room for 1 of them"):
        Numbers(there, 9, [3, 3, 3], **twice).check_slots(2, threads=2)
    with pytest.raises(NoTaskSlots, match="room for 2 of them") as raised:
        Numbers(there, 4, [2, 2]).check_slots(3, threads=2)
    assert "containers=1," in raised.value.hint, "and something is left for queries"
    # Where Spark has not told of all executors, only the sum counts.
    assert Numbers(there, 9, [3, 3]).check_slots(4, threads=2) == (9, 8)


def test_containers_of_other_ponds_are_in_the_way_as_little_as_they_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spark_cluster, "SLOTS_S", 0.0)
    ours = Numbers("spark://there:7077", 9, [3, 3, 3])
    monkeypatch.setattr(Numbers, "held_by_others", 3)
    assert ours.check_slots(2, threads=2) == (9, 7)  # they may be where one slot of three is left
    monkeypatch.setattr(Numbers, "held_by_others", 4)
    with pytest.raises(NoTaskSlots, match="room for 2 of them"):
        ours.check_slots(3, threads=2)


def test_executors_that_are_still_to_come_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_cluster, "SLOTS_S", 10.0)
    monkeypatch.setattr(spark_cluster, "_SLOTS_PAUSE_S", 0.0)
    waited = Numbers("spark://there:7077", 9, [2, 2, 5])
    tries = iter([[3, 3, 3], [3, 3, 3]])
    asked = waited.executors

    def executors() -> list[Executor]:
        waited._sizes_of_executors = next(tries, [4, 4, 4])
        return asked()

    monkeypatch.setattr(waited, "executors", executors)
    assert waited.check_slots(4, threads=2) == (9, 8)


def test_few_slots_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond.pond.opening import _check_slots

    with pytest.warns(FewTaskSlots, match="of the 3 tasks.*take 2: 1 left"):
        _check_slots(Numbers("local[3]", 3), 2, 1)
    with warnings.catch_warnings(action="error"):
        _check_slots(Numbers("local[4]", 4), 2, 1)


# Of Spark Connect, as far as anybody looks.
SESSION = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
FRAME = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
CONNECT_REFUSED = '(?s)of Spark Connect.*"standalone".*mp.connect.*toArrow'
STOPPED = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))


@pytest.mark.parametrize(
    ("options", "option", "says"),
    [
        ({"hosting": "standalone"}, "hosting", "millpond serve --root .*mp.connect"),
        ({"hosting": "somewhere"}, "hosting", "'embedded', 'spark', 'standalone'"),
        ({"hosting": "spark"}, "spark", "needs a Spark session"),
        ({"spark": STOPPED}, "spark", "has been stopped"),
        ({"hosting": "spark", "spark": SESSION}, "spark", CONNECT_REFUSED),
        ({"spark": SESSION}, "spark", CONNECT_REFUSED),
    ],
)
def test_what_cannot_be_hosted_is_refused_with_the_way_that_works(
    options: dict[str, Any], option: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadOption, match=says) as raised:
        mp.open(tmp_path / "pond", **options)
    assert raised.value.option == option
    assert raised.value.hint
    assert os.listdir(tmp_path) == []


def test_what_is_of_spark_connect_is_refused_wherever_it_is_given(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond") as pond:
        state = pond.state("counts", key="long", value="long")
        feed = state.update(key="k", at="t", value="v", name="feed")
        fetch = state.fetch(key="k", at="t", into="w", name="ask")
        step = pond.state("sums", key="long", value="long").step(
            lambda rows, ask: rows, key="k", into="w", value="v", name="shop"
        )
        for use in (
            lambda: mp.connect(pond.address, (tmp_path / "pond" / "token").read_text(), SESSION),
            lambda: feed(FRAME, 0),
            lambda: fetch.now(FRAME),
            lambda: fetch.to(print)(FRAME, 0),
            lambda: step(FRAME, 0),
            lambda: pond.flow("trips").source(FRAME),
        ):
            with pytest.raises(BadOption, match=CONNECT_REFUSED):
                use()
