"""Compile, or load from the cache, every specialisation of every kernel that stores call."""

from __future__ import annotations

import numpy as np

from millpond.kernels import (
    buffers,
    compaction,
    digest,
    edges,
    encoding,
    folding,
    hashing,
    index,
    lookups,
    partition,
    rows,
    segment_words,
    segments,
    sliced,
    slot_hashing,
    spilled,
    versions,
)
from millpond.kernels import control as at


def warm_up() -> None:
    """Call each kernel once on a few rows. A test holds that no store call compiles anything after this."""
    longs = np.arange(3, dtype=np.int64)
    offsets = np.arange(4, dtype=np.int64)
    data = np.zeros(64, np.uint8)
    out, begin, end = np.empty_like(longs), np.empty_like(longs), np.empty_like(longs)

    hashes = hashing.hash_longs(longs)
    hashing.hash_bytes(offsets, data)
    places, _ = partition.slice_places(hashing.slices_of(hashes, 4), 4)
    order = partition.inverse(places)
    partition.scatter(longs, order, out)
    partition.gather(longs, order, out)
    partition.gather_bits(data, 0, order, data[:1].copy())

    buffers.gather_codes(longs.astype(np.int32), longs, out)
    buffers.gather_sizes(offsets, longs, np.empty_like(offsets))
    buffers.gather_bytes(offsets, data, longs, offsets, data)
    buffers.scatter_sizes(offsets, longs, offsets.copy())
    buffers.scatter_bytes(offsets, data, longs, offsets, data)
    buffers.pack_valid(data, longs, data.copy())
    buffers.offsets_in_bounds(offsets, 3)

    digest.fold_words(hashes, hashes, data, 0)
    digest.fold_lists(offsets, hashes, hashes)
    digest.total_of(hashes)

    sizes = np.full(3, 12, np.int64)
    encoding.add_sizes(offsets, sizes)
    encoding.write_longs(longs, longs * 8, data)
    encoding.write_bytes(offsets, data, longs * 8, np.zeros(64, np.uint8))
    encoding.read_longs(data, longs * 8, longs * 8 + 8, out)
    encoding.read_sizes(np.zeros(64, np.uint8), longs * 8, longs * 8 + 8, offsets.copy())
    encoding.read_bytes(data, longs.copy(), np.zeros(4, np.int64), data)

    control = np.zeros(at.SIZE, np.int64)
    table, old = np.zeros((16, 2), np.int64), np.zeros((0, 2), np.int64)
    entries = np.zeros((3, 2), np.int64)
    marks = slot_hashing.hash_longs(longs)
    slot_hashing.hash_bytes(offsets, data)
    index.find_bytes(offsets, data, marks, table, old, np.zeros(4, np.int64), data, out)
    index.create_bytes(
        offsets, data, marks, 0, table, old, np.zeros(4, np.int64), data, entries, control, out
    )
    control[:] = 0
    table[:] = 0
    index.find(marks, table, old, out)
    index.create(longs, marks, 0, table, old, longs.copy(), entries, control, out)
    index.migrate(table, old, control, 1)

    arena, heads = np.zeros((32, 3), np.int64), np.full(versions.CLASSES, -1, np.int64)
    new = np.zeros((3, 3), np.int64)
    lookups.mark_nulls(data, 0, 0, new)
    versions.insert(out, new, 0, True, 0, 0, 0, entries, arena, heads, control)
    versions.merge(out, new, order, 0, True, 0, 0, entries, arena, heads, control)
    lookups.latest_at(out, entries, arena, longs, begin)
    lookups.drop_until(begin, arena, longs)
    lookups.ranges(out, entries, arena, longs, longs, begin, end)
    lookups.entry_ranges(entries, control, begin, end)
    lookups.expand(begin, end, np.empty(4, np.int64), np.empty(3, np.int64))
    lookups.gather(arena, 0, 2, 0, begin, out, data[:1])
    lookups.gather_refs(arena, 1, begin, out)
    valid = np.empty(3, np.uint8)
    lookups.aggregate_longs(arena, 1, 2, 0, begin, end, lookups.TOTAL, out, valid)
    none, bounds, rows_out = longs[:0], np.zeros((0, 2), np.int64), np.zeros((1, 3), np.int64)
    by_key = (none, bounds, longs, offsets, data, slot_hashing.SECRET)
    sliced.latest_of_slices(*by_key, longs, longs, 2, bounds, rows_out, np.zeros((1, 3), np.uint8))
    sliced.insert_of_slices(*by_key, new, True, 0, 0, 0, 0, out, rows_out)
    cells, doubles = arena.view(np.float64), np.empty(3, np.float64)
    lookups.aggregate_doubles(arena, cells, 1, 2, 0, begin, end, lookups.TOTAL, doubles, valid)
    compaction.sweep(entries, arena, heads, control, 0, 1, 0, 3, valid)
    compaction.mark(longs, valid)
    ids = compaction.full_entries(longs[:1], entries, arena, 1)
    compaction.ranges_below(ids, entries, arena, 1, begin, end)
    compaction.retain(ids, offsets, data, entries, arena, heads, control, valid)
    compaction.rewrite(entries, arena.copy(), arena, control)
    compaction.renumber(entries, arena, control, 1)

    changed, step = np.full(3, folding.NEVER), np.zeros(3, np.uint8)
    folding.mark(longs, longs, changed, out)
    folding.plan_size(longs[:0], changed, entries, arena, out)
    folding.plan(longs[:0], out, entries, arena, 0, begin, step)
    folding.add_longs(arena, 1, 2, longs, step)
    folding.add_doubles(cells, 1, 2, False, longs, step)
    sums = offsets.copy()
    folding.vector_sizes(offsets, offsets, step, sums)
    for items in (longs, doubles, doubles.astype(np.float32)):
        folding.add_vectors(offsets, items, offsets, items, step, sums, items.copy())
    edges.net(offsets, longs, longs, slot_hashing.SECRET, step)

    keys, slots, made = longs.reshape(3, 1), np.zeros((16, 2), np.int64), np.full(3, rows.NO_ROW)
    rows.hash_keys(keys.view(np.uint64), slot_hashing.SECRET, np.empty(3, np.uint64))
    rows.find_rows(keys, longs, slots, keys, out)
    rows.make_rows(keys, longs, 0, slots, keys.copy(), np.zeros(1, np.int64), made)
    rows.move(slots, np.zeros((32, 2), np.int64))
    _warm_up_windows()


