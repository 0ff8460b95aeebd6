"""The public face: `mp.open` and `mp.connect` give a Pond, a Pond gives States, tables, transactions and flows."""

from __future__ import annotations

from millpond.pond.opening import connect, open_pond
from millpond.pond.pond import Pond
from millpond.pond.state import State

__all__ = ["Pond", "State", "connect", "open_pond"]
