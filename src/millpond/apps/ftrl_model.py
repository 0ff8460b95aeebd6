"""FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013), in columns.

A feature has two parameters, `z` and `n`, from which its weight follows. A task copies those of the features that its samples
have, learns from one sample after another on this copy, and adds what changed to what all share. With one task at a time that
is plain FTRL. Gradients that were all taken at the same parameters and then summed up would be simpler, and learn
far too much at once where a feature is in thousands of samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.kernels._jit import inlined, jit

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

ALPHA, BETA, L1, L2 = 0.05, 1.0, 0.1, 0.1
LOSS = -1  # no feature: under this key `z` is the sum of losses, `n` the number of samples


@jit
def learn_samples(
    offsets: npt.NDArray[np.int32],
    features: npt.NDArray[np.int32],
    clicks: npt.NDArray[np.int64],
    z: npt.NDArray[np.float64],
    n: npt.NDArray[np.float64],
) -> float:
    """Learns in place from samples in their order, and gives the sum of their losses, each predicted before it is learnt
    from. Sample i has the features `features[offsets[i] : offsets[i + 1]]`, by their places in `z` and `n`.
    """
    total = 0.0
    w = np.empty(features.shape[0])
    for sample in range(clicks.shape[0]):
        start, stop = offsets[sample], offsets[sample + 1]
        score = 0.0
        for at in range(start, stop):
            w[at] = weight(z[features[at]], n[features[at]])
            score += w[at]
        p = 1.0 / (1.0 + math.exp(-score))
        click = clicks[sample]
        total += math.log1p(math.exp(-abs(score))) + max(score, 0.0) - click * score
        g = p - click
        for at in range(start, stop):
            i = features[at]
            sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / ALPHA
            z[i] += g - sigma * w[at]
            n[i] += g * g
    return total


@inlined
def weight(z: float, n: float) -> float:
    if abs(z) <= L1:
        return 0.0
    return (math.copysign(L1, z) - z) / ((BETA + math.sqrt(n)) / ALPHA + L2)


def learn(samples: pa.Table, ask: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """For `State.step`: what these samples add to the parameters of each of their features, and to the loss.

    Samples have `features`, a list of longs from 0 on, each once, and `click`, 0 or 1.
    """
    offsets, features, places = encoded(samples)
    known = ask(pa.table({"feature": features}))
    before = doubles(known["z"]), doubles(known["n"])
    z, n = before[0].copy(), before[1].copy()
    loss = learn_samples(offsets, places, np.asarray(samples["click"], dtype=np.int64), z, n)
    return pa.table(
        {
            "feature": np.append(features.to_numpy(), LOSS),
            "z": np.append(z - before[0], loss),
            "n": np.append(n - before[1], len(samples)),
        }
    )


def encoded(samples: pa.Table) -> tuple[npt.NDArray[np.int32], pa.Array, npt.NDArray[np.int32]]:
    """Where each sample's features begin, the different ones of all samples, and for each feature which of these it is."""
    lists = samples["features"].combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    offsets = lists.offsets.to_numpy()
    features = lists.flatten().dictionary_encode()
    # The kernel takes arrays that can be written to; Arrow's cannot.
    return (offsets - offsets[0]).astype(np.int32), features.dictionary, np.array(features.indices)


def doubles(column: pa.ChunkedArray) -> Floats:
    """A feature that nobody has learnt anything of has no parameters yet: they are zero."""
    return np.asarray(pc.fill_null(column, 0.0), dtype=np.float64)


def weights(z: Floats, n: Floats) -> Floats:
    """What the parameters of features stand for."""
    return -np.sign(z) * np.maximum(np.abs(z) - L1, 0) / ((BETA + np.sqrt(n)) / ALPHA + L2)


class Predicted(NamedTuple):
    """Of samples."""

    p: Floats
    loss: Floats


def predict(rows: pa.Table) -> Predicted:
    """From answered rows of whole samples, in any order: a row has the parameters of one feature of a sample, `id`."""
    ids = np.asarray(rows["id"], dtype=np.int64)
    _, first, sample_of = np.unique(ids, return_index=True, return_inverse=True)
    score = np.bincount(sample_of, weights(doubles(rows["z"]), doubles(rows["n"])))
    click = np.asarray(rows["click"], dtype=np.int64)[first]
    return Predicted(1 / (1 + np.exp(-score)), np.logaddexp(0, score) - click * score)


def sequential(features: Longs, clicks: Longs) -> float:
    """The log-loss of plain FTRL, which predicts a sample, learns from it, and goes on to the next.

    A loop over dictionaries that shares nothing with the above: what it is compared with.
    """
    z: defaultdict[int, float] = defaultdict(float)
    n: defaultdict[int, float] = defaultdict(float)

    def weight_of(i: int) -> float:
        if abs(z[i]) <= L1:
            return 0.0
        return (math.copysign(L1, z[i]) - z[i]) / ((BETA + math.sqrt(n[i])) / ALPHA + L2)

    total = 0.0
    for sample, click in zip(features.tolist(), clicks.tolist(), strict=True):
        w = [weight_of(i) for i in sample]
        p = 1 / (1 + math.exp(-sum(w)))
        total -= math.log(p if click else 1 - p)
        g = p - click
        for i, w_i in zip(sample, w, strict=True):
            z[i] += g - (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / ALPHA * w_i
            n[i] += g * g
    return total / len(clicks)
