from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.durable.crashpoints import SimulatedCrash, armed, reach
from millpond.durable.files import Files, OsFiles
from millpond.testing import LossyFiles

SEEDS = range(200)
OLD, NEW = b"the old content", b"what came in its place"


def content(files: LossyFiles, path: str) -> bytes | None:
    return files.read(path).to_pybytes() if files.exists(path) else None


def durable(path: str, data: bytes, seed: int | None = None) -> LossyFiles:
    files = LossyFiles(seed)
    files.make_dir(os.path.dirname(path))
    files.write(path, [data])
    files.sync(path)
    files.sync_dir(os.path.dirname(path))
    return files


def outcomes(prepare: Callable[[LossyFiles], None], *paths: str) -> set[tuple[bytes | None, ...]]:
    """What the crash of each seed leaves at the paths, after `/d/f` was durable and `prepare` was not."""
    left = set()
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        prepare(files)
        files = files.crash()
        left.add(tuple(content(files, path) for path in paths))
    return left


@pytest.mark.parametrize("lose", ["nothing", "all", "content", "names", "some"])
def test_what_was_synced_survives_every_crash(lose: str) -> None:
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        for _ in range(3):
            files = files.crash(lose)  # type: ignore[arg-type]
            assert content(files, "/d/f") == OLD
            assert files.losses == []
            assert files.unsynced() == []


def test_a_new_file_that_was_not_synced_may_be_gone_empty_torn_zeroed_or_there() -> None:
    left = {data for (data,) in outcomes(lambda files: files.write("/d/g", [NEW]), "/d/g")}
    assert {None, b"", NEW} <= left
    others = {data for data in left if data not in (None, b"", NEW)}
    assert any(data == NEW[: len(data)] for data in others if data)
    assert any(
        data.rstrip(b"\0") == NEW[: len(data.rstrip(b"\0"))] and len(data) == len(NEW)
        for data in others
        if data
    )
    assert all(NEW.startswith(data.rstrip(b"\0")) for data in others if data)


def test_content_written_over_may_still_be_the_old() -> None:
    left = {data for (data,) in outcomes(lambda files: files.write("/d/f", [NEW]), "/d/f")}
    assert {OLD, NEW} < left
    assert None not in left


def test_synced_content_under_a_name_that_was_not_is_all_or_nothing() -> None:
    def prepare(files: LossyFiles) -> None:
        files.write("/d/g", [NEW])
        files.sync("/d/g")

    assert outcomes(prepare, "/d/g") == {(None,), (NEW,)}


def test_a_rename_is_kept_or_undone_as_one() -> None:
    def prepare(files: LossyFiles) -> None:
        files.write("/d/f.tmp", [NEW])
        files.sync("/d/f.tmp")
        files.sync_dir("/d")
        files.rename("/d/f.tmp", "/d/f")

    assert outcomes(prepare, "/d/f", "/d/f.tmp") == {(OLD, NEW), (NEW, None)}


def test_a_rename_before_the_content_is_synced_can_destroy_the_old_file() -> None:
    def prepare(files: LossyFiles) -> None:
        files.write("/d/f.tmp", [NEW])
        files.rename("/d/f.tmp", "/d/f")

    left = outcomes(prepare, "/d/f")
    assert (b"",) in left
    assert (OLD,) in left
    files = durable("/d/f", OLD)
    prepare(files)
    assert content(files.crash("content"), "/d/f") == b""


def test_a_file_moved_to_another_directory_may_be_in_both_or_in_neither() -> None:
    def prepare(files: LossyFiles) -> None:
        files.make_dir("/e")
        files.rename("/d/f", "/e/f")

    assert outcomes(prepare, "/d/f", "/e/f") == {(OLD, None), (OLD, OLD), (None, OLD), (None, None)}


def test_a_removed_file_may_come_back_and_of_two_either() -> None:
    def prepare(files: LossyFiles) -> None:
        files.write("/d/g", [NEW])
        files.sync("/d/g")
        files.sync_dir("/d")
        files.remove("/d/f")
        files.remove("/d/g")

    assert outcomes(prepare, "/d/f", "/d/g") == {(OLD, NEW), (OLD, None), (None, NEW), (None, None)}


