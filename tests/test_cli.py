from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import millpond
from millpond import cli
from millpond.errors import BadRoot, MillpondError


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run_command(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["millpond", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Ended(code or 0, *capsys.readouterr())

    return run_command


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    def add(name: str, **members: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    return add


def test_version(run: Any) -> None:
    ended = run("--version")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("millpond 0.")


def test_no_arguments_show_the_commands(run: Any) -> None:
    ended = run()
    for command in ("serve", "bench", "demo"):
        assert command in ended.out + ended.err


def test_help_needs_no_heavy_import() -> None:
    code = "import sys, millpond.cli; print([m for m in ('pyspark', 'duckdb', 'polars') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("kind", ["bench", "demo"])
def test_an_unknown_name_lists_the_known_ones(run: Any, kind: str) -> None:
    ended = run(kind, "lake")
    known = cli.BENCHES if kind == "bench" else cli.DEMOS
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines() == [
        f"error: no {kind} is called 'lake'",
        f"hint: known: {', '.join(known)}",
    ]


def test_errors_have_no_traceback_and_no_markup(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    def fail() -> bool:
        raise BadRoot("cannot write [/data/pond]", hint="give a [bold]directory", root="/data/pond")

    module("fake_demo", run=fail)
    monkeypatch.setitem(cli.DEMOS, "pond", "fake_demo")
    ended = run("demo", "pond")
    assert ended.code == 1
    assert ended.err.splitlines() == ["error: cannot write [/data/pond]", "hint: give a [bold]directory"]


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_a_demo_ends_with_what_it_found(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: Any, right: bool, code: int
) -> None:
    module("fake_demo", run=lambda: right)
    monkeypatch.setitem(cli.DEMOS, "pond", "fake_demo")
    assert run("demo", "pond").code == code


def test_a_demo_gets_the_options_that_were_given(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    got: list[dict[str, object]] = []
    where: list[tuple[object, ...]] = []

    def show(
        seconds: int = 30,
        rate: int = 10,
        keys: int = 5,
        master: str = "",
        hosting: str = "",
        containers: int = 1,
        backups: int = 0,
    ) -> bool:
        got.append({"seconds": seconds, "rate": rate, "keys": keys})
        where.append((master, hosting, containers, backups))
        return True

    module("fake_demo", run=show)
    monkeypatch.setitem(cli.DEMOS, "adcamp", "fake_demo")
    assert run("demo").code == 0
    assert run("demo", "adcamp", "--rate", "7", "--keys", "8").code == 0
    assert got == [{"seconds": 30, "rate": 10, "keys": 5}, {"seconds": 30, "rate": 7, "keys": 8}]
    assert run("demo", "--seconds", "0").code == 2
    cluster = (
        "--master",
        "local-cluster[2,2,1024]",
        "--hosting",
        "spark",
        "--containers",
        "3",
        "--backups",
        "1",
    )
    assert run("demo", "adcamp", *cluster).code == 0
    assert where == [("", "", 1, 0), ("", "", 1, 0), ("local-cluster[2,2,1024]", "spark", 3, 1)]


def test_an_option_that_a_demo_does_not_have(run: Any, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    module("fake_demo", run=lambda: pytest.fail("it ran"))
    monkeypatch.setitem(cli.DEMOS, "pond", "fake_demo")
    ended = run("demo", "pond", "--rate", "7")
    assert ended.code == 1
    assert ended.err.splitlines()[0] == "error: the demo 'pond' has no --rate"


@pytest.mark.parametrize("quick", [True, False])
def test_bench_prints_and_writes_its_results(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: Any, tmp_path: Path, quick: bool
) -> None:
    results = [{"system": "millpond", "rows_per_s": 2.0, "threads": 1}]

    def measure(quick_run: bool, progress: Any) -> list[dict[str, Any]]:
        assert quick_run is quick
        progress("loading [1/2]")
        return results

    module("fake_bench", run=measure)
    monkeypatch.setitem(cli.BENCHES, "kernels", "fake_bench")
    file = tmp_path / "out.json"
    ended = run("bench", "kernels", *["--quick"] * quick, "--json", str(file))
    assert ended.code == 0, ended.err
    assert "millpond" in ended.out
    assert "loading [1/2]" in ended.err
    assert json.loads(file.read_text()) == {"bench": "kernels", "results": results}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_bench_checks_its_file_before_it_runs(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: Any, tmp_path: Path
) -> None:
    module("fake_bench", run=lambda quick, progress: pytest.fail("it ran"))
    monkeypatch.setitem(cli.BENCHES, "kernels", "fake_bench")
    for file in (tmp_path / "nowhere" / "out.json", tmp_path):
        ended = run("bench", "kernels", "--json", str(file))
        assert ended.code == 1
        assert f"cannot write {file}" in ended.err


def test_bench_without_a_peer_says_how_to_install_it(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_duckdb.py").write_text("import duckdb\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.BENCHES, "kernels", "needs_duckdb")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    ended = run("bench", "kernels")
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "error: the bench 'kernels' needs duckdb",
        "hint: pip install 'millpond[bench]'",
    ]


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "trust"), [(signal.SIGINT, "all"), (signal.SIGTERM, "data")])
def test_serve_says_where_it_is_and_ends_cleanly(
    run: Any, module: Any, tmp_path: Path, number: int, trust: str
) -> None:
    seen: dict[str, Any] = {}
    events = []

    @contextmanager
    def open_pond(root: Path, **options: Any) -> Iterator[Any]:
        seen.update(options, root=root)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        yield types.SimpleNamespace(address="127.0.0.1:4100")
        events.append("closed")

    module("millpond.pond", open_pond=open_pond)
    trusting = () if trust == "all" else ("--trust", trust)
    sizes = ("--containers", "2", "--threads", "3", "--backups", "1", "--port", "4100")
    ended = run("serve", "--root", str(tmp_path), *sizes, *trusting)
    assert ended.code == 0, ended.err
    assert events == ["closed"]
    assert seen == {
        "root": tmp_path,
        "containers": 2,
        "threads": 3,
        "slices": 64,
        "backups": 1,
        "host": "127.0.0.1",
        "port": 4100,
        "trust": trust,
    }
    for part in (
        "127.0.0.1:4100, 2 containers",
        f"token in {tmp_path / 'token'}, one that may only read in {tmp_path / 'token.read'}",
        "mp.connect('127.0.0.1:4100'",
    ):
        assert part in ended.out


@pytest.mark.parametrize(("number", "containers"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_served_pond_can_be_joined_and_ends_with_its_group(
    tmp_path: Path, number: int, containers: int
) -> None:
    """As in a terminal, where Ctrl-C reaches the containers too."""
    command = [
        sys.executable,
        "-c",
        "from millpond.cli import main; main()",
        "serve",
        "--root",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [*command, "--containers", str(containers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as served:
        assert served.stdout is not None
        address = served.stdout.readline().split(" at ")[1].partition(",")[0]
        token = (tmp_path / "token").read_text()
        with millpond.connect(address, token) as pond:
            processes = [container.pid for container in pond.containers()]
            assert len(processes) == containers
        os.killpg(served.pid, number)
        out, err = served.communicate(timeout=60)
    assert (served.returncode, err) == (0, "")
    assert out.endswith("closing\n")
    assert token.strip() not in out
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_can_be_ended_while_it_opens(run: Any, module: Any, tmp_path: Path, number: int) -> None:
    def open_pond(root: Path, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        threading.Event().wait(10)
        pytest.fail("it was not interrupted")

    module("millpond.pond", open_pond=open_pond)
    ended = run("serve", "--root", str(tmp_path))
    assert ended.code != 0
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "options",
    [
        ["--containers", "0"],
        ["--slices", "65536"],
        ["--slices", "0"],
        ["--port", "70000"],
        ["--backups", "17"],
    ],
)
def test_serve_refuses_numbers_out_of_range(run: Any, tmp_path: Path, options: list[str]) -> None:
    ended = run("serve", "--root", str(tmp_path / "pond"), *options)
    assert ended.code == 2
    assert options[0] in ended.err
    assert not (tmp_path / "pond").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("1073741824", 1 << 30), ("900m", 900 << 20), ("2g", 2 << 30), ("2 GiB", 2 << 30), ("1TB", 1 << 40)],
)
def test_serve_passes_its_limits_on(run: Any, module: Any, tmp_path: Path, text: str, size: int) -> None:
    def open_pond(root: Path, **options: Any) -> Any:
        limits = f"limits {options['memory']} and {options['code_seconds']}"
        raise MillpondError(f"{limits}, {options['backups']} backups")

    module("millpond.pond", open_pond=open_pond)
    ended = run("serve", "--root", str(tmp_path), "--memory", text, "--code-seconds", "2.5", "--backups", "1")
    assert f"limits {size} and 2.5, 1 backups" in ended.err


@pytest.mark.parametrize("text", ["", "much", "-1g", "1.5g", "2x", "1e9"])
def test_serve_refuses_a_memory_that_is_no_number(run: Any, tmp_path: Path, text: str) -> None:
    ended = run("serve", "--root", str(tmp_path / "pond"), "--memory", text)
    assert ended.code == 1
    assert "--memory 2g" in ended.err
    assert not (tmp_path / "pond").exists()
