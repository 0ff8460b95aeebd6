"""What is compiled, and that the same code runs without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
STORES = HERE.parent / "stores"
SECURITY = HERE.parent / "security"

COUNT_AFTER_WARM_UP = """
import sys
from numba.core.dispatcher import Dispatcher
import millpond.kernels
import millpond.kernels.index, millpond.stores.versioned, millpond.stores.rows

def compiled():
    return {
        (name, attribute): len(value.signatures)
        for name, module in sys.modules.items() if name.startswith("millpond.kernels")
        for attribute, value in vars(module).items() if isinstance(value, Dispatcher)
    }

millpond.kernels.warm_up()
before = compiled()
sys.path[:0] = sys.argv[1:]
import test_keys, test_rowlog, test_rows, test_together, test_versioned
test_versioned.test_many_random_batches_across_growth("i64", 2)
test_versioned.test_many_random_batches_across_growth("bytes", 1)
test_versioned.test_read_only_strided_and_unaligned_input()
test_versioned.test_nan_is_above_all_numbers()
test_versioned.test_more_columns_than_the_null_mask_holds()
test_versioned.test_a_frozen_copy_keeps_what_it_was_taken_with()
test_together.test_slices_together_are_as_each_by_itself("i64", True, "keep_latest")
test_together.test_slices_together_are_as_each_by_itself("bytes", False, "ttl")
test_keys.test_single_columns_round_trip("boolean", 1)
test_keys.test_the_encoding_is_a_format()
test_keys.test_empty_batches()
for name in test_rows.VALUES:
    test_rows.test_order_partition_and_offsets_make_no_difference(name)
    test_rows.test_answers_return_to_the_order_of_their_batch(name)
for name in test_rowlog.SCHEMAS:
    test_rowlog.compare_with_oracle(test_rowlog.unaligned_in_memory(test_rowlog.SCHEMAS[name]), name, 1)
after = compiled()
late = sorted(k for k in after if after[k] > before.get(k, 0))
assert not late, late
assert len(before) > 30
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_warm_up_compiles_all_that_stores_use() -> None:
    done = run(["-c", COUNT_AFTER_WARM_UP, str(STORES)])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_same_answers_without_the_compiler() -> None:
    chosen = [
        f"{STORES}/test_versioned.py::test_every_type_under_every_rule[i64-long]",
        f"{STORES}/test_versioned.py::test_every_type_under_every_rule[bytes-string]",
        f"{STORES}/test_versioned.py::test_every_type_under_every_rule[i64-double]",
        f"{STORES}/test_versioned.py::test_nan_is_above_all_numbers",
        f"{STORES}/test_versioned.py::test_a_total_may_pass_the_limit_on_its_way",
        f"{STORES}/test_versioned.py::test_a_frozen_copy_keeps_what_it_was_taken_with",
        f"{STORES}/test_together.py::test_slices_together_are_as_each_by_itself[keep_latest-True-bytes]",
        f"{STORES}/test_together.py::test_slices_together_are_as_each_by_itself[ttl-False-i64]",
        f"{STORES}/test_keys.py",
        f"{STORES}/test_rows.py",
        f"{STORES}/test_rowlog.py::test_any_sequence_gives_what_the_oracle_gives[unaligned-0-nested]",
        f"{STORES}/test_rowlog.py::test_any_sequence_gives_what_the_oracle_gives[unaligned-1-longs]",
        f"{HERE}/test_hashing.py",
        f"{SECURITY}/test_chosen_keys.py::test_byte_keys_have_siphash",
        f"{SECURITY}/test_chosen_keys.py::test_equal_hashes_mean_equal_longs",
        f"{SECURITY}/test_chosen_times.py::test_merged_rows_come_to_lie_where_rows_one_by_one_would",
        f"{HERE}/test_growth.py::test_bytes_keys_that_share_a_hash_stay_apart",
        f"{HERE}/test_growth.py::test_sweeping_gives_memory_back",
    ]
    options = ["-q", "-p", "no:cacheprovider", "-W", "error::RuntimeWarning"]
    done = run(["-m", "pytest", *options, *chosen], NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
