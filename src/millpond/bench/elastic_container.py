"""A container process whose files have other bounds, given as JSON before all else: for benchmarks alone."""

from __future__ import annotations

import socket
import sys
from typing import Any

import msgspec

from millpond.container import process
from millpond.container.holdings.base import Bounds, Means


def main(bounds: Bounds, root: str, sockets: str, *rest: Any) -> None:
    def means(*args: Any, **kwargs: Any) -> Means:
        return Means(*args, **{**kwargs, "bounds": bounds})

    # There is no option for it: nobody else needs one.
    process.Means = means  # type: ignore[assignment,attr-defined]
    process.main(root, sockets, *rest)


if __name__ == "__main__":
    _bounds, _root, _sockets, _container, _threads, _seconds, _memory, _trust, _line = sys.argv[1:]
    main(
        msgspec.json.decode(_bounds, type=Bounds),
        *(_root, _sockets, int(_container), int(_threads), float(_seconds), int(_memory), _trust),
        socket.socket(fileno=int(_line)),
    )
