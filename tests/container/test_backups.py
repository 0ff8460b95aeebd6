"""A pond whose slices have backups: a container goes with its disk, slices move while updates go on, and nothing is lost."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.layout import MANIFEST, incarnation_of, is_directory, term_of_snapshot
from millpond.coordinator.journal import Journal
from millpond.coordinator.migrations import PAUSES_S
from millpond.coordinator.slices import REBUILT_S
from millpond.durable.crashpoints import armed
from millpond.errors import CorruptFile, MillpondError, StageLost, Unavailable
from millpond.runtime import Serial
from millpond.testing import LossyFiles, Oracle
from millpond.testing.local import LocalPond
from millpond.wire.backups import Dismiss, Enlist
from millpond.wire.base import SliceId
from millpond.wire.house import LetGo, Release

sys.path.append(str(Path(__file__).resolve().parent.parent / "durability"))
import crashes

pytestmark = pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
SLICES = 6
KEYS = range(24)
DELAY = 8
ROOT = "/pond"


@mp.transaction(results="now long")
def add(t, k, v):  # type: ignore[no-untyped-def]
    t[k].x += v
    return t[k].x


@mp.transaction(results="now long")
def fold(d, k, v):  # type: ignore[no-untyped-def]
    """What it comes to tells in which order events ran."""
    d[k].x = (d[k].x * 3 + v) % 1_000_003
    return d[k].x


def numbers(*slices: int) -> list[SliceId]:
    return [SliceId(number) for number in slices]


class Model:
    """What the pond must hold, in plain Python."""

    def __init__(self) -> None:
        self.oracle = Oracle(keep="all")
        self.sums: dict[int, int] = defaultdict(int)
        self.delayed: list[tuple[int, int, int]] = []
        self.epochs = 0


class Scene:
    """A pond with a State of two updaters, a table with transactions, and one whose events wait."""

    def __init__(
        self,
        files: LossyFiles,
        containers: int = 3,
        backups: int = 1,
        model: Model | None = None,
        seed: int = 0,
    ) -> None:
        self.files = files
        self.containers = containers
        self.backups = backups
        self.chance = random.Random(seed)
        self.pond = LocalPond(files, ROOT, containers, SLICES, backups=backups)
        self.state = self.pond.state("s", key="long", value="long", compact=mp.keep_all())
        self.pond.table("t", key="k long", value="x long", default={"x": 0}, group="now")
        self.pond.table("d", key="k long", value="x long", default={"x": 0}, group="later")
        self.feeds = {
            name: self.state.update(key="k", at="at", value="v", name=name, delay=3) for name in ("a", "b")
        }
        self.adding = self.pond.transactions("adding", ["t"], {"add": add})
        self.folding = self.pond.transactions("folding", ["d"], {"fold": fold}, seq="seq", delay=DELAY)
        wait = self.coordinator._migrations._catch_up

        def catch_up(*given: Any) -> None:
            """Upkeep goes on while somebody waits for it."""
            self.pond.maintain()
            wait(*given)

        self.coordinator._migrations._catch_up = catch_up
        self.model = model or Model()
        for name in self.feeds:
            self.model.oracle.register_updater(name)

    @property
    def coordinator(self) -> Any:
        return self.pond.coordinator

    @property
    def record(self) -> Any:
        return self.coordinator._record

    def epoch(self) -> None:
        number = self.model.epochs
        now = 10 * number
        self.feed(number)
        added = [(key, self.chance.randrange(100)) for key in self.chance.choices(KEYS, k=6)]
        self.adding(
            pa.table({"ts": [now] * 6, "k": [k for k, _ in added], "v": [v for _, v in added]}), number
        )
        for key, value in added:
            self.model.sums[key] += value
        waiting = [
            (now + self.chance.randrange(DELAY), number * 10 + n, key) for n, key in enumerate((1, 2, 3))
        ]
        columns = {
            "ts": [w[0] for w in waiting],
            "seq": [w[1] for w in waiting],
            "k": [w[2] for w in waiting],
        }
        self.folding(pa.table({**columns, "v": columns["seq"]}), number)
        self.model.delayed += waiting
        self.model.epochs += 1

    def feed(self, number: int) -> None:
        """To the State alone."""
        now = 10 * number
        for name, feed in self.feeds.items():
            rows = [
                (key, now + self.chance.randrange(-5, 10), self.chance.randrange(1000))
                for key in self.chance.sample(KEYS, 8)
            ]
            columns = dict(zip(("k", "at", "v"), map(list, zip(*rows, strict=True)), strict=True))
            done = feed(pa.table(columns), number)
            receipt = self.model.oracle.update(name, number, rows, delay=3)
            assert (done.rows, done.late) == (receipt.rows_applied, receipt.late)

    def upkeep(self) -> None:
        """Slices get the backups that they lack, and these apply what they have."""
        for _ in range(10):
            self.coordinator.maintain()
            self.pond.maintain()
            if all(len(held) == self.wanted for held in self.holders().values()):
                return
        raise AssertionError(f"backups are lacking: {self.holders()}")

    @property
    def wanted(self) -> int:
        return min(self.backups, self.containers - 1)

    def holders(self) -> dict[SliceId, list[int]]:
        return {SliceId(n): self.coordinator._migrations._backing.holders(SliceId(n)) for n in range(SLICES)}

    def check(self) -> None:
        self.pond.validate()
        model = self.model
        final = model.oracle.update_progress
        if model.epochs:
            assert self.state.progress().update == final
            assert {row["key"]: (row["time"], row["value"]) for row in self.state.snapshot().to_pylist()} == (
                model.oracle.snapshot()
            )
            asked = pa.table({"k": list(KEYS), "lo": [-100] * len(KEYS), "hi": [int(final) - 1] * len(KEYS)})
            fetch = self.state.fetch(key="k", between=("lo", "hi"), into="v", rule=mp.values())
            wanted = [model.oracle.fetch_range(key, -100, int(final) - 1, "values") for key in KEYS]
            assert fetch.now(asked)["v"].to_pylist() == wanted
        table = {row["k"]: row["x"] for row in self.pond.table("t").snapshot().to_pylist()}
        assert table == dict(model.sums)
        ran, waits = self.folded()
        assert {row["k"]: row["x"] for row in self.pond.table("d").snapshot().to_pylist()} == ran
        assert self.folding.pending().rows == waits
        # One owner each, as the journal says.
        served = [(n, c) for c, service in self.pond.hosting.services.items() for n in service.core.owned]
        assert sorted(served) == list(enumerate(self.record.owners))

    def folded(self) -> tuple[dict[int, int], int]:
        """What has run of the events that wait, and how many still do."""
        events = sorted(self.model.delayed)
        below = max((time for time, *_ in events), default=0) - DELAY
        rows: dict[int, int] = {}
        for time, seq, key in events:
            if time < below:
                rows[key] = (rows.get(key, 0) * 3 + seq) % 1_000_003
        return rows, sum(time >= below for time, *_ in events)

    def move(self, slices: list[SliceId], to: int) -> None:
        for ticket in self.coordinator.elasticity.move(slices, to):
            assert (ticket.stage, ticket.error) == ("moved", None)

    # What goes

    def terms(self, container: int) -> set[int]:
        """Of all its incarnations that have left anything."""
        names = [name for name in self.files.list(f"{ROOT}/containers") if is_directory(name)]
        return {incarnation_of(name)[1] for name in names if incarnation_of(name)[0] == container}

    def lose_disk(self, container: int) -> int:
        """Every file that the container has written is gone. How many there were."""
        terms = self.terms(container)
        gone = 0
        for name in self.files.list(f"{ROOT}/containers"):
            if is_directory(name) and incarnation_of(name)[0] == container:
                gone += remove_all(self.files, f"{ROOT}/containers/{name}")
                gone += remove_all(self.files, f"{ROOT}/backups/{name}")
        for resident in self.files.list(f"{ROOT}/snapshots"):
            for name in self.files.list(f"{ROOT}/snapshots/{resident}"):
                if term_of_snapshot(name) in terms:
                    self.files.remove(f"{ROOT}/snapshots/{resident}/{name}")
                    gone += 1
            self.files.sync_dir(f"{ROOT}/snapshots/{resident}")
        for name in ("containers", "backups"):
            if self.files.exists(f"{ROOT}/{name}"):
                self.files.sync_dir(f"{ROOT}/{name}")
        return gone

    def lose(self, container: int) -> None:
        """It goes with its disk, and a new one comes in its place."""
        self.pond.hosting.kill(container)
        assert self.lose_disk(container)
        self.coordinator.recover(container)

    def reopened(self, lost: int | None = None, upkeep: bool = True) -> Scene:
        """The pond as another process finds it, perhaps without a container's disk.

        Slices may rest on others' files then, until `upkeep` has come.
        """
        again = after(self.files)
        if lost is not None:
            self.files, files = again, self.files
            assert self.lose_disk(lost)
            self.files = files
        scene = Scene(again, self.containers, self.backups, self.model, self.chance.randrange(1 << 30))
        if upkeep:
            scene.pond.maintain()
        return scene


def remove_all(files: LossyFiles, path: str) -> int:
    gone = 0
    for name in files.list(path):
        if files.is_dir(f"{path}/{name}"):
            gone += remove_all(files, f"{path}/{name}")
        else:
            files.remove(f"{path}/{name}")
            gone += 1
    if files.is_dir(path):
        files.sync_dir(path)
        files.remove_dir(path)
    return gone


def after(files: LossyFiles) -> LossyFiles:
    """What the next process would find if this one ended now. It goes on all the same."""
    halted, chance = files._halted, files.seed
    try:
        return crashes.after(files, "all", 0)
    finally:
        files._halted, files.seed = halted, chance


def made(containers: int = 3, epochs: int = 2, checkpoint: bool = False, seed: int = 0) -> Scene:
    """One whose slices have their backups, some by copy and some by records."""
    scene = Scene(LossyFiles(), containers, seed=seed)
    scene.epoch()
    scene.upkeep()
    for _ in range(epochs):
        scene.epoch()
    if checkpoint:
        scene.pond.checkpoint()
        scene.epoch()
    return scene


# Disks that are lost


@pytest.mark.parametrize("containers", [2, 3])
def test_every_slice_has_a_backup_on_another_container(containers: int) -> None:
    scene = made(containers)
    for number, held in scene.holders().items():
        assert len(held) == 1
        assert scene.record.owners[number] not in held
    scene.check()
    before = scene.record.backups
    scene.coordinator.maintain()
    assert before == scene.record.backups, "what is enough is let alone"


@pytest.mark.parametrize("checkpoint", [False, True], ids=["from the log", "from snapshots"])
@pytest.mark.parametrize("containers", [2, 3])
def test_a_container_that_goes_with_its_disk_while_others_run_on(containers: int, checkpoint: bool) -> None:
    scene = made(containers, checkpoint=checkpoint)
    for gone in range(containers):
        scene.lose(gone)
        scene.check()
        scene.epoch()
        scene.check()
        scene.upkeep()
        scene.epoch()
        scene.check()
    scene.reopened().check()


@pytest.mark.parametrize(
    ("how", "lost"), [("ended", 0), ("ended", 2), ("closed", 1), ("checkpointed", 0), ("checkpointed", 2)]
)
def test_a_disk_that_is_gone_when_the_pond_opens_again(how: str, lost: int) -> None:
    scene = made(checkpoint=how == "checkpointed", seed=lost)
    if how == "closed":
        scene.pond.close()
    scene = scene.reopened(lost)
    scene.check()
    scene.epoch()
    scene.upkeep()
    scene.epoch()
    scene.check()
    # Once there are backups again, the next one may go.
    scene = scene.reopened((lost + 1) % 3)
    scene.check()


def test_backups_that_are_not_durable_when_they_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary: what is beside this does not hold by chance."""
    sync = LossyFiles.sync
    monkeypatch.setattr(LossyFiles, "sync", lambda self, path: "b/" in str(path) or sync(self, path))
    with pytest.raises((MillpondError, AssertionError)):
        test_a_disk_that_is_gone_when_the_pond_opens_again("ended", 0)