def _warm_up_windows() -> None:
    """The same for rows of open windows."""
    control = np.zeros(segments.CONTROL_SIZE, np.int64)
    control[segments.PARTS_FREE] = control[segments.SEGMENTS_FREE] = -1
    groups = np.full((2, segments.GROUP_FIELDS), -1, np.int64)
    parts = np.zeros((4, segments.PART_FIELDS), np.int64)
    table = np.zeros((8, segments.SEGMENT_FIELDS), np.int64)
    words, one, starts = np.zeros(8, np.int64), np.zeros(1, np.int64), np.array([0, 1])
    out, other = np.empty(4, np.int64), np.empty(4, np.int64)
    octets = words.view(np.uint8)

    segments.cluster(one, words[:2].copy(), one.copy(), one.copy(), starts.copy())
    segments.first_repeated(one, words[:2].copy())
    segments.add_rows(one, starts, starts, 0, groups, parts, table, control)
    segments.count_rows(one, groups, parts, out)
    segments.count_parts(one, groups, parts)
    segments.missing_parts(one, groups, parts, out, other)
    segments.collect(one, groups, parts, table, out, other)
    segments.collect_new(one, parts, table, out, other)
    segments.move_live(words, words.copy(), parts, table, control)
    segments.expect(one, one, 0, groups, parts, table, control)
    segments.merge(one, one, groups, parts)
    spilled.add_spilled(one, starts, parts, table, control)
    segments.add_loaded(one, starts[1:].copy(), starts, parts, table, control)
    spilled.evict(one, parts, table, control)
    spilled.on_disk_alone(groups, parts, 1, out, other)
    entries, wanted = np.zeros((1, spilled.ENTRY_FIELDS), np.int64), np.zeros(1, np.uint8)
    spilled.name_live(parts, wanted, out[:1].copy())
    spilled.scan(entries, one, out, other)
    spilled.spans(entries, 0, out, other, one.copy())
    spilled.checksums(words, one, one, out)
    spilled.copy_words(words, one, starts, words.copy())
    segments.release(one, groups, parts, table, control)

    segment_words.add_words(starts, 8, one.copy())
    segment_words.put_values(one, 1, one, starts, one.copy(), words)
    segment_words.get_values(words, 1, starts, one.copy(), out)
    segment_words.put_bytes(octets[:8].copy(), starts, one.copy(), words, octets)
    segment_words.get_bytes(octets, starts, one.copy(), octets[:8].copy())