def test_a_removed_directory_comes_back_with_what_was_durable_in_it_or_is_gone_with_all_of_it() -> None:
    def prepare(files: LossyFiles) -> None:
        files.remove("/d/f")
        files.remove_dir("/d")

    assert outcomes(prepare, "/d/f") == {(OLD,), (None,)}
    for lose, back in [("nothing", False), ("content", False), ("all", True), ("names", True)]:
        files = durable("/d/f", OLD)
        prepare(files)
        assert files.unsynced() == ["removal of /d/f", "removal of directory /d"]
        files = files.crash(lose)  # type: ignore[arg-type]
        assert files.exists("/d") is back
        assert files.list("/d") == (["f"] if back else [])
        assert files.losses == (["removal of /d/f", "removal of directory /d"] if back else [])
    empty_again = 0
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        prepare(files)
        files = files.crash()
        assert files.exists("/d") or not files.exists("/d/f")
        empty_again += files.exists("/d") and not files.exists("/d/f")
    assert empty_again


def test_a_directory_whose_removal_was_synced_does_not_come_back() -> None:
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        files.remove("/d/f")
        files.remove_dir("/d")
        files.sync_dir("/")
        assert files.unsynced() == []
        assert not files.crash().exists("/d")


def test_a_directory_made_anew_does_not_hold_what_the_one_before_held() -> None:
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        files.remove("/d/f")
        files.remove_dir("/d")
        files.make_dir("/d")
        files = files.crash()
        assert files.exists("/d")
        assert files.list("/d") == []


def test_directories_come_back_only_where_their_parents_do() -> None:
    left = set()
    for seed in SEEDS:
        files = durable("/d/e/f", OLD, seed)
        files.remove("/d/e/f")
        files.remove_dir("/d/e")
        files.remove_dir("/d")
        files = files.crash()
        left.add(tuple(files.exists(path) for path in ("/d", "/d/e", "/d/e/f")))
    assert left == {(False,) * 3, (True, False, False), (True, True, False), (True,) * 3}


def unsynced_changes() -> LossyFiles:
    files = durable("/d/f", OLD)
    files.write("/d/f", [NEW])
    files.write("/d/g", [NEW])
    files.sync("/d/g")
    files.write("/d/h", [NEW])
    return files


@pytest.mark.parametrize(
    ("lose", "f", "g", "h"),
    [
        ("nothing", NEW, NEW, NEW),
        ("all", OLD, None, None),
        ("content", OLD, NEW, b""),
        ("names", NEW, None, None),
    ],
)
def test_the_deterministic_losses(lose: str, f: bytes, g: bytes | None, h: bytes | None) -> None:
    files = unsynced_changes().crash(lose)  # type: ignore[arg-type]
    assert (content(files, "/d/f"), content(files, "/d/g"), content(files, "/d/h")) == (f, g, h)


def test_without_a_seed_the_crash_loses_all_and_tells_what() -> None:
    before = unsynced_changes()
    assert before.unsynced() == ["creation of /d/g", "creation of /d/h", "content of /d/f", "content of /d/h"]
    files = before.crash()
    assert files.list("/d") == ["f"]
    assert files.losses == [
        "creation of /d/g",
        "creation of /d/h",
        f"content of /d/f: {len(NEW)} bytes became {len(OLD)}",
    ]


def test_the_same_seed_loses_the_same_and_each_crash_draws_anew() -> None:
    def run(seed: int) -> list[list[str]]:
        files = LossyFiles(seed)
        files.make_dir("/d")
        losses = []
        for number in range(8):
            for name in "abc":
                files.write(f"/d/{number}{name}", [NEW])
            files = files.crash()
            losses.append(files.losses)
        assert files.crashes == 8
        return losses

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len({len(losses) for losses in run(1)}) > 1


def test_what_survived_a_crash_is_not_lost_by_the_next() -> None:
    for seed in SEEDS:
        files = durable("/d/f", OLD, seed)
        files.write("/d/f", [NEW])
        files.remove("/d/f")
        files = files.crash()
        survived = content(files, "/d/f")
        assert content(files.crash(), "/d/f") == survived