def test_a_disk_that_is_gone_right_after_one_that_was_lost_came_back() -> None:
    """Those who were promoted rest on their own files, and are backed up anew before the next is lost."""
    scene = made(2)
    for gone in (0, 1, 0, 1):
        scene.lose(gone)
        scene.upkeep()
        scene = scene.reopened()
        scene.check()
        scene.upkeep()
        scene.epoch()
        scene.check()


def test_slices_that_were_adopted_from_others_files_do_not_hang_on_one_disk() -> None:
    """A pond that opens gives slices to who has none: they rest on what their owner before wrote, until written anew."""
    scene = made(2, checkpoint=True)
    scene.lose(0)
    scene.upkeep()
    scene = scene.reopened(upkeep=False)
    assert set(scene.record.owners) == {0, 1}
    scene.upkeep()
    scene.pond.checkpoint()
    scene.reopened(lost=1)


def test_without_backups_a_lost_disk_is_an_error_that_names_what_is_missing() -> None:
    """A canary: these tests would notice."""
    scene = Scene(LossyFiles(), 2, backups=0)
    scene.epoch()
    with pytest.raises(CorruptFile) as raised:
        scene.reopened(lost=0)
    assert raised.value.hint


@pytest.mark.parametrize("what", ["manifests", "records", "snapshots"])
def test_what_is_left_of_a_disk_of_which_a_part_is_lost_does_not_stand_in_the_way_of_backups(
    what: str,
) -> None:
    """Somebody began to remove a container's files, and all ended: the others have what is lost."""
    scene = made(checkpoint=True)
    files = after(scene.files)
    lost = 0
    for place in ("containers", "snapshots"):
        for directory in files.list(f"{ROOT}/{place}"):
            path = f"{ROOT}/{place}/{directory}"
            for name in files.list(path):
                kind = place if place == "snapshots" else "manifests" if name == MANIFEST else "records"
                term = term_of_snapshot(name) if kind == "snapshots" else incarnation_of(directory)[1]
                if kind == what and term in scene.terms(0):
                    files.remove(f"{path}/{name}")
                    lost += 1
            files.sync_dir(path)
    assert lost
    again = Scene(files, scene.containers, scene.backups, scene.model)
    again.check()
    again.epoch()
    again.upkeep()
    again.check()
    again.reopened(lost=1).check()


