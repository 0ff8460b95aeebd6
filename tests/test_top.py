"""`millpond top`: pages from two readings, without a terminal; and once the real thing in one."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond import cli
from millpond.errors import BadOption, NotPrivate, Unavailable
from millpond.monitor import loop, words
from millpond.monitor.joining import way_to
from millpond.monitor.keys import keys_in
from millpond.monitor.loads import Reading, as_rates, loads_of
from millpond.monitor.pages import page, shared_out
from millpond.monitor.sections import Seen
from millpond.monitor.view import HEATS, SORTS, View, grid_of, press

SIZES = [(100, 30), (80, 24), (132, 50), (40, 10), (20, 5)]
NOW_S = 1_700_000_000.0


def container(at: int, up_s: float, factor: float) -> dict[str, float]:
    return {
        "up_s": up_s,
        "term": 1 + at,
        "pid": 100 + at,
        "cpu_s": factor,
        "rss_bytes": 400 << 20,
        "memory_max_bytes": 2 << 30,
        "threads": 2,
        "slices": 32,
        "rows_staged": 0,
        "log_records": 3,
        "rows_applied": 1000 * factor * (1 + at),
        "rows_fetched": 50 * factor,
        "checkpoints": 1,
        "snapshot_pause_ms_max": 2.5,
    }


def metrics(seconds: float, slices: int = 64, containers: int = 2, **others: Any) -> dict[str, Any]:
    """A pond that has been up for so long: slice n has n + 1 updates a second, container n 1000 (n + 1)."""
    return {
        "coordinator": {"up_s": seconds, "epochs_committed": 3 * seconds, "container_restarts": 0, "slices": slices},
        "containers": {at: container(at, seconds, seconds) for at in range(containers)},
        "away": {},
        "states": {"clicks": {"keys": 5, "bytes": 1 << 20, "versions": 9, "rule_failures": 0}},
        "groups": {"tables": {"tables": {"t": {"keys": 7, "bytes": 2048}}, "waiting": {"rows": 4, "bytes": 1}}},
        "slices": {
            n: {
                "container": n * containers // slices, "rows_updated": (n + 1) * seconds, "rows_fetched": 0,
                "cpu_s": seconds * (slices - n) / 1e4, "bytes": 1000 * ((7 * n) % slices), "keys": n,
            }
            for n in range(slices)
        },
        "progress": {
            "clicks": {
                "kind": "states", "update": int((NOW_S - 3) * 1e6), "fetch": -math.inf,
                "time_kind": "timestamp", "updaters": {}, "held_by": ["feed"],
                "fetchers": {"views": {"progress": -math.inf, "waiting": 20_001, "since": 5, "late": 0}},
            },
            "tables": {
                "kind": "groups", "update": 41, "fetch": math.inf, "time_kind": "long", "updaters": {},
                "held_by": [], "fetchers": {},
            },
        },
        "moves": [],
        "task_slots": {},
        **others,
    }  # fmt: skip


MOVE = {
    "id": 4,
    "slices": [3, 5, 8, 13],
    "from": 0,
    "to": 1,
    "phase": "copy",
    "progress": 0.5,
    "cause": "rebalance",
    "seconds_left": 12.0,
}


def troubled(seconds: float) -> dict[str, Any]:
    """Everything at once: a container away, slices that move, some with too few backups, too few task slots."""
    made = metrics(seconds, moves=[MOVE], task_slots={"wanted": 4, "had": 3}, away={2: "it was stopped"})
    for number, each in made["slices"].items():
        each |= {"backups_wanted": 1, "backups": int(number not in (6, 7))}
    made["slices"][60]["container"] = 2
    return made


def seen_of(before: dict[str, Any], now: dict[str, Any], **others: Any) -> Seen:
    readings = Reading(before, NOW_S - 2), Reading(now, NOW_S)
    loads = loads_of(*readings)
    return Seen("unix:/pond/sockets/pond", readings[1], loads, [loads], **others)


SEEN = seen_of(metrics(10), metrics(12))


def text_of(view: View, seen: Seen = SEEN, width: int = 100, height: int = 30) -> str:
    lines = page(view, seen, width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines), "it is too wide"
    assert all("\n" not in line.plain for line in lines)
    return "\n".join(line.plain for line in lines)


def section(text: str, title: str) -> list[str]:
    """The lines under a title."""
    lines = text.splitlines()
    (start,) = [at for at, line in enumerate(lines) if line.startswith(f"─ {title}")]
    body = lines[start + 1 :]
    return body[: next((at for at, line in enumerate(body) if line.startswith("─ ")), len(body))]


def pressed(*keys: str, view: View | None = None, seen: Seen = SEEN, width: int = 100) -> View:
    view = view or View()
    for key in keys:
        view = press(view, key, seen.loads, width)
    return view


# Rates


def test_rates_are_by_the_clock_of_who_was_asked() -> None:
    loads = SEEN.loads
    assert [load.updates for load in loads.containers.values()] == [1000, 2000]
    assert [load.cpu for load in loads.containers.values()] == [1, 1]
    assert loads.epochs == 3
    assert loads.slices.updates.tolist() == pytest.approx([n + 1 for n in range(64)])
    assert loads.total("updates") == 3000
    assert loads.containers[1].keys == sum(range(32, 64))


def test_what_began_anew_has_no_rate() -> None:
    now = metrics(12)
    now["containers"][0] |= {"pid": 999, "up_s": 1.0, "rows_applied": 5}
    now["slices"][40]["container"] = 0
    now["slices"][41]["rows_updated"] = 0
    loads = loads_of(Reading(metrics(10), 0), Reading(now, 2))
    assert math.isnan(loads.containers[0].updates)
    assert loads.containers[1].updates == 2000
    unknown = {n for n, rate in enumerate(loads.slices.updates.tolist()) if math.isnan(rate)}
    assert unknown == {*range(32), 40, 41}
    assert loads.total("updates") == 2000
    first = loads_of(None, Reading(now, 2))
    assert all(math.isnan(load.updates) for load in first.containers.values())
    rates = as_rates(first)
    assert rates["containers"]["1"] == {"updates": None, "fetches": None, "cpu": None}
    assert json.loads(json.dumps(rates)) == rates


# Pages


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("page_name", ["pond", "container", "slice", "help"])
@pytest.mark.parametrize(
    "seen",
    [
        SEEN,
        seen_of(troubled(10), troubled(12), problem="the pond was closed " * 20),
        seen_of(
            metrics(1, slices=1, containers=1, progress={}), metrics(1, slices=1, containers=1, progress={})
        ),
        seen_of(metrics(10, slices=5000, containers=40), metrics(12, slices=5000, containers=40)),
    ],
    ids=["usual", "troubled", "smallest", "large"],
)
def test_every_page_fits(seen: Seen, page_name: Any, width: int, height: int) -> None:
    for focus in ("containers", "slices"):
        for heat in HEATS:
            text_of(View(page=page_name, focus=focus, container=0, heat=heat), seen, width, height)  # type: ignore[arg-type]


def test_windows_are_among_states_and_tables() -> None:
    made = metrics(
        12,
        windows={"visits": {"rows": 9, "fired": 2, "open": 31, "bytes": 1 << 20, "spilled_bytes": 3 << 20}},
    )
    made["progress"]["visits"] = {
        **made["progress"]["tables"], "kind": "windows", "update": 77, "fetch": -math.inf, "held_by": ["source"]
    }  # fmt: skip
    text = text_of(View(), seen_of(metrics(10), made), 132, 40)
    header, *others, visits = section(text, "states, tables and windows")
    assert header.split()[-6:] == ["keys", "bytes", "disk", "U", "waits", "for"]
    assert [line.split()[:2] for line in others] == [["clicks", "state"], ["tables", "group"]]
    assert visits.split() == ["visits", "window", "77", "none", "yet", "0", "31", "1.0M", "3.0M", "source"]
    made["windows"]["visits"]["broken"] = "not trusted"
    assert "broken: visits" in text_of(View(), seen_of(metrics(10), made))


def test_the_pond_at_100_by_30() -> None:
    text = text_of(View())
    head = text.splitlines()[:3]
    assert head[0].startswith("millpond top unix:/pond/sockets/pond  up 00:00:12  every 2 s")
    assert "updates/s 3.0k" in head[1]
    assert "waiting 20,001" in head[1]
    assert "epochs/s 3" in head[1]
    assert head[2].startswith("2 containers, 64 slices, all served")
    containers = section(text, "containers")
    assert containers[0].split()[:5] == ["id▲", "slices", "updates/s", "fetches/s", "CPU"]
    assert [line.split()[:5] for line in containers[1:]] == [
        ["▸", "0", "32", "1.0k", "50"],
        ["1", "32", "2.0k", "50", "100%"],
    ]
    heat = section(text, "slices")
    assert [line.split()[0] for line in heat] == ["0", "16", "32", "48"]
    assert heat[0].split()[1:3] == ["▁▁▁▁", "▁▁▁▁"]
    assert heat[3].split()[-1] == "████"
    states = section(text, "states and tables")
    assert states[1].split() == [
        "clicks",
        "11-14",
        "22:13:17",
        "3.0",
        "s",
        "none",
        "yet",
        "20,001",
        "5",
        "1.0M",
        "feed",
    ]
    assert states[2].split() == ["tables", "41", "finished", "4", "7", "2.0K"]
    assert "disk" not in states[0]
    hottest = section(text, "hottest slices")
    assert [line.split()[0] for line in hottest[1:4]] == ["63", "62", "61"]
    assert text.splitlines()[-1].startswith("q quit")


def test_no_figure_of_the_pond_is_cut_off_at_80_columns() -> None:
    assert " keys" in text_of(View()).splitlines()[1]
    head = text_of(View(), width=80).splitlines()[1]
    assert head.split()[-2:] == ["epochs/s", "3"]
    assert " keys" not in head


def test_a_move_says_how_far_it_is_in_full_and_what_hinders_it() -> None:
    moves = [
        {**MOVE, "phase": "catching up", "progress": 0.9, "cause": "return"},
        {**MOVE, "id": 5, "phase": "waiting", "error": "container 1 is not up"},
    ]
    seen = seen_of(metrics(10), metrics(12, moves=moves))
    text = text_of(View(), seen)
    assert "moves under way 5 is tried again: container 1 is not up" in text
    first, second = section(text, "moves under way")[1:3]
    assert "catching up" in first
    assert first.split()[-4:] == ["90%", "12", "s", "return"]
    assert "waiting" in second


def test_one_is_not_many() -> None:
    seen = seen_of(metrics(10, slices=1, containers=1), metrics(12, slices=1, containers=1))
    assert "1 container, 1 slice, all served" in text_of(View(), seen)
    assert "its 1 slice " in text_of(View(page="container", container=0), seen)


def test_what_needs_attention_is_said() -> None:
    text = text_of(View(), seen_of(troubled(10), troubled(12)))
    health = text.splitlines()[2]
    assert "away: container 2" in health
    assert "too few backups: slices 6, 7" in health
    assert "task slots 3 of 4" in health
    (move,) = section(text, "moves under way")[1:2]
    assert move.split() == [
        "4",
        "3,",
        "5,",
        "8",
        "and",
        "1",
        "more",
        "0",
        "1",
        "copy",
        "██████",
        "50%",
        "12",
        "s",
        "rebalance",
    ]
    assert "away" in section(text, "containers")[3]
    assert section(text, "slices")[3].split()[13] == "xxxx"
    seen = seen_of(troubled(10), troubled(12), problem="the pond was closed")
    assert text_of(View(), seen).splitlines()[2] == "no answer: the pond was closed"
    assert "it was stopped" in text_of(View(page="container", container=2), seen)
    on_slice = text_of(View(page="slice", slice=6), seen_of(troubled(10), troubled(12)))
    assert "backups 0 of 1" in on_slice
    assert "moves under way" in text_of(View(page="slice", slice=5), seen_of(troubled(10), troubled(12)))


def test_a_reading_that_is_old_says_so() -> None:
    assert "7 s old" in text_of(View(), replace(SEEN, age_s=7)).splitlines()[0]
    assert "paused" in text_of(View(paused=True), replace(SEEN, age_s=7)).splitlines()[0]


def test_many_slices_share_cells_and_the_hottest_is_found() -> None:
    many = [metrics(at, slices=65_535, containers=2) for at in (10, 12)]
    for at, made in zip((10, 12), many, strict=True):
        made["slices"][30_000]["rows_updated"] = 10**7 * at
    seen = seen_of(*many)
    grid = grid_of(65_535, 100)
    assert grid.per_row * grid.together * grid.rows >= 65_535
    cell = 30_000 // grid.together
    view = View(focus="slices", slice=cell * grid.together)
    text = text_of(view, seen)
    assert "each the hottest of" in text
    rows = section(text, "slices")
    shown = grid_of(65_535, 100, len(rows))
    cells = "".join(row.split()[1] for row in rows)
    assert cells.index("█") == 30_000 // shown.together
    assert pressed("enter", view=view, seen=seen).slice == 30_000


@pytest.mark.parametrize("slices", [1, 2, 7, 8, 9, 64, 100, 256, 1000, 4096, 65_535])
@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_a_grid_has_a_place_for_every_slice(slices: int, width: int) -> None:
    grid = grid_of(slices, width)
    assert grid.rows <= 8
    assert grid.rows * grid.per_row * grid.together >= slices
    assert grid.per_row * grid.cell <= max(8, width)


def test_rows_are_shared_out() -> None:
    assert shared_out({"a": 3, "b": 20}, 30) == {"a": 3, "b": 20}
    assert shared_out({"a": 3, "b": 20, "c": 20}, 23) == {"a": 3, "b": 10, "c": 10}
    assert shared_out({"a": 0, "b": 9}, 2) == {"a": 0, "b": 4}


# Keys


def test_sort_and_drill_down_and_back() -> None:
    by_updates = pressed("s")
    assert (by_updates.sort, by_updates.descending) == ("updates", True)
    containers = section(text_of(by_updates), "containers")
    assert [line.split()[1 if "▸" in line else 0] for line in containers[1:]] == ["1", "0"]
    assert "updates/s▼" in containers[0]
    in_container = pressed("down", "enter", view=by_updates)
    assert (in_container.page, in_container.container) == ("container", 0)
    listed = section(text_of(in_container), "its 32 slices")
    assert [line.strip("▸ ").split()[0] for line in listed[1:4]] == ["31", "30", "29"]
    in_slice = pressed("down", "enter", view=in_container)
    assert (in_slice.page, in_slice.slice, in_slice.watched) == ("slice", 30, 30)
    seen = replace(
        SEEN,
        residents={"clicks": dict.fromkeys(("rows_updated", "rows_fetched", "cpu_s", "bytes", "keys"), 1)},
    )
    assert "clicks" in text_of(in_slice, seen)
    assert pressed("right", view=in_slice).slice == 31
    assert pressed("escape", "backspace", view=in_slice).page == "pond"
    assert pressed("escape", view=View()) == View()
    assert pressed("r", view=by_updates).descending is False
    assert pressed(*"s" * len(SORTS)).sort == "id"


def test_the_heat_map_has_a_cursor_and_three_measures() -> None:
    view = pressed("tab", "right", "down")
    assert (view.focus, view.slice) == ("slices", 17)
    assert "slice 17 in container 0" in text_of(view)
    assert pressed("up", "up", "left", view=view).slice == 0
    assert pressed("end", view=view).slice == 63
    assert pressed("enter", view=view).page == "slice"
    by_cpu = pressed("h", view=view)
    assert "by CPU" in text_of(by_cpu)
    assert section(text_of(by_cpu), "slices")[0].split()[1] == "████"
    assert "by bytes held" in text_of(pressed("h", view=by_cpu))
    assert pressed("h", "h", "h").heat == "rows"


def test_help_pause_and_keys_that_mean_nothing() -> None:
    assert "go back" in text_of(pressed("?"))
    assert pressed("?", "x") == View()
    assert pressed("p").paused
    assert pressed("x", "\x00", "left") == View(container=0)
    empty = seen_of(
        metrics(1, slices=1, containers=0, progress={}), metrics(2, slices=1, containers=0, progress={})
    )
    for key in ("up", "down", "enter", "tab", "end", "pagedown"):
        text_of(pressed("tab", key, key, seen=empty), empty)
        text_of(pressed(key, key, seen=empty), empty)


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    typed = "sq\x1b[A\x1bOB\x1b[C\x1b[D\x1b[5~\x1b[6~\x1b[H\x1b[F\t\r\x7f\x1b\x1b[1;5A"
    assert keys_in(typed) == [
        *("s", "q", "up", "down", "right", "left", "pageup", "pagedown", "home", "end"),
        *("tab", "enter", "backspace", "escape", "\x1b[1;5A"),
    ]


# Words


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (words.number(0), "0"),
        (words.number(0.25), "0.2"),
        (words.number(999), "999"),
        (words.number(999.7), "1.0k"),
        (words.number(12_345), "12k"),
        (words.number(9_960_000), "10M"),
        (words.number(math.nan), "-"),
        (words.size(1023), "1023"),
        (words.size(1536), "1.5K"),
        (words.size(3 << 30), "3.0G"),
        (words.percent(0.04), "4.0%"),
        (words.percent(0.0004), "0.04%"),
        (words.percent(0), "0%"),
        (words.percent(1.5), "150%"),
        (words.duration(3.21), "3.2 s"),
        (words.duration(200), "3 min"),
        (words.duration(9000), "2 h"),
        (words.clock(90_061), "1 d 01:01:01"),
        (words.progress(-math.inf, "long"), "none yet"),
        (words.progress(math.inf, "timestamp"), "finished"),
        (words.bar(0.5, 4), "██  "),
        (words.bar(math.nan, 4), "    "),
        (words.spark([0, 1, 2], 4), " ·▄█"),
        (words.fitted("abcdef", 4), "abc…"),
        (words.numbers_of([1, 2, 3, 4], 2), "1, 2 and 2 more"),
    ],
)
def test_figures_in_few_characters(said: str, wanted: str) -> None:
    assert said == wanted


# The real thing


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[mp.Pond, Path]]:
    root = tmp_path_factory.mktemp("top") / "pond"
    with mp.open(root, slices=8, port=0) as opened:
        state = opened.state("clicks", key="long", value="long")
        keys = list(range(1000))
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": keys, "t": keys, "v": keys}), 0)
        yield opened, root


def test_ways_to_a_pond(pond: tuple[mp.Pond, Path], tmp_path: Path) -> None:
    opened, root = pond
    by_root = way_to(str(root))
    assert by_root.address == f"unix:{root}/sockets/pond"
    assert by_root.token == (root / "token.read").read_text().strip()
    assert by_root.token not in repr(by_root)
    assert way_to(by_root.address) == by_root
    with way_to(opened.address, root / "token.read").join() as joined:
        assert len(joined.metrics()["slices"]) == 8
    with pytest.raises(BadOption, match="a token is needed"):
        way_to(opened.address)
    with pytest.raises(BadOption, match="neither a directory here nor an address"):
        way_to("nowhere")
    with pytest.raises(BadOption, match="cannot be read: No such file"):
        way_to(opened.address, tmp_path / "none")
    with pytest.raises(Unavailable, match="no pond is open"):
        way_to(str(tmp_path))
    shown = tmp_path / "shown"
    shown.write_text("x")
    shown.chmod(0o644)
    with pytest.raises(NotPrivate):
        way_to(opened.address, shown)


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["millpond", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    assert code is None or isinstance(code, int)
    return (code or 0, *capsys.readouterr())


def test_once(
    pond: tuple[mp.Pond, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    _, root = pond
    code, said, problems = run(capsys, monkeypatch, "top", str(root), "--once", "--json", "--interval", "0.1")
    assert (code, problems) == (0, "")
    document = json.loads(said, parse_constant=pytest.fail)
    assert sum(each["rows_updated"] for each in document["slices"].values()) == 1000
    assert document["rates"]["slices"]["7"]["updates"] == 0
    assert document["progress"]["clicks"]["update"] == 999
    code, said, problems = run(capsys, monkeypatch, "top", str(root), "--once", "--interval", "0.1")
    assert (code, problems) == (0, "")
    assert "\x1b" not in said
    assert "─ states and tables" in said
    assert "clicks" in said
    code, said, problems = run(capsys, monkeypatch, "top", str(root), "--json")
    assert (code, said) == (1, "")
    assert problems.splitlines()[0] == "error: --json prints one document"
    code, said, problems = run(capsys, monkeypatch, "metrics", str(root))
    assert (code, problems) == (0, "")
    assert "millpond_slice_keys" in said
    file = tmp_path / "millpond.prom"
    assert run(capsys, monkeypatch, "metrics", str(root), "--out", str(file))[0] == 0
    assert file.read_text().startswith("# TYPE millpond_up gauge\nmillpond_up 1\n")
    assert list(tmp_path.iterdir()) == [file]
    code, _, problems = run(capsys, monkeypatch, "metrics", str(root), "--every", "1")
    assert (code, problems.splitlines()[0]) == (1, "error: --every writes a file anew")
    code, _, problems = run(capsys, monkeypatch, "top", str(tmp_path), "--once")
    assert (code, problems.splitlines()[0]) == (1, f"error: no pond is open in {tmp_path}")


class Terminal:
    """`millpond top` in a pseudo-terminal of 100 by 30, and what it has shown."""

    def __init__(self, root: Path) -> None:
        self.terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.modes = termios.tcgetattr(inner)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        # Ctrl-C is the terminal's to send: it must be the process's own.
        own = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        command = [sys.executable, "-c", f"{own}; from millpond.cli import main; main()"]
        self.process = subprocess.Popen(
            [*command, "top", str(root), "--interval", "0.2"],
            **dict.fromkeys(("stdin", "stdout", "stderr"), inner),
            env=environment,
            start_new_session=True,
        )
        self.inner = inner
        self.shown = ""

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.terminal, keys.encode())

    def await_text(self, wanted: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while wanted not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} was not shown, but {self.shown[-3000:]!r}"
            if select.select([self.terminal], [], [], min(left, 0.5))[0]:
                said = os.read(self.terminal, 65_536).decode(errors="replace")
                self.raw = said
                self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)

    def end(self) -> int:
        """Its exit code. The terminal is as it was."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 65_536).decode(errors="replace")
        code = self.process.wait(1)
        assert termios.tcgetattr(self.inner) == self.modes
        assert "Traceback" not in self.shown
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)
        os.close(self.inner)


