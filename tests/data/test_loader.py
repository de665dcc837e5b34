"""The pack loader: the right rows, closed at the right time, whatever the pack; resumable to the bit."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.data.layout import Cursor, Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.order import order
from plora_jax.data.shapes import Shape, choose_shapes
from plora_jax.errors import UserError
from tests.data.conftest import make_examples

EXAMPLES = make_examples(21, seed=7)
OTHER = make_examples(13, seed=8, high=40)


def shapes_for(m=1, group=None, fill=False, limit=5):
    return choose_shapes([(EXAMPLES, 0), (OTHER, 1)], m, group=group, fill=fill, limit=limit, refill=True)


def run(slots, m=1, *, group=None, fill=False, cursors=None, shapes=None):
    loader = PackLoader(
        slots, m, shapes or shapes_for(m, group, fill), group=group, fill=fill, cursors=cursors
    )
    batches = list(loader)
    loader.close()
    return batches


def optimizer_batches(batches, j):
    """Return slot j's rows, one set an optimizer batch (with its epoch), as `close` cuts them."""
    out, rows = [], []
    for b in batches:
        if b.active[j]:
            rows += sorted(set(b.rows[j].ravel().tolist()) - {-1})
        if b.close[j]:
            out.append((int(b.epoch[j]), sorted(rows)))
            rows = []
    assert not rows
    return out


def expected(slot):
    n, size = len(slot.examples), slot.batch_size
    out, epoch = [], 0
    while len(out) < slot.steps:
        rows = order(slot.data_seed, epoch, n).tolist()
        out += [(epoch, sorted(rows[k : k + size])) for k in range(0, n, size)]
        epoch += 1
    return out[: slot.steps]


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name, left, right in zip(x._fields, x, y, strict=True):
            assert left.dtype == right.dtype and np.array_equal(left, right), name


MIX = [Slot(EXAMPLES, 4, 3, 9), None, Slot(OTHER, 8, 1, 2), Slot(EXAMPLES, 8, 3, 4), Slot(EXAMPLES, 4, 4, 6)]


@pytest.mark.parametrize(
    ("m", "group", "fill"),
    [(1, 1, False), (2, 2, False), (4, 4, False), (1, 1, True), (1, 4, True), (2, 4, True)],
)
def test_every_optimizer_batch_is_the_right_slice_of_the_order(m, group, fill):
    batches = run(MIX, m, group=group, fill=fill)
    for j, slot in enumerate(MIX):
        assert optimizer_batches(batches, j) == (expected(slot) if slot else [])
    for b in batches:
        S, P = b.tokens.shape[2], b.targets.shape[2]
        assert b.tokens.shape == b.positions.shape == b.rows.shape == (5, m, S)
        assert b.trained.shape == b.targets.shape == (5, m, P) and Shape(S, P) in shapes_for(m, group, fill)
        assert all(x.dtype == np.int32 for x in b[:6]) and b.close.dtype == b.active.dtype == bool
        idle = ~b.active
        assert (b.rows[idle] == -1).all() and (b.targets[idle] == -1).all() and not b.close[idle].any()
    assert not batches[0].active[1] and batches[-1].active.any()


def test_tokens_and_targets_are_the_examples_own():
    for b in run(MIX, 2):
        for j, slot in enumerate(MIX):
            if slot is None:
                continue
            for i in range(2):
                row = b.rows[j, i, 0]
                if row < 0:
                    assert (b.targets[j, i] == -1).all()
                    continue
                tokens = slot.examples.tokens[row]
                assert b.tokens[j, i, : len(tokens)].tolist() == tokens.tolist()
                assert b.positions[j, i, : len(tokens)].tolist() == list(range(len(tokens)))
                assert (b.rows[j, i, len(tokens) :] == -1).all()
                live = b.targets[j, i] >= 0
                assert b.trained[j, i][live].tolist() == slot.examples.heads[row].tolist()
                assert b.targets[j, i][live].tolist() == slot.examples.targets[row].tolist()


def test_slots_that_share_data_and_seed_see_the_same_rows_at_the_same_micro_step():
    slots = [Slot(EXAMPLES, 4, 3, 6), Slot(EXAMPLES, 8, 3, 3), Slot(EXAMPLES, 2, 3, 11)]
    for m, group, fill in [(2, 2, False), (1, 2, True)]:
        batches = run(slots, m, group=group, fill=fill, shapes=[Shape(128, 128)])
        assert len(batches) == 11 and all(b.active.all() for b in batches)
        assert all((b.rows == b.rows[:1]).all() and (b.tokens == b.tokens[:1]).all() for b in batches)
        # 21 rows: the last micro-step has one row, and closes every slot's partial batch
        assert batches[-1].close.all() and len(set(batches[-1].rows[0].ravel()) - {-1}) == 1


def test_lockstep_outlasts_groups_too_large_for_every_shape():
    slots = [Slot(EXAMPLES, 4, 3, 6), Slot(EXAMPLES, 8, 3, 3)]
    batches = run(slots, 1, group=4, fill=True, shapes=[Shape(64, 64)])
    assert all(b.active.all() and (b.rows[0] == b.rows[1]).all() for b in batches)
    assert [optimizer_batches(batches, j) for j in range(2)] == [expected(s) for s in slots]


