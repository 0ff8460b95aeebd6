"""What is said of a partition's rows once they are staged, or would be if they were."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.wire.epochs import Receipt


def receipt_of(
    partition: int, times: npt.NDArray[np.int64], late: int, digest: int, *, attempt: int = 0
) -> Receipt:
    """The receipt for rows of these times, `late` others left out. `digest` is the sum of the digests of their parts."""
    return Receipt(
        partition=partition,
        attempt=attempt,
        rows=len(times),
        late=late,
        digest=digest % (1 << 64),
        time_max=int(times.max()) if len(times) else None,
    )