def test_a_file_that_no_backup_makes_up_for_is_an_error_and_all_stays_as_it_was() -> None:
    scene = made(2)
    files = after(scene.files)
    directories = [name for name in files.list(f"{ROOT}/containers") if is_directory(name)]
    names = {
        f"{ROOT}/containers/{d}/{name}" for d in directories for name in files.list(f"{ROOT}/containers/{d}")
    }
    kept = {path: files.read(path) for path in names if not path.endswith(MANIFEST)}
    for path in kept:
        files.remove(path)
    with pytest.raises(CorruptFile, match="missing"):
        Scene(files, scene.containers, scene.backups, scene.model)
    for path, content in kept.items():
        files.write(path, [content])
        files.sync(path)
    again = Scene(files, scene.containers, scene.backups, scene.model)
    again.check()


def test_a_slice_whose_record_still_waits_for_another_does_not_forget_it() -> None:
    """A record is about a slice that is whole and one whose copy has not come: promoted, the first rests on it."""
    scene = made(2, epochs=1)
    slices = scene.record.slices_of(0)
    waits, whole = slices[0], slices[1:]
    backups = scene.pond.hosting.services[1].backups
    ids = [known.resident.id for known in scene.record.residents.values()]
    scene.epoch()
    backups.core.await_copies(1, ids, [waits])
    scene.epoch()
    scene.pond.maintain()
    assert backups.core.missing([waits], {name: {} for name in scene.record.residents})
    scene.coordinator._migrations.move(0, 1, whole)
    assert [scene.record.owners[number] for number in slices] == [0, *[1] * len(whole)]
    scene.check()
    scene = scene.reopened()
    scene.check()