def test_fewer_rows_than_the_batch_size_and_a_single_row():
    one = make_examples(1)
    batches = run([Slot(one, 8, 0, 3)], 4, shapes=[Shape(64, 64)])
    assert [b.close.tolist() for b in batches] == [[True]] * 3 and [int(b.epoch[0]) for b in batches] == [
        0,
        1,
        2,
    ]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_slots_rows_do_not_depend_on_the_pack(data):
    draw = data.draw
    mine = Slot(EXAMPLES, draw(st.sampled_from([2, 4, 8])), draw(st.integers(0, 3)), draw(st.integers(1, 12)))
    others = [
        Slot(
            draw(st.sampled_from([EXAMPLES, OTHER])),
            draw(st.sampled_from([2, 4, 6])),
            draw(st.integers(0, 3)),
            draw(st.integers(1, 9)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    j = draw(st.integers(0, len(others)))
    fill = draw(st.booleans())
    batches = run([*others[:j], mine, *others[j:]], 2 if not fill else 1, group=2, fill=fill)
    assert optimizer_batches(batches, j) == expected(mine)


@pytest.mark.parametrize(("m", "group", "fill"), [(2, 2, False), (1, 4, True), (1, 1, True)])
def test_resuming_from_any_cursor_gives_the_same_bits(m, group, fill):
    whole = run(MIX, m, group=group, fill=fill)
    loader = PackLoader(MIX, m, shapes_for(m, group, fill), group=group, fill=fill)
    for k in range(len(whole)):
        saved = json.loads(json.dumps(loader.cursors))  # as a checkpoint would hold them
        same(run(MIX, m, group=group, fill=fill, cursors=saved)[:4], whole[k : k + 4])
        next(loader)
    loader.close()


def test_a_refilled_slot_starts_afresh_and_leaves_the_others_alone():
    first, second, new = Slot(EXAMPLES, 4, 3, 9), Slot(EXAMPLES, 4, 3, 12), Slot(OTHER, 4, 1, 5)
    loader = PackLoader([first, second], 2, shapes_for(2))
    before = [next(loader) for _ in range(7)]  # three optimizer batches and a half
    loader.set_slot(0, new)
    after = list(loader)
    loader.close()
    assert optimizer_batches([*before, *after], 1) == expected(second)
    assert optimizer_batches(after, 0) == expected(new)
    loader = PackLoader([first, second], 2, shapes_for(2))
    next(loader)
    loader.set_slot(1, None)
    rest = list(loader)
    assert not any(b.active[1] for b in rest) and optimizer_batches(rest, 0)[1:] == expected(first)[1:]
    loader.set_slot(1, new, Cursor(0, 4, 1))  # a finished loader goes on when it is given work
    assert optimizer_batches(list(loader), 1) == expected(new)[1:]
    loader.close()


def test_padding_is_counted():
    loader = PackLoader([Slot(EXAMPLES, 4, 0, 2), None], 4, [Shape(64, 64)])
    batches = list(loader)
    real = int(EXAMPLES.lengths[order(0, 0, 21)[:8]].sum())
    assert loader.filled == (real, len(batches) * 4 * 64 - real, len(batches) * 4 * 64)
    assert loader.filled.padded == pytest.approx(1 - real / (2 * 4 * 64))
    loader.close()


def test_batches_are_made_ahead_and_errors_reach_the_caller(monkeypatch):
    loader = PackLoader([Slot(EXAMPLES, 4, 0, 9)], 2, shapes_for(2), prefetch=4)
    for future in list(loader._queue):
        future.result(timeout=5)  # done without anyone asking for a batch
    assert loader.cursors == (Cursor(),)  # and yet the cursor is where the caller stands
    next(loader)
    assert loader.cursors[0] == Cursor(0, 0, 0, 0b11)
    import plora_jax.data.loader as module

    def broken(*_):
        raise RuntimeError("broken row")

    monkeypatch.setattr(module, "lay_out", broken)
    loader.set_slot(0, Slot(OTHER, 4, 0, 1))
    with pytest.raises(RuntimeError, match="broken row"):
        next(loader)
    loader.close()


def test_what_cannot_be_served_is_said():
    with pytest.raises(UserError, match="batch size 6 is no multiple of a micro-step's 4 examples"):
        PackLoader([Slot(EXAMPLES, 6, 0, 1)], 4, shapes_for(4))
    with pytest.raises(UserError, match="8 examples a micro-step need fill"):
        PackLoader([Slot(EXAMPLES, 8, 0, 1)], 4, shapes_for(4), group=8)
    loader = PackLoader([Slot(OTHER, 4, 0, 1)], 4, [Shape(40, 40)])
    with pytest.raises(UserError, match=r"made up: has rows of up to \d+ tokens .* longest shape of 40"):
        loader.set_slot(0, Slot(EXAMPLES, 4, 0, 1))
    loader.close()
