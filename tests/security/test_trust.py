"""A root that came from somebody else, opened with `trust="data"`: it is read, none of its code runs, nothing changes."""

from __future__ import annotations

import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

import millpond as mp
from millpond import private
from millpond.code.capture import Code
from millpond.code.rules import CompactRule, UpdateRule, keep_latest, put
from millpond.code.tables import TransactionCode
from millpond.container.layout import incarnations, read_manifest, write_manifest
from millpond.durable.arrow_files import MAGIC, VERSION, read_metadata, read_table_file, write_table_file
from millpond.durable.crashpoints import POINTS, SimulatedCrash, armed, counted
from millpond.durable.files import Files, OsFiles
from millpond.errors import BadOption, BadRoot, CorruptFile, NotThePond, NotTrusted
from millpond.pond.source import _reader
from millpond.stores.parts import pack, unpack
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.txn import load
from millpond.wire.handshake import read_only_token
from millpond.wire.house import OpenResident
from millpond.wire.states import StateSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore::millpond.RuleInterpreted"),
    pytest.mark.usefixtures("started_as_ever"),
]

ODD = 'x"): pass; raise SystemExit #'
"""A name that would end a line of code."""
KEEP = "def keep(times, value):\n    {}\n    return [True] * len(times)\n"
JOIN = "def join(old, new):\n    {}\n    return old + new"
PAY = "def pay(accounts, account, amount):\n    print('pay')\n    accounts[account].balance += amount"
ROWS = pa.table({"k": [1, 1, 2], "t": [1, 5, 9], "v": [1, 2, 3], "s": ["a", "b", "c"]})
UNKNOWN = {"folded", "folded as of", "folded count"}
"""What cannot be told without running code."""
SWEEP_S_MAX = 20.0


def every(times: Any, value: Any) -> str:
    return str(list(value))


@mp.transaction
def earn(accounts: Any, account: int, amount: int) -> None:
    accounts[account].balance += amount


def state_with(pond: mp.Pond, name: str, update: UpdateRule, compact: CompactRule) -> mp.State:
    pond._client.call(OpenResident(StateSpec(name, "key long", "value string", update, compact)))
    return pond.state(name)


def bank_with(pond: mp.Pond, source: str) -> Any:
    accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
    return pond.transactions("bank", [accounts], {"pay": load(TransactionCode(Code("pay", source)))})


def payments(epoch: int) -> pa.Table:
    return pa.table({"ts": [epoch], "account": [7], "amount": [5]})


class Roots(NamedTuple):
    """A root full of code, as it was closed; as a crash in the middle of an epoch left it; and what its code leaves."""

    whole: Path
    torn: Path
    marks: Path

    def ran(self) -> set[str]:
        """Which code has run since this was asked last."""
        names = {path.name for path in self.marks.iterdir()}
        for name in names:
            (self.marks / name).unlink()
        return names


def compactions(mark: Callable[[str], str], constant: str) -> dict[str, Code]:
    """Compaction rules with something to run wherever Python may find it."""
    plain = KEEP.format("pass")
    named = f"{plain}globals()[{ODD!r}] = keep\n{mark('name')}"
    return {
        "module": Code("keep", f"{mark('module')}\n{plain}"),
        "body": Code("keep", KEEP.format(mark("body"))),
        "default": Code("keep", plain.replace("value)", f"value=({mark('default')}, 0)[1])")),
        "decorator": Code("keep", f"@(lambda rule, done={mark('decorator')}: rule)\n{plain}"),
        "constant": Code("keep", KEEP.format("open(WHERE, 'w').close()"), {"WHERE": ("str", constant)}),
        "name": Code(ODD, named, {"odd": ("eval", mark("eval"))}, {ODD: "math"}),
    }


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    base = tmp_path_factory.mktemp("foreign")
    roots = Roots(base / "whole", base / "torn", base / "marks")
    roots.marks.mkdir()

    def mark(name: str) -> str:
        return f"open({str(roots.marks / name)!r}, 'w').close()"

    pond = LocalPond(OsFiles(), str(roots.whole))
    for name, code in compactions(mark, str(roots.marks / "constant")).items():
        kept = state_with(pond, f"kept_{name}", put(), CompactRule("custom", code))
        kept.update(key="k", at="t", value="s", name="feed")(ROWS, 0)
        kept.report("views", fetch=5)
    joined = Code("join", f"{mark('update')}\n{JOIN.format(mark('join'))}")
    folded = state_with(pond, "folded", UpdateRule("custom", joined), keep_latest())
    folded.update(key="k", at="t", value="s", name="feed")(ROWS, 0)
    for name, update in (("plain", put()), ("sums", mp.add())):
        state = pond.state(name, key="long", value="long", update=update)
        state.update(key="k", at="t", value="v", name="feed")(ROWS, 0)
    odd = pond.state("odd", key="long", value=f"`{ODD}` long, `b):\n` long")
    odd.update(key="k", at="t", value=["v", "v"], name="feed")(ROWS, 0)
    asking(pond)(ROWS.select(["k", "t"]), 0)
    bank = bank_with(pond, f"{mark('transactions')}\n{PAY}")
    bank(payments(0), 0)
    with armed("journal.append.before") as plan, pytest.raises(SimulatedCrash):
        bank(payments(1), 1)
    assert plan.fired
    shutil.copytree(roots.whole, roots.torn)
    LocalPond(OsFiles(), str(roots.whole)).close()
    return roots


