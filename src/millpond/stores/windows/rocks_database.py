"""RocksDB as its users would set it up for windows: one cache and its write buffers within a budget, no write-ahead log."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import BadOption


class RocksMemory:
    """A block cache, and write buffers that are charged to it: for one database, or for all of a process.

    `shared`: by a database for each slice. Each has smaller buffers then, for all of them together must not be full at once.
    """

    def __init__(self, budget: int, shared: bool = False) -> None:
        rocks = imported()
        self.budget = budget
        self._buffers = 32 if shared else 4
        self.cache = rocks.Cache(budget)
        self.write_buffers = rocks.WriteBufferManager.new_write_buffer_manager_with_cache(
            budget // 2, False, self.cache
        )
        self._lock = threading.Lock()
        self.loops = {"batches": 0.0, "puts": 0.0, "fill_s": 0.0, "steps": 0.0, "step_s": 0.0}
        """What it takes to be called for each key: CPU seconds to fill write batches, which RocksDB knows nothing of as yet, and
        in loops over iterators, in which are its own searches. What peers in C++ would not have is in these."""

    def note(self, puts: int, seconds: float) -> None:
        """A write batch was filled."""
        with self._lock:
            for name, more in (("batches", 1), ("puts", puts), ("fill_s", seconds)):
                self.loops[name] += more

    def note_steps(self, steps: int, seconds: float) -> None:
        """An iterator was moved so often."""
        with self._lock:
            self.loops["steps"] += steps
            self.loops["step_s"] += seconds

    def options(
        self, *, compaction: str = "level", prefix_bytes: int = 0, direct_io: bool = False
    ) -> dict[str, Any]:
        """How a database is set up, to be printed beside figures."""
        return {
            "budget_bytes": self.budget,
            "write_buffers_bytes": self.budget // 2,
            "write_buffer_bytes": max(self.budget // self._buffers, 1 << 16),
            "compaction": compaction,
            "compression": "none",
            "bloom_bits": 10,
            "prefix_bytes": prefix_bytes,
            "block_bytes": 4096,
            "background_jobs": 2,
            "write_ahead_log": False,
            "direct_io": direct_io,
        }


def open_database(path: str, memory: RocksMemory, chosen: dict[str, Any]) -> tuple[Any, Any]:
    """An empty database, and the options to write to it with."""
    rocks = imported()
    table = rocks.BlockBasedOptions()
    table.set_block_cache(memory.cache)
    table.set_bloom_filter(chosen["bloom_bits"], False)
    table.set_block_size(chosen["block_bytes"])
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_format_version(5)
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_write_buffer_size(chosen["write_buffer_bytes"])
    options.set_max_write_buffer_number(4)
    if chosen["prefix_bytes"]:
        options.set_prefix_extractor(rocks.SliceTransform.create_fixed_prefix(chosen["prefix_bytes"]))
        options.set_memtable_prefix_bloom_ratio(0.1)
    options.set_compression_type(rocks.DBCompressionType.none())
    style = rocks.DBCompactionStyle
    options.set_compaction_style(style.universal() if chosen["compaction"] == "universal" else style.level())
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(chosen["background_jobs"])
    options.set_use_direct_reads(chosen["direct_io"])
    options.set_use_direct_io_for_flush_and_compaction(chosen["direct_io"])
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    database = rocks.Rdict(path, options)
    writes = rocks.WriteOptions()
    writes.disable_wal = True
    database.set_write_options(writes)
    return database, writes


def as_bytes(numbers: NDArray[Any]) -> list[bytes]:
    """Each row of an array, as it lies in memory."""
    rows = np.ascontiguousarray(numbers).reshape(len(numbers), -1 if len(numbers) else 1)
    named: list[bytes] = rows.view(f"V{rows.shape[1] * rows.itemsize}").ravel().tolist() if rows.size else []
    return named


def imported() -> Any:
    try:
        return importlib.import_module("rocksdict")
    except ImportError as error:
        raise BadOption(
            "windows in RocksDB need the package rocksdict, which is not installed",
            hint="pip install 'millpond[bench]'",
            option="store",
        ) from error
