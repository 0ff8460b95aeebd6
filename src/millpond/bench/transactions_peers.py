"""The peers of the transactions benchmark through Spark: Redis, PostgreSQL and SQLite, a transaction for each event.

Each is a function for `mapInArrow` that gives the events with their outcomes. All keys have their rows beforehand.
Two tasks at once run their events side by side: none of the peers keeps the order of the events' times then.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    import psycopg

PIPELINE = 1_000
START_S_MAX = 20.0
DEBIAN = Path("/usr/lib/postgresql")  # it keeps the server's programs off PATH
Rows = dict[str, dict[int, tuple[int, ...]]]  # of all tables, by key


class Columns(NamedTuple):
    """What the peers know of an application: its tables with their defaults, its kinds with their fields, its results."""

    tables: Mapping[str, Mapping[str, int]]
    kinds: Mapping[str, Sequence[str]]
    results: Sequence[str]

    def calls(self, batch: pa.RecordBatch) -> Iterator[tuple[str, list[Any]]]:
        """Kind and fields of each event."""
        columns = {name: batch[name].to_pylist() for name in batch.schema.names}
        fields = {kind: [columns[name] for name in names] for kind, names in self.kinds.items()}
        for row, kind in enumerate(columns["kind"]):
            yield kind, [column[row] for column in fields[kind]]

    def with_outcomes(self, batch: pa.RecordBatch, found: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """The events, and of each a reason, null where it committed, and its results."""
        reasons, *results = zip(*found, strict=True) if found else [()] * (1 + len(self.results))
        batch = batch.append_column("committed", pa.array([reason is None for reason in reasons], pa.bool_()))
        batch = batch.append_column("reason", pa.array(reasons, pa.string()))
        for name, values in zip(self.results, results, strict=False):
            batch = batch.append_column(name, pa.array(values, pa.int64()))
        return batch


APPS = {
    "ledger": Columns(
        tables={"accounts": {"balance": 1_000}, "assets": {"amount": 1_000}},
        kinds={
            "transfer": ("src", "dst", "src_asset", "dst_asset", "money", "units"),
            "deposit": ("dst", "dst_asset", "money", "units"),
        },
        results=("balance", "left"),
    ),
    "bidding": Columns(
        tables={"items": {"price": 100, "stock": 1_000}},
        kinds={
            "bid": ("item", "price", "quantity"),
            "alter": ("ids", "numbers"),
            "top": ("ids", "numbers"),
        },
        results=("paid",),
    ),
}


class Peer(Protocol):
    """For `mapInArrow`; plain data that tasks can carry."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]: ...


# Redis: a hash for each column of a table, a script for each kind

LUA = {
    "transfer": """
        if tonumber(redis.call('HGET', KEYS[1], ARGV[1])) < tonumber(ARGV[5]) then return 'insufficient funds' end
        if tonumber(redis.call('HGET', KEYS[2], ARGV[3])) < tonumber(ARGV[6]) then return 'not enough assets' end
        redis.call('HINCRBY', KEYS[1], ARGV[1], -ARGV[5])
        redis.call('HINCRBY', KEYS[1], ARGV[2], ARGV[5])
        redis.call('HINCRBY', KEYS[2], ARGV[3], -ARGV[6])
        redis.call('HINCRBY', KEYS[2], ARGV[4], ARGV[6])
        return {tonumber(redis.call('HGET', KEYS[1], ARGV[1])), tonumber(redis.call('HGET', KEYS[2], ARGV[3]))}""",
    "deposit": """
        redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[3])
        redis.call('HINCRBY', KEYS[2], ARGV[2], ARGV[4])
        return {}""",
    "bid": """
        local price = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
        if tonumber(ARGV[2]) < price then return 'bid too low' end
        if tonumber(redis.call('HGET', KEYS[2], ARGV[1])) < tonumber(ARGV[3]) then return 'sold out' end
        redis.call('HINCRBY', KEYS[2], ARGV[1], -ARGV[3])
        return {price * ARGV[3]}""",
    # Keys and numbers come in turns.
    "alter": "redis.call('HSET', KEYS[1], unpack(ARGV)) return {}",
    "top": """
        for place = 1, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], ARGV[place], ARGV[place + 1]) end
        return {}""",
}


