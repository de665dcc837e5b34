"""Shapes chosen from the data: least padding, never too small, few."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.data.order import order
from plora_jax.data.shapes import Shape, choose_shapes, load, split_lengths, spread
from tests.data.conftest import make_examples


def padding(loads, tops) -> int:
    return sum(min(t for t in tops if t >= n) - n for n in loads)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(1, 4))
def test_split_lengths_is_as_good_as_trying_every_choice(loads, limit):
    loads = np.array(loads)
    grid = sorted({-(-n // 8) * 8 for n in loads.tolist()})
    best = min(
        padding(loads.tolist(), [*inner, grid[-1]])
        for k in range(min(limit, len(grid)))
        for inner in combinations(grid[:-1], k)
    )
    found = split_lengths(loads, limit)
    assert len(found) <= limit and found == sorted(found) and all(f % 8 == 0 for f in found)
    assert padding(loads.tolist(), found) == best


def test_spread_balances_by_length_only_with_fill():
    lengths = np.array([5, 9, 4, 3, 8, 1])
    assert spread(lengths[:3], 4, fill=False).tolist() == [0, 1, 2]
    assert spread(lengths, 1, fill=True).tolist() == [0] * 6
    # longest first into the emptiest: 9→0, 8→1, 5→1 (13), 4→0 (13), 3→0 (16), 1→1 (14)
    assert spread(lengths, 2, fill=True).tolist() == [1, 0, 0, 0, 1, 1]
    assert load(lengths, np.ones(6, int), 2, fill=True) == Shape(16, 3)
    assert load(lengths, np.ones(6, int), 6, fill=False) == Shape(9, 1)
    assert load(lengths, np.ones(6, int), 1, fill=True) == Shape(30, 6)


@pytest.mark.parametrize(("m", "group", "fill"), [(1, 1, False), (4, 4, False), (1, 4, True), (2, 4, True)])
@pytest.mark.parametrize("refill", [False, True])
def test_every_load_of_the_first_epoch_and_every_example_fits(m, group, fill, refill):
    examples = make_examples(60, seed=3)
    shapes = choose_shapes([(examples, 5)], m, group=group, fill=fill, refill=refill, limit=6)
    assert 1 <= len(shapes) <= 6 and list(shapes) == sorted(shapes)
    assert all(a.P <= b.P and a.S < b.S for a, b in pairwise(shapes))
    assert examples.lengths.max() <= shapes[-1].S and examples.counts.max() <= shapes[-1].P <= shapes[-1].S
    rows = order(5, 0, 60)
    for i in range(0, 60, group):
        piece = rows[i : i + group]
        need = load(examples.lengths[piece], examples.counts[piece], m, fill)
        assert any(need.S <= s.S and need.P <= s.P for s in shapes)


def test_one_shape_when_one_is_asked_for_and_tight_trained_positions():
    examples = make_examples(40, trained=2)
    (only,) = choose_shapes([(examples, 0)], 8, limit=1)
    assert only == Shape(-(-int(examples.lengths.max()) // 8) * 8, 2)


def test_data_sets_are_joined():
    short, long = make_examples(30, low=4, high=9), make_examples(5, low=90, high=99)
    shapes = choose_shapes([(short, 0), (long, 0)], 1, limit=2)
    assert shapes[0].S == 8 and 88 <= shapes[1].S <= 104
