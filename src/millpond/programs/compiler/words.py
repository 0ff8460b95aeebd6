"""What methods may use of Millpond itself, and how the code of tasks calls it."""

from __future__ import annotations

from typing import Any

from millpond.programs import merging
from millpond.programs.annotations import everywhere, reject
from millpond.programs.elements import DenseMatrix, Matrix, Vector

EVERYWHERE, REJECT = "mp_everywhere", "mp_reject"
WORDS: dict[Any, str] = {
    everywhere: EVERYWHERE,
    reject: REJECT,
    merging.total: "mp_total",
    merging.average: "mp_average",
    Vector: "mp_Vector",
    Matrix: "mp_Matrix",
    DenseMatrix: "mp_DenseMatrix",
}
