"""Packed forward and backward through the interpreted kernel against float64, on fixed and drawn shapes."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import hopper

from .problems import INTERPRET, ONE_BLOCK, exact, exact_of_rounded, in_fp8, packed, raced, worst

TOLERANCE = 8e-3  # a few roundings to bf16, each 2^-9 in norm


def check(*shape, **options):
    x, mask, sites, dys = packed(*shape, **options)
    ys, us = hopper.forward(x, mask, sites, config=lambda site: ONE_BLOCK, interpret=INTERPRET)
    assert not raced()
    grads = hopper.backward(x, mask, sites, us, dys, config=ONE_BLOCK, interpret=INTERPRET)
    assert not raced()
    (want_ys, want_us), want_grads = exact(x, mask, sites, dys)
    assert worst(ys, want_ys) < TOLERANCE
    assert worst(us, want_us) < TOLERANCE
    assert worst(grads, want_grads) < TOLERANCE
    assert all(g.dtype == jnp.float32 for g in (*grads[1], *grads[2]) if g is not None)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 72, 128, (128, 64), (8, 8)), {}),  # sites that share x and a shrink
        ((1, 64, 64, (64, 64), (5, 0)), {"dropout": True}),  # a rank no copy can take, a site without adapter
        ((1, 64, 64, (64,), (96,)), {"bias": False}),  # a step and a half of ranks
        ((1, 16, 64, (64, 64, 128), (5, 30, 40)), {}),  # which begin anywhere in the stack
        ((1, 16, 64, (64,), (256,)), {}),  # too wide for a leader tile
    ],
)
def test_packed_equals_float64(shape, options):
    check(*shape, **options)


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 72, 256, (128, 128), (8, 8)), {}),
        ((1, 64, 128, (128, 128), (5, 0)), {"dropout": True}),
        ((1, 64, 128, (256,), (96,)), {"bias": False}),
    ],
)
def test_on_an_fp8_base_packed_equals_float64_of_the_rounded_numbers(shape, options, backward):
    x, mask, sites, dys = packed(*shape, **options)
    eight = in_fp8(sites, backward)
    ys, us = hopper.forward(x, mask, eight, config=lambda site: ONE_BLOCK, interpret=INTERPRET)
    assert not raced()
    dx, *grads = hopper.backward(x, mask, eight, us, dys, config=ONE_BLOCK, interpret=INTERPRET)
    assert not raced()

    (want_ys, want_us), want_grads = exact_of_rounded(x, mask, eight, dys)
    assert worst(ys, want_ys) < TOLERANCE and worst(us, want_us) < TOLERANCE
    assert worst((dx, *grads), want_grads) < TOLERANCE


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    jobs=st.integers(1, 3),
    tokens=st.integers(1, 20).map(lambda n: 8 * n),
    d_in=st.sampled_from([64, 128]),
    sites=st.lists(st.tuples(st.sampled_from([64, 128, 192]), st.integers(0, 70)), min_size=1, max_size=2),
    dropout=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_rank(jobs, tokens, d_in, sites, dropout, seed):
    d_outs, ranks = zip(*sites, strict=True)
    if any(ranks):
        check(jobs, tokens, d_in, d_outs, ranks, dropout=dropout, seed=seed)
