"""What is said of a partition's rows once they are staged, or would be if they were."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.wire.epochs import Receipt


def receipt_of(
    partition: int,
    attempt: int,
    rows: int,
    late: int,
    digest: int,
    times: npt.NDArray[np.int64] | None = None,
) -> Receipt:
    """The receipt for so many rows, `late` others left out. `digest` is the sum of the digests of their parts."""
    newest = int(times.max()) if times is not None and len(times) else None
    return Receipt(partition, attempt, rows, late, digest % (1 << 64), newest)
