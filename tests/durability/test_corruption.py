"""Files that were cut, altered, deleted or swapped are refused by name; a pond never opens with half its data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import driving
import pytest
from driving import Checkpoint, Model, Step, Update, Upkeep, World, history

from millpond.container.layout import read_manifest, record_numbers
from millpond.coordinator.journal import Journal
from millpond.durable.crashpoints import SimulatedCrash, armed
from millpond.durable.files import AnyPath, OsFiles
from millpond.errors import CorruptFile


class DiskFiles(OsFiles):
    """The real files. No machine dies here, so nobody has to wait for the disk."""

    def sync(self, path: AnyPath) -> None:
        pass

    def sync_dir(self, path: AnyPath) -> None:
        pass


class Case(NamedTuple):
    """A pond on disk, and what it must hold."""

    root: Path
    model: Model
    picture: dict[str, Any] | None = None
    """What is seen of the model, if it is known and the model changes no more."""

    def files(self) -> list[str]:
        """Every durable file, below the root."""
        return sorted(
            str(path.relative_to(self.root)) for path in self.root.rglob("*.arrow") if path.is_file()
        )

    def put(self, name: str, data: bytes) -> None:
        """Another content under that name."""
        (self.root / name).unlink(missing_ok=True)
        (self.root / name).write_bytes(data)

    def check(self) -> None:
        world = World(DiskFiles(), str(self.root))
        world.start(2)
        driving.check_same(self.picture or driving.picture_of_model(self.model), world.pond)


def drive(root: Path, steps: list[Step]) -> Case:
    world, model = World(DiskFiles(), str(root)), Model()
    for step in steps:
        step.on_pond(world)
        step.on_model(model)
    return Case(root, model)


def a_log(root: Path) -> Case:
    """Three containers, nothing but logs, over two incarnations: the second needs the log of the first."""
    steps = [step for step in history(3, 3) if not isinstance(step, (Checkpoint, Upkeep))]
    return drive(root, steps[:-4])


def snapshots_and_a_log(root: Path) -> Case:
    """Two checkpoints, of which the second came after the pond was opened with fewer containers, and a log since."""
    return drive(root, history(3, 2)[:-9])


def an_unfinished_checkpoint(root: Path) -> Case:
    """The process ended when the new snapshots were written and the manifest was not."""
    case = drive(root, history(1, 1)[:16])
    world = World(DiskFiles(), str(root))
    world.start(1)
    with armed("manifest.append.before"), pytest.raises(SimulatedCrash):
        world.pond.checkpoint()
    return case


MAKERS = (a_log, snapshots_and_a_log, an_unfinished_checkpoint)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case: Case = request.param(tmp_path_factory.mktemp("made") / "pond")
    return case._replace(picture=driving.picture_of_model(case.model))


@pytest.fixture
def copied(made: Case, tmp_path: Path) -> Callable[[], Case]:
    """Gives a fresh copy of the pond each time."""

    def copy() -> Case:
        root = tmp_path / "pond"
        shutil.rmtree(root, ignore_errors=True)
        # Links are quick, and safe where a file is never written over: `put` makes a new one.
        shutil.copytree(made.root, root, copy_function=os.link)
        return made._replace(root=root)

    return copy


def needed(case: Case) -> list[str]:
    """The files that slices rest on: what the journal names, and what is named there. Others wait to be tidied up."""
    files, root = DiskFiles(), str(case.root)
    record = Journal(files, root).load()
    assert record is not None
    names = {name for name in case.files() if kind_of(name) == "journal"}
    for directory, numbers in record.directories.items():
        names.add(f"containers/{directory}/manifest.arrow")
        manifest = read_manifest(files, root, directory)
        for number in numbers:
            ground = manifest.slices[number]
            names |= {f"snapshots/{resident}/{name}" for resident, name in ground.snapshots.items()}
            names |= {f"snapshots/{each}/{name}" for each, found in ground.deltas.items() for name in found}
            for span in ground.logs:
                names |= {
                    f"containers/{span.directory}/{seq:012d}.arrow"
                    for seq in record_numbers(files, root, span)
                    if seq not in span.skipped
                }
    return [name for name in case.files() if name in names]


def kind_of(name: str) -> str:
    if name.startswith("containers/"):
        return "manifest" if name.endswith("manifest.arrow") else "record"
    return "journal" if name.startswith("journal/") else "snapshot"


def refusal_of(case: Case, name: str) -> CorruptFile:
    """Opening fails; the error names the file, or the log or directory that it is missing from."""
    with pytest.raises(CorruptFile) as refusal:
        case.check()
    check_names(refusal.value, case, name)
    return refusal.value


def check_names(refusal: CorruptFile, case: Case, name: str) -> None:
    assert refusal.path in str(refusal)
    allowed = [str(case.root / place) for place in (name, os.path.dirname(name), "containers")]
    assert refusal.path in allowed, (refusal.path, name)


DAMAGES: dict[str, Callable[[bytearray], object]] = {
    "cut in half": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "cut by a byte": bytearray.pop,
    "emptied": bytearray.clear,
    "one bit in the middle": lambda data: data.__setitem__(len(data) // 3, data[len(data) // 3] ^ 0x10),
    "the last bit": lambda data: data.__setitem__(-1, data[-1] ^ 0x01),
    "longer": lambda data: data.append(0),
}


def test_the_ponds_open_as_they_are_and_have_files_of_every_kind(copied: Callable[[], Case]) -> None:
    case = copied()
    assert {kind_of(name) for name in needed(case)} >= {"manifest", "record", "journal"}
    case.check()


def test_some_pond_has_snapshots_and_some_pond_a_snapshot_that_does_not_count(tmp_path: Path) -> None:
    case = snapshots_and_a_log(tmp_path / "a")
    assert "snapshot" in {kind_of(name) for name in needed(case)}
    case = an_unfinished_checkpoint(tmp_path / "b")
    assert set(needed(case)) < set(case.files())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(copied: Callable[[], Case], damage: str) -> None:
    for name in needed(copied()):
        case = copied()
        path = case.root / name
        data = bytearray(path.read_bytes())
        DAMAGES[damage](data)
        case.put(name, data)
        assert refusal_of(case, name).path == str(path)


def test_a_missing_file_is_noticed_and_once_it_is_back_so_is_everything(copied: Callable[[], Case]) -> None:
    refusals = 0
    for name in needed(copied()):
        case = copied()
        path = case.root / name
        data = path.read_bytes()
        path.unlink()
        try:
            case.check()
        except CorruptFile as refusal:
            check_names(refusal, case, name)
            refusals += 1
            case.put(name, data)
            case.check()
        else:
            # An incarnation that has written nothing yet is not missed: the one before it has it all.
            assert kind_of(name) == "manifest"
            assert not list(path.parent.glob("*.arrow"))
    assert refusals >= len(needed(copied())) - 1


def test_a_file_in_the_place_of_another_is_refused_by_name(copied: Callable[[], Case]) -> None:
    names = needed(copied())
    swaps = 0
    for name in names:
        others = [other for other in names if kind_of(other) == kind_of(name) and other != name]
        for other in {*others[:1], *others[-1:]}:
            case = copied()
            case.put(name, (case.root / other).read_bytes())
            assert refusal_of(case, name).path == str(case.root / name), other
            swaps += 1
    assert swaps > 10


def test_an_older_snapshot_of_the_same_slice_is_refused(tmp_path: Path) -> None:
    steps = history(1, 1)[:18]
    case = drive(tmp_path / "pond", steps[:12])
    older = {name: (case.root / name).read_bytes() for name in needed(case) if kind_of(name) == "snapshot"}
    world = World(DiskFiles(), str(case.root))
    world.start(1)
    for step in (*steps[12:], Checkpoint()):
        step.on_pond(world)
        step.on_model(case.model)
    newer = [name for name in needed(case) if kind_of(name) == "snapshot" and name not in older]
    assert newer
    for name in newer:
        before = next(data for old, data in older.items() if old[:-26] == name[:-26])
        data = (case.root / name).read_bytes()
        (case.root / name).write_bytes(before)
        assert refusal_of(case, name).path == str(case.root / name)
        (case.root / name).write_bytes(data)
    case.check()


def test_an_older_journal_is_refused(tmp_path: Path) -> None:
    steps = history(1, 1)[:12]
    case = drive(tmp_path / "pond", steps[:9])
    (older,) = (case.root / "journal").glob("*.arrow")
    data, name = older.read_bytes(), older.name
    world = World(DiskFiles(), str(case.root))
    world.start(1)
    for step in steps[9:]:
        step.on_pond(world)
        step.on_model(case.model)
    (newest,) = (case.root / "journal").glob("*.arrow")
    kept = newest.read_bytes()
    newest.write_bytes(data)
    assert refusal_of(case, f"journal/{newest.name}").path == str(newest)
    newest.unlink()
    (case.root / "journal" / name).write_bytes(data)
    assert "older" in str(refusal_of(case, f"journal/{name}"))
    (case.root / "journal" / name).unlink()
    assert "gone" in str(refusal_of(case, f"journal/{name}"))
    newest.write_bytes(kept)
    case.check()


def test_without_its_newest_manifest_a_pond_does_not_go_back_to_rows_that_were_never_decided(
    tmp_path: Path,
) -> None:
    steps = history(1, 1)
    update = steps[7]
    assert isinstance(update, Update)
    case = drive(tmp_path / "pond", steps[:7])
    world = World(DiskFiles(), str(case.root))
    world.start(1)
    with armed("journal.append.before"), pytest.raises(SimulatedCrash):
        update.on_pond(world)
    world.start(1)
    update.with_other_rows().on_pond(world)
    update.with_other_rows().on_model(case.model)
    newest = [name for name in case.files() if kind_of(name) == "manifest"][-1]
    data = (case.root / newest).read_bytes()
    (case.root / newest).unlink()
    assert refusal_of(case, newest).path == str(case.root / newest)
    case.put(newest, data)
    case.check()


def test_leftovers_of_unfinished_writes_are_harmless(copied: Callable[[], Case]) -> None:
    case = copied()
    for name in case.files():
        path = case.root / name
        path.with_name(path.name + ".tmp").write_bytes(path.read_bytes()[:100])
    for directory in {(case.root / name).parent for name in case.files()}:
        (directory / "999999999999.arrow.tmp").write_bytes(b"")
    case.check()
    case.check()
