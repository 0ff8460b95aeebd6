"""Small programs that nobody thought of come out in a pond as they do in one process, epoch by epoch."""

from __future__ import annotations

import pyarrow as pa
from both_ways import DRAWN, EXAMPLES, define, graph
from hypothesis import given, settings
from hypothesis import strategies as st
from test_program_plain import entries
from test_programs_random import HEAD, HELPER, blocks

from millpond.programs.local import LocalRun
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 4
ROWS = pa.schema({"k": pa.int64(), "j": pa.int64(), "xs": pa.list_(pa.int64())})


@settings(parent=DRAWN, max_examples=EXAMPLES // 4 or 25)
@given(
    body=blocks(2, "        "),
    lanes=st.integers(1, 3),
    seed=st.integers(0, 50),
    containers=st.integers(1, 3),
)
def test_a_pond_and_one_process(body: str, lanes: int, seed: int, containers: int) -> None:
    """Also where a field is visited twice, and calls of an epoch go past each other: both do so in the same way."""
    cls = define(HEAD + body + "        return x + y\n" + HELPER, LANES=lanes)
    calls = [
        {"k": (n + seed) % 4, "j": (n * 3 + seed) % 5, "xs": [(n + i) % 3 for i in range((n + seed) % 3)]}
        for n in range(6)
    ]
    local = LocalRun(graph(cls), slices=SLICES)
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        program = pond.program("p", cls)
        go = program.call("go", into="out", name="feed")
        for epoch, part in enumerate((calls[:4], calls[4:])):
            given_back = go(pa.Table.from_pylist(part, ROWS), epoch)["out"].to_pylist()
            assert given_back == [each.value for each in local.epoch([("go", call) for call in part])]
        held = entries(program)
        expected = {name: held_there for name, held_there in local.state().items() if name in held}
        assert held == expected
        pond.validate()
