"""What is ready, late and below F: the same for one time, for an array and, in `tests/spark`, for a column."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from millpond.code.rules import FetchRule, as_of, count, keep_latest, latest, put
from millpond.errors import BelowFetchProgress
from millpond.stores.readiness import check_not_below, late, late_rows, lowest_asked, positions, ready
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.states import StateSpec

TIMES = [TIME_MIN, -1, 0, 7, 8, TIME_MAX - 1, TIME_MAX]
PROGRESSES: list[Progress] = [-math.inf, TIME_MIN, 0, 8, TIME_MAX, math.inf]
SPEC = StateSpec("s", "key long", "value long", put(), keep_latest())


@pytest.mark.parametrize("progress", PROGRESSES)
def test_times_one_by_one_and_in_an_array_are_judged_alike(progress: Progress) -> None:
    lows, highs = (np.array(column) for column in zip(*product(TIMES, TIMES), strict=True))
    pairs = list(zip(lows.tolist(), highs.tolist(), strict=True))
    for expected, one, many in [
        ([high < progress for _, high in pairs], lambda low, high: ready(None, high, progress), ready(None, highs, progress)),
        ([high < progress for _, high in pairs], lambda low, high: ready(low, high, progress), ready(lows, highs, progress)),
        ([low < progress for low, _ in pairs], lambda low, high: ready(low, high, progress, False), ready(lows, highs, progress, False)),
        ([progress > -math.inf] * len(pairs), lambda low, high: ready(None, high, progress, False), ready(None, highs, progress, False)),
        ([high < progress for _, high in pairs], lambda low, high: late(None, high, progress), late(None, highs, progress)),
        ([low + 1 < progress for low, _ in pairs], lambda low, high: late(low, high, progress), late(lows, highs, progress)),
    ]:  # fmt: skip
        assert [one(low, high) for low, high in pairs] == expected
        assert positions(many, len(pairs)).tolist() == [at for at, true in enumerate(expected) if true]
    assert late_rows(highs, progress).tolist() == positions(late(None, highs, progress), len(highs)).tolist()


@pytest.mark.parametrize(
    ("rule", "as_of_a_time", "of_a_range"),
    [(latest(), 5, 3), (as_of(), 5, 5), (count(), -math.inf, 3)],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_lowest_time_that_an_answer_depends_on(
    rule: FetchRule, as_of_a_time: Progress, of_a_range: Progress
) -> None:
    lows, highs, none = np.array([2, 4]), np.array([5, 9]), np.array([], np.int64)
    assert lowest_asked(None, highs, rule, SPEC) == as_of_a_time
    assert lowest_asked(lows, highs, rule, SPEC) == of_a_range
    assert lowest_asked(None, none, rule, SPEC) == math.inf, "who asks nothing is below nothing"


def test_a_read_below_f_is_refused() -> None:
    check_not_below(5, 5, "long")
    check_not_below(math.inf, math.inf, "long")
    check_not_below(-math.inf, -math.inf, "long")
    for time in (4, -math.inf):
        with pytest.raises(BelowFetchProgress):
            check_not_below(time, 5, "long")