def test_the_dead_file_system_takes_no_more_calls() -> None:
    files = durable("/d/f", OLD)
    after = files.crash()
    calls: list[Callable[[], object]] = [
        lambda: files.write("/d/f", [NEW]),
        lambda: files.sync("/d/f"),
        lambda: files.rename("/d/f", "/d/g"),
        lambda: files.sync_dir("/d"),
        lambda: files.read("/d/f"),
        lambda: files.list("/d"),
        lambda: files.remove("/d/f"),
        lambda: files.make_dir("/e"),
        lambda: files.remove_dir("/d"),
        lambda: files.exists("/d/f"),
    ]
    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()
    after.write("/d/f", [NEW])
    assert content(after, "/d/f") == NEW


def test_halt_as_the_action_of_a_crash_point_stops_the_whole_process() -> None:
    files = durable("/d/f", OLD)
    with armed("log.sync.after", action=files.halt) as plan:
        with pytest.raises(SimulatedCrash):
            reach("log.sync.after")
        with pytest.raises(SimulatedCrash, match=r"log\.sync\.after"):
            files.remove("/d/f")
    assert plan.fired
    assert content(files.crash(), "/d/f") == OLD


# It is a file system as the real one is, as long as nothing crashes


names = st.sampled_from(["a", "b", "d/a", "d/b", "e/a"])
contents = st.lists(st.binary(max_size=4), max_size=3)
ranges = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=3)
steps = st.one_of(
    st.tuples(st.just("write"), names, contents),
    st.tuples(st.just("append"), names, contents),
    st.tuples(st.just("read_range"), names, st.integers(0, 6), st.integers(0, 4)),
    st.tuples(st.just("read_ranges"), names, ranges),
    st.tuples(st.just("copy_ranges"), names, ranges, names).filter(lambda step: step[1] != step[3]),
    st.tuples(st.just("sync"), names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("read"), names),
    st.tuples(st.just("remove"), names),
    st.tuples(st.just("exists"), st.one_of(names, st.sampled_from(["d", "e", "d/e"]))),
    st.tuples(st.just("list"), st.sampled_from(["", "d", "e", "d/e"])),
    st.tuples(st.just("sync_dir"), st.sampled_from(["", "d", "e"])),
    st.tuples(st.just("make_dir"), st.sampled_from(["d", "e", "d/e"])),
    st.tuples(st.just("remove_dir"), st.sampled_from(["a", "d", "e", "d/e"])),
)


def outcome(files: Files, root: str, step: tuple[object, ...]) -> object:
    operation, *arguments = step
    paths = [
        os.path.join(root, argument) if isinstance(argument, str) else argument for argument in arguments
    ]
    try:
        result = getattr(files, str(operation))(*paths)
    except (OSError, EOFError) as error:
        return type(error)
    return result.to_pybytes() if str(operation).startswith("read") else result


@given(history=st.lists(steps, max_size=25))
def test_it_answers_as_the_real_file_system(tmp_path_factory: pytest.TempPathFactory, history: list) -> None:  # type: ignore[type-arg]
    root: Path = tmp_path_factory.mktemp("files")
    lossy = LossyFiles()
    lossy.make_dir(root)
    for number, step in enumerate(history):
        real = outcome(OsFiles(), str(root), step)
        assert outcome(lossy, str(root), step) == real, history[: number + 1]
    process_died = lossy.crash("nothing")
    for step in [
        ("list", ""),
        ("list", "d"),
        ("list", "e"),
        *(("read", name) for name in ("a", "d/a", "e/a")),
    ]:
        assert outcome(process_died, str(root), step) == outcome(OsFiles(), str(root), step)


def test_a_disk_that_is_lost_brings_nothing_back() -> None:
    for seed in SEEDS:
        files = durable("/d/e/f", OLD, seed)
        files.write("/d/e/g", [NEW])
        files.write("/d/early", [OLD])
        files.sync("/d/early")
        files.write("/d/e2", [NEW])
        files.sync("/d/e2")
        files.sync_dir("/d")
        files.lose("/d/e")
        files.lose("/d/early")
        assert files.list("/d") == ["e2"]
        after = files.crash()
        assert after.list("/d") == ["e2"]
        assert content(after, "/d/e2") == NEW
        after.make_dir("/d/e")
        assert after.list("/d/e") == []
