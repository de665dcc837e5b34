"""The fused kernel on the CPU: interpreted with race detection against float64, and lowered for CUDA."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper_gemm import DEFAULT, Extra, Shrink, lora_gemm
from pallas_kernels.tiles import GemmConfig, fit_shared

from .problems import INTERPRET, ONE_BLOCK, raced, relative


def draw(jobs, tokens, depths, n, ranks, transposed, bias, dtype=jnp.bfloat16):
    """Products of the given depths with one shrink each; rank 0 leaves a product without."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

    products = [(normal(jobs, tokens, k), normal(n, k) if transposed else normal(k, n)) for k in depths]
    shrinks = [
        Shrink(p, normal(jobs, r, k), jnp.asarray(rng.uniform(1, 2, (jobs, r)), jnp.float32))
        for p, (k, r) in enumerate(zip(depths, ranks, strict=True))
        if r
    ]
    extras = [Extra(s, normal(jobs, sh.a.shape[1], n)) for s, sh in enumerate(shrinks)]
    return products, shrinks, extras, normal(n) if bias else None


def answer(products, shrinks, extras, bias, transposed):
    def f64(t):
        return np.asarray(t, np.float64)

    us = [f64(products[s.product][0]) @ f64(s.a).swapaxes(1, 2) * f64(s.scale)[:, None, :] for s in shrinks]
    out = sum(f64(x) @ (f64(w).T if transposed else f64(w)) for x, w in products)
    for extra in extras:
        out = out + us[extra.u] @ f64(extra.e)
    return out + (0 if bias is None else f64(bias)), us


