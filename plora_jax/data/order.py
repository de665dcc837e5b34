"""The order of the training rows: a pure function of (data seed, epoch, number of rows)."""

import numpy as np
from jaxtyping import Int64, UInt64

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def splitmix64(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Return SplitMix64's output for each uint64 state (Steele, Lea & Flood 2014): a bijection of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def order(data_seed: int, epoch: int, n: int) -> Int64[np.ndarray, " n"]:
    """Return the permutation in which epoch `epoch` of a job with `data_seed` sees its n rows.

    Rows are sorted by a counter-based hash, so the order needs no generator state, and integer arithmetic
    keeps it the same in every numpy version. Keys of one epoch never tie: the hash is a bijection.
    """
    start = np.array([data_seed & _MASK], dtype=np.uint64)
    start = splitmix64(splitmix64(start + np.uint64(_GOLDEN)) + np.uint64((epoch + 1) * _GOLDEN & _MASK))
    with np.errstate(over="ignore"):
        keys = splitmix64(start + np.uint64(_GOLDEN) * np.arange(1, n + 1, dtype=np.uint64))
    return np.argsort(keys, kind="stable")
