"""How many steps a job takes, where its cursor goes, and how examples lie in sequences."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.data.layout import (
    Cursor,
    Slot,
    advance,
    blank,
    choose,
    lay_out,
    leading,
    open_batch,
    pending,
    selection,
    steps_per_epoch,
    total_steps,
)
from plora_jax.data.order import order
from plora_jax.data.shapes import Shape, load
from plora_jax.jobs import Job
from tests.data.conftest import make_examples


@pytest.mark.parametrize(
    ("rows", "job", "steps"),
    [
        (64, Job(batch_size=8), 8),
        (65, Job(batch_size=8), 9),  # the partial last batch is a step of its own
        (3, Job(batch_size=8), 1),  # fewer rows than the batch size
        (1, Job(batch_size=1), 1),
        (65, Job(batch_size=8, epochs=2), 18),
        (65, Job(batch_size=8, epochs=0.5), 5),
        (65, Job(batch_size=8, epochs=1.01), 10),
        (65, Job(batch_size=8, epochs=0.001), 1),
        (65, Job(batch_size=8, epochs=3, max_steps=4), 4),  # max_steps wins
        (4, Job(batch_size=8, max_steps=10), 10),  # and runs over as many epochs as it needs
    ],
)
def test_total_steps_as_transformers_counts_them(rows, job, steps):
    assert total_steps(job, rows) == steps
    assert Slot.of(job, make_examples(rows)).steps == steps


def test_a_cursor_walks_every_row_once_an_epoch_and_closes_every_batch():
    slot = Slot(make_examples(11), 4, data_seed=9, steps=7)
    cursor, seen, closes = Cursor(), [], []
    while cursor.step < slot.steps:
        batch, waiting = open_batch(slot, cursor), pending(slot, cursor, 2)
        seen.append((cursor.epoch, batch[waiting].tolist()))
        cursor, closed = advance(slot, cursor, waiting)
        closes.append(closed)
    first, second = order(9, 0, 11).tolist(), order(9, 1, 11).tolist()
    # 11 rows in batches of 4, 4, 3 at two rows a micro-step; epoch 1 and one batch of epoch 2
    third = order(9, 2, 11).tolist()
    cuts = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    expected = [(e, rows[a:b]) for e, rows in enumerate((first, second)) for a, b in cuts]
    assert seen == [*expected, (2, third[:2]), (2, third[2:4])]
    assert closes == [False, True] * 7
    assert cursor == Cursor(2, 4, 7, 0)


def test_rows_taken_out_of_order_are_not_offered_again():
    slot = Slot(make_examples(8), 8, 0, 1)
    cursor, closed = advance(slot, Cursor(), np.array([1, 5]))
    assert not closed and cursor == Cursor(0, 0, 0, 0b100010) and cursor.place is None
    assert pending(slot, cursor, None).tolist() == [0, 2, 3, 4, 6, 7]
    cursor, closed = advance(slot, cursor, np.array([0, 2, 3, 4, 6, 7]))
    assert closed and cursor == Cursor(1, 0, 1, 0)
    assert Cursor(2, 8, 3, 0b111).place == (2, 11)


def test_leading_is_the_longest_prefix_that_fits():
    lengths, counts = np.array([5, 9, 4, 3]), np.array([1, 1, 1, 1])
    assert leading(lengths, counts, 1, True, Shape(18, 9)).tolist() == [0, 1, 2]
    assert leading(lengths, counts, 1, True, Shape(18, 2)).tolist() == [0, 1]
    assert leading(lengths, counts, 2, False, Shape(9, 1)).tolist() == [0, 1]
    assert leading(lengths, counts, 1, True, Shape(4, 9)).tolist() == []


def test_selection_fills_with_the_longest_that_fit():
    lengths, counts = np.array([5, 9, 4, 3, 1]), np.array([1, 1, 1, 1, 1])
    assert selection(lengths, counts, 1, Shape(8, 9)).tolist() == [0, 3]
    assert selection(lengths, counts, 1, Shape(14, 9)).tolist() == [0, 1]
    assert selection(lengths, counts, 1, Shape(14, 1)).tolist() == [1]
    assert selection(lengths, counts, 2, Shape(9, 9)).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 3), st.integers(60, 140), st.integers(30, 80))
def test_a_selection_lies_within_its_shape(seed, m, S, P):
    examples = make_examples(12, seed=seed)
    took = selection(examples.lengths, examples.counts, m, Shape(S, P))
    if len(took):
        need = load(examples.lengths[took], examples.counts[took], m, True)
        assert need.S <= S and need.P <= P
        lay_out(examples, took, m, True, Shape(S, P))


def test_choose_takes_the_first_shape_in_lockstep_and_the_fullest_apart():
    shapes = [Shape(8, 8), Shape(16, 16), Shape(32, 32)]
    lengths = {0: np.array([6, 6, 4]), 1: np.array([7, 7, 2])}
    counts = {j: np.ones(3, int) for j in lengths}
    shape, took = choose(lengths, counts, 1, True, shapes, apart=False)
    assert shape == Shape(16, 16) and [t.tolist() for t in took.values()] == [[0, 1, 2]] * 2
    shape, took = choose(lengths, counts, 1, True, shapes[:1], apart=False)  # nothing holds all: leading ones
    assert [t.tolist() for t in took.values()] == [[0], [0]]
    shape, took = choose(
        {0: np.array([7, 1]), 1: np.array([8])}, {0: np.ones(2), 1: np.ones(1)}, 1, True, shapes, True
    )
    assert shape == Shape(8, 8) and [t.tolist() for t in took.values()] == [[0, 1], [0]]


def test_lay_out_restarts_positions_and_keeps_labels_inside_each_example():
    examples = make_examples(9, low=4, high=12, seed=1)
    rows = np.array([7, 2, 5, 0, 3])
    shape = Shape(32, 30)
    block = lay_out(examples, rows, 2, True, shape)
    assert sorted(set(block.rows.ravel().tolist()) - {-1}) == sorted(rows.tolist())
    total = 0
    for b in range(2):
        for row in set(block.rows[b].tolist()) - {-1}:
            at = np.flatnonzero(block.rows[b] == row)
            assert (np.diff(at) == 1).all()
            assert block.tokens[b, at].tolist() == examples.tokens[row].tolist()
            assert block.positions[b, at].tolist() == list(range(len(at)))
        for s, target in zip(block.trained[b], block.targets[b], strict=True):
            if target >= 0:
                row, place = block.rows[b, s], block.positions[b, s]
                # the target is the next token of the example that the position is in, and a label
                assert target == examples.tokens[row][place + 1] and examples.trained[row][place + 1]
                total += 1
    assert total == examples.counts[rows].sum()


def test_without_fill_each_example_has_a_sequence_of_its_own():
    examples = make_examples(5)
    block = lay_out(examples, np.array([4, 1]), 3, False, Shape(64, 64))
    assert [sorted(set(r.tolist())) for r in block.rows] == [[-1, 4], [-1, 1], [-1]]
    empty = blank(3, Shape(4, 2))
    assert (empty.rows == -1).all() and (empty.targets == -1).all() and (empty.tokens == 0).all()


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9))
def test_an_epoch_is_as_many_micro_steps_for_every_batch_size(n, k):
    counts = set()
    for batch_size in (2, 4, 2 * k):
        slot, cursor, steps = Slot(make_examples(n), batch_size, 0, 10**6), Cursor(), 0
        while cursor.epoch == 0:
            cursor, _ = advance(slot, cursor, pending(slot, cursor, 2))
            steps += 1
        counts.add(steps)
        assert cursor.step == steps_per_epoch(n, batch_size) == math.ceil(n / batch_size)
    assert counts == {math.ceil(n / 2)}


def test_padding_is_told_by_length_and_never_by_token_id():
    zeros = make_examples(3, low=5, high=6)
    for tokens in zeros.tokens:
        tokens[:] = 0  # the id that padding has too
    block = lay_out(zeros, np.array([2, 0, 1]), 2, True, Shape(16, 16))
    assert (block.rows >= 0).sum() == 15
    assert (block.targets == 0).sum() == zeros.counts.sum()
    assert (block.targets == -1).sum() == 2 * 16 - zeros.counts.sum()