def interpreted(transposed, config, *shape, bias=False):
    products, shrinks, extras, bias = draw(*shape, transposed, bias)
    out, us = lora_gemm(
        products, shrinks, extras, bias=bias, transposed=transposed, config=config, interpret=INTERPRET
    )
    want, want_us = answer(products, shrinks, extras, bias, transposed)
    assert relative(out, want) < 4e-3
    assert all(relative(u, w) < 4e-3 for u, w in zip(us, want_us, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "shape, bias",
    [
        ((2, 128, [128], 256, [8]), True),
        ((3, 72, [128, 64], 192, [8, 64]), False),  # rows, columns and ranks beyond the tiles; two products
        ((1, 72, [64, 64, 64], 128, [64, 0, 128]), False),  # more ranks together than one accumulator holds
        ((1, 8, [64], 64, [0]), False),  # no adapter, one tile
    ],
)
def test_interpreted_equals_float64_without_races(transposed, shape, bias):
    interpreted(transposed, ONE_BLOCK, *shape, bias=bias)
    assert not raced()


def test_race_detection_bites(monkeypatch):
    """The same kernel that does not wait before it reuses the buffer of an outgoing copy is caught."""
    wait = plgpu.wait_smem_to_gmem

    def careless(n, wait_read_only=False):
        if not wait_read_only:
            wait(n)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", careless)
    interpreted(False, ONE_BLOCK, 2, 128, [64], 256, [0])
    assert raced()


@pytest.mark.parametrize("transposed", [False, True])
def test_extras_take_rows_of_e(transposed):
    """Rows that end E, two steps, and rows beside which stand others."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16)

    x, w, e = normal(2, 72, 64), normal(192, 64), normal(2, 192, 192)
    us, starts = [normal(2, 72, rank) for rank in (24, 128, 40)], (168, 16, 144)
    extras = [Extra(u, e, start) for u, start in zip(us, starts, strict=True)]
    products = [(x, w if transposed else w.T)]
    how = {"transposed": transposed, "config": ONE_BLOCK, "interpret": INTERPRET}
    out, _ = lora_gemm(products, (), extras, **how)
    x, w, e, *us = (np.asarray(t, np.float64) for t in (x, w, e, *us))
    parts = [u @ e[:, start : start + u.shape[2]] for u, start in zip(us, starts, strict=True)]
    want = x @ w.T + sum(parts)
    assert relative(out, want) < 4e-3
    assert not raced()

    # what stands behind the end of a job's E is another job's
    poisoned = [extra._replace(e=extra.e.at[1].set(jnp.nan)) for extra in extras]
    again, _ = lora_gemm(products, (), poisoned, **how)
    np.testing.assert_array_equal(again[0], out[0])
    assert np.isnan(again[1]).all()


@pytest.mark.parametrize("ranks", [(8, 8, 8), (32, 8, 24), (64, 40)])
def test_a_shrink_makes_several_arrays(ranks):
    (x_w,), (shrink,), _, _ = draw(2, 72, [128], 128, [sum(ranks)], False, False)
    _, us = lora_gemm([x_w], [shrink._replace(ranks=ranks)], config=ONE_BLOCK, interpret=INTERPRET)
    assert [u.shape for u in us] == [(2, 72, rank) for rank in ranks]
    _, (want,) = answer([x_w], [shrink], [], None, False)
    assert relative(jnp.concatenate(us, axis=2), want) < 4e-3
    assert not raced()


@pytest.mark.slow
def test_clusters_share_w():
    """Two blocks that share copies of W, in a process with enough threads for six interpreted warpgroups."""
    code = (
        "from tests.pallas_kernels.test_hopper_gemm import *\n"
        "interpreted(False, GemmConfig(sms=2, cluster=2, tile_n=128, stages=3), 3, 72, [128, 64], 192, [8, 64])\n"
        "assert not raced()"
    )
    environment = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=240)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "jobs, tokens, depths, n, ranks",
    [
        (1, 8192, [3584], 3584, [8]),
        (8, 1024, [3584], 18944, [128]),
        (32, 256, [2048, 256, 256], 2048, [16, 32, 40]),
        (5, 1000, [896], 128, [24]),
    ],
)
def test_lowers_for_cuda(dtype, transposed, jobs, tokens, depths, n, ranks):
    def sd(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    products = [(sd(jobs, tokens, k), sd(n, k) if transposed else sd(k, n)) for k in depths]
    pairs = list(zip(depths, ranks, strict=True))
    shrinks = [(sd(jobs, r, k), sd(jobs, r, dtype=jnp.float32)) for k, r in pairs]
    es = [sd(jobs, r, n) for r in ranks]

    def run(products, shrinks, es, bias):
        shrinks = [Shrink(p, *s) for p, s in enumerate(shrinks)]
        extras = [Extra(s, e) for s, e in enumerate(es)]
        return lora_gemm(products, shrinks, extras, bias=bias, transposed=transposed)

    lowered = jax.jit(run).trace(products, shrinks, es, sd(n)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("width, piece", [(0, 0), (16, 16), (96, 32), (64, 64), (128, 64)])
def test_shared_memory_fits(width, piece):
    config, a_stages = fit_shared(DEFAULT, width, piece)
    assert config.stages >= 3
    assert a_stages >= 2 or not width
    with pytest.raises(ValueError, match="does not fit"):
        fit_shared(GemmConfig(tile_n=1024), width, piece)


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="128 is the most"):
        lora_gemm(*draw(1, 64, [64], 64, [192], False, False)[:3])


def test_arrays_of_shrinks_are_what_their_ranks_say():
    products, (one, other), _, _ = draw(1, 64, [64, 64], 64, [16, 16], False, False)
    with pytest.raises(ValueError, match="other ranks than its A"):
        lora_gemm(products, [one._replace(ranks=(8,))])
    with pytest.raises(ValueError, match="one array each"):
        lora_gemm(products, [one._replace(ranks=(8, 8)), other])


@pytest.mark.parametrize("ranks", [(8, 16), (32, 8, 24), (64, 40), (32, 32, 32)])
def test_a_shrink_of_several_arrays_lowers_for_cuda(ranks):
    def sd(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(x, w, a, scale, e):
        return lora_gemm([(x, w)], [Shrink(0, a, scale, ranks)], [Extra(1, e)])

    total = sum(ranks)
    given = sd(2, 1000, 896), sd(896, 128), sd(2, total, 896), sd(2, total, dtype=jnp.float32)
    text = jax.jit(run).trace(*given, sd(2, ranks[1], 128)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
