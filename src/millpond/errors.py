"""Every error a user can meet: what happened, where, and how to mend it.

Each error is a `MillpondError` and the built-in that fits it, so both `except mp.MillpondError`
and `except ValueError` work. Its typed attributes cross the wire with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


class MillpondError(Exception):
    """Base of all Millpond errors. `hint` says how to mend the cause; it may be empty."""

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, *, hint: str = "", **attributes: Any) -> None:
        unknown = set(attributes) - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {sorted(unknown)}")
        super().__init__(message)
        self.message = message
        self.hint = hint
        for field in self.fields:
            setattr(self, field, attributes.get(field))

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self).__name__, self.message, self.hint, self.attributes()))

    def attributes(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.fields}


def _rebuild(code: str, message: str, hint: str, attributes: dict[str, Any]) -> MillpondError:
    return error_named(code)(message, hint=hint, **attributes)


def error_named(code: str) -> type[MillpondError]:
    """The error class of that name; `MillpondError` itself for a name this version does not know."""
    found = globals().get(code)
    if isinstance(found, type) and issubclass(found, MillpondError):
        return found
    return MillpondError


# What a user asked for


class BadName(MillpondError, ValueError):
    """A name outside `[a-z0-9_]{1,64}`."""

    fields = ("name",)


class BadType(MillpondError, ValueError):
    """A type string that cannot be read, or a type that cannot serve in that place."""

    fields = ("ddl",)


class BadDuration(MillpondError, ValueError):
    """A delay that is neither a duration nor an integer, or the wrong one for the time column."""


class BadOption(MillpondError, ValueError):
    """An option with a value outside its choices."""

    fields = ("option",)


def check_not_connect(thing: object, option: str) -> None:
    """BadOption for a session or a DataFrame of Spark Connect, told by its module's name: its driver is elsewhere."""
    if type(thing).__module__.startswith("pyspark.sql.connect"):
        raise BadOption(
            f"a {type(thing).__name__} of Spark Connect cannot be used: its driver is in another process, where a pond does"
            " not reach",
            hint='use hosting="standalone": run the pond with `millpond serve`, join it with mp.connect(address, token), without'
            " spark=, and hand it Arrow tables, as frame.toArrow() makes them",
            option=option,
        )


class BadRoot(MillpondError, OSError):
    """A root directory that cannot hold a pond."""

    fields = ("root",)


class RootUnseen(MillpondError, OSError):
    """A process that must see the pond's root does not: at the path `root`, on the machine `host`. It wrote nothing."""

    fields = ("root", "host")
    root: str
    host: str


class NotPrivate(MillpondError, PermissionError):
    """A file or directory that must be this user's alone, and is another's or open to others. It was not used.

    `owner` is the other user's name, where it is another's.
    """

    fields = ("path", "owner")
    path: str
    owner: str | None


class PondInUse(MillpondError, RuntimeError):
    """Another process has this root open."""

    fields = ("root",)


class UnknownResident(MillpondError, LookupError):
    """A State or group that the pond does not hold."""

    fields = ("resident",)


class UnknownTable(MillpondError, LookupError):
    """The pond, or a group, has no table of that name."""

    fields = ("table",)


class UnknownUpdater(MillpondError, LookupError):
    """A name that no updater or fetcher of the State or group has."""

    fields = ("resident", "name")


class SchemaMismatch(MillpondError, ValueError):
    """A State or table opened with another schema than it was made with."""

    fields = ("resident", "existing", "requested")


# What came in


class WrongColumn(MillpondError, LookupError):
    """A column that the table does not have."""

    fields = ("column", "available")


class WrongType(MillpondError, TypeError):
    """A column of another type than the state asks for."""

    fields = ("column", "expected", "actual")


class NullKey(MillpondError, ValueError):
    """A null in a key column."""

    fields = ("column", "rows")


class NullTime(MillpondError, ValueError):
    """A null in a time column."""

    fields = ("column", "rows")


class NullValue(MillpondError, ValueError):
    """A null where the State's update rule needs a value."""

    fields = ("column", "rows")


class BadRule(MillpondError, ValueError):
    """A rule that cannot be used there: with that State, with those columns, or at all."""

    fields = ("rule",)