def test_a_copy_whose_journal_entry_may_be_on_disk_is_no_backup() -> None:
    """The entry failed, the copier lets go: what the journal may say must not come to count."""
    scene = Scene(LossyFiles(), 2)
    scene.epoch()

    def full_disk(_point: str) -> None:
        raise OSError(28, "No space left on device")

    enter = scene.coordinator._migrations._enter_backup

    def doubtful(*entry: Any) -> None:
        with armed("journal.dirsync.after", action=full_disk) as plan:
            try:
                enter(*entry)
            finally:
                assert plan.fired

    scene.coordinator._migrations._enter_backup = doubtful
    with suppress(MillpondError):
        scene.coordinator._migrations.replicate(1)
    assert scene.record.backups == {}
    on_disk = Journal(after(scene.files), ROOT).load()
    assert on_disk is not None
    assert on_disk.backups == {}
    scene.coordinator._migrations._enter_backup = enter
    scene.upkeep()
    scene.epoch()
    scene.check()
    scene.lose(0)
    scene.check()


def test_an_epoch_that_meets_a_container_whose_directory_is_gone_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the container's end, of which nobody has heard yet: nothing that the caller would have to mend."""
    scene = made()
    assert scene.lose_disk(0)
    naps: list[float] = []

    def notice(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            scene.pond.hosting.kill(0)
            scene.coordinator.recover(0)

    monkeypatch.setattr(Serial, "sleep", lambda _, seconds: notice(seconds))
    scene.epoch()
    assert naps
    scene.check()


# Moves


def test_what_a_move_has_copied_stays_until_it_is_switched() -> None:
    """Backups are looked after all the time, and until the switch the target's copy is one too many."""
    scene = made()
    migrations = scene.coordinator._migrations
    number = next(n for n, owner in enumerate(scene.record.owners) if owner == 0)
    to = next(c for c in (1, 2) if c not in scene.holders()[SliceId(number)])
    wait = migrations._catch_up
    held: list[list[int]] = []

    def catch_up(*given: Any) -> None:
        scene.coordinator.maintain()
        held.append(scene.holders()[SliceId(number)])
        wait(*given)

    migrations._catch_up = catch_up
    scene.move(numbers(number), to)
    assert len(held) == 1, "the first try"
    assert to in held[0]
    scene.upkeep()
    assert len(scene.holders()[SliceId(number)]) == 1, "and then what is too much goes"
    scene.epoch()
    scene.check()


def test_slices_move_while_updates_go_on() -> None:
    scene = made()
    migrations = scene.coordinator._migrations
    carried_out: list[str] = []

    def between(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """An epoch before each step of a move."""

        def epoch_first(*given: Any) -> Any:
            carried_out.append(what)
            scene.epoch()
            return work(*given)

        return epoch_first

    migrations._copy = between("copy", migrations._copy)
    migrations._catch_up = between("catch up", migrations._catch_up)
    for slices, to in (([0, 1], 2), ([5, 0], 1), ([0, 1, 2, 3, 4, 5], 0), ([3], 1)):
        scene.move(numbers(*slices), to)
        assert {scene.record.owners[number] for number in slices} == {to}
        scene.check()
        scene.epoch()
        scene.check()
        scene.reopened().check()
    assert set(carried_out) == {"copy", "catch up"}
    scene.upkeep()
    scene.lose(0)
    scene.check()


@pytest.mark.parametrize("backups", [0, 1])
def test_what_was_copied_for_a_move_stays_while_it_waits_for_long_epochs(backups: int) -> None:
    scene = Scene(LossyFiles(), backups=backups)
    scene.epoch()
    scene.upkeep()
    commits, migrations = scene.coordinator._commits, scene.coordinator._migrations
    paused_soon = commits.paused_soon
    refusals = [False] * (len(PAUSES_S) + 2)

    @contextmanager
    def held_up(residents: Any, limit_s: float) -> Iterator[bool]:
        """Epochs run, for longer than anybody waits, and upkeep goes on."""
        scene.coordinator.maintain()
        with paused_soon(residents, limit_s) as is_paused:
            yield refusals.pop() if refusals else is_paused

    commits.paused_soon = held_up
    number = scene.record.slices_of(0)[0]
    target = next(c for c in (1, 2) if c not in scene.holders()[number])
    copied = migrations.copied
    [ticket] = scene.coordinator.elasticity.move([number], target)
    assert (ticket.stage, scene.record.owners[number]) == ("moved", target)
    assert ticket.tries == 1
    assert migrations.copied == copied + 1
    commits.paused_soon = paused_soon
    scene.check()
    scene.upkeep()
    assert len(scene.holders()[number]) == backups


def test_who_gave_slices_away_holds_a_backup_of_them() -> None:
    scene = made(2)
    mine = scene.record.slices_of(0)
    scene.move(mine, 1)
    assert all(scene.holders()[number] == [0] for number in mine)
    scene.epoch()
    scene.lose(1)
    assert scene.record.slices_of(0) == list(range(SLICES))
    scene.check()
    scene.epoch()
    scene.check()


def test_slices_whose_owner_ends_while_they_are_placed_have_one_owner() -> None:
    """Who held their backup serves them then, and must not serve on when they go to another."""
    scene = made()
    mine = scene.record.slices_of(0)
    telling = scene.coordinator._telling
    catch_up = telling.catch_up

    def end_first(*given: Any) -> None:
        telling.catch_up = catch_up
        scene.pond.hosting.kill(0)
        scene.coordinator.recover(0)
        assert not scene.record.slices_of(0)
        catch_up(*given)

    telling.catch_up = end_first
    with pytest.raises(Unavailable, match="went elsewhere"):
        scene.coordinator.place([1 if number in mine else o for number, o in enumerate(scene.record.owners)])
    assert telling.catch_up == catch_up, "no slice was adopted"
    scene.coordinator.maintain()
    services = scene.pond.hosting.services
    for container in range(3):
        assert sorted(services[container].core.owned) == scene.record.slices_of(container)
    scene.check()
    scene.epoch()
    scene.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_moves_losses_and_epochs(seed: int) -> None:
    scene = made(seed=seed)
    chance = random.Random(seed)
    done = set()
    for _ in range(16):
        deed = chance.choice(
            ["epoch", "epoch", "move", "lose", "kill", "checkpoint", "reopen", "reopen without"]
        )
        done.add(deed)
        container = chance.randrange(3)
        match deed:
            case "epoch":
                scene.epoch()
            case "move":
                scene.move(numbers(*chance.sample(range(SLICES), 2)), container)
            case "kill":
                scene.pond.hosting.kill(container)
                scene.coordinator.recover(container)
            case "checkpoint":
                scene.pond.checkpoint()
            case "lose":
                scene.upkeep()
                scene.lose(container)
            case "reopen":
                scene = scene.reopened()
            case "reopen without":
                scene.upkeep()
                if scene.terms(container):
                    scene = scene.reopened(container)
        scene.check()
    assert len(done) > 4


def test_without_backups_peers_rebuild_the_slices_of_one_that_is_gone_from_the_root() -> None:
    """But for those whose log runs user code, and once: what ends one after the other ends not all of them."""
    scene = Scene(LossyFiles(), 3, backups=0)
    for _ in range(3):
        scene.epoch()
    tables = [scene.record.residents[name].spec.home_slice for name in ("now", "later")]
    code = set(tables)
    scene.move(numbers(*range(SLICES)), 0)
    scene.upkeep()
    own = scene.record.slices_of(0)
    scene.pond.hosting.kill(0)
    scene.coordinator.recover(0)
    assert set(scene.record.slices_of(0)) == code.intersection(own)
    assert len({scene.record.owners[number] for number in own if number not in code}) == 2, "in parallel"
    scene.epoch()
    scene.check()
    before = scene.record.owners
    scene.pond.hosting.kill(1)
    scene.coordinator.recover(1)
    assert scene.record.owners == before, (
        "it has just rebuilt slices of another, and may have ended over them"
    )
    scene.epoch()
    scene.check()
    scene = scene.reopened()
    scene.check()


@mp.program(lanes=2)
class Kept:
    sums: mp.Partitioned[mp.Map[int, int]]

    def add(self, key: int, by: int):
        self.sums[key] += by


def own_sum(times, v) -> int:  # type: ignore[no-untyped-def]
    return int(sum(v))


def test_a_program_is_rebuilt_by_peers_and_runs_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log has what was changed, and not the calls that changed it."""
    with LocalPond(LossyFiles(), ROOT, 3, SLICES) as pond:
        program = pond.program("kept", Kept)
        add = program.call("add", name="adding")
        add(pa.table({"key": list(KEYS), "by": list(KEYS)}), 0)
        pond.checkpoint()
        add(pa.table({"key": list(KEYS), "by": list(KEYS)}), 1)
        sums = {key: 2 * key for key in KEYS}
        own = [number for number, owner in pond.placement().items() if owner == 0]
        with monkeypatch.context() as patch:
            patch.setattr("millpond.container.holdings.program_code._loaded", _refuse)
            pond.hosting.kill(0)
            pond.coordinator.recover(0)
            assert {pond.placement()[number] for number in own} == {1, 2}
            assert program.entries("sums") == sums
        add(pa.table({"key": list(KEYS), "by": [1] * len(KEYS)}), 2)
        assert program.entries("sums") == {key: total + 1 for key, total in sums.items()}
        pond.validate()


def _refuse(data: bytes) -> Any:
    raise AssertionError("code was loaded")


@pytest.mark.parametrize("aggregate", [mp.total("v"), own_sum], ids=["cells", "a function"])
def test_a_window_is_rebuilt_by_peers_if_no_function_of_its_own_runs_again(aggregate: Any) -> None:
    with LocalPond(LossyFiles(), ROOT, 3, SLICES) as pond:
        window = pond.window("w", key="k long", window=mp.tumbling(10), aggregate={"s": aggregate})
        feed = window.over(key="k", at="t")
        feed(pa.table({"k": list(KEYS), "t": [1] * len(KEYS), "v": list(KEYS)}), 0)
        own = [number for number, owner in pond.placement().items() if owner == 0]
        pond.hosting.kill(0)
        pond.coordinator.recover(0)
        stays = aggregate is own_sum
        assert {pond.placement()[number] for number in own} == ({0} if stays else {1, 2})
        fired = feed(pa.table({"k": list(KEYS), "t": [11] * len(KEYS), "v": list(KEYS)}), 1)
        assert {row["k"]: row["s"] for row in fired.to_pylist()} == {key: key for key in KEYS}
        pond.validate()


def test_slices_that_were_rebuilt_lately_keep_no_others_from_being_rebuilt() -> None:
    """Of a container that ends soon after it took over slices, its own go to peers: only what it took over waits."""
    scene = Scene(LossyFiles(), 3, backups=0)

    def fed() -> None:
        scene.feed(scene.model.epochs)
        scene.model.epochs += 1

    for table in ("t", "d"):
        scene.pond.forget(scene.pond.tables()[table])  # their logs run code
    fed()
    scene.move(numbers(0, 1), 0)
    scene.move(numbers(2, 3), 1)
    scene.move(numbers(4, 5), 2)
    fed()
    scene.pond.hosting.kill(0)
    scene.coordinator.recover(0)
    taken = [number for number in numbers(0, 1) if scene.record.owners[number] == 1]
    assert sorted(scene.record.owners[number] for number in (0, 1)) == [1, 2]
    scene.pond.hosting.kill(1)
    scene.coordinator.recover(1)
    assert scene.record.slices_of(1) == taken, "these may be what ended it"
    fed()
    scene.coordinator._runtime.sleep(REBUILT_S + 1.0)
    scene.pond.hosting.kill(1)
    scene.coordinator.recover(1)
    assert scene.record.slices_of(1) == []
    fed()
    state = scene.state
    at = 10 * scene.model.epochs - 20
    answers = state.fetch(key="k", at="at", into="v").now(pa.table({"k": KEYS, "at": [at] * len(KEYS)}))
    assert answers["v"].to_pylist() == [scene.model.oracle.fetch_latest(key, at) for key in KEYS]


@pytest.mark.parametrize("backups", [0, 1])
def test_slices_that_go_to_and_fro_leave_no_files_behind(backups: int) -> None:
    """What was copied for a move, and what a slice rested on where it was, go when nobody needs them."""
    scene = Scene(LossyFiles(), 3, backups=backups)
    counts = []
    for _ in range(8):
        for target in (1, 2, 0):
            scene.epoch()
            scene.move(numbers(0, 1, 2), target)
            scene.epoch()
            scene.pond.maintain()
        for service in scene.pond.hosting.services.values():
            service.checkpoint()
        scene.upkeep()
        scene.pond.maintain()
        scene.coordinator._tidying._next_s = 0.0
        scene.coordinator.maintain()
        counts.append(files_of(scene.files))
    scene.check()
    # Merging comes and goes: there is no trend.
    assert max(counts[4:]) <= 1.2 * max(counts[:4]), f"files after each round: {counts}"
    scene = scene.reopened()
    scene.check()


def files_of(files: LossyFiles, path: str = ROOT) -> int:
    """Snapshots and manifests; logs are cut at checkpoints, and may be longer or shorter."""
    count = 0
    for name in files.list(path):
        inside = f"{path}/{name}"
        if files.is_dir(inside):
            count += files_of(files, inside)
        else:
            count += name.startswith(("s0", "manifest"))
    return count


def test_a_disk_that_is_lost_in_the_middle_of_a_switch_takes_nothing_with_it() -> None:
    """The target has promoted its backup, and begins anew: what it held is all that is left."""
    scene = made(2, epochs=3)
    slices = scene.record.slices_of(0)
    migrations = scene.coordinator._migrations
    ask = scene.coordinator._slices.ask

    def lost(container: int, message: Any) -> Any:
        if type(message).__name__ == "Demote":
            scene.pond.hosting.kill(0)
            assert scene.lose_disk(0)
        return ask(container, message)

    scene.coordinator._slices.ask = lost
    with pytest.raises(MillpondError):
        migrations.move(0, 1, slices)
    scene.coordinator._slices.ask = ask
    scene.coordinator.maintain()
    scene.check()
    scene.epoch()
    scene.upkeep()
    scene.check()
    scene = scene.reopened()
    scene.check()


def overtaken(lock: Any, happens: Callable[[], object]) -> Any:
    """A lock for which somebody waits, for the first time, until that has happened."""
    waiting = [happens]

    class Overtaken:
        def __enter__(self) -> None:
            if waiting:
                waiting.pop()()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

        def acquire(self, *, timeout: float = -1) -> bool:
            return bool(lock.acquire(timeout=timeout))

        def release(self) -> None:
            lock.release()

    return Overtaken()


def test_what_waits_for_a_lock_until_it_is_too_late_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice leaves, and whoever comes to serve it rests on what it left."""
    scene = made(2, epochs=2)
    service, order = scene.pond.hosting.services[0], scene.coordinator._slices.order
    late, slices = order(), scene.record.slices_of(0)
    before = service.checkpoints.named()

    def leaves() -> None:
        service._here.place(Release(order(), slices))

    with monkeypatch.context() as patch:
        patch.setattr(service.checkpoints, "lock", overtaken(service.checkpoints.lock, leaves))
        with pytest.raises(StageLost):
            service._here.place(LetGo(late, [service.log.directory], []))
    assert service.core.owned == set()
    assert service.checkpoints.named() == before
    assert set(slices) <= set(service.checkpoints.grounds)


def test_a_backup_that_is_enlisted_anew_is_not_dismissed_by_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = made(2, epochs=2)
    number, (holder,) = next(iter(scene.holders().items()))
    service, order = scene.pond.hosting.services[holder], scene.coordinator._slices.order
    late = order()

    def enlisted() -> None:
        service._here.place(Enlist(order(), [number]))

    checkpoints = service.backups.checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "lock", overtaken(checkpoints.lock, enlisted))
        with pytest.raises(StageLost):
            service._here.place(Dismiss(late, [number]))
    assert number in service.backups.core.owned


def test_a_slice_that_comes_rests_on_no_record_that_is_older() -> None:
    """An epoch was prepared here and never decided, and its record is gone with the slices that went."""
    scene = made(2, epochs=2)
    slices = scene.record.slices_of(0)
    service = scene.pond.hosting.services[0]
    scene.move(slices, 1)
    scene.pond.maintain()  # the backups that they have become rest on files of their own
    service._here.place(LetGo(scene.coordinator._slices.order(), [service.log.directory], []))
    assert service.log.records == 0, "nobody needs it"
    assert service.core.seq > 1
    service.core._numbered["ghost"] = 1
    scene.move(slices, 0)
    scene.epoch()
    scene.pond.checkpoint()
    scene.check()
    scene = scene.reopened()
    scene.check()


def test_a_backup_that_lacks_something_takes_records_from_when_it_is_enlisted_again() -> None:
    """Else the first epoch of a copy would end the copy."""
    scene = Scene(LossyFiles())
    scene.epoch()
    scene.upkeep()
    number, (holder,) = next(iter(scene.holders().items()))
    coordinator, core = scene.coordinator, scene.pond.hosting.services[holder].backups.core
    core.lost(core.holding("s"), [number])
    coordinator._backing.lose(holder, core.term, [number])
    barrier = coordinator._commits.barrier

    def epoch_after(residents: Any) -> None:
        barrier(residents)
        scene.epoch()

    coordinator._commits.barrier = epoch_after
    coordinator._migrations.copy(scene.record.owners[number], holder, [number])
    assert scene.holders()[number] == [holder]
    scene.check()


def test_a_container_that_takes_no_copies_keeps_no_other_from_them() -> None:
    scene = Scene(LossyFiles(), backups=0)
    scene.epoch()

    def refuse(message: Any) -> None:
        raise Unavailable("its disk is full", address="")

    scene.pond.hosting.services[1].backups.copy = refuse
    with pytest.raises(Unavailable, match="its disk is full"):
        scene.coordinator._migrations.replicate(1)
    held = [holders for number, holders in scene.holders().items() if scene.record.owners[number] == 1]
    assert held
    assert all(held)
    assert {holder for holders in scene.holders().values() for holder in holders} == {0, 2}
