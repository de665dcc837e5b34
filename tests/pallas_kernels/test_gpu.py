"""Numerics on a GPU, as punica and lorax test theirs: bf16 and fp32 against float64, over shapes, ranks and jobs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import GATED, SHRUNK, choose, fp8, hopper_rows, lora_dense, lora_mlp, using
from pallas_kernels.choice import implementation
from plora_jax.training.losses import with_gradient

from .problems import exact, exact_of_rounded, in_fp8, packed, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def run(x, mask, sites, dys):
    with using("hopper"):  # also where the choice would find it slow
        kernel = implementation(x, sites)

    def both(x, mask, sites, dys):
        ys, us = kernel.forward(x, mask, sites)
        return (ys, us), kernel.backward(x, mask, sites, us, dys)

    return jax.jit(both)(x, mask, sites, dys)


@pytest.mark.parametrize("hidden", [4096, 11008])
@pytest.mark.parametrize("rank", [8, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("jobs, tokens", [(1, 133 * 8), (3, 128), (7, 256)])
def test_punica_grid(hidden, rank, jobs, tokens):
    problem = packed(jobs, tokens, hidden, (512,), (rank,), seed=rank)
    got = run(*problem)
    assert worst(got, exact(*problem)) < 8e-3
    again = run(*problem)
    jax.tree.map(np.testing.assert_array_equal, got, again)


@pytest.mark.parametrize(
    "jobs, tokens, rank, dtype, name",
    [
        (1, 128, 1, jnp.bfloat16, "hopper"),
        (2, 1000, 5, jnp.bfloat16, "hopper"),  # T no multiple of the tile
        (128, 128, 256, jnp.bfloat16, "hopper"),
        (16, 64, 8, jnp.bfloat16, "xla"),
        (4, 10, 8, jnp.bfloat16, "xla"),
        (4, 128, 8, jnp.float16, "hopper"),
        (4, 128, 8, jnp.float32, "xla"),
    ],
)
def test_edges(jobs, tokens, rank, dtype, name):
    with using("hopper"):
        assert choose(dtype, jobs, tokens, 256, [128], [rank]).name == name
    problem = packed(jobs, tokens, 256, (128,), (rank,), dtype=dtype)
    with jax.default_matmul_precision("highest"):
        got = run(*problem)
    assert worst(got, exact(*problem)) < (1e-5 if dtype == jnp.float32 else 8e-3)


@pytest.mark.parametrize("narrow", [64, 128, 192, 320])
def test_narrow_results(narrow):
    """Fewer columns than a tile has, of y and of dx."""
    for d_in, d_outs in ((256, (narrow, 256)), (narrow, (256, narrow))):
        problem = packed(3, 200, d_in, d_outs, (8, 16))
        assert worst(run(*problem), exact(*problem)) < 8e-3


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "shape, dropout",
    [
        ((3, 128, 4096, (512,), (8,)), False),
        ((2, 1000, 512, (11008,), (96,)), False),
        ((4, 256, 512, (512, 128, 384), (16, 32, 5)), True),
        ((7, 256, 896, (896, 128, 128), (64, 64, 64)), False),
    ],
)
def test_an_fp8_base(shape, dropout, backward):
    x, mask, sites, dys = packed(*shape, dropout=dropout)
    problem = x, mask, in_fp8(sites, backward), dys
    got = run(*problem)
    assert worst(got, exact_of_rounded(*problem)) < 8e-3
    jax.tree.map(np.testing.assert_array_equal, got, run(*problem))


@pytest.mark.parametrize("sizes", [(128,), (256, 768), (512 * 15, 512)])
def test_rounding_gives_the_same_numbers_as_xla(sizes):
    """For pieces of one, two and four numbers a thread; rows that are not finite have scales that are not."""
    draw = np.random.default_rng(0).standard_normal
    xs = [jnp.asarray(draw((70, size)), jnp.bfloat16).at[5, 100].set(jnp.nan) for size in sizes]
    columns = [jnp.asarray(np.abs(draw(size)), jnp.float32) for size in sizes]
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        got, want = (
            jax.jit(f, static_argnums=2)(xs, columns, dtype) for f in (hopper_rows.round_rows, fp8.round_rows)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert np.isnan(got[1][5])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [128, 4864, 18944])
def test_the_gated_unit_gives_the_same_numbers_as_xla(size, activation):
    """For rows of one, two and four warpgroups, and the same bits again; NaN and a gate of -1e4 stay in their rows."""
    draw = np.random.default_rng(0).standard_normal
    gate, up, dh = (jnp.asarray(3 * draw((500, size)), jnp.bfloat16) for _ in range(3))
    gate = gate.at[5, 100].set(jnp.nan).at[6, 100].set(-1e4)
    columns = [jnp.asarray(np.abs(draw(size)), jnp.float32) for _ in range(2)]

    def both(own):
        unit = own.round_glu(activation, gate, up)
        return unit, own.round_glu_back(activation, gate, up, dh, columns, jnp.float8_e4m3fn)

    kernel = jax.jit(both, static_argnums=0)
    got, again, want = kernel(hopper_rows), kernel(hopper_rows), both(fp8)
    for own, second, other in zip(*(jax.tree.leaves(t) for t in (got, again, want)), strict=True):
        own, second, other = (
            np.asarray(t, np.float32) for t in (own, second, other)
        )  # NaN equals itself there
        np.testing.assert_array_equal(own, second)
        assert np.mean((own == other) | (np.isnan(own) & np.isnan(other))) > 0.99
    assert np.isnan(got[0].scale[5, 0]) and np.isfinite(np.delete(got[0].scale, 5)).all()
    assert np.isnan(got[1][1][1][5]) and np.isfinite(np.delete(got[1][1][1], 5)).all()


@pytest.mark.parametrize("dropout", [False, True])
def test_groups(dropout):
    problem = packed(4, 256, 512, (512, 128, 128), (16, 32, 0), dropout=dropout)
    assert worst(run(*problem), exact(*problem)) < 8e-3


@pytest.mark.parametrize("ranks", [(8, 8, 8), (5, 40, 24), (64, 40, 0), (32, 8, 70)])
def test_ranks_of_several_sites(ranks):
    """What the launch of one site makes for the others, and what stands beside a site's rows in the stack."""
    problem = packed(3, 200, 512, (512, 256, 128), ranks)
    assert worst(run(*problem), exact(*problem)) < 8e-3


