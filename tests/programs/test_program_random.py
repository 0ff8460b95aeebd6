"""Small programs that nobody thought of come out in a pond as they do in one process, epoch by epoch."""

from __future__ import annotations

import pyarrow as pa
from both_ways import DRAWN, EXAMPLES, graph
from hypothesis import given, settings
from hypothesis import strategies as st
from test_program_plain import entries
from test_programs_random import drawn_call, drawn_class, programs

from millpond.programs.local import LocalRun, Outcome
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 4
ROWS = pa.schema({"k": pa.int64(), "j": pa.int64(), "xs": pa.list_(pa.int64()), "s": pa.string()})


@settings(parent=DRAWN, max_examples=EXAMPLES // 4 or 25)
@given(
    source=programs(),
    lanes=st.integers(1, 3),
    seed=st.integers(0, 50),
    containers=st.integers(1, 3),
)
def test_a_pond_and_one_process(source: str, lanes: int, seed: int, containers: int) -> None:
    """Also where a field is visited twice, and calls of an epoch go past each other: both do so in the same way."""
    cls = drawn_class(source, lanes)
    calls = [drawn_call(cls, number, seed) for number in range(6)]
    for _, given_to in calls:
        given_to.pop("us", None)
    local = LocalRun(graph(cls), slices=SLICES)
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        program = pond.program("p", cls)
        for epoch, part in enumerate((calls[:4], calls[4:])):
            for method in sorted({method for method, _ in part}):
                rows = [arguments for name, arguments in part if name == method]
                call = program.call(method, into="out", name=method, history="shared")
                came = call(pa.Table.from_pylist(rows, ROWS), epoch).to_pylist()
                given_back = [Outcome(row["out"], row.get("error")) for row in came]
                assert given_back == local.epoch([(method, arguments) for arguments in rows])
        held = entries(program)
        expected = {name: held_there for name, held_there in local.state().items() if name in held}
        assert held == expected
        pond.validate()
