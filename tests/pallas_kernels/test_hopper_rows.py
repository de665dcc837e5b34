"""The rounding kernel, interpreted, against XLA's, which test_fp8.py and test_glu.py check against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8, hopper_rows
from pallas_kernels.hopper_rows import AT_ONCE, round_glu, round_glu_back, round_rows, rows_fit
from tests.pallas_kernels.problems import INTERPRET, raced


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def same(got, want):
    """Say that scales are equal to a bit or so, as a division by a constant may be, and values but for ties then."""
    np.testing.assert_allclose(got[1], want[1], rtol=2.0**-22)
    for a, b in zip(got[0], want[0], strict=True):
        assert a.dtype == b.dtype and np.mean(np.asarray(a, np.float32) == np.asarray(b, np.float32)) > 0.999


def near(got, want):
    """Say that numbers are equal but for ties, as exp is not the same in the last bit everywhere."""
    assert got.dtype == want.dtype and np.mean(np.asarray(got) == np.asarray(want)) > 0.999
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2.0**-7, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(
    ("sizes", "scaled"),
    [
        ((128,), (False,)),  # one piece of one number a thread
        ((896,), (True,)),  # pieces of 128
        ((512 * (AT_ONCE + 3),), (False,)),  # a turn and what is left
        ((1024, 512, 512), (True, False, True)),  # q, k and v: one scale for all
        ((2 * 512 * AT_ONCE, 256), (True, True)),  # the narrowest decides how wide a piece is
    ],
)
def test_the_kernel_rounds_as_xla_does(sizes, scaled, dtype):
    # another array has the largest number in each row
    sizes_of = [10.0 ** ((np.arange(3) + n) % len(sizes))[:, None] for n in range(len(sizes))]
    xs = [(draw(n, 2, 3, size) * sizes_of[n]).astype(jnp.bfloat16) for n, size in enumerate(sizes)]
    columns = [
        jnp.abs(draw(9, size, dtype=jnp.float32)) if own else None
        for size, own in zip(sizes, scaled, strict=True)
    ]
    got = round_rows(xs, columns, dtype, interpret=INTERPRET)
    assert not raced()
    same(got, fp8.round_rows(xs, columns, dtype))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_rows_of_zeros_and_rows_that_are_not_finite(dtype):
    """What is not finite in one array makes the row's scale so, and with it the other array's products."""
    x, other = draw(0, 4, 256).at[0].set(0).at[1, 200].set(jnp.inf).at[2, 7].set(jnp.nan), draw(1, 4, 128)
    other = other.at[0].set(0)
    got = round_rows((x, other), (None, None), dtype, interpret=INTERPRET)
    scale = np.asarray(got[1])
    assert not np.isfinite(scale[1:3]).any() and np.isfinite(scale[[0, 3]]).all()
    for values in got[0]:
        product = np.asarray(values, np.float32).sum(1) * scale
        assert product[0] == 0 and not np.isfinite(product[1:3]).any() and np.isfinite(product[3])
    same(([v[3:] for v in got[0]], got[1][3:]), fp8.round_rows((x[3:], other[3:]), (None, None), dtype))


@pytest.mark.parametrize("busy", [1, 100], ids=["a warpgroup a row", "four"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [128, 512 * (4 * AT_ONCE + 3)])
def test_the_kernel_computes_the_unit_and_its_gradients_as_xla_does(size, activation, busy, monkeypatch):
    monkeypatch.setattr(hopper_rows, "BUSY_WGS", busy)
    gate, up, dh = (draw(n, 1, 2, size) for n in range(3))
    h = round_glu(activation, gate, up, interpret=INTERPRET)
    assert not raced()
    want = fp8.round_glu(activation, gate, up)
    near(h.x, want.x)
    same(([h.values], h.scale), ([want.values], want.scale))

    columns = [jnp.abs(draw(n, size, dtype=jnp.float32)) for n in (3, 4)]
    arrays = gate, up, dh, columns, jnp.float8_e5m2
    gradients, rounded = round_glu_back(activation, *arrays, interpret=INTERPRET)
    assert not raced()
    want_gradients, want_rounded = fp8.round_glu_back(activation, *arrays)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        near(got, wanted)
    same(rounded, want_rounded)


def test_what_is_said_to_fit_lowers_and_what_does_not_is_left_to_xla():
    """At the limit: a long row with short ones beside it, each of which begins anew on a KiB."""

    def lower(sizes):
        xs = [jax.ShapeDtypeStruct((4, size), jnp.bfloat16) for size in sizes]
        fits = rows_fit(xs)
        run = jax.jit(lambda xs: round_rows(xs, [None] * len(xs), jnp.float8_e4m3fn))
        return fits, "mosaic_gpu" in run.trace(xs).lower(lowering_platforms=("cuda",)).as_text()

    # as many warpgroups as there may be, whose scratch memory counts
    beside = [128, 128]
    longest = max(
        n
        for n in range(100_096, 2**17, 128)
        if rows_fit([jax.ShapeDtypeStruct((4, size), jnp.bfloat16) for size in (n, *beside)])
    )
    assert lower([longest, *beside]) == (True, True)
    assert lower([longest + 512, *beside]) == (False, False)
