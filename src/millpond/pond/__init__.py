"""The public face: `mp.open` and `mp.connect` give a Pond, a Pond gives States, tables, transactions and flows."""

from __future__ import annotations

from millpond.pond.dedup import Dedup
from millpond.pond.join import Join
from millpond.pond.opening import connect, open_pond
from millpond.pond.pond import Pond
from millpond.pond.state import State
from millpond.pond.window import Window

__all__ = ["Dedup", "Join", "Pond", "State", "Window", "connect", "open_pond"]