def test_in_a_terminal(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    with mp.open(root, slices=8) as opened:
        feed = opened.state("clicks", key="long", value="long").update(
            key="k", at="t", value="v", name="feed"
        )
        feed(pa.table({"k": [1], "t": [1], "v": [1]}), 0)
        first, second = Terminal(root), Terminal(root)
        try:
            first.await_text("clicks")
            first.press("s")
            first.await_text("updates/s▼")
            first.press("\r")
            first.await_text("its 8 slices")
            first.press("\r")
            first.await_text("what is in it")
            first.await_text("rows updated")
            first.press("\x1b")
            first.await_text("its 8 slices")
            second.await_text("clicks")
            second.press("\x03")
            assert second.end() == 0
            opened.close()
            first.press("")
            first.await_text("no answer: ")
            first.press("q")
            assert first.end() == 0
        finally:
            first.close()
            second.close()


def test_a_pond_that_is_open_again_is_joined_anew(tmp_path: Path) -> None:
    def connect() -> mp.Pond:
        return way_to(str(tmp_path / "pond")).join()

    def await_seen(wanted: Any) -> None:
        deadline = time.monotonic() + 30
        while not wanted(asking.seen("here", 0.1, View())):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with mp.open(tmp_path / "pond", slices=4):
        asking = loop._Asking(connect, 0.1)
        asking.start()
        await_seen(lambda seen: len(seen.history) > 2)
    try:
        await_seen(lambda seen: seen.problem)
        with mp.open(tmp_path / "pond"):
            await_seen(lambda seen: not seen.problem)
    finally:
        asking.end()
