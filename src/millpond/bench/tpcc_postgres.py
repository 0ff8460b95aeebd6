"""PostgreSQL, the peer of the TPC-C benchmark: a function for each kind, as it advises, and sessions that call them."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pcsv

from millpond.apps.tpcc_inputs import KEY_SIZES
from millpond.bench.tpcc_peers import FIELDS, INDEXES, calls, create_table

if TYPE_CHECKING:
    import psycopg

PIPELINE = 1_000
_TYPES = {
    "int64": "bigint", "bool": "boolean", "string": 'text COLLATE "C"', "timestamp[us, tz=UTC]": "bigint"
}  # fmt: skip
_CASTS = {
    "ts": "bigint", "c_last": "text", "amount": "bigint", "items": "bigint[]", "supplies": "bigint[]",
    "quantities": "bigint[]",
}  # fmt: skip

FUNCTIONS = """
CREATE FUNCTION named(w bigint, d bigint, name text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE ids bigint[];
BEGIN
    SELECT array_agg(c_id ORDER BY c_first, c_id) INTO ids FROM customer
        WHERE c_w_id = w AND c_d_id = d AND c_last = name;
    RETURN ids[(cardinality(ids) + 1) / 2];
END $$;

CREATE FUNCTION new_order(ts bigint, w bigint, d bigint, c bigint, items bigint[], supplies bigint[],
    quantities bigint[], OUT reason text, OUT o bigint, OUT total bigint, OUT brands bigint, OUT credit text)
    LANGUAGE plpgsql AS $$
DECLARE
    discount bigint; tax bigint; known bigint; different bigint; size int := cardinality(items);
BEGIN
    SELECT count(*), count(DISTINCT (i_id, supply)) INTO known, different
        FROM unnest(items, supplies) AS wanted(i, supply) JOIN item ON i_id = i;
    IF known < size THEN reason := 'item number is not valid'; RETURN; END IF;
    UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = w AND d_id = d
        RETURNING d_next_o_id - 1, d_tax INTO o, tax;
    SELECT tax + w_tax INTO tax FROM warehouse WHERE w_id = w;
    SELECT c_discount, c_credit INTO discount, credit FROM customer
        WHERE c_w_id = w AND c_d_id = d AND c_id = c;
    INSERT INTO orders VALUES (w, d, o, c, ts, 0, size, w = ALL (supplies));
    INSERT INTO new_order VALUES (w, d, o, ts);
    WITH made AS (
        INSERT INTO order_line SELECT w, d, o, place, i, supply, 0, q, q * i_price
            FROM unnest(items, supplies, quantities) WITH ORDINALITY AS wanted(i, supply, q, place)
            JOIN item ON i_id = i
            RETURNING ol_amount)
        SELECT sum(ol_amount) INTO total FROM made;
    IF different = size THEN
        WITH taken AS (
            UPDATE stock SET s_quantity = s_quantity - q + CASE WHEN s_quantity - q < 10 THEN 91 ELSE 0 END,
                s_ytd = s_ytd + q, s_order_cnt = s_order_cnt + 1,
                s_remote_cnt = s_remote_cnt + CASE WHEN supply <> w THEN 1 ELSE 0 END
                FROM unnest(items, supplies, quantities) AS wanted(i, supply, q)
                WHERE s_w_id = supply AND s_i_id = i
                RETURNING i, s_original)
            SELECT count(*) INTO brands FROM taken JOIN item ON i_id = i WHERE s_original AND i_original;
    ELSE
        -- An item that is ordered twice is taken twice, one after the other.
        FOR place IN 1 .. size LOOP
            UPDATE stock SET s_quantity = s_quantity - quantities[place]
                    + CASE WHEN s_quantity - quantities[place] < 10 THEN 91 ELSE 0 END,
                s_ytd = s_ytd + quantities[place], s_order_cnt = s_order_cnt + 1,
                s_remote_cnt = s_remote_cnt + CASE WHEN s_w_id <> w THEN 1 ELSE 0 END
                WHERE s_w_id = supplies[place] AND s_i_id = items[place];
        END LOOP;
        SELECT count(*) INTO brands FROM unnest(items, supplies) AS wanted(i, supply)
            JOIN item ON i_id = i JOIN stock ON s_w_id = supply AND s_i_id = i
            WHERE s_original AND i_original;
    END IF;
    total := total * (10000 - discount) * (10000 + tax) / 100000000;
END $$;

CREATE FUNCTION payment(ts bigint, w bigint, d bigint, c_w bigint, c_d bigint, given bigint, name text,
    amount bigint, OUT reason text, OUT c bigint, OUT balance bigint, OUT credit text) LANGUAGE plpgsql AS $$
DECLARE payments bigint;
BEGIN
    c := CASE WHEN given = 0 THEN named(c_w, c_d, name) ELSE given END;
    UPDATE warehouse SET w_ytd = w_ytd + amount WHERE w_id = w;
    UPDATE district SET d_ytd = d_ytd + amount WHERE d_w_id = w AND d_id = d;
    UPDATE customer SET c_balance = c_balance - amount, c_ytd_payment = c_ytd_payment + amount,
        c_payment_cnt = c_payment_cnt + 1,
        c_paid_w_id = CASE WHEN c_credit = 'BC' THEN w ELSE c_paid_w_id END,
        c_paid_d_id = CASE WHEN c_credit = 'BC' THEN d ELSE c_paid_d_id END,
        c_paid_amount = CASE WHEN c_credit = 'BC' THEN amount ELSE c_paid_amount END
        WHERE c_w_id = c_w AND c_d_id = c_d AND c_id = c
        RETURNING c_balance, c_credit, c_payment_cnt INTO balance, credit, payments;
    INSERT INTO history VALUES (c_w, c_d, c, payments, w, d, ts, amount);
END $$;

CREATE FUNCTION order_status(w bigint, d bigint, given bigint, name text, OUT reason text, OUT c bigint,
    OUT balance bigint, OUT o bigint, OUT carrier bigint, OUT lines bigint, OUT total bigint)
    LANGUAGE plpgsql AS $$
BEGIN
    c := CASE WHEN given = 0 THEN named(w, d, name) ELSE given END;
    SELECT c_balance INTO balance FROM customer WHERE c_w_id = w AND c_d_id = d AND c_id = c;
    SELECT o_id, o_carrier_id INTO o, carrier FROM orders WHERE o_w_id = w AND o_d_id = d AND o_c_id = c
        ORDER BY o_id DESC LIMIT 1;
    SELECT count(*), sum(ol_amount) INTO lines, total FROM order_line
        WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id = o;
END $$;

CREATE FUNCTION delivery(ts bigint, w bigint, carrier bigint, OUT reason text, OUT delivered bigint)
    LANGUAGE plpgsql AS $$
DECLARE o bigint; c bigint; amount bigint;
BEGIN
    delivered := 0;
    FOR d IN 1 .. 10 LOOP
        SELECT no_o_id INTO o FROM new_order WHERE no_w_id = w AND no_d_id = d ORDER BY no_o_id LIMIT 1 FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM new_order WHERE no_w_id = w AND no_d_id = d AND no_o_id = o;
        UPDATE orders SET o_carrier_id = carrier WHERE o_w_id = w AND o_d_id = d AND o_id = o
            RETURNING o_c_id INTO c;
        WITH brought AS (
            UPDATE order_line SET ol_delivery_d = ts WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id = o
                RETURNING ol_amount)
            SELECT sum(ol_amount) INTO amount FROM brought;
        UPDATE customer SET c_balance = c_balance + amount, c_delivery_cnt = c_delivery_cnt + 1
            WHERE c_w_id = w AND c_d_id = d AND c_id = c;
        delivered := delivered + 1;
    END LOOP;
END $$;

CREATE FUNCTION stock_level(w bigint, d bigint, threshold bigint, OUT reason text, OUT low bigint)
    LANGUAGE plpgsql AS $$
DECLARE after bigint;
BEGIN
    SELECT d_next_o_id INTO after FROM district WHERE d_w_id = w AND d_id = d;
    SELECT count(DISTINCT ol_i_id) INTO low FROM order_line JOIN stock ON s_w_id = w AND s_i_id = ol_i_id
        WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id >= after - 20 AND ol_o_id < after AND s_quantity < threshold;
END $$;
"""


class Postgres:
    """A server's tables, made anew; `run` takes events by one session or by several."""

    def __init__(self, address: str, tables: Mapping[str, pa.Table]) -> None:
        self._address = address
        self._schemas = {name: table.schema for name, table in tables.items()}
        places = {
            kind: ", ".join(f"%s::{_CASTS.get(name, 'bigint')}" for name in names)
            for kind, names in FIELDS.items()
        }
        self._calls = {kind: f"SELECT * FROM {kind}({places[kind]})".encode() for kind in FIELDS}  # noqa: S608 - our own names
        with self._connect() as connection:
            connection.execute(b"DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            for name, table in tables.items():
                connection.execute(create_table(name, table.schema, _TYPES).encode())
                with connection.cursor().copy(f"COPY {name} FROM STDIN (FORMAT csv)".encode()) as copy:
                    copy.write(_csv(table))
            for index in INDEXES:
                connection.execute(index.encode())
            connection.execute(FUNCTIONS.encode())
            connection.execute(b"VACUUM ANALYZE")

    def run(self, events: pa.Table, per_commit: int) -> list[tuple[Any, ...]]:
        """One session, in the order of rows, pipelined; `per_commit` events are a transaction of the server's."""
        answers: list[tuple[Any, ...]] = []
        with self._connect() as connection:
            for start in range(0, len(events), PIPELINE):
                cursors = []
                # Commands up to a sync are one transaction.
                with connection.pipeline() as pipeline:
                    for row, (kind, fields) in enumerate(calls(events.slice(start, PIPELINE)), start=1):
                        cursors.append(
                            connection.execute(self._calls[kind], fields, prepare=True, binary=True)
                        )
                        if row % per_commit == 0:
                            pipeline.sync()
                answers += [row for cursor in cursors for row in cursor]
        return answers

    def run_at_once(self, events: pa.Table, sessions: int) -> None:
        """Several sessions, each with the events of its warehouses, a transaction for each event.

        Sessions do not wait for each other: which of two transactions of different warehouses is first is open. One that
        the server ends because of a deadlock is run again.
        """
        import psycopg

        errors: list[BaseException] = []

        def session(number: int) -> None:
            own = events.filter(pa.array([w % sessions == number for w in events["w"].to_pylist()]))
            try:
                with self._connect() as connection:
                    for kind, fields in calls(own):
                        while True:
                            try:
                                connection.execute(self._calls[kind], fields, prepare=True, binary=True)
                                break
                            except psycopg.errors.DeadlockDetected:
                                continue
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [threading.Thread(target=session, args=(number,)) for number in range(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def table(self, name: str) -> pa.Table:
        schema = self._schemas[name]
        key = ", ".join(schema.names[: KEY_SIZES[name]])
        query = f"COPY (SELECT * FROM {name} ORDER BY {key}) TO STDOUT (FORMAT csv)"  # noqa: S608 - our own names
        with self._connect() as connection, connection.cursor().copy(query.encode()) as copy:
            text = b"".join(copy)
        types = {
            field.name: pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in schema
        }
        if not text:
            return schema.empty_table()
        read = pcsv.read_csv(
            io.BytesIO(text),
            read_options=pcsv.ReadOptions(column_names=schema.names),
            convert_options=pcsv.ConvertOptions(
                column_types=types, true_values=["t"], false_values=["f"], strings_can_be_null=False
            ),
        )
        return read.cast(schema)

    def _connect(self) -> psycopg.Connection:
        import psycopg

        return psycopg.connect(self._address, autocommit=True)


def _csv(table: pa.Table) -> bytes:
    plain = pa.schema(
        [pa.field(f.name, pa.int64() if pa.types.is_timestamp(f.type) else f.type) for f in table.schema]
    )
    out = io.BytesIO()
    pcsv.write_csv(table.cast(plain), out, pcsv.WriteOptions(include_header=False))
    return out.getvalue()