class RedisTask:
    """Asks a server, many events in one pipeline."""

    def __init__(self, app: str, port: int) -> None:
        self._columns = APPS[app]
        self._port = port

    def load(self, keys: int) -> None:
        import redis

        with redis.Redis(port=self._port) as client:
            client.flushall()
            for table, defaults in self._columns.tables.items():
                for column, value in defaults.items():
                    client.hset(f"{table}.{column}", mapping=dict.fromkeys(map(str, range(keys)), value))

    def tables(self) -> Rows:
        import redis

        found: Rows = {}
        with redis.Redis(port=self._port) as client:
            for table, defaults in self._columns.tables.items():
                columns: list[Any] = [client.hgetall(f"{table}.{column}") for column in defaults]
                found[table] = {int(key): tuple(int(column[key]) for column in columns) for key in columns[0]}
        return found

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import redis

        columns = self._columns
        names = [f"{table}.{column}" for table, defaults in columns.tables.items() for column in defaults]
        nothing = (None,) * len(columns.results)
        with redis.Redis(port=self._port) as client:
            script = {kind: client.script_load(LUA[kind]) for kind in columns.kinds}
            for batch in batches:
                found: list[tuple[Any, ...]] = []
                for start in range(0, batch.num_rows, PIPELINE):
                    pipe = client.pipeline(transaction=False)
                    for kind, fields in columns.calls(batch.slice(start, PIPELINE)):
                        if kind in ("alter", "top"):
                            words = [word for pair in zip(*fields, strict=True) for word in pair]
                        else:
                            words = fields
                        pipe.execute_command("EVALSHA", script[kind], len(names), *names, *words)
                    found += [
                        (said.decode(), *nothing) if isinstance(said, bytes) else (None, *(said or nothing))
                        for said in pipe.execute()
                    ]
                yield columns.with_outcomes(batch, found)


# PostgreSQL: a function for each kind

SQL = {
    "ledger": """
        CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
        CREATE TABLE assets (id bigint PRIMARY KEY, amount bigint NOT NULL);
        CREATE FUNCTION transfer(src bigint, dst bigint, src_asset bigint, dst_asset bigint, money bigint, units bigint,
            OUT reason text, OUT r0 bigint, OUT r1 bigint) LANGUAGE plpgsql AS $$
        BEGIN
            -- In one order for all, so that no two wait for each other.
            PERFORM 1 FROM accounts WHERE id IN (src, dst) ORDER BY id FOR UPDATE;
            PERFORM 1 FROM assets WHERE id IN (src_asset, dst_asset) ORDER BY id FOR UPDATE;
            IF (SELECT balance FROM accounts WHERE id = src) < money THEN
                reason := 'insufficient funds'; RETURN;
            END IF;
            IF (SELECT amount FROM assets WHERE id = src_asset) < units THEN
                reason := 'not enough assets'; RETURN;
            END IF;
            UPDATE accounts SET balance = balance - money WHERE id = src RETURNING balance INTO r0;
            UPDATE accounts SET balance = balance + money WHERE id = dst;
            UPDATE assets SET amount = amount - units WHERE id = src_asset RETURNING amount INTO r1;
            UPDATE assets SET amount = amount + units WHERE id = dst_asset;
            IF src = dst THEN r0 := r0 + money; END IF;
            IF src_asset = dst_asset THEN r1 := r1 + units; END IF;
        END $$;
        CREATE FUNCTION deposit(dst bigint, dst_asset bigint, money bigint, units bigint,
            OUT reason text, OUT r0 bigint, OUT r1 bigint) LANGUAGE plpgsql AS $$
        BEGIN
            UPDATE accounts SET balance = balance + money WHERE id = dst;
            UPDATE assets SET amount = amount + units WHERE id = dst_asset;
        END $$;
    """,
    "bidding": """
        CREATE TABLE items (id bigint PRIMARY KEY, price bigint NOT NULL, stock bigint NOT NULL);
        CREATE FUNCTION bid(item bigint, offered bigint, quantity bigint, OUT reason text, OUT r0 bigint)
            LANGUAGE plpgsql AS $$
        DECLARE found items;
        BEGIN
            SELECT * INTO found FROM items WHERE id = item FOR UPDATE;
            IF offered < found.price THEN reason := 'bid too low'; RETURN; END IF;
            IF found.stock < quantity THEN reason := 'sold out'; RETURN; END IF;
            UPDATE items SET stock = stock - quantity WHERE id = item;
            r0 := found.price * quantity;
        END $$;
        CREATE FUNCTION alter(ids bigint[], numbers bigint[], OUT reason text, OUT r0 bigint) LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM 1 FROM items WHERE id = ANY(ids) ORDER BY id FOR UPDATE;
            UPDATE items SET price = n FROM (
                SELECT DISTINCT ON (i) i, n FROM unnest(ids, numbers) WITH ORDINALITY AS given(i, n, place)
                ORDER BY i, place DESC) AS last WHERE id = i;
        END $$;
        CREATE FUNCTION top(ids bigint[], numbers bigint[], OUT reason text, OUT r0 bigint) LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM 1 FROM items WHERE id = ANY(ids) ORDER BY id FOR UPDATE;
            UPDATE items SET stock = stock + n FROM (
                SELECT i, sum(n) AS n FROM unnest(ids, numbers) AS given(i, n) GROUP BY i) AS total WHERE id = i;
        END $$;
    """,
}


