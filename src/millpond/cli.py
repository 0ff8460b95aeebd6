"""The `millpond` command: serve a pond, look at one, run a benchmark, show a demonstration."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from millpond import __version__
from millpond.errors import BadOption, MillpondError, Unavailable

BENCHES = {
    "kernels": "millpond.bench.kernels",
    "streams": "millpond.bench.streams",
    "adcamp": "millpond.bench.adcamp",
    "growth": "millpond.bench.growth",
    "access": "millpond.bench.access",
    "cycles": "millpond.bench.cycles",
    "ftrl": "millpond.bench.ftrl",
    "transactions": "millpond.bench.transactions",
    "transactions-sensitivity": "millpond.bench.transactions_sensitivity",
    "tpcc": "millpond.bench.tpcc",
    "elastic": "millpond.bench.elastic",
    "nexmark": "millpond.bench.nexmark",
    "programs": "millpond.bench.programs",
}
DEMOS = {
    "adcamp": "millpond.apps.adcamp",
    "pond": "millpond.apps.pond_demo",
    "cycles": "millpond.apps.cycles",
    "ftrl": "millpond.apps.ftrl",
    "ledger": "millpond.apps.ledger",
    "bidding": "millpond.apps.bidding",
    "grep_sum": "millpond.apps.grep_sum",
    "tolls": "millpond.apps.tolls",
    "tpcc": "millpond.apps.tpcc",
    "topk": "millpond.apps.topk",
    "tweets": "millpond.apps.tweets",
    "nexmark": "millpond.apps.nexmark_demo",
    "recommender": "millpond.apps.recommender",
    "regression": "millpond.apps.regression",
    "clusters": "millpond.apps.clusters",
    "key_values": "millpond.apps.key_values",
    "word_count": "millpond.apps.word_count",
}
PEERS = ("duckdb", "networkx", "polars", "redis", "river")

app = typer.Typer(
    help="Shared, timestamped, transactional and elastic state for PySpark streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


def main() -> None:
    """Run the command line. A `MillpondError` ends it with its message, its hint and exit code 1."""
    try:
        app()
    except MillpondError as error:
        err.print("error:", style="bold red", end=" ")
        err.print(error.message, markup=False)
        if error.hint:
            err.print(f"hint: {error.hint}", markup=False)
        raise SystemExit(1) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"millpond {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end."),
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command()
def serve(
    root: Annotated[Path, typer.Option(help="The pond's directory; made where it does not exist.")],
    containers: Annotated[int, typer.Option(min=1, help="How many container processes to run.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each container.")] = None,
    slices: Annotated[
        int, typer.Option(min=1, max=65_535, help="Slices of a new pond; fixed from then on.")
    ] = 64,
    backups: Annotated[
        int, typer.Option(min=0, max=16, help="How many other containers hold a copy of each slice.")
    ] = 0,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; by TLS if it is not loopback, as 0.0.0.0 for all."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port to listen on; 0 takes a free one.")
    ] = 0,
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The certificate to show, in PEM; by default one is made."),
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, in PEM.")] = None,
    trust: Annotated[
        Literal["all", "data"],
        typer.Option(help="Opening a root runs the code in it; with data it is only read, and none runs."),
    ] = "all",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What each container may take, as in 2g or 900m; by default three quarters of the machine's.",
        ),
    ] = None,
    code_seconds: Annotated[
        float | None,
        typer.Option(help="How long transactions and rules of one's own may run; inf for no limit."),
    ] = None,
    log_figures: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="Say the pond's figures so often, a line of JSON on stderr."
        ),
    ] = None,
) -> None:
    """Run a pond on its own, to be shared by several programs. Ends on Ctrl-C or SIGTERM."""
    from millpond.pond import open_pond

    # While the pond opens, both signals interrupt it; once it is open, they let it close.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given: dict[str, Any] = {} if code_seconds is None else {"code_seconds": code_seconds}
    given |= {name: path for name, path in (("certificate", certificate), ("key", key)) if path is not None}
    if memory is not None:
        given["memory"] = _bytes_of(memory)
    if log_figures is not None:
        logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
        given["log_figures"] = log_figures
    with open_pond(
        root,
        containers=containers,
        threads=threads,
        slices=slices,
        backups=backups,
        host=host,
        port=port,
        trust=trust,
        **given,
    ) as pond:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        token_file = root.absolute() / "token"
        out.print(
            f"pond {root} at {pond.address}, {containers} container{'s' * (containers > 1)}", markup=False
        )
        out.print(f"token in {token_file}, one that may only read in {token_file}.read", markup=False)
        shown = ""
        bundle = root.absolute() / "client.pem"
        if bundle.exists():
            shown = f", certificate={str(bundle)!r}"
            out.print(
                f"by TLS: clients also need {bundle}, those that only read {bundle.with_suffix('.read.pem')};"
                " copy them by a safe way, mode 0600",
                markup=False,
            )
        out.print(
            f"connect with mp.connect({pond.address!r}, token=open({str(token_file)!r}).read(){shown})",
            markup=False,
        )
        # A signal that another thread took does not wake this one: it looks again by itself.
        while not ended.wait(0.5):
            pass
        out.print("closing")


Where = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="The pond's address; on this machine its root does as well.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Holds a token of the pond; the read-only one will do."),
]
BundleFile = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        metavar="FILE",
        help="By TLS: a copy of the pond's client.pem; client.read.pem goes with the read-only token.",
    ),
]


@app.command()
def top(
    address: Where,
    token_file: TokenFile = None,
    certificate: BundleFile = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one page and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: one JSON document instead.")] = False,
) -> None:
    """Watch a pond: containers, slices, rates, progress, moves. Ends on q or Ctrl-C; ? shows the keys."""
    from millpond.monitor import loop
    from millpond.monitor.joining import way_to

    if json and not once:
        raise BadOption("--json prints one document", hint="give --once, too", option="--json")
    way = way_to(address, token_file, certificate)
    if once or not out.is_terminal:
        loop.once(way.join, way.address, interval, json, out)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        loop.watch(way.join, way.address, interval, Console(highlight=False))


@app.command()
def metrics(
    address: Where,
    token_file: TokenFile = None,
    certificate: BundleFile = None,
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write there instead, whole or not at all."),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="With --out: again and again, until Ctrl-C or SIGTERM."
        ),
    ] = None,
) -> None:
    """Print a pond's figures as Prometheus reads them."""
    from millpond.monitor.joining import way_to
    from millpond.pond.figures import NO_POND

    if every is not None and file is None:
        raise BadOption("--every writes a file anew", hint="give --out FILE, too", option="--every")
    way = way_to(address, token_file, certificate)
    if file is None:
        with way.join() as pond:
            out.file.write(pond.metrics_text())
        return
    _check_writable(file, "--out")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            try:
                with way.join() as pond:
                    _replace(file, pond.metrics_text())
            except Unavailable:
                if every is None:
                    raise
                # Figures of a pond that is closed must not look as if they were of now.
                _replace(file, NO_POND)
            if every is None:
                return
            time.sleep(every)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run, to see that it works.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the results to FILE too, and plots of them beside it."),
    ] = None,
    flink: Annotated[
        bool,
        typer.Option(
            "--flink", help="Measure Flink too, for adcamp and nexmark: installed for itself on first use."
        ),
    ] = False,
    query: Annotated[
        list[str] | None,
        typer.Option(metavar="Q", help="Measure this query alone, for nexmark; may be given again."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM,...",
            help="Measure these systems of streams alone, or these parts of programs or nexmark.",
        ),
    ] = None,
) -> None:
    """Measure Millpond beside its peers, on the same work in the same run."""
    module = _registered(BENCHES, name, "bench")
    asked: dict[str, Any] = {"flink": flink or None, "only": only and only.split(","), "query": query or None}
    options = {option: value for option, value in asked.items() if value is not None}
    for option in options.keys() - inspect.signature(module.run).parameters.keys():
        raise BadOption(f"the bench {name!r} has no --{option}", hint="leave it out", option=f"--{option}")
    if json is not None:
        _check_writable(json)
    from millpond.bench import report

    results = module.run(quick, lambda line: err.print(line, style="dim", markup=False), **options)
    shown = module if hasattr(module, "print_table") else report
    shown.print_table(name, results)
    if json is not None:
        report.write_json(json, name, results)
        for file in shown.plot(json.with_suffix(""), name, results):
            err.print(f"wrote {file}", style="dim", markup=False)


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(DEMOS)}.")] = "adcamp",
    seconds: Annotated[int | None, typer.Option(min=1, help="How long its streams run.")] = None,
    rate: Annotated[int | None, typer.Option(min=1, help="Rows a second of each stream.")] = None,
    keys: Annotated[int | None, typer.Option(min=1, help="How many keys the rows have.")] = None,
    warehouses: Annotated[int | None, typer.Option(min=1, help="How many there are, for tpcc.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="How trainers keep in step, for ftrl: bsp, ssp or asp.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="How many words or tweets a window has, for topk and tweets.")
    ] = None,
    query: Annotated[
        list[str] | None, typer.Option(help="Of nexmark, one query; may be given several times.")
    ] = None,
    events: Annotated[int | None, typer.Option(min=1, help="How many there are, for nexmark.")] = None,
    master: Annotated[
        str | None, typer.Option(help="Where Spark runs, for adcamp, as in local-cluster[2,2,1024].")
    ] = None,
    hosting: Annotated[
        str | None, typer.Option(help="Where the pond's containers run, for adcamp: embedded or spark.")
    ] = None,
    containers: Annotated[int | None, typer.Option(min=1, help="How many there are, for adcamp.")] = None,
    backups: Annotated[
        int | None,
        typer.Option(min=0, help="How many other containers hold a copy of each slice, for adcamp."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ratings for recommender: MovieLens' u.data or ratings.csv."),
    ] = None,
) -> None:
    """Show Millpond at work. Ends by itself, with exit code 0 if every answer was right."""
    run = _registered(DEMOS, name, "demo").run
    asked = {
        "seconds": seconds,
        "rate": rate,
        "keys": keys,
        "warehouses": warehouses,
        "mode": mode,
        "window": window,
        "query": query or None,
        "events": events,
        "master": master,
        "hosting": hosting,
        "containers": containers,
        "backups": backups,
        "data": data,
    }
    given = {option: value for option, value in asked.items() if value is not None}
    for option in given.keys() - inspect.signature(run).parameters.keys():
        raise BadOption(f"the demo {name!r} has no --{option}", hint="leave it out", option=f"--{option}")
    if not run(**given):
        raise typer.Exit(1)


