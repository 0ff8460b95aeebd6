"""One seed: a pond, applications and weather drawn from it, and in the end all of it compared with the models."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import pyarrow as pa

from millpond.container.staging import STAGED_S_MAX
from millpond.errors import RuleInterpreted, UnknownResident
from millpond.pond.pond import Pond
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.chains import DRAWN as CHAINS_DRAWN
from millpond.testing.simulation.chains import ChainCaller, ChainChecker, ChainModel, ChainReader, draw_chain
from millpond.testing.simulation.faults import Weather
from millpond.testing.simulation.fetcher import Fetcher, FetcherModel, draw_fetcher
from millpond.testing.simulation.joins import DRAWN as ROWS_DRAWN
from millpond.testing.simulation.joins import RowsModel, draw_rows
from millpond.testing.simulation.kernel import Simulation
from millpond.testing.simulation.ledger import LedgerModel, Teller, draw_ledger
from millpond.testing.simulation.lost_disk import Witness, lose_a_disk
from millpond.testing.simulation.memory import scarce_memory
from millpond.testing.simulation.pond import SLICES, SimPond
from millpond.testing.simulation.programs import DRAWN as PROGRAMS_DRAWN
from millpond.testing.simulation.programs import ProgramCaller, ProgramChecker, ProgramModel, draw_program
from millpond.testing.simulation.report import LINES, Report
from millpond.testing.simulation.scheduler import Process
from millpond.testing.simulation.silence import SilenceModel, SilenceReader, SilentUpdater
from millpond.testing.simulation.silent_windows import (
    SilentFeeder,
    SilentWindowChecker,
    SilentWindowModel,
    draw_silent_window,
)
from millpond.testing.simulation.states import (
    KEYS,
    AddModel,
    PutModel,
    Reader,
    StateModel,
    Updater,
    check_answers,
    check_snapshot,
    draw_feed,
    open_state,
)
from millpond.testing.simulation.windows import (
    DRAWN,
    FURTHER,
    SHAPES,
    WATCHED,
    Shape,
    WindowChecker,
    WindowFeeder,
    WindowModel,
    WindowWatcher,
    draw_window,
)

STEPS_MAX = 300_000
PACE = 0.8
"""Most epochs come while there are faults."""
WINDOW_PACE = 0.4
FURTHER_DRAWN, SILENT_DRAWN = 0.7, 0.4
"""Of seeds that have none of all that, so many have a window of a further kind; of those, so many one that falls silent."""
CALM_S_MAX = 400.0
"""Within this time of the last fault everybody has finished."""


class Scenario:
    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(f"scenario {seed}")
        self.sim = Simulation(seed, Weather.of(chance), STEPS_MAX)
        self.sim.network.on_failure = self._handler_failed
        self.pond = SimPond(self.sim, chance)
        self.chronicle = Chronicle()
        self.storm_s = math.exp(chance.uniform(math.log(3), math.log(60)))
        self.models: list[StateModel] = []
        self.apps: list[App] = []
        self.readers: list[Reader | ChainReader | WindowWatcher] = []
        self._failed: Exception | None = None
        self._loses_early = self.pond.elastic.random() < 0.5
        """A disk is lost while applications are still at their last epochs."""
        self._disk_over = self._disk_lost = False
        self.ledgers: list[LedgerModel] = []
        self.fetches: list[FetcherModel] = []
        for number in range(chance.choice((1, 1, 2))):
            self._draw_state(f"state{number}")
        if chance.random() < 0.5:
            self._draw_ledger("accounts")
        if chance.random() < 0.5:
            self.apps.append(Passer(self.pond, self.chronicle, "passer", chance, self.storm_s / 8))
        if chance.random() < 0.3:
            self._draw_silence("silence")
        self.windows: list[WindowModel] = []
        # Not from `chance`: seeds without a window are as they were.
        self._window_chance = Random(f"windows {seed}")
        if self._window_chance.random() < DRAWN:
            self._draw_window("window", self._window_chance, SHAPES)
        self.programs: list[ProgramModel] = []
        self._program_chance = Random(f"programs {seed}")
        self.chains: list[ChainModel] = []
        if self._program_chance.random() < PROGRAMS_DRAWN:
            if Random(f"chains {seed}").random() < CHAINS_DRAWN:
                self._draw_chain("chain")
            else:
                self._draw_program("program")
        self._rows_chance = Random(f"joins {seed}")
        if not (self.windows or self.programs or self.chains) and self._rows_chance.random() < ROWS_DRAWN:
            self._feed(draw_rows(self._rows_chance, "rows"), self._rows_chance)
        self.silent_windows: list[SilentWindowModel] = []
        further = Random(f"further windows {seed}")
        if not (self.windows or self.programs or self.chains) and further.random() < FURTHER_DRAWN:
            if further.random() < SILENT_DRAWN:
                self._draw_silent_window("silent", further)
            else:
                self._draw_window("window", further, FURTHER)

    def _draw_state(self, name: str) -> None:
        chance = self.chance
        count, epochs = chance.choice((1, 2, 3)), chance.randint(2, 6)
        feeds = {f"{name}_feed{n}": draw_feed(chance, n, count, epochs) for n in range(count)}
        model = chance.choice((PutModel, AddModel))(name, feeds)
        self.models.append(model)
        pause_s = PACE * self.storm_s / epochs
        if chance.random() < 0.5:
            queries = draw_fetcher(chance, model, f"{name}_fetcher", epochs)
            model.compacts = any(one.delay is not None or one.reports for one in queries)
            self.fetches += queries
            for number, one in enumerate(queries):
                self.apps.append(
                    Fetcher(self.pond, self.chronicle, f"{one.name}{number or ''}", one, chance, pause_s)
                )
        for feed in feeds:
            self.apps.append(Updater(self.pond, self.chronicle, feed, model, chance, pause_s))
        self.readers.append(
            Reader(self.pond, self.chronicle, f"{name}_reader", model, chance, self.storm_s / 16)
        )

    def _draw_silence(self, name: str) -> None:
        chance = self.chance
        count, epochs = chance.choice((2, 3)), chance.randint(3, 8)
        feeds = {f"{name}_feed{n}": draw_feed(chance, n, count, epochs) for n in range(count)}
        model = SilenceModel(name, feeds)
        pause_s = PACE * self.storm_s / epochs
        for feed in feeds:
            self.apps.append(SilentUpdater(self.pond, self.chronicle, feed, model, chance, pause_s))
        reader = SilenceReader(self.pond, self.chronicle, f"{name}_reader", model, chance, self.storm_s / 16)
        self.apps.append(reader)

    def _draw_ledger(self, table: str) -> None:
        epochs = self.chance.randint(2, 8)
        model = draw_ledger(self.chance, table, epochs)
        self.ledgers.append(model)
        pause_s = PACE * self.storm_s / epochs
        self.apps.append(Teller(self.pond, self.chronicle, f"{table}_teller", model, self.chance, pause_s))

    def _draw_silent_window(self, name: str, chance: Random) -> None:
        model = draw_silent_window(chance, name)
        self.silent_windows.append(model)
        self.pond.window_bytes = chance.choice((None, 0, 600))
        pause_s = WINDOW_PACE * self.storm_s / len(model.turns)
        for source in model.delays:
            self.apps.append(SilentFeeder(self.pond, self.chronicle, source, model, chance, pause_s))

    def _draw_window(self, name: str, chance: Random, shapes: Mapping[str, Shape]) -> None:
        # What fires more than once is drawn apart, too.
        model = draw_window(chance, name, Random(f"staying {self.sim.seed}"), shapes)
        self.pond.window_bytes = chance.choice((None, 0, 600))
        # So that windows come to rest on the log, and go on from there, within a storm.
        self.pond.log_records = chance.choice((1, 3, 8))
        self._feed(model, chance)
        if not model.apart and Random(f"watching {self.sim.seed}").random() < WATCHED:
            self.readers.append(
                WindowWatcher(self.pond, self.chronicle, f"{name}_watcher", model, self.storm_s / 30)
            )

    def _feed(self, model: WindowModel, chance: Random) -> None:
        name = model.name
        self.windows.append(model)
        self.pond.upkeep_s = min(self.pond.upkeep_s, self.storm_s / 12)
        pause_s = WINDOW_PACE * self.storm_s / len(model.turns)
        feeders = [[source] for source in model.delays] if model.apart else [list(model.delays)]
        for number, sources in enumerate(feeders):
            own = f"{name}_feeder{number}"
            own_pause_s = pause_s * len(feeders)
            self.apps.append(
                WindowFeeder(self.pond, self.chronicle, own, model, sources, chance, own_pause_s)
            )

    def _draw_program(self, name: str) -> None:
        chance = self._program_chance
        model = draw_program(chance, name, SLICES)
        self.programs.append(model)
        pause_s = PACE * self.storm_s / len(model.turns)
        self.apps.append(ProgramCaller(self.pond, self.chronicle, model, chance, pause_s))

    def _draw_chain(self, name: str) -> None:
        chance = self._program_chance
        model = draw_chain(chance, name, SLICES)
        self.chains.append(model)
        pause_s = PACE * self.storm_s / len(model.turns)
        self.apps.append(ChainCaller(self.pond, self.chronicle, model, chance, pause_s))
        self.readers.append(ChainReader(self.pond, self.chronicle, model, chance, self.storm_s / 30))

    # The run

    def run(self) -> None:
        sim, world = self.sim, self.sim.scheduler.world
        world.spawn(self.pond.supervise, "supervisor")
        self._register()
        storms = sim.storms(self._victims, self._crash, self.pond.containers_up)
        storms.begin()
        if self.chance.random() < 0.5:
            world.spawn(lambda: self.pond.move_slices(self.storm_s / 14), "mover")
        if self.pond.is_balanced:
            world.spawn(lambda: self.pond.balance_load(self.storm_s / 10), "balancer")
        for app in [*self.apps, *self.readers]:
            world.spawn(app.live, app.name)
        sim.scheduler.sleep(self.storm_s)
        storms.end()
        sim.scheduler.note("the storms are over")
        # That all goes on again shows at one more epoch; many in calm weather show nothing more.
        drawn: list[
            StateModel
            | FetcherModel
            | LedgerModel
            | WindowModel
            | SilentWindowModel
            | ProgramModel
            | ChainModel
        ]
        drawn = [
            *self.models,
            *self.fetches,
            *self.ledgers,
            *self.windows,
            *self.silent_windows,
            *self.programs,
            *self.chains,
        ]
        for model in drawn:
            model.cut()
        for reader in self.readers:
            reader.stopping = True
        if self._loses_early:
            world.spawn(self._lose_a_disk, "disk loss")
        deadline = sim.scheduler.now + CALM_S_MAX
        self._await(deadline, lambda: all(app.done for app in self.apps), "applications are not done")
        self._await(deadline, lambda: all(reader.done for reader in self.readers), "readers are not done")
        if not self._loses_early:
            self._lose_a_disk()
        self._await(deadline, lambda: self._disk_over, "a lost disk is not got over")
        while sim.network.travelling:
            sim.scheduler.sleep(10.0)
        self._finish()

    def _lose_a_disk(self) -> None:
        """One container, if others hold all that it has; epochs go on."""
        if self.pond.backups:
            before = Witness(self.pond, self.chronicle, 0)
            self.sim.scheduler.world.spawn(before.live, before.name)
            self._disk_lost = lose_a_disk(self.pond)
            deadline = self.sim.scheduler.now + CALM_S_MAX
            self._await(deadline, lambda: before.done, "an epoch came to nothing")
            Witness(self.pond, self.chronicle, 1).live()
            self._await(deadline, lambda: self.pond.is_whole, "containers are not back")
        self._disk_over = True

    def _register(self) -> None:
        """All updaters are there before one sends: a later one would find times final that its rows have."""
        Registrar(self.pond, self.chronicle, self.models).live()

    def _await(self, deadline: float, done: Callable[[], bool], what: str) -> None:
        while not done():
            if self._failed is not None:
                raise self._failed
            if self.sim.scheduler.now > deadline:
                raise Wrong(f"{what} {CALM_S_MAX:.0f} s after the last fault\n{self.sim.scheduler.dump()}")
            self.sim.scheduler.sleep(1.0)

    def _finish(self) -> None:
        """Everything is compared; then once more after names were forgotten, and the pond was opened anew.

        Where a disk was lost, the machine goes down, too: those who have the slices now hold them on their own disks.
        """
        self._check_all("the end")
        self.pond.expire(2 * STAGED_S_MAX)
        Forgetter(self.pond, self.chronicle, self.models, self.chance).live()
        assert self.pond.driver is not None
        if self._disk_lost:
            self.pond.crash()
            self.sim.disk.crash()
        else:
            self.pond.driver.kill()
        self._check_all("the end, opened anew")
        self.pond.validate()

    def _check_all(self, when: str) -> None:
        self.sim.scheduler.note(f"compares everything at {when}")
        Checker(self.pond, self.chronicle, self.models, self.ledgers).live()
        if self.windows:
            WindowChecker(self.pond, self.chronicle, self.windows, self._window_chance).live()
        if self.silent_windows:
            SilentWindowChecker(self.pond, self.chronicle, self.silent_windows).live()
        if self.programs:
            ProgramChecker(self.pond, self.chronicle, self.programs, self._program_chance).live()
        if self.chains:
            ChainChecker(self.pond, self.chronicle, self.chains, self._program_chance).live()

    # What faults reach

    def _victims(self) -> list[Process]:
        apps = [app.process for app in [*self.apps, *self.readers] if app.process is not None]
        return [*self.pond.processes(), *apps]

    def _crash(self) -> None:
        self.pond.crash()
        for app in [*self.apps, *self.readers]:
            if app.process is not None:
                app.process.kill()
        self.sim.disk.crash()

    def _handler_failed(self, error: Exception) -> None:
        if not isinstance(error, OSError | MemoryError):
            self._failed = error

    def report(self) -> Report:
        failure = ""
        try:
            with scarce_memory(self.sim, self.pond.checkpoint_soon), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuleInterpreted)
                self.sim.scheduler.run(self.run)
            if self._failed is not None:
                raise self._failed
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told with what went before
            failure = self._told(error)
        scheduler = self.sim.scheduler
        did = Counter(
            reads=sum(reader.reads for reader in self.readers),
            epochs=sum(len(feed.epochs) for model in self.models for feed in model.feeds.values()),
            openings=self.pond.opened,
        )
        did["window epochs"] = sum(len(model.turns) for model in self.windows)
        did.update({f"{each.kind} epochs": each.done for each in self.windows if isinstance(each, RowsModel)})
        did["windows fired"] = sum(len(rows) for model in self.windows for rows in model.results.values())
        did["silent window epochs"] = sum(len(model.turns) for model in self.silent_windows)
        did["own turns"] = sum(app.own_turns for app in self.apps if isinstance(app, SilentFeeder))
        for model in self.windows:
            did[f"windows: {model.kind_name}"] += 1
        did["program epochs"] = sum(model.acknowledged for model in self.programs)
        did["chain turns"] = sum(model.acknowledged for model in self.chains)
        return Report(
            self.sim.seed,
            failure,
            self.sim.faults.fired,
            did,
            self.sim.history.digest,
            scheduler.steps,
            scheduler.now,
        )

    def _told(self, error: Exception) -> str:
        """What went wrong, and the lines that matter: those about the keys concerned, and the faults among them."""
        keys = error.keys if isinstance(error, Wrong) else frozenset()
        lines = [(line.now, f"{line.who} {line.what}") for line in self.chronicle.about(keys, LINES)]
        since = lines[0][0] if lines else 0.0
        lines += [(now, f"FAULT {what}") for now, what in list(self.sim.faults.last)[-LINES:] if now >= since]
        told = "\n".join(f"{now:12.6f} {what}"[:300] for now, what in sorted(lines))
        return f"{type(error).__name__}: {error}\n{told}"


class Registrar(App):
    """Opens every State and lets its updaters exist."""

    def __init__(self, pond: SimPond, chronicle: Chronicle, models: list[StateModel]) -> None:
        super().__init__(pond, chronicle, "registrar")
        self._models = models

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            state = open_state(pond, model)
            for updater, feed in model.feeds.items():
                state.update(key="k", at="t", value="v", delay=feed.delay, name=updater)


class Forgetter(App):
    """Lets go of some names whose work is done: what they did stays."""

    def __init__(self, pond: SimPond, chronicle: Chronicle, models: list[StateModel], chance: Random) -> None:
        super().__init__(pond, chronicle, "forgetter")
        self._models = models
        self._chance = chance

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            state = open_state(pond, model)
            progress = state.progress()
            for name in [*progress.updaters, *progress.fetchers]:
                if self._chance.random() < 0.5:
                    pond.forget(state, name=name)


class Passer(App):
    """Opens a State, uses it and forgets it, again and again: each time it is empty."""

    TIMES = 3

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, name: str, chance: Random, pause_s: float
    ) -> None:
        super().__init__(pond, chronicle, name)
        self._chance = chance
        self._pause_s = pause_s
        self._passed = 0
        self._used = False

    def work(self, pond: Pond, process: Process) -> None:
        while self._passed < self.TIMES:
            self.pause(process, self._pause_s)
            try:
                if not self._used:
                    self._use(pond, process, self._passed)
                self._used = True
                pond.forget("scratch")
            except UnknownResident:
                # An order to forget it that was sent twice, or before this process was killed, came only now.
                self.say("scratch is gone")
            self._passed += self._used
            self._used = False

    def _use(self, pond: Pond, process: Process, number: int) -> None:
        scratch = pond.state("scratch", key="long", value="long")
        update = scratch.update(key="k", at="t", value="v", name="once")
        update(pa.table({"k": [number], "t": [number], "v": [number]}), 0)
        self.pause(process, self._pause_s)
        scratch.finish("once")
        rows = scratch.snapshot().to_pylist()
        if rows != [{"key": number, "time": number, "value": number}]:
            raise Wrong(f"a State that was forgotten and opened anew holds {rows}")
        self.say(f"scratch {number} is used")


class Checker(App):
    """Compares everything that can be asked for with what the models say."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, models: list[StateModel], ledgers: list[LedgerModel]
    ) -> None:
        super().__init__(pond, chronicle, "checker")
        self._models = models
        self._ledgers = ledgers

    def work(self, pond: Pond, process: Process) -> None:
        for ledger in self._ledgers:
            rows = pond.table(ledger.table).snapshot().to_pylist()
            ledger.check_balances(ledger.acknowledged, {row["key"]: row["balance"] for row in rows})
        for model in self._models:
            state = open_state(pond, model)
            progress = state.progress()
            model.check_progress(model.progress_floor, progress.update)
            rows = state.snapshot().to_pylist()
            snapshot = {row["key"]: (row["time"], row["value"]) for row in rows}
            check_snapshot(model, snapshot, progress.update)
            oldest = 0 if progress.fetch == -math.inf else int(progress.fetch)
            newest = max([oldest, *(time + 1 for time, _ in snapshot.values())])
            times = {key: model.turning_points(key) | {oldest, newest} for key in range(KEYS)}
            questions = [(key, at) for key in times for at in sorted(times[key]) if oldest <= at <= newest]
            asked = pa.table(
                [pa.array(column, pa.int64()) for column in zip(*questions, strict=True)], ["k", "t"]
            )
            answers = state.fetch(key="k", at="t", into="v").now(asked)
            check_answers(model, list(zip(*(answers[name].to_pylist() for name in "ktv"), strict=True)))


def simulate(seed: int) -> Report:
    """A whole pond with its applications, on virtual time, disk and network; the same seed gives the same report."""
    return Scenario(seed).report()
