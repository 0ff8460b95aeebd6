"""What a user writes: the decorator, what fields are annotated with, and what methods may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, overload

from millpond.errors import BadOption, Rejected

T = TypeVar("T")
C = TypeVar("C", bound=type)
LANES_MAX = 1 << 10
ROUNDS_MAX = 1_000_000


class Kind(NamedTuple):
    """How a field is spread."""

    name: Literal["partitioned", "partial"]


Partitioned = Annotated[T, Kind("partitioned")]
"""Of a field: it is split by key, and a method reaches one key of it at a time: `self.field[key]`."""

Partial = Annotated[T, Kind("partial")]
"""Of a field: there are as many of it as lanes. A row reaches that of its lane, or all by `everywhere`."""


class ProgramOptions(NamedTuple):
    """What the decorator was told."""

    lanes: int
    max_rounds: int


@overload
def program(cls: C, /) -> C: ...
@overload
def program(*, lanes: int = 1, max_rounds: int = 1_000) -> Callable[[C], C]: ...
def program(cls: Any = None, /, *, lanes: int = 1, max_rounds: int = 1_000) -> Any:
    """Make a class a program: its annotated fields are state, its methods what can be called.

    The class stays what it is, and `Class()` runs it as plain Python. It is translated here, and what cannot be is a
    BadProgram with file, line and what to do. `lanes` is how many of each partial field there are; `max_rounds` how many
    tasks one call may go through, where a loop goes from task to task.
    """
    for option, value, most in (("lanes", lanes, LANES_MAX), ("max_rounds", max_rounds, ROUNDS_MAX)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise BadOption(
                f"{option}={value!r} is not within 1 and {most:,}",
                hint=f"for example {option}=2",
                option=option,
            )

    def made(given: Any) -> Any:
        from millpond.programs.compiler.translate import translate  # noqa: PLC0415 - it reads what is written with these
        from millpond.programs.plain import plain_class  # noqa: PLC0415 - as above

        given.__millpond_program__ = ProgramOptions(lanes, max_rounds)
        given.__millpond_graph__ = translate(given, lanes, max_rounds)
        given.__new__ = lambda asked, *_, **__: object.__new__(plain_class(asked))
        return given

    return made if cls is None else made(cls)


def reject(reason: str) -> NoReturn:
    """End the call: nothing was changed, and its row has the reason as its error. Before the first write only."""
    raise Rejected(str(reason), reason=str(reason))


def everywhere(field: Any) -> Any:
    """All lanes of a partial field: an operation on it gives a Collection, with a value from each.

    It only reads, but for `everywhere(self.field).assign(value)` and `.clear()`, which do the same in all lanes.
    """
    lanes = getattr(field, "__millpond_lanes__", None)
    if lanes is None:
        raise TypeError("everywhere takes a partial field of a program, as in mp.everywhere(self.field)")
    return lanes()