def _bytes_of(text: str) -> int:
    """A number of bytes, as in 2g, 900m or 1073741824: units are powers of 1,024."""
    from millpond.ops.limits import parse_bytes

    size = parse_bytes(text)
    if size is None:
        raise BadOption(
            f"{text!r} is not a number of bytes",
            hint="for example --memory 2g, or --memory 900m",
            option="--memory",
        )
    return size


def _registered(registry: dict[str, str], name: str, kind: str) -> ModuleType:
    if name not in registry:
        raise BadOption(f"no {kind} is called {name!r}", hint=f"known: {', '.join(registry)}", option="NAME")
    try:
        return importlib.import_module(registry[name])
    except ModuleNotFoundError as error:
        if error.name not in PEERS:
            raise
        raise MillpondError(
            f"the {kind} {name!r} needs {error.name}", hint="pip install 'millpond[bench]'"
        ) from error


def _replace(file: Path, text: str) -> None:
    """Whoever reads it meanwhile reads what was there before, or this."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise BadOption(f"cannot write {file}: {error.strerror}", option="--out") from None


def _check_writable(file: Path, option: str = "--json") -> None:
    """Before a run of minutes, not after it."""
    target = file if file.exists() else file.parent
    if file.is_dir() or not os.access(target, os.W_OK):
        raise BadOption(f"cannot write {file}", hint="give a file in a directory that exists", option=option)
