"""A process that joins a pond, and calls what it is told to, line by line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from test_program_clients import Orders

import millpond as mp

address, token = sys.argv[1:]
with mp.connect(address, Path(token).read_text()) as pond:
    orders = pond.program("orders", Orders)
    for line in sys.stdin:
        method, key, arguments = json.loads(line)
        try:
            given = orders.ask(method, idempotency_key=key, **arguments)
        except mp.MillpondError as error:
            given = {"error": f"{type(error).__name__}: {error.message}"}
        sys.stdout.write(f"{json.dumps(given)}\n")
        sys.stdout.flush()