class RuleFailed(MillpondError, RuntimeError):
    """A user's own rule raised an error, or gave what its State cannot take."""

    fields = ("rule",)


class CodeTookTooLong(MillpondError, TimeoutError):
    """User code that did not end within the pond's `code_seconds`. What it was to change did not happen."""

    fields = ("what", "seconds")


class OutOfMemory(MillpondError, MemoryError):
    """User code, or a request, that needs more memory than its container may have. What it was to change did not happen."""

    fields = ("what",)


class NoRoom(MillpondError, MemoryError):
    """Slices that a container has no memory left for. They are served where they were."""

    fields = ("container", "needs", "left")


class LateRows(MillpondError, ValueError):
    """Rows below the updater's watermark, under `late="error"`."""

    fields = ("rows", "watermark")


class EpochOutOfOrder(MillpondError, ValueError):
    """An epoch that skips ahead, or one from before the updater's first."""

    fields = ("epoch", "expected")


class EpochChanged(MillpondError, ValueError):
    """An epoch replayed with other rows: the source does not replay."""

    fields = ("epoch",)


class UpdaterFinished(MillpondError, RuntimeError):
    """An update by an updater that has declared it will send no more."""

    fields = ("resident", "name")


# What was asked too early, too late, or is too large


def updater_finished(resident: str, name: str) -> UpdaterFinished:
    return UpdaterFinished(
        f"updater {name!r} of {resident!r} has finished",
        hint="what it wrote is final. Another updater may go on, as long as one of the State has not finished",
        resident=resident,
        name=name,
    )


def unknown_state(name: str, known: Iterable[str]) -> UnknownResident:
    return UnknownResident(f"there is no state {name!r} in this pond", hint=_holds(known), resident=name)


def unknown_window(name: str, known: Iterable[str]) -> UnknownResident:
    return UnknownResident(f"there is no window {name!r} in this pond", hint=_holds(known), resident=name)


def unknown_table(name: str, known: Iterable[str], where: str = "this pond") -> UnknownTable:
    return UnknownTable(f"there is no table {name!r} in {where}", hint=_holds(known), table=name)


def _holds(known: Iterable[str], made_by: str = "key= and value=") -> str:
    return f"it holds: {', '.join(sorted(known)) or 'none yet'}; to make one, give {made_by}"


def wrong_time_kind(whose: str, expected: str, actual: str, column: str = "") -> WrongType:
    """Times of another kind than the State's; `column` is the one that holds them, where there is one."""
    give = "give a datetime" if expected == "timestamp" else "give an integer"
    return WrongType(
        f"the times of {whose} are of kind {expected}, not {actual}"
        + (f" as in the column {column!r}" if column else ""),
        hint=f"cast the column to {expected}" if column else give,
        column=column,
        expected=expected,
        actual=actual,
    )


class RowsWaiting(MillpondError, RuntimeError):
    """Rows whose time update progress has not passed yet. `held_by` are the updaters that it waits for."""

    fields = ("rows", "update_progress", "held_by")


class BelowFetchProgress(MillpondError, ValueError):
    """A read of a time below fetch progress F, where values may have been compacted."""

    fields = ("time", "fetch_progress")


class TotalOverflow(MillpondError, ArithmeticError):
    """A `total()` that does not fit a long."""

    fields = ("rows",)


class MessageTooLarge(MillpondError, ValueError):
    """A message or a batch beyond the limit of its kind."""

    fields = ("size", "limit")


class BadMessage(MillpondError, ValueError):
    """A message or a batch that does not have the form its kind asks for."""


class Unauthorised(MillpondError, PermissionError):
    """A call without a token, or with one that does not permit it."""


def token_refused(address: str) -> Unauthorised:
    return Unauthorised(
        f"{address} refused the token", hint="the pond's token is in the file `token` under its root"
    )


class NotThePond(MillpondError, ConnectionError):
    """Whoever listens at the address could not show that it is the pond of the token. It was told nothing."""

    fields = ("address",)


class NotTrusted(MillpondError, PermissionError):
    """In a pond that is open with `trust="data"`: what would run code, or change what its root holds."""


