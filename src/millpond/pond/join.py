"""A join of two streams as its users see it."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from millpond.client.client import Client
from millpond.code.windows import WindowCode
from millpond.errors import BadOption
from millpond.ops.columns import Names
from millpond.ops.join import JoinSource
from millpond.ops.window import LateRows
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.times import TIME_MAX, parse_duration
from millpond.wire.base import KindOfTime, check_name
from millpond.wire.house import Register
from millpond.wire.joins import SIDES, Between, JoinSpec, Side
from millpond.wire.questions import AskProgress, ResidentProgress

Duration = str | int | timedelta
_EXAMPLE = 'for example window=mp.tumbling("10 seconds"), or between=("-5 minutes", "10 minutes")'


class Join:
    """A join by its name: `left` and `right` make its sides."""

    def __init__(self, client: Client, spec: JoinSpec) -> None:
        self._client = client
        self._spec = spec

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def place(self) -> tuple[str, None]:
        return self._spec.name, None

    def __repr__(self) -> str:
        return f"<{self.explain().splitlines()[0]}>"

    def left(
        self,
        *,
        key: Names | None = None,
        at: str = "ts",
        value: Names | None = None,
        delay: Duration = 0,
        late: str | LateRows = "drop",
        idle: str | timedelta | None = None,
        history: str = "continue",
    ) -> JoinSource:
        """An operator `(rows, epoch)` for rows of the left side: for `foreachBatch` by `.to(function)`.

        It gives the pairs that the epoch lets out, whichever side they waited for. `key`, `at` and `value` name the rows'
        columns; by default those of the join. The watermark of a side is its newest `at` less its `delay`, that of the join
        the lower of both. Late rows are dropped and counted, with `late="error"` refused, or given to a function
        `(rows, epoch)`: in windows, those whose windows are over by their own side's watermark, else those before it. A side
        of which no rows came for as long as `idle` is not waited for. `history` as for `State.update`.
        """
        return self._side("left", key, at, value, delay, late, idle, history)

    def right(
        self,
        *,
        key: Names | None = None,
        at: str = "ts",
        value: Names | None = None,
        delay: Duration = 0,
        late: str | LateRows = "drop",
        idle: str | timedelta | None = None,
        history: str = "continue",
    ) -> JoinSource:
        """The same for rows of the right side."""
        return self._side("right", key, at, value, delay, late, idle, history)

    def _side(
        self,
        side: Side,
        key: Names | None,
        at: str,
        value: Names | None,
        delay: Duration,
        late: str | LateRows,
        idle: str | timedelta | None,
        history: str,
    ) -> JoinSource:
        # Each side waits for the other, also before anybody has made that.
        updaters = self.progress().updaters
        for other in SIDES:
            if other != side and other not in updaters:
                self._client.call(Register(self._spec.name, other, "updater"))
        return JoinSource(
            self._client,
            self._spec,
            side,
            key=parse_ddl(self._spec.key, "key").names if key is None else key,
            at=at,
            value=value,
            delay=delay,
            late=late,
            idle=idle,
            history=history,
        )

    def explain(self) -> str:
        """How its rows are kept, and when pairs come out."""
        spec = self._spec
        if spec.between is None:
            pairs = f"{spec.window} by {spec.key}"
            store = "AAR (append, aligned read): rows of both sides by window, for all keys; a window is read as a whole"
            fires = "when a window ends by the lower watermark of both sides"
        else:
            unit = " us" if spec.between.span_kind == "timestamp" else ""
            pairs = f"right time from {spec.between.low} to {spec.between.high}{unit} after the left by {spec.key}"
            store = "rows of both sides by key and time, as long as the other side may match them"
            fires = "with the second row of each pair"
        return f"join {spec.name}: {pairs}\n  store: {store}\n  fires: {fires}"

    def progress(self) -> ResidentProgress:
        """How far each side has come (`updaters`), and how many of its rows were `late`. `update` is the join's watermark."""
        return self._client.call(AskProgress(self._spec.name))


def join_spec(
    name: str,
    key: str | None,
    left: str | None,
    right: str | None,
    window: WindowCode | None,
    between: tuple[Duration, Duration] | None,
) -> JoinSpec:
    """The spec of a join as users describe it; an error that says what is wrong."""
    check_name(name, "the join")
    spec = JoinSpec(
        name, _canonical(name, "key", key), _canonical(name, "left", left), _canonical(name, "right", right)
    )
    check_key_types(parse_ddl(spec.key, "key"))
    if (window is None) == (between is None):
        what = "neither a window nor an interval" if window is None else "both a window and an interval"
        raise BadOption(f"join {name!r} has {what}", hint=_EXAMPLE, option="window")
    if between is not None:
        return replace(spec, between=_interval(between))
    if not isinstance(window, WindowCode):
        raise BadOption(f"window={window!r} is no window", hint=_EXAMPLE, option="window")
    if window.kind not in ("tumbling", "sliding"):
        raise BadOption(
            f"join {name!r} cannot be in {window}: only tumbling and sliding windows are the same for both sides",
            hint="mp.tumbling, mp.sliding, or between=(low, high) for rows that are near each other",
            option="window",
        )
    return replace(spec, window=window)


def _canonical(name: str, option: str, ddl: str | None) -> str:
    if ddl is None:
        raise BadOption(
            f"join {name!r} needs {option}=, as a DDL string",
            hint='for example key="id long", left="name string", right="price double"; "" for no columns',
            option=option,
        )
    return format_ddl(parse_ddl(ddl, option)) if ddl or option == "key" else ""


def _interval(between: object) -> Between:
    if not isinstance(between, tuple | list) or len(between) != 2:
        raise BadOption(
            f"between={between!r} is no interval",
            hint='how much later the right row may be, as in between=("-5 minutes", "10 minutes")',
            option="between",
        )
    (low, one), (high, other) = (_signed(bound) for bound in between)
    kinds: set[KindOfTime] = {kind for kind in (one, other) if kind}
    if len(kinds) > 1:
        raise BadOption(
            f"between={between!r} has both a duration and an integer",
            hint="durations go with timestamps, integers with logical time",
            option="between",
        )
    if low > high:
        raise BadOption(
            f"between={between!r}: nothing is from {between[0]!r} to {between[1]!r}",
            hint="the lower bound comes first",
            option="between",
        )
    if high - low >= TIME_MAX:
        raise BadOption(f"between={between!r} is too long", hint="2**63 - 1 units at most", option="between")
    return Between(low, high, kinds.pop() if kinds else "")


def _signed(bound: Duration) -> tuple[int, KindOfTime]:
    """A duration that may be negative, and the kind of time that it goes with; zero goes with any."""
    kind: KindOfTime = "timestamp" if isinstance(bound, str | timedelta) else "long"
    negative = False
    if isinstance(bound, str):
        negative = bound.strip().startswith("-")
        bound = bound.strip().removeprefix("-")
    elif isinstance(bound, timedelta):
        negative = bound < timedelta(0)
        bound = abs(bound)
    elif isinstance(bound, int) and not isinstance(bound, bool):
        negative = bound < 0
        bound = abs(bound)
    amount = parse_duration(bound)
    return (-amount if negative else amount), kind if amount else ""
