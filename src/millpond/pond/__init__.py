"""The public face: `open` and `connect` give a Pond, a Pond gives States."""

from __future__ import annotations

from millpond.pond.opening import connect, open_pond
from millpond.pond.pond import Pond
from millpond.pond.state import State

__all__ = ["Pond", "State", "connect", "open_pond"]
