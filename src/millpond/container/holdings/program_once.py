"""Which idempotency keys a slice remembers, and what their calls gave: entries of a map, as those of fields are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from millpond.container.holdings.program_store import ProgramStore
from millpond.errors import EpochChanged
from millpond.programs.decided import ABSENT
from millpond.programs.entries import KEYS
from millpond.programs.graph import Method
from millpond.programs.packing import pack, unpack

KEYS_KEPT = 20_000
"""Of all slices together, the newest keys are remembered in any case; and all that are younger than `KEYS_KEPT_S`."""
KEYS_KEPT_S = 900.0
_SLICE_MIN = 256


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """What a call gave. `call` tells it from others with the same key."""

    since_s: float
    call: bytes
    result: bytes
    error: str | None


class Given(NamedTuple):
    result: Any
    error: str | None


def place_of_key(method: Method, key: str) -> str:
    return f"{method.name} {key}"


def call_of(method: Method, arguments: Sequence[Any]) -> bytes:
    """What tells a call from another one, of all its arguments in their order."""
    types = [parameter.type for parameter in method.parameters]
    packed = pack([*arguments, method.returns or ""], [*types, "string"])
    return hashlib.blake2b(packed, digest_size=16).digest()


def remembered(store: ProgramStore, method: Method, key: str, call: bytes) -> Given | None:
    """What a call with that key gave; EpochChanged if it was another one."""
    found = store.part(KEYS).get(place_of_key(method, key))
    if found is ABSENT:
        return None
    kept = msgspec.msgpack.decode(found, type=_Kept)
    if kept.call != call:
        raise EpochChanged(
            f"a call of {method.name} with the idempotency key {key!r} was made with other arguments",
            hint="nothing was changed: give each call a key of its own",
            epoch=None,
        )
    return Given(unpack(kept.result, [method.returns or "long"])[0], kept.error)


def remember(store: ProgramStore, method: Method, key: str, call: bytes, given: Given, now_s: float) -> None:
    result = pack([given.result], [method.returns or "long"])
    value = msgspec.msgpack.encode(_Kept(now_s, call, result, given.error))
    store.part(KEYS).change(place_of_key(method, key), value)


def forget_oldest(store: ProgramStore, slices: int, now_s: float) -> None:
    """Lets go of keys that are neither young nor among the newest; `slices` is how many share what is kept."""
    keys = store.part(KEYS)
    most = max(_SLICE_MIN, 2 * KEYS_KEPT // slices)
    # Looking takes a while: it is done each time that there is a quarter more.
    if len(keys) <= max(most, store.keys_looked) * 5 // 4:
        return
    ages = sorted((msgspec.msgpack.decode(kept, type=_Kept).since_s, place) for place, kept in keys.items())
    until = now_s - KEYS_KEPT_S
    for since_s, place in ages[: len(ages) - most]:
        if since_s < until:
            keys.change(place, ABSENT)
    store.keys_looked = len(keys)