def asking(pond: mp.Pond) -> Any:
    return pond.state("plain").fetch(key="k", at="t", into="v", name="views").to(lambda rows, epoch: None)


def read_all(pond: mp.Pond) -> dict[str, Any]:
    """All that a pond tells, but for what it cannot without running code."""
    told: dict[str, Any] = {}

    def look(name: str, read: Callable[[], pa.Table]) -> None:
        try:
            told[name] = sorted(tuple(row.values()) for row in read().to_pylist())
        except NotTrusted as error:
            assert "without trust=" in error.hint

    asked = pa.table({"k": [1, 2], "t": [6, 8], "low": [4, 4]})
    for name, state in pond.states().items():
        into = ["x", "y"] if name == "odd" else "x"
        look(name, state.snapshot)
        look(f"{name} as of", lambda s=state, i=into: s.fetch(key="k", at="t", into=i).now(asked, "null"))
        count = state.fetch(key="k", between=("low", "t"), into="n", rule=mp.count())
        look(f"{name} count", lambda count=count: count.now(asked, "null"))
        told[f"{name} progress"] = state.progress()
    for name, table in pond.tables().items():
        look(name, table.snapshot)
        look(f"{name} read", lambda table=table: table.read([7, 8]))
    told["pending"] = asking(pond).pending()
    return told


def read_by_spark(pond: mp.Pond, **what: str) -> list[dict[str, Any]]:
    """As `spark.read.format("millpond")` does in its driver and its tasks."""
    assert pond.link is not None
    reader = _reader(pond.link, what)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, reader.schema()).to_pylist()


