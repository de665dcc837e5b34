"""The order of rows: pinned, a permutation, and a function of seed, epoch and row count alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.data.order import order, splitmix64

# The first outputs of SplitMix64 seeded with 1234567, as published with Vigna's splitmix64.c.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def mix(x: int) -> int:
    """SplitMix64's output function in plain integers."""
    mask = (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def test_splitmix64_gives_the_published_values():
    states = np.uint64(1234567) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 6, dtype=np.uint64)
    assert splitmix64(states).tolist() == PUBLISHED


def test_the_order_is_pinned():
    assert order(0, 0, 10).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert order(0, 1, 10).tolist() == [6, 0, 4, 5, 2, 7, 9, 1, 8, 3]
    assert order(1, 0, 10).tolist() == [9, 8, 7, 4, 2, 0, 3, 6, 5, 1]
    assert order(2**31 - 1, 7, 0).tolist() == [] and order(5, 5, 1).tolist() == [0]


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 1000), st.integers(0, 200))
def test_it_is_the_permutation_that_plain_integers_give(seed, epoch, n):
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    start = mix((mix((seed + golden) & mask) + (epoch + 1) * golden) & mask)
    keys = [mix((start + golden * (i + 1)) & mask) for i in range(n)]
    assert order(seed, epoch, n).tolist() == sorted(range(n), key=keys.__getitem__)


def test_every_row_is_as_likely_at_every_place():
    places = np.stack([order(seed, epoch, 8) for seed in range(100) for epoch in range(40)])
    counts = np.array([np.bincount(column, minlength=8) for column in places.T])
    # chi-square with 49 degrees of freedom: 99.9 % lie below 85.4
    assert ((counts - 500) ** 2 / 500).sum() < 85.4