def test_an_empty_slot_is_zero_and_poison_stays_in_its_job():
    """Zero A and B add exactly nothing; NaN in one job's tokens or adapter leaves every other job's bits."""
    x, mask, (site,), dys = packed(3, 128, 256, (256,), (16,), bias=False)
    zero = site._replace(a=site.a.at[1].set(0), b=site.b.at[1].set(0))
    (ys, _), (dx, das, dbs) = run(x, mask, (zero,), dys)
    (plain, _), _ = run(x, mask, (zero._replace(b=zero.b * 0),), dys)
    np.testing.assert_array_equal(ys[0][1], plain[0][1])
    assert not np.any(das[0][1]) and not np.any(dbs[0][1])
    poisoned = site._replace(a=zero.a.at[0].set(jnp.nan), b=zero.b)
    (bad, _), (bad_dx, bad_das, bad_dbs) = run(x.at[0].set(jnp.inf), mask, (poisoned,), dys)
    for good, other in ((ys[0], bad[0]), (dx, bad_dx), (das[0], bad_das[0]), (dbs[0], bad_dbs[0])):
        np.testing.assert_array_equal(good[1:], other[1:])


def test_layer_under_scan_checkpoint_and_vmap():
    """Two scanned, rematerialised layers vmapped over jobs equal the einsums within bf16 noise, bit for bit again."""
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    w = draw(2, 256, 256, scale=1 / 16, dtype=jnp.bfloat16)
    adapters = draw(2, 4, 16, 256, scale=1 / 16), draw(2, 4, 256, 16, scale=0.1), jnp.full((2, 4), 0.5)
    x = draw(4, 128, 256, dtype=jnp.bfloat16)

    def einsum(x, w, a, b, scale):
        y = x @ w + (scale * ((x @ a.T.astype(x.dtype)) @ b.T.astype(x.dtype))).astype(x.dtype)
        return y

    def step(dense):
        def loss(adapters, x):
            def layer(h, xs):
                return jnp.tanh(dense(h, xs[0], *xs[1])), None

            h, _ = jax.lax.scan(jax.checkpoint(layer), x, (w, adapters))
            return jnp.sum(h.astype(jnp.float32) ** 2)

        mapped = jax.vmap(loss, in_axes=(1, 0))
        return jax.jit(jax.grad(lambda p, x: jnp.sum(mapped(p, x)), argnums=(0, 1)))(adapters, x)

    with using("hopper"):
        got = step(lora_dense)
    want = step(einsum)
    got, want = (got[0][:2], got[1]), (want[0][:2], want[1])
    assert worst(got, want) < 3e-2
    with using("hopper"):
        again = step(lora_dense)
    jax.tree.map(np.testing.assert_array_equal, got, (again[0][:2], again[1]))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "jobs, tokens, d, d_ff, rank", [(3, 128, 256, 512, 8), (2, 1000, 896, 4864, 32), (4, 256, 512, 704, 96)]
)
def test_a_gated_mlp_in_its_products_launches(jobs, tokens, d, d_ff, rank, activation):
    """Value and gradients against XLA's in float32, with the unit kept and made again: the same bits, and again."""
    draw = np.random.default_rng(0).standard_normal
    shapes = [(d, d_ff), (d, d_ff), (d_ff, d)]
    ws = tuple(jnp.asarray(draw(shape) * shape[0] ** -0.5, jnp.bfloat16) for shape in shapes)
    adapters = tuple(
        (
            jnp.asarray(draw((jobs, rank, i)) * i**-0.5, jnp.float32),
            jnp.asarray(draw((jobs, o, rank)) * rank**-0.5, jnp.float32),
            jnp.full((jobs,), 0.5),
        )
        for i, o in shapes
    )
    x, dy = (jnp.asarray(draw((jobs, tokens, d)), jnp.bfloat16) for _ in range(2))

    def both(x, dy, adapters, ws, keep):
        def run(x, adapters):
            return lora_mlp(x, ws, adapters, activation=activation, keep=keep)

        if not keep:
            run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(SHRUNK, GATED))
        y, pull = jax.vjp(jax.vmap(run), x, adapters)
        return y, pull(dy)

    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda t: t.astype(jnp.float32), (x, dy, adapters, ws))
        want = jax.jit(both, static_argnums=4)(*wide, True)
    with using("hopper"):
        got = [jax.jit(both, static_argnums=4)(x, dy, adapters, ws, keep) for keep in (True, True, False)]
    y, (dx, grads) = got[0]
    scales_apart = [(a, b) for a, b, _ in grads], [(a, b) for a, b, _ in want[1][1]]
    assert worst((y, dx, scales_apart[0]), (want[0], want[1][0], scales_apart[1])) < 1.5e-2
    for other in got[1:]:
        jax.tree.map(np.testing.assert_array_equal, got[0], other)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("rows, d, vocabulary", [(1024, 896, 151_936), (777, 2304, 32_064), (8, 64, 64)])
def test_the_loss_at_a_head(rows, d, vocabulary, softcap):
    """Losses and gradients against XLA's in float32."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((rows, d)) * 2, jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((vocabulary, d)) * d**-0.5, jnp.bfloat16)
    targets = jnp.asarray(rng.integers(-1, vocabulary, rows), jnp.int32).at[0].set(-1)
    loss, dh = jax.jit(with_gradient(softcap, "hopper"))(h, targets, w)
    with jax.default_matmul_precision("highest"):
        wide = (h.astype(jnp.float32), targets, w.astype(jnp.float32))
        want, slope = jax.jit(with_gradient(softcap, "xla"))(*wide)
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-5)
    assert worst((dh,), (slope,)) < 5e-3
    assert not dh[0].any() and loss[0] == 0