def find_postgres(progress: Callable[[str], None]) -> Path | None:
    """The directory of the server's programs. None, and a line that says so, where there is none."""
    found = shutil.which("initdb")
    installed = [Path(found).parent] if found else []
    installed += sorted(DEBIAN.glob("*/bin"), reverse=True)
    installed = [path for path in installed if (path / "initdb").exists() and (path / "postgres").exists()]
    if not installed:
        progress("postgresql: skipped, it is not installed (Debian: apt-get install postgresql)")
        return None
    try:
        import psycopg  # noqa: F401 - is it there?
    except ImportError:
        progress("postgresql: skipped, psycopg is not installed (pip install 'millpond[bench]')")
        return None
    return installed[0]


@contextlib.contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Runs a server with its default settings in a directory of its own. Gives what to connect with.

    It listens on a socket in that directory, which only its user may enter, and never runs as root.
    """
    user: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="millpond-pg-") as folder:
        if os.geteuid() == 0:
            owner = _unprivileged()
            user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = os.path.join(folder, "data")
        subprocess.run(  # noqa: S603 - a path that was found, constant arguments
            [programs / "initdb", "-D", data, "-U", "bench", "-A", "trust", "--no-instructions"],
            check=True,
            capture_output=True,
            cwd=folder,
            **user,
        )
        server = subprocess.Popen(  # noqa: S603 - as above
            [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses="],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **user,
        )
        address = f"host={folder} user=bench dbname=postgres"
        try:
            _await_postgres(address)
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def _unprivileged() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def _await_postgres(address: str) -> None:
    import psycopg

    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class PostgresTask:
    """Calls a function for each event, pipelined; `per_commit` events are a transaction."""

    def __init__(self, app: str, address: str, per_commit: int) -> None:
        self._app = app
        self._columns = APPS[app]
        self._address = address
        self._per_commit = per_commit

    def load(self, keys: int) -> None:
        with self._connect() as connection:
            for table in self._columns.tables:
                connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
            for kind in self._columns.kinds:
                connection.execute(f"DROP FUNCTION IF EXISTS {kind}".encode())
            connection.execute(SQL[self._app].encode())
            for table, defaults in self._columns.tables.items():
                values = ", ".join(map(str, defaults.values()))
                connection.execute(
                    f"INSERT INTO {table} SELECT id, {values} FROM generate_series(0, {keys - 1}) AS id".encode()  # noqa: S608 - our own names
                )
                connection.execute(f"VACUUM ANALYZE {table}".encode())

    def tables(self) -> Rows:
        with self._connect() as connection:
            return {
                table: {row[0]: row[1:] for row in connection.execute(f"SELECT * FROM {table}".encode())}  # noqa: S608 - our own names
                for table in self._columns.tables
            }

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._connect() as connection:
            for batch in batches:
                found: list[tuple[Any, ...]] = []
                for start in range(0, batch.num_rows, PIPELINE):
                    found += self._run(connection, batch.slice(start, PIPELINE))
                yield self._columns.with_outcomes(batch, found)

    def _run(self, connection: psycopg.Connection, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        calls = {
            kind: f"SELECT * FROM {kind}({', '.join(['%s'] * len(fields))})".encode()  # noqa: S608 - our own names
            for kind, fields in self._columns.kinds.items()
        }
        cursors = []
        # Commands up to a sync are one transaction.
        with connection.pipeline() as pipeline:
            for row, (kind, fields) in enumerate(self._columns.calls(batch), start=1):
                cursors.append(connection.execute(calls[kind], fields, prepare=True, binary=True))
                if row % self._per_commit == 0:
                    pipeline.sync()
        return [row for cursor in cursors for row in cursor]

    def _connect(self) -> psycopg.Connection:
        import psycopg

        return psycopg.connect(self._address, autocommit=True)


# SQLite, in memory


class SqliteTask:
    """A database of the task's own: processes share none that is in memory."""

    def __init__(self, app: str, keys: int) -> None:
        self._app = app
        self._columns = APPS[app]
        self._keys = keys

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with contextlib.closing(self.database()) as database:
            yield from self.run(database, batches)

    def database(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", isolation_level=None)
        for table, defaults in self._columns.tables.items():
            columns = ", ".join(f"{name} INTEGER NOT NULL" for name in defaults)
            database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {columns})")
            places = ", ".join("?" * (1 + len(defaults)))
            rows = ((key, *defaults.values()) for key in range(self._keys))
            database.execute("BEGIN")
            database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)  # noqa: S608 - our own names
            database.execute("COMMIT")
        return database

    def tables(self, database: sqlite3.Connection) -> Rows:
        return {
            table: {row[0]: row[1:] for row in database.execute(f"SELECT * FROM {table}")}  # noqa: S608 - our own names
            for table in self._columns.tables
        }

    def run(
        self, database: sqlite3.Connection, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        do = database.execute
        for batch in batches:
            found: list[tuple[Any, ...]] = []
            for kind, fields in self._columns.calls(batch):
                do("BEGIN")
                found.append(STATEMENTS[kind](do, *fields))
                do("COMMIT")
            yield self._columns.with_outcomes(batch, found)


def _transfer(do: Any, src: int, dst: int, src_asset: int, dst_asset: int, money: int, units: int) -> Any:
    if do("SELECT balance FROM accounts WHERE id = ?", (src,)).fetchone()[0] < money:
        return "insufficient funds", None, None
    if do("SELECT amount FROM assets WHERE id = ?", (src_asset,)).fetchone()[0] < units:
        return "not enough assets", None, None
    do("UPDATE accounts SET balance = balance - ? WHERE id = ?", (money, src))
    do("UPDATE accounts SET balance = balance + ? WHERE id = ?", (money, dst))
    do("UPDATE assets SET amount = amount - ? WHERE id = ?", (units, src_asset))
    do("UPDATE assets SET amount = amount + ? WHERE id = ?", (units, dst_asset))
    balance = do("SELECT balance FROM accounts WHERE id = ?", (src,)).fetchone()[0]
    return None, balance, do("SELECT amount FROM assets WHERE id = ?", (src_asset,)).fetchone()[0]


def _deposit(do: Any, dst: int, dst_asset: int, money: int, units: int) -> Any:
    do("UPDATE accounts SET balance = balance + ? WHERE id = ?", (money, dst))
    do("UPDATE assets SET amount = amount + ? WHERE id = ?", (units, dst_asset))
    return None, None, None


def _bid(do: Any, item: int, offered: int, quantity: int) -> Any:
    price, stock = do("SELECT price, stock FROM items WHERE id = ?", (item,)).fetchone()
    if offered < price:
        return "bid too low", None
    if stock < quantity:
        return "sold out", None
    do("UPDATE items SET stock = stock - ? WHERE id = ?", (quantity, item))
    return None, price * quantity


def _alter(do: Any, ids: list[int], numbers: list[int]) -> Any:
    for item, price in zip(ids, numbers, strict=True):
        do("UPDATE items SET price = ? WHERE id = ?", (price, item))
    return None, None


def _top(do: Any, ids: list[int], numbers: list[int]) -> Any:
    for item, quantity in zip(ids, numbers, strict=True):
        do("UPDATE items SET stock = stock + ? WHERE id = ?", (quantity, item))
    return None, None


STATEMENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "transfer": _transfer,
    "deposit": _deposit,
    "bid": _bid,
    "alter": _alter,
    "top": _top,
}