def not_trusted(what: str) -> NotTrusted:
    return NotTrusted(
        f'{what}, and the pond is open with trust="data": it runs no code and changes nothing',
        hint='if you trust whoever made the root, close the pond and open it without trust="data"',
    )


# What failed


class CorruptFile(MillpondError, OSError):
    """A file of the pond that is truncated, altered or missing. It was not read."""

    fields = ("path",)


class WriteFailed(MillpondError, OSError):
    """A file of the pond could not be written. What it was to make durable did not happen."""

    fields = ("path",)


class Unavailable(MillpondError, ConnectionError):
    """A container or the pond that does not answer."""

    fields = ("address",)


def no_answer(address: str, why: str) -> Unavailable:
    return Unavailable(f"{address} does not answer ({why})", hint="is the pond running?", address=address)


class StageLost(MillpondError, RuntimeError):
    """A container no longer holds what was staged there. The driver stages again."""

    fields = ("container",)


class BackupLost(MillpondError, RuntimeError):
    """A backup does not hold what it must, or does not answer. The coordinator lets go of it, and finds another."""

    fields = ("container", "term")


class Moved(MillpondError, RuntimeError):
    """The slice is served elsewhere. The client asks the coordinator where, and retries."""

    fields = ("slice_id",)


class ContainerFailed(MillpondError, RuntimeError):
    """A container that ends whenever it is started."""

    fields = ("container",)


class RuleInterpreted(UserWarning):
    """A user's own rule runs as Python, row by row: the warning says why it could not be compiled."""


class BadTransaction(MillpondError, ValueError):
    """A transaction function that cannot be used: `line` says where, counted as in the file that holds it."""

    fields = ("transaction", "line")


class BadProgram(MillpondError, ValueError):
    """A program that cannot be translated: `file` and `line` say where, `method` in which of its methods."""

    fields = ("program", "method", "file", "line")
    program: str
    method: str
    file: str
    line: int


class ProgramFailed(MillpondError, RuntimeError):
    """A call of a program that raised, or went through too many tasks. Its epoch changed nothing.

    `row` is the number of the call in its epoch, `line` that of the file which holds the program.
    """

    fields = ("program", "method", "line", "row")
    program: str
    method: str
    line: int
    row: int


class Rejected(MillpondError, RuntimeError):
    """A call that a program turned away with `mp.reject`: it changed nothing."""

    fields = ("reason",)
    reason: str


class UnknownKind(MillpondError, LookupError):
    """An event of a kind that no transaction function serves."""

    fields = ("kind", "known")


class Aborted(MillpondError, RuntimeError):
    """A transaction that ended itself: nothing of it remains but the reason."""

    fields = ("reason",)


class OutputsGone(MillpondError, LookupError):
    """What an epoch of transactions gave is no longer kept; it took effect, once."""

    fields = ("epoch",)


class ResidentBroken(MillpondError, RuntimeError):
    """A State or group that could not be rebuilt from its log. It answers again once it can; all else serves."""

    fields = ("resident",)


class OtherQuery(MillpondError, ValueError):
    """An operator's name is another query's: under a new checkpoint its rows would count again."""

    fields = ("resident", "name", "query")


class WorkersUnfit(MillpondError, RuntimeError):
    """Spark's Python workers cannot do a pond's work: they have no millpond, or another one. `python` is what they run."""

    fields = ("python",)
    python: str


class NoTaskSlots(MillpondError, RuntimeError):
    """Containers on Spark would take every task slot that there is: no query could run. `left` may be below zero.

    Or no executor has, or not enough executors have, as many slots as one container takes for its threads.
    """

    fields = ("slots", "taken", "left")
    slots: int
    taken: int
    left: int


class FewTaskSlots(UserWarning):
    """Containers on Spark leave queries fewer task slots than there are containers."""


class QueryStopped(MillpondError, RuntimeError):
    """A streaming query was stopped in the middle of a batch. No failure: started again, it does the batch again."""


class CodeFailed(MillpondError, RuntimeError):
    """User code ended its container: it crashed, or took all memory. Its epoch is refused, and nothing was changed."""

    fields = ("resident",)


class Interrupted(BaseException):
    """Raised inside user code that runs too long, to end it. Not an error: whoever catches all else lets it pass."""