@pytest.mark.parametrize("which", ["whole", "torn"])
def test_none_of_its_code_runs_and_its_data_is_read(
    roots: Roots, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(roots.whole if which == "whole" else roots.torn, tmp_path / "pond")
    # Whoever looks around in a root before opening it must not import what lies there, either.
    (root / "msgspec.py").write_text(f"open({str(roots.marks / 'import')!r}, 'w').close()\n")
    monkeypatch.chdir(root)
    roots.ran()
    with mp.open(root, trust="data") as pond:
        told = read_all(pond)
        assert read_by_spark(pond, state="plain") == [{"key": 1, "time": 5, "value": 2}]
        metrics = pond.metrics()
        assert metrics["states"]["kept_body"]["versions"] == 3
        assert "trust=" in metrics["states"]["folded"]["broken"]
    assert roots.ran() == set()
    # Opened plainly, it is as it was, and its code runs.
    with mp.open(root) as pond:
        wanted = read_all(pond)
        unknown = UNKNOWN if which == "whole" else {*UNKNOWN, "accounts", "accounts read"}
        assert wanted.keys() - told.keys() == unknown
        assert {name: wanted[name] for name in told} == told
        assert wanted["accounts"] == [(7, 5)]
        assert wanted["folded"] == [(1, 5, "ab")]
        assert wanted["kept_name"] == [(1, 5, "b")]
        # Compaction comes by in its own time.
        expected = {"module", "body", "default", "decorator", "constant", "name", "update"}
        expected |= {"join", "transactions"} if which == "torn" else {"join"}
        ran, deadline = roots.ran(), time.monotonic() + SWEEP_S_MAX
        while not ran >= expected and time.monotonic() < deadline:
            time.sleep(0.05)
            ran |= roots.ran()
        assert ran == expected


# What would change something, or run code

REFUSED: dict[str, Callable[[mp.Pond], object]] = {
    "a new state": lambda pond: pond.state("other", key="long", value="long"),
    "a new table": lambda pond: pond.table("others", key="long", value="n long"),
    "a new updater": lambda pond: pond.state("plain").update(key="k", at="t", value="v", name="another"),
    "an update": lambda pond: pond.state("plain").update(key="k", at="t", value="v", name="feed")(ROWS, 1),
    "progress": lambda pond: pond.state("plain").report("views", fetch=5),
    "the end of an updater": lambda pond: pond.state("plain").finish("feed"),
    "a stream of questions": lambda pond: asking(pond)(ROWS.select(["k", "t"]), 1),
    "transactions": lambda pond: pond.transactions("bank", ["accounts"], {"pay": earn})(payments(1), 1),
    "new transactions": lambda pond: pond.transactions("other", ["accounts"], {"pay": earn}),
    "to forget a state": lambda pond: pond.forget("plain"),
    "to forget an updater": lambda pond: pond.forget("plain", name="feed"),
    "to forget a table": lambda pond: pond.forget("accounts"),
    "a checkpoint": lambda pond: pond.checkpoint(),
    "a fetch with code": lambda pond: (
        pond.state("plain")
        .fetch(key="k", between=("a", "b"), rule=every)
        .now(pa.table({"k": [1], "a": [0], "b": [8]}))
    ),
}


def test_what_would_change_it_or_run_code_is_refused(roots: Roots, tmp_path: Path) -> None:
    root = shutil.copytree(roots.whole, tmp_path / "pond")
    roots.ran()
    pond = LocalPond(OsFiles(), str(root), trust="data")
    before = read_all(pond)
    for what, change in REFUSED.items():
        with pytest.raises(NotTrusted, match='trust="data"') as caught:
            pytest.fail(f"{what} gave {change(pond)}")
        assert "without trust=" in caught.value.hint
    # To ask for what is there changes nothing.
    assert pond.state("plain", key="long", value="long").snapshot().num_rows == 1
    pond.maintain()
    assert read_all(pond) == before
    pond.validate()
    pond.close()
    assert roots.ran() == set()


# Wherever it ended


def history(files: Files) -> None:
    """Each kind of user code in its epochs: from the log, from snapshots, and half-way."""
    pond = LocalPond(files)
    kept = state_with(pond, "kept", put(), CompactRule("custom", Code("keep", KEEP.format("pass"))))
    folded = state_with(
        pond, "folded", UpdateRule("custom", Code("join", JOIN.format("pass"))), keep_latest()
    )
    plain = pond.state("plain", key="long", value="long")
    feeds = [(state.update(key="k", at="t", value="s", name="feed")) for state in (kept, folded)]
    feeds.append(plain.update(key="k", at="t", value="v", name="feed"))
    bank = bank_with(pond, PAY)
    asking(pond)
    for epoch in range(3):
        for feed in feeds:
            feed(ROWS.set_column(1, "t", pa.array([1, 5, 6 + epoch])), epoch)
        kept.report("views", fetch=2 + epoch)
        bank(payments(epoch), epoch)
        pond.maintain()
        if epoch == 1:
            pond.checkpoint()


def test_wherever_it_ended_it_can_be_read_and_is_as_it_was_afterwards() -> None:
    with counted() as plans:
        history(LossyFiles())
    refused = 0
    # What one step leaves is what the next one finds.
    points = [point for point in POINTS if point.endswith(".after") and plans[point].hits]
    # So short a history has no second checkpoint of a slice: its deltas and merges have tests of their own.
    missed = {point for point in POINTS if point.endswith(".after")}.difference(points)
    assert {point.partition(".")[0] for point in missed} <= {"delta", "merge"}
    for number, point in enumerate(points):
        files = LossyFiles()
        with armed(point, plans[point].hits, files.halt) as plan, pytest.raises(SimulatedCrash):
            history(files)
        assert plan.fired, point
        wanted = read_all(LocalPond(files.crash("nothing")))
        foreign = files.crash("nothing")
        for _ in range(2):
            pond = LocalPond(foreign, containers=1 + number % 3, trust="data")
            told = read_all(pond)
            unknown = wanted.keys() - told.keys()
            assert unknown - UNKNOWN <= {"accounts", "accounts read"}, point
            assert {name: wanted[name] for name in told} == told, point
            refused += len(unknown)
            # Its slices move on to what it wrote, as they do where the pond was opened plainly.
            pond.maintain()
            pond.close()
        pond = LocalPond(foreign)
        assert read_all(pond) == wanted, point
        pond.validate()
    assert refused > len(UNKNOWN) * len(points)


# How it is asked for


def test_a_root_that_is_not_trusted_must_be_a_pond_without_links(roots: Roots, tmp_path: Path) -> None:
    with pytest.raises(BadRoot, match="holds no pond"):
        mp.open(tmp_path / "none", trust="data")
    assert not (tmp_path / "none").exists()
    root = shutil.copytree(roots.whole, tmp_path / "pond")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter").write_text("dear")
    traps: dict[Path, Callable[[Path], None]] = {
        root / "container-0.log": lambda place: place.symlink_to(mine / "letter"),
        root / "snapshots" / "gone.7": lambda place: place.symlink_to(mine),
        root / "token.tmp": os.mkfifo,
    }
    for place, lay in traps.items():
        place.unlink(missing_ok=True)
        lay(place)
        with pytest.raises(BadRoot, match=r"is a link|neither a file nor a directory") as caught:
            mp.open(root, trust="data")
        assert str(place) in str(caught.value)
        place.unlink()
    assert (mine / "letter").read_text() == "dear"


def test_a_manifest_names_nothing_outside_of_its_root(roots: Roots, tmp_path: Path) -> None:
    """Or a checkpoint would remove the snapshot of another pond, once it is replaced."""
    files = OsFiles()
    mine = shutil.copytree(roots.whole, tmp_path / "mine")
    root = shutil.copytree(roots.whole, tmp_path / "pond")
    directory = incarnations(files, str(root))[-1]
    manifest = read_manifest(files, str(root), directory)
    number, ground = next((n, each) for n, each in manifest.slices.items() if each.snapshots)
    away = {
        resident: f"../../../{mine.name}/snapshots/{resident}/{name}"
        for resident, name in ground.snapshots.items()
    }
    log = f"../../{mine.name}/containers/{directory}"
    elsewhere = [replace(span, directory=log) for span in ground.logs]
    assert elsewhere
    for changed in (replace(ground, snapshots=away), replace(ground, logs=elsewhere)):
        rewritten = replace(manifest, slices={**manifest.slices, number: changed})
        write_manifest(files, str(root), directory, rewritten)
        with pytest.raises(CorruptFile, match="is not a manifest file"):
            LocalPond(files, str(root), trust="data")


# Columns that lie: the checksum of a file is anyone's to make


def lying(column: pa.Array) -> pa.Array:
    """A column as that one, of strings, bytes or lists, but with offsets that lead far away, except the last."""
    large = pa.types.is_large_binary(column.type)
    offsets = np.zeros(len(column) + 1, np.int64 if large else np.int32)
    values = {"children": [column.values]} if pa.types.is_list(column.type) else {}
    buffers = [None, pa.py_buffer(offsets), *([] if values else [column.buffers()[2]])]
    made = pa.Array.from_buffers(column.type, len(column), buffers, **values)
    # Arrow has looked at them.
    offsets[1:-1] = 1 << (40 if large else 28)
    return made


def in_stream(rows: pa.Table) -> pa.Table:
    place = rows.schema.types.index(pa.string())
    return rows.set_column(place, rows.schema.field(place), lying(rows.column(place).combine_chunks()))


def in_part(batch: pa.RecordBatch) -> pa.RecordBatch:
    """In one of the tables that a batch of bytes holds."""
    return pack([part._replace(rows=in_stream(part.rows)) for part in unpack(batch)])


def in_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(2, batch.schema.field(2), lying(batch.column(2)))


@pytest.mark.parametrize(
    ("resident", "lie"), [("lists", in_column), ("tables", in_column), ("tables", in_part)]
)
def test_columns_that_lie_are_not_read(
    tmp_path: Path, resident: str, lie: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    """They would be read out of bounds, and written: which is a way to run code."""
    root, files = tmp_path / "pond", OsFiles()
    private.make_dir(str(root))
    pond = LocalPond(files, str(root), slices=1)
    lists = pond.state("lists", key="long", value="array<bigint>")
    rows = pa.table({"k": [1, 2], "t": [1, 2], "v": pa.array([[1], [2]], pa.list_(pa.int64()))})
    lists.update(key="k", at="t", value="v", name="feed")(rows, 0)
    names = pond.table("names", key="string", value="n long", default={"n": 0})
    count = Code("count", "def count(names, name):\n    names[name].n += 1")
    pond.transactions("counts", [names], {"count": load(TransactionCode(count))})(
        pa.table({"ts": [1, 2], "name": ["a", "b"]}), 0
    )
    pond.checkpoint()
    pond.close()
    (path,) = root.glob(f"snapshots/{resident}.*/*.arrow")
    batches, schema, metadata = read_table_file(files, path)
    write_table_file(files, path, "snapshot", schema, [lie(batch) for batch in batches], metadata)
    with pytest.raises(CorruptFile, match=str(path)), mp.open(root, threads=1, trust="data") as opened:
        opened.states()["lists"].snapshot()
        opened.tables()["names"].snapshot()


def test_what_a_task_reads_of_waiting_rows_is_sound(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "rows.arrow"
    batch = pa.record_batch({"s": lying(pa.array(["a", "b"]))})
    write_table_file(files, path, "waiting", batch.schema, [batch], {})
    with pytest.raises(CorruptFile, match="Offset"):
        read_table_file(files, path)


@pytest.mark.parametrize("read", [read_table_file, read_metadata])
def test_metadata_that_is_no_text_is_named(tmp_path: Path, read: Callable[..., object]) -> None:
    schema = pa.schema([pa.field("a", pa.int64())], {b"millpond.place": b"\xff"})
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    content = sink.getvalue().to_pybytes()
    trailer = struct.pack("<8sIQI", MAGIC, VERSION, len(content), zlib.crc32(content))
    (tmp_path / "f").write_bytes(content + trailer)
    with pytest.raises(CorruptFile, match="utf-8"):
        read(OsFiles(), tmp_path / "f")


def test_counts_below_zero_are_none(roots: Roots, tmp_path: Path) -> None:
    """They add up to the rows that there are, and lead in front of them."""
    files, root = OsFiles(), str(shutil.copytree(roots.torn, tmp_path / "pond"))
    (path, *_) = sorted((tmp_path / "pond").glob("containers/*/0*.arrow"))
    batches, schema, metadata = read_table_file(files, path)
    head = msgspec.json.decode(metadata["record"])
    head["counts"] = [[-1, 1 + sum(counts), *[0] * (len(counts) - 2)] for counts in head["counts"]]
    metadata["record"] = msgspec.json.encode(head).decode()
    write_table_file(files, path, "log", schema, batches, metadata)
    with pytest.raises(CorruptFile, match="counts"):
        LocalPond(files, root, trust="data")


@pytest.mark.parametrize("trust", ["none", "", None, True, ["data"]])
def test_another_trust_is_refused(tmp_path: Path, trust: Any) -> None:
    with pytest.raises(BadOption, match="trust=") as caught:
        mp.open(tmp_path / "pond", trust=trust)
    assert caught.value.option == "trust"
    assert not (tmp_path / "pond").exists()


def test_whoever_made_the_root_knows_no_token_of_it(roots: Roots, tmp_path: Path) -> None:
    root = shutil.copytree(roots.whole, tmp_path / "pond")
    known = "a" * 43
    private.write_text(str(root / "token"), known)
    with mp.open(root, threads=1, trust="data", port=0) as pond:
        for token in (known, read_only_token(known)):
            with pytest.raises(NotThePond):
                mp.connect(pond.address, token)
