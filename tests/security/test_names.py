"""A path is made of names that the pond itself gave, each held to its form where it is read: from a message or a file."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond.client.waiting import WaitingPlace, WaitingRowsAway
from millpond.code.rules import keep_latest, put
from millpond.container import layout, marks
from millpond.coordinator.journal import Journal
from millpond.coordinator.records import (
    AskingRecord,
    FetcherRecord,
    PinRecord,
    PondRecord,
    QueryRecord,
    ResidentRecord,
    UpdaterRecord,
)
from millpond.durable.arrow_files import write_table_file
from millpond.durable.files import OsFiles, remove_tree
from millpond.durable.landmark import make_landmark
from millpond.errors import BadMessage, BadName, CorruptFile
from millpond.ops import frames
from millpond.runtime import Threads
from millpond.stores.waiting import LIST_SCHEMA, WaitingFile, WaitingRows
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire import epochs, house, questions, waiting
from millpond.wire.base import Epoch, ResidentId, SliceId, Term, Turn
from millpond.wire.codec import decode, encode
from millpond.wire.states import StateSpec

FILES = OsFiles()
TURN = Turn(Epoch(0))
ESCAPES = ["..", ".", "../../victim", "/etc", "a/b", "", "x\n", "-rf", "file:///etc/passwd", "s\0"]
escapes = pytest.mark.parametrize("name", ESCAPES, ids=repr)


# Queries


def frame_of(query: str) -> Any:
    """A DataFrame under that local property, which any code of the driver can set."""
    context = SimpleNamespace(getLocalProperty=lambda name: query)
    return SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))


@escapes
def test_a_query_has_an_id_or_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadName):
        frames.query_of(frame_of(name))
    for parts in (("s", "f", name), ("s", name, "q"), (name, "f", "q")):
        with pytest.raises(BadName):
            WaitingRows(str(tmp_path), *parts)
    for message in (
        house.Forget("s", "f", name),
        questions.Pin("s", "f", name, TURN, "continue"),
        epochs.BeginEpoch("s", "u", name, TURN, "continue"),
        waiting.KeepWaiting("s", "f", name, TURN, "list-0.arrow"),
        waiting.ReadWaiting("s", name, "q", TURN, "list-0.arrow"),
        waiting.ReadWaiting("s", "f", "q", TURN, name),
        waiting.KeepWaiting("s", "f", "q", TURN, f"list-0.arrow/../{name}"),
        waiting.TidyWaiting("s", "f", name),
        questions.Pending(0, None, 0, drains={name: questions.Drain(TURN, TURN, "")}),
        questions.Pending(0, None, 0, unfinished=[name]),
    ):
        with pytest.raises(BadMessage):
            decode(encode(message))


@pytest.mark.parametrize("name", ["local", "0b7c9e4e-7d3f-4c7b-8a61-c1ae4fd2c6a5", "a..b", "_"])
def test_ids_that_spark_and_the_pond_give_pass(name: str) -> None:
    assert frames.query_of(frame_of(name)) == name


def test_forgetting_a_query_by_a_path_removes_nothing() -> None:
    files = LossyFiles()
    with LocalPond(files, "/pond") as pond:
        state = pond.state("s", key="long", value="long")
        state.fetch(key="k", at="t", into="v", name="views").to(lambda rows, epoch: None)(
            pa.table({"k": [1], "t": [9]}), 0
        )
        assert files.list("/pond/waiting/s/views/local")
        for query in ("..", ".", "../..", "local/.."):
            with pytest.raises(BadName) as caught:
                pond.forget(state, "views", query)
            assert caught.value.hint
        assert files.list("/pond/waiting/s/views/local")


# What waits


@pytest.mark.parametrize(
    "name",
    [
        *("{tmp}/victim", "../../../../../../victim", "file://{tmp}/victim", "", None),
        *(
            "{token}-0000000000000000.arrow/../victim",
            "ffffffffffffffff-0000000000000000.arrow",
            "list-{token}.arrow",
        ),
    ],
)
def test_a_list_names_only_files_of_its_own_run(tmp_path: Path, name: str | None) -> None:
    rows = WaitingRows(str(tmp_path / "pond"), "s", "f", "q")
    token = rows.token()
    good = rows.write(TURN, token, [pa.record_batch({"k": [1]})])
    # What waits elsewhere on the machine, as this user may read it.
    write_table_file(
        FILES, tmp_path / "victim", "waiting", LIST_SCHEMA, [], {"turn": "000000000000.0000", "token": token}
    )
    rows.list_files(TURN, token, "", [good])
    listed = rows.listed(TURN, token)
    assert rows.read(listed, listed.files[0]).num_rows == 1
    named: Any = name if name is None else name.format(tmp=tmp_path, token=token)
    rows.list_files(TURN, token, "", [good, WaitingFile(named, 1)])
    with pytest.raises(CorruptFile, match="names files") as caught:
        rows.listed(TURN, token)
    assert os.path.basename(caught.value.attributes()["path"]) == f"list-{token}.arrow"


def test_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    rows = WaitingRows(str(tmp_path), "s", "f", "q")
    token = rows.token()
    path = os.path.join(rows.folder, "000000000000.0000", f"list-{token}.arrow")
    FILES.make_dir(os.path.dirname(path))
    write_table_file(FILES, path, "waiting", pa.schema([]), [], {"turn": "000000000000.0000", "token": token})
    with pytest.raises(CorruptFile, match="not a list"):
        rows.listed(TURN, token)


@pytest.mark.parametrize(
    "root", ["relative", "/nowhere/pond", "{tmp}/open", "{tmp}/link", "{tmp}/closed/../closed"]
)
def test_rows_wait_only_under_a_root_that_is_ones_own(tmp_path: Path, root: str) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "closed")

    landmark = make_landmark(FILES, str(tmp_path / "closed"), lambda count: 2**count - 1)
    (name,) = os.listdir(tmp_path / "closed")
    (tmp_path / "open" / name).write_text(landmark)
    client: Any = SimpleNamespace(files=None, runtime=Threads())

    def rows(told: str) -> WaitingRows:
        return WaitingPlace(told, landmark, "s", "f", "q").rows(client)

    assert type(rows(str(tmp_path / "closed"))) is WaitingRows
    assert type(rows(root.format(tmp=tmp_path))) is WaitingRowsAway


# Messages between coordinator and containers


@escapes
def test_directories_and_lists_in_messages_have_their_form(name: str) -> None:
    refused = [
        house.ContainerReport([name], []),
        house.ContainerReport([], [ResidentId(name)]),
        house.Adopt(0, {}, {name: {}}),
        house.Adopt(0, {}, {"s": {name: TURN}}),
    ]
    if name:
        refused += [
            house.Adopt(0, {SliceId(0): name}, {}),
            questions.Pinned(0, 0, "", None, name, TURN),
            questions.Answered("s", "f", "q", TURN, 1, 0, 0, 0, name),
            questions.Pending(0, None, 0, drains={"q": questions.Drain(TURN, TURN, name)}),
        ]
    for message in refused:
        with pytest.raises(BadMessage):
            decode(encode(message))
    good = house.Adopt(0, {SliceId(0): "t00000001-c0000", SliceId(1): ""}, {"s": {"f@q": TURN}})
    assert decode(encode(good)) == good


# Files


def journal_of(name: str) -> dict[str, PondRecord]:
    """Journals in which a name is one that the pond never gave; each as only one who can write files could make it."""
    pond = PondRecord((0,))
    spec = StateSpec("s", "key long", "value long", put(), keep_latest())

    def with_state(**fields: Any) -> PondRecord:
        return msgspec.structs.replace(pond, residents={"s": ResidentRecord(spec, 1, **fields)})

    return {
        "directory": msgspec.structs.replace(pond, directories={name: (SliceId(0),)}),
        "resident": msgspec.structs.replace(pond, residents={name: ResidentRecord(spec, 1)}),
        "updater": with_state(updaters={name: UpdaterRecord(0)}),
        "fetcher": with_state(fetchers={name: FetcherRecord(0)}),
        "query": with_state(updaters={"u": UpdaterRecord(0, queries={name: QueryRecord(TURN, ())})}),
        "asking": with_state(fetchers={"f": FetcherRecord(0, queries={name: AskingRecord()})}),
        "ended": with_state(fetchers={"f": FetcherRecord(0, ended={name: TURN})}),
        "token": with_state(
            fetchers={
                "f": FetcherRecord(0, queries={"q": AskingRecord(0, (PinRecord(TURN, 0, 0, token=name),))})
            }
        ),
    }


@pytest.mark.parametrize("name", ["..", "../../victim", "/etc"])
@pytest.mark.parametrize("where", sorted(journal_of("..")))
def test_a_journal_with_a_name_that_is_none_is_not_read(where: str, name: str) -> None:
    files = LossyFiles()
    journal = Journal(files, "/pond")
    journal.load()
    journal.write(journal_of(name)[where])
    with pytest.raises(CorruptFile, match="journal"):
        Journal(files, "/pond").load()


@pytest.mark.parametrize("name", ["..", "../../victim", "/etc"])
def test_a_manifest_with_a_name_that_is_none_is_not_read(name: str) -> None:
    files = LossyFiles()
    own, span = ResidentId("s.1"), layout.LogSpan("t00000001-c0000", 0)
    good = layout.Ground({own: "s00000-t00000001-n000001.arrow"}, {own: {"f@q": TURN}}, [span], {own: [span]})
    bad = [
        layout.Ground({own: name}),
        layout.Ground({ResidentId(name): "s00000-t00000001-n000001.arrow"}),
        layout.Ground(logs=[layout.LogSpan(name, 0)]),
        layout.Ground(behind={ResidentId(name): []}),
        layout.Ground(behind={own: [layout.LogSpan(name, 0)]}),
        layout.Ground(vectors={own: {name: TURN}}),
    ]
    files.make_dir("/pond/containers/t00000001-c0000")
    for ground in (good, *bad):
        manifest = layout.Manifest(Term(1), 0, {SliceId(0): ground})
        layout.write_manifest(files, "/pond", "t00000001-c0000", manifest)
        if ground is good:
            assert layout.read_manifest(files, "/pond", "t00000001-c0000").slices[SliceId(0)] == good
        else:
            with pytest.raises(CorruptFile, match="manifest"):
                layout.read_manifest(files, "/pond", "t00000001-c0000")
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(marks.Mark(name, 1)), type=marks.Mark)


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "victim")
    remove_tree(FILES, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "victim" / "file").exists()
