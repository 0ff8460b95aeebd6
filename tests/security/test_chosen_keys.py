"""Whoever chooses the keys, and knows every public hash, makes no hash table slow.

What is counted is how many slots lie between a key and where it was to be: the same on every machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

import millpond as mp
from millpond.kernels import control as at
from millpond.kernels import edges, hashing, slot_hashing
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.strings import Strings

compiled = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="a hundred thousand keys take a compiler"
)

Words = NDArray[np.uint64]
LONGS, BYTES = 100_000, 20_000
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # of XXH64
ARROW = (11400714785074694791, 14029467366897019727)  # of Arrow's dictionaries


def rotated(x: Words, bits: int) -> Words:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


def times(x: Words, factor: int) -> Words:
    return x * np.uint64(factor)


def divided(x: Words, factor: int) -> Words:
    return times(x, pow(factor, -1, 2**64))


def unfolded(x: Words, shift: int) -> Words:
    """What `x ^ (x >> shift)` was made of, for shifts of 22 and more."""
    return x ^ (x >> np.uint64(shift)) ^ (x >> np.uint64(2 * shift) if 2 * shift < 64 else np.uint64(0))


def words_of(mixed: Words) -> Words:
    """The words that XXH64 mixes into its state as these."""
    return divided(rotated(divided(mixed, P1), 64 - 31), P2)


def mixed(words: Words) -> Words:
    return times(rotated(times(words, P2), 31), P1)


def longs_hashed_to(hashes: Words) -> NDArray[np.int64]:
    """XXH64 of 8 bytes, step by step backwards."""
    h = divided(unfolded(hashes, 32), P3)
    h = divided(unfolded(h, 29), P2)
    h = unfolded(h, 33) - np.uint64(P4)
    h = rotated(divided(h, P1), 64 - 27) ^ np.uint64(P5 + 8)
    return words_of(h).view(np.int64)


def bytes_of_one_hash(count: int) -> NDArray[np.uint8]:
    """Keys of 16 bytes: the second word takes back what the first did to the state."""
    first = np.arange(1, count + 1, dtype=np.uint64)
    state = times(rotated(np.uint64(P5 + 16) ^ mixed(first), 27), P1) + np.uint64(P4)
    second = words_of(state ^ np.uint64(2**40 + 7))
    return np.stack([first, second], axis=1).view(np.uint8)


def texts_of_one_arrow_hash(count: int) -> list[str]:
    """Strings of 16 characters. One in 256 of what would do is text."""
    rng = np.random.default_rng(5)
    found: list[str] = []
    while len(found) < count:
        last = rng.integers(0, 128, (1 << 19, 8), dtype=np.uint8).view(np.uint64)[:, 0]
        first = divided((times(last, ARROW[0]).byteswap() ^ np.uint64(99)).byteswap(), ARROW[1])
        keys = np.stack([first, last], axis=1)
        keys = keys[((keys & np.uint64(0x8080808080808080)) == 0).all(axis=1)]
        found += [bytes(key).decode() for key in keys]
    return found[:count]


def binary(keys: NDArray[np.uint8]) -> pa.Array:
    count, size = keys.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(size)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(keys))]
    )


def chosen_longs() -> NDArray[np.int64]:
    """Their hashes share the lower 24 bits, by which they would have one slot, and the upper 22, for one slice."""
    return longs_hashed_to((np.arange(LONGS, dtype=np.uint64) << np.uint64(24)) | np.uint64(5))


def patterned() -> dict[str, NDArray[np.int64]]:
    i = np.arange(LONGS, dtype=np.uint64)
    return {
        "hash": chosen_longs(),
        "near": i.view(np.int64),
        "far": (i << np.uint64(47)).view(np.int64),
        "grid": ((i & np.uint64(511)) | ((i >> np.uint64(9)) << np.uint64(56))).view(np.int64)[: 1 << 16],
    }


def index_of(keys: Keys) -> KeyIndex:
    index = KeyIndex(keys.kind, np.zeros(at.SIZE, np.int64))
    index.assign(keys)
    index.advance_growth(len(index.old))
    return index


def steps(index: KeyIndex) -> float:
    """How many slots a key lies behind the one that it was to have, on average."""
    slots = np.flatnonzero(index.table[:, 1])
    return float(((slots - index.table[slots, 0]) & (len(index.table) - 1)).mean())


@compiled
def test_the_keys_are_what_they_are_meant_to_be() -> None:
    longs = chosen_longs()
    assert len(np.unique(longs)) == LONGS
    assert set((hashing.hash_longs(longs) & np.uint64(2**24 - 1)).tolist()) == {5}
    assert set(hashing.slices_of(hashing.hash_longs(longs), 64).tolist()) == {0}
    keys = Keys.from_arrow(binary(bytes_of_one_hash(BYTES)))
    assert len(set(keys.to_arrow().to_pylist())) == BYTES
    assert len(set(keys.hashes.tolist())) == 1


@compiled
@pytest.mark.parametrize("name", list(patterned()))
def test_chosen_longs_do_not_gather(name: str) -> None:
    longs = patterned()[name]
    random = np.random.default_rng(3).integers(-(2**63), 2**63, len(longs))
    assert steps(index_of(Keys.from_longs(longs))) < 3 * steps(index_of(Keys.from_longs(random)))


@compiled
def test_byte_keys_of_one_hash_do_not_gather() -> None:
    random = np.random.default_rng(3).integers(0, 256, (BYTES, 16), dtype=np.uint8)
    usual = steps(index_of(Keys.from_arrow(binary(random))))
    assert steps(index_of(Keys.from_arrow(binary(bytes_of_one_hash(BYTES))))) < 3 * usual


def cpu_ratio(chosen: Callable[[], object], usual: Callable[[], object]) -> float:
    """How much longer the one takes, by the best of three runs of each, after one that warms up."""
    usual()

    def seconds(work: Callable[[], object]) -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    return min(seconds(chosen) for _ in range(3)) / min(seconds(usual) for _ in range(3))


@compiled
def test_strings_that_arrow_cannot_tell_apart_are_numbered_in_time() -> None:
    random = np.random.default_rng(3).integers(33, 127, (BYTES, 16), dtype=np.uint8)
    texts, usual = pa.array(texts_of_one_arrow_hash(BYTES)), binary(random).cast(pa.string())
    assert cpu_ratio(lambda: Strings().intern(texts), lambda: Strings().intern(usual)) < 10


@compiled
def test_chosen_neighbours_are_counted_in_time() -> None:
    # They would fall into one place, if it were the upper bits of a product with a number that is known.
    chosen = divided(np.arange(LONGS, dtype=np.uint64) << np.uint64(40), 2**64 - 7046029254386353131)
    random = np.random.default_rng(3).integers(-(2**63), 2**63, LONGS)
    offsets, added = np.array([0, LONGS]), np.ones(LONGS, np.int64)

    def net(ids: NDArray[np.int64]) -> int:
        return edges.net(offsets, ids, added, slot_hashing.SECRET, np.zeros(LONGS, np.uint8))

    assert net(chosen.view(np.int64)) == LONGS
    assert cpu_ratio(lambda: net(chosen.view(np.int64)), lambda: net(random)) < 10


# The secret


def test_byte_keys_have_siphash() -> None:
    """Python's own hash of bytes is SipHash-1-3, of key 0 if it is told so."""
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip("this Python hashes bytes in another way")
    texts = [bytes(range(size)) for size in range(1, 40)]
    done = subprocess.run(
        [sys.executable, "-c", f"print([hash(text) for text in {texts!r}])"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    offsets, data = np.array([0, *np.cumsum([len(text) for text in texts])]), b"".join(texts)
    no_secret = np.zeros(6, np.uint64)
    hashes = slot_hashing.hash_bytes(offsets, np.frombuffer(bytearray(data), np.uint8), no_secret)
    assert str(hashes.tolist()) == done.stdout.strip()


def test_equal_hashes_mean_equal_longs() -> None:
    """Each step can be taken back."""
    longs = np.random.default_rng(3).integers(-(2**63), 2**63, 1000)
    secret = slot_hashing.SECRET
    h = slot_hashing.hash_longs(longs).view(np.uint64)
    for factor in secret[3:0:-1].tolist():
        assert factor % 2 == 1
        h = divided(unfolded(h, 32), factor)
    assert np.array_equal((h ^ secret[0]).view(np.int64), longs)


@compiled
def test_each_process_has_a_secret_of_its_own_that_no_kernel_is_compiled_with() -> None:
    script = """
import numpy as np
from pathlib import Path
from millpond.kernels import _jit, slot_hashing as hashing
print(hashing.hash_longs(np.arange(2)).tolist())
cached = b"".join(file.read_bytes() for file in Path(_jit.CACHE_DIRECTORY).rglob("slot_hashing*.nb?"))
assert len(cached) > 1000
assert not any(word.tobytes() in cached for word in hashing.SECRET)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    # The same cached kernel, another secret.
    assert done.stdout.strip() != str(slot_hashing.hash_longs(np.arange(2)).tolist())


def test_entries_come_in_the_order_of_their_keys_whatever_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys.from_longs(np.random.default_rng(3).integers(0, 500, 2000))

    def entries(secret: bytes) -> list[int]:
        made = slot_hashing.make_secret(secret)
        monkeypatch.setattr(slot_hashing.hash_longs, "__defaults__", (made,))
        return KeyIndex("i64", np.zeros(at.SIZE, np.int64)).assign(keys).tolist()

    assert entries(b"\x05" * 48) == entries(bytes(range(48)))


# Through the public face


@mp.transaction
def pay(accounts: Any, account: int, amount: int) -> None:
    accounts[account].balance += amount


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mp.Pond]:
    root: Path = tmp_path_factory.mktemp("chosen") / "pond"
    with mp.open(root, containers=1) as opened:
        yield opened


def pond_ratio(pond: mp.Pond, chosen: Callable[[], object], usual: Callable[[], object]) -> float:
    """As `cpu_ratio`, of work that containers do, too: how busy the machine is with others does not count."""

    def spent() -> float:
        return time.process_time() + sum(own["cpu_s"] for own in pond.metrics()["containers"].values())

    def seconds(work: Callable[[], object]) -> float:
        start = spent()
        work()
        return spent() - start

    usual_seconds = min(seconds(usual) for _ in range(2))
    return min(seconds(chosen) for _ in range(2)) / max(usual_seconds, 0.2)


@compiled
@pytest.mark.parametrize("key", ["long", "binary"])
def test_a_state_takes_and_finds_chosen_keys_in_time(pond: mp.Pond, key: str) -> None:
    rng = np.random.default_rng(3)
    if key == "long":
        chosen, usual = pa.array(chosen_longs()), pa.array(rng.integers(-(2**63), 2**63, LONGS))
    else:
        chosen = binary(bytes_of_one_hash(BYTES))
        usual = binary(rng.integers(0, 256, (BYTES, 16), dtype=np.uint8))
    state = pond.state(f"s_{key}", key=key, value="long")
    feed, fetch = (
        state.update(key="k", at="t", value="v", name="feed"),
        state.fetch(key="k", at="t", into="v"),
    )
    epochs = iter(range(10))

    def work(keys: pa.Array) -> None:
        epoch, numbers = next(epochs), np.arange(len(keys))
        times = epoch * LONGS + numbers
        feed(pa.table({"k": keys, "t": times, "v": numbers}), epoch)
        # The last one's time is not final yet.
        asked = pa.table({"k": keys[:-1], "t": np.full(len(keys) - 1, times[-2])})
        assert np.array_equal(fetch.now(asked)["v"].to_numpy(), numbers[:-1])

    assert pond_ratio(pond, lambda: work(chosen), lambda: work(usual)) < 5


@compiled
def test_transactions_take_chosen_keys_in_time(pond: mp.Pond) -> None:
    accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
    bank = pond.transactions("bank", [accounts], {"pay": pay})
    epochs = iter(range(10))

    def work(keys: NDArray[np.int64]) -> None:
        epoch = next(epochs)
        times, amounts = epoch * LONGS + np.arange(len(keys)), np.ones(len(keys), np.int64)
        outcomes = bank(pa.table({"ts": times, "account": keys, "amount": amounts}), epoch)
        assert outcomes["committed"].to_numpy().sum() == len(keys)

    longs, random = chosen_longs(), np.random.default_rng(3).integers(-(2**63), 2**63, LONGS)
    assert pond_ratio(pond, lambda: work(longs), lambda: work(random)) < 5
