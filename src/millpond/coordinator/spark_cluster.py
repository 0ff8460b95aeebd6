"""What a pond asks of Spark: how many tasks it can run at a time, where they run, and a job of one task.

Spark tells some of this to its own classes only, and the names may change with a version: what cannot be had is done
without, and a container then runs wherever Spark has a slot.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from millpond.errors import BadOption, NoTaskSlots, check_not_connect

# Executors come one by one after a session has started.
SLOTS_S = 15.0
_SLOTS_PAUSE_S = 0.2
_clusters: WeakSet[Cluster] = WeakSet()


class Slots(NamedTuple):
    """Tasks that run at a time: `total` in the whole application, `taken` by containers for as long as the pond is open."""

    total: int
    taken: int

    @property
    def left(self) -> int:
        return self.total - self.taken


class Executor(NamedTuple):
    """`free` of its `slots` run nothing now."""

    id: str
    host: str
    free: int
    slots: int


class Cluster:
    """A Spark application, from its driver, for one pond. `held` is how many slots the pond's containers take."""

    held = 0

    def __init__(self, session: Any) -> None:
        self.context = session.sparkContext
        self._spark = self.context._jsc.sc()
        _clusters.add(self)

    @property
    def held_by_others(self) -> int:
        """By containers of other ponds that this process has open in the same application."""
        return sum(
            other.held for other in list(_clusters) if other is not self and other.context is self.context
        )

    def setting(self, key: str, default: str = "") -> str:
        return str(self.context.getConf().get(key, default))

    def _is_set(self, key: str) -> bool:
        return self.setting(key, "false").lower() == "true"

    @property
    def driver_host(self) -> str:
        """The address at which executors know the driver."""
        return self.setting("spark.driver.host") or "127.0.0.1"

    @property
    def bind_address(self) -> str:
        return self.setting("spark.driver.bindAddress") or self.driver_host

    @property
    def is_local(self) -> bool:
        """Whether tasks run inside the driver's own Java machine."""
        return bool(re.match(r"local(\[|$)", self.context.master))

    @property
    def task_cpus(self) -> int:
        return int(self.setting("spark.task.cpus", "1"))

    @property
    def dynamic(self) -> bool:
        return not self.is_local and self._is_set("spark.dynamicAllocation.enabled")

    @property
    def speculates(self) -> bool:
        """Whether Spark may run a second attempt beside a task that is the only one of its stage."""
        return self._is_set("spark.speculation") and bool(
            self.setting("spark.speculation.task.duration.threshold")
        )

    def slots_of(self, threads: int) -> int:
        """How many slots a container with so many threads takes: several where Spark can be asked for that."""
        if self.is_local or self.dynamic:
            return 1
        return max(1, math.ceil(threads / self.task_cpus))

    def check_slots(self, containers: int, threads: int, patience_s: float | None = None) -> Slots:
        """NoTaskSlots if nothing would be left for queries, or a container would find nowhere as many slots as it takes.

        Executors that are still to come are waited for.
        """
        each = self.slots_of(threads)
        tasks = containers * (2 if self.speculates else 1)
        own = tasks * each
        others = self.held_by_others
        deadline = time.monotonic() + (SLOTS_S if patience_s is None else patience_s)
        while True:
            slots = Slots(self._total_slots(), own + others)
            sizes = self._sizes(slots.total) if each > 1 else []
            fitting = fitting_tasks(sizes, each, others) if sizes else tasks
            if slots.left >= max(1, containers) and fitting >= tasks:
                return slots
            if time.monotonic() > deadline or self.is_local:
                break
            time.sleep(_SLOTS_PAUSE_S)
        if fitting < tasks:
            raise self._no_executors(slots, containers, threads, each, sizes, fitting)
        if slots.left < 1:
            raise self._no_slots(slots, containers, each, own)
        return slots

    def _sizes(self, total: int) -> list[int]:
        """How many slots each executor has; nothing where Spark does not tell of all."""
        sizes = [executor.slots for executor in self.executors()]
        return sizes if sum(sizes) >= total else []

    def _no_executors(
        self, slots: Slots, containers: int, threads: int, each: int, sizes: list[int], fitting: int
    ) -> NoTaskSlots:
        """The slots may be enough, but lie on too many executors: a task runs on one."""
        most = max(sizes)
        have = (
            f"{len(sizes)} executors of {most} slots" if len(sizes) > 1 else f"one executor of {most} slots"
        )
        if len(set(sizes)) > 1:
            have = f"executors of {', '.join(map(str, sorted(sizes, reverse=True)))} slots"
        twice = ", and for their second attempts (spark.speculation)" * self.speculates
        doubled = 2 if self.speculates else 1
        room = fitting // doubled
        others = slots.taken - containers * each * doubled
        fewer = min(room, (slots.total - others - 1) // (each * doubled))
        hint = f"take containers={fewer}" if fewer > 0 else f"take threads={most * self.task_cpus} at most"
        return NoTaskSlots(
            f"Spark has {have} ({self.context.master}): {containers} containers take {each} slots each, for"
            f" threads={threads}, of one executor{twice}, and there is room for {room} of them",
            hint=f"{hint}, or give executors more cores (spark.executor.cores)",
            slots=slots.total,
            taken=slots.taken,
            left=slots.left,
        )

    def _no_slots(self, slots: Slots, containers: int, each: int, own: int) -> NoTaskSlots:
        a_container = "one" if each == 1 else f"{each}, for its threads,"
        twice = (
            ", and as many for the second attempts that it may start (spark.speculation)" * self.speculates
        )
        others = slots.taken - own
        beside = f", beside {others} that containers of other ponds take" if others else ""
        fitting = max(0, (slots.total - others - 1) * containers // own)
        fewer = f"take containers={fitting}" if fitting else 'open it with hosting="embedded"'
        lacking = slots.taken + 1 - slots.total
        return NoTaskSlots(
            f"Spark runs {slots.total} tasks at a time ({self.context.master}): {containers} containers take {a_container}"
            f" each for as long as the pond is open{twice}{beside}, which leaves {max(0, slots.left)} for queries",
            hint=f"{fewer}, or give the application at least {lacking} more core{'s' * (lacking > 1)}",
            slots=slots.total,
            taken=slots.taken,
            left=slots.left,
        )

    def _total_slots(self) -> int:
        profile = self._spark.resourceProfileManager().defaultResourceProfile()
        now = int(self._spark.maxNumConcurrentTasks(profile))
        if not self.dynamic:
            return now
        most = self.setting("spark.dynamicAllocation.maxExecutors")
        if not most or int(most) >= 2**31 - 1:
            return max(now, 1 << 20)  # as many as are asked for
        cores = int(self.setting("spark.executor.cores", "0")) or max(
            (executor.free for executor in self.executors()), default=1
        )
        return max(now, int(most) * max(1, cores // self.task_cpus))

    def executors(self) -> list[Executor]:
        """Those that take tasks; none where Spark does not tell."""
        found = []
        with suppress(Exception):
            summaries = self._spark.statusStore().executorList(True)
            for summary in map(summaries.apply, range(summaries.size())):
                host = str(summary.hostPort()).rpartition(":")[0]
                free = summary.maxTasks() - summary.activeTasks()
                if summary.id() != "driver" and not self.is_leaving(summary.id()):
                    found.append(Executor(summary.id(), host, free, summary.maxTasks()))
        return found

    def is_leaving(self, executor: str) -> bool:
        """Whether it is being decommissioned."""
        with suppress(Exception):
            return bool(self._spark.taskScheduler().getExecutorDecommissionState(executor).isDefined())
        return False

    def executor_of(self, group: str, attempt: int) -> str:
        """The executor that runs that attempt of a job's only task; "" where Spark does not tell, or not yet."""
        with suppress(Exception):
            tracker = self.context.statusTracker()
            for job in tracker.getJobIdsForGroup(group):
                stages = tracker.getJobInfo(job).stageIds
                tasks = self._spark.statusStore().taskList(stages[0], 0, 100)
                for task in map(tasks.apply, range(tasks.size())):
                    if task.taskId() == attempt:
                        return str(task.executorId())
        return ""

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """One with which the Java side has a thread of its own, for as long as it runs."""
        from pyspark import InheritableThread

        return InheritableThread(target=work, name=name, daemon=True)

    def run(
        self, task: Callable[[Any], Any], group: str, description: str, wanted: Executor | None, threads: int
    ) -> Any:
        """Runs a job of one task, in this thread, and gives its result; preferably on the executor that is wanted."""
        context = self.context
        context.setJobGroup(group, description)
        # In a pool of its own, which counts where spark.scheduler.mode is FAIR: a container comes before queries wait
        # for it.
        context.setLocalProperty("spark.scheduler.pool", "millpond")
        context.setLocalProperty("callSite.short", description)
        rows = self._one_row(wanted)
        slots = self.slots_of(threads)
        if slots > 1:
            from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

            request = TaskResourceRequests().cpus(slots * self.task_cpus)
            rows = rows.withResources(ResourceProfileBuilder().require(request).build)
        (result,) = rows.map(task).collect()
        return result

    def _one_row(self, wanted: Executor | None) -> Any:
        """One row in one partition, which would rather be on an executor than elsewhere."""
        from pyspark import RDD
        from pyspark.serializers import CPickleSerializer

        if wanted is not None:
            with suppress(Exception):
                jvm = self.context._jvm
                serializer: Any = CPickleSerializer()
                where = jvm.java.util.ArrayList()
                where.add(f"executor_{wanted.host}_{wanted.id}")
                row = jvm.scala.Tuple2(serializer.dumps(0), jvm.PythonUtils.toSeq(where))
                rows = jvm.java.util.ArrayList()
                rows.add(row)
                kind = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
                placed = self._spark.makeRDD(jvm.PythonUtils.toSeq(rows), kind)
                return RDD(placed.toJavaRDD(), self.context, serializer)
        return self.context.parallelize([0], 1)

    def cancel(self, group: str) -> None:
        with suppress(Exception):  # the session may have been stopped
            self.context.cancelJobGroup(group)

    @property
    def is_stopped(self) -> bool:
        """Also when Java has ended, by whatever way: then it answers nothing."""
        try:
            return self.context._jsc is None or bool(self._spark.isStopped())
        except Exception:  # noqa: BLE001 - of Py4J, for a gateway that is gone
            return True


def fitting_tasks(sizes: Sequence[int], each: int, others: int) -> int:
    """For how many tasks of `each` slots executors of these sizes have room at most, beside `others`.

    Others are taken to be where they are least in the way, for all that anyone knows.
    """
    left_over = sum(size % each for size in sizes)
    in_the_way = math.ceil(max(0, others - left_over) / each)
    return max(0, sum(size // each for size in sizes) - in_the_way)


def choose(executors: list[Executor], containers: Mapping[str, int]) -> Executor | None:
    """The one with the fewest containers on its host, then of its own, of those with a free slot."""
    on_host: dict[str, int] = {}
    for executor in executors:
        on_host[executor.host] = on_host.get(executor.host, 0) + containers.get(executor.id, 0)
    free = [executor for executor in executors if executor.free > 0]
    return min(
        free,
        key=lambda executor: (on_host[executor.host], containers.get(executor.id, 0), -executor.free),
        default=None,
    )


def check_session(session: Any) -> None:
    """BadOption unless containers can run in the session: it must be one of this process's own."""
    if session is None:
        raise BadOption(
            'hosting="spark" needs a Spark session', hint="mp.open(root, spark=spark, ...)", option="spark"
        )
    check_not_connect(session, "spark")
    if getattr(session.sparkContext, "_jsc", session) is None:
        raise BadOption(
            "the Spark session has been stopped", hint="start another, and give that one", option="spark"
        )
