"""Random problems for the kernels, their float64 answers, and the ways to run a kernel without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Fp8Weight, quantise, quantise_weight, reference
from pallas_kernels.fp8 import round_gradients
from pallas_kernels.hopper_gemm import GemmConfig
from pallas_kernels.reference import Site

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
ONE_BLOCK = GemmConfig(sms=1, cluster=1, tile_n=128, stages=3)


def raced() -> bool:
    """Say whether the last interpretation saw a data race."""
    return gpu_callbacks.get_races().races_found


def relative(got, want) -> float:
    """Return ‖got − want‖ / ‖want‖ in float64; NaN stays NaN and fails every comparison."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / norm) if norm else float(np.linalg.norm(got))


def stood_for(values, scale):
    """Return the float64 numbers that quantised ones stand for."""
    return np.asarray(values, np.float64) * np.asarray(scale, np.float64)[..., None]


def packed(jobs, tokens, d_in, d_outs, ranks, *, dropout=False, bias=True, seed=0, dtype=jnp.bfloat16):
    """Draw x, mask, sites and cotangents of a packed call; rank 0 leaves a site without adapter."""
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0, as_type=dtype):
        return jnp.asarray(rng.standard_normal(shape) * scale, as_type)

    sites = []
    for d_out, rank in zip(d_outs, ranks, strict=True):
        adapter = (None, None, None)
        if rank:
            a = draw(jobs, rank, d_in, scale=d_in**-0.5, as_type=jnp.float32)
            b = draw(jobs, d_out, rank, scale=rank**-0.5, as_type=jnp.float32)
            adapter = (a, b, jnp.asarray(rng.uniform(0.5, 2, jobs), jnp.float32))
        w = draw(d_in, d_out, scale=d_in**-0.5)
        sites.append(Site(w, draw(d_out) if bias else None, *adapter))
    x = draw(jobs, tokens, d_in)
    mask = jnp.asarray((rng.random(x.shape) > 0.2) / 0.8, jnp.float32) if dropout else None
    return x, mask, tuple(sites), tuple(draw(jobs, tokens, d_out) for d_out in d_outs)


def exact(x, mask, sites, dys):
    """Return the float64 results (ys, us), (dx, das, dbs) of a packed call."""
    with jax.enable_x64(True):
        x, mask, sites, dys = jax.tree.map(
            lambda t: jnp.asarray(np.asarray(t), jnp.float64), (x, mask, sites, dys)
        )
        ys, us = reference.forward(x, mask, sites)
        return (ys, us), reference.backward(x, mask, sites, us, dys)


def in_fp8(sites, backward):
    """Return the sites with their weights rounded to fp8."""
    return tuple(site._replace(w=Fp8Weight(*quantise_weight(site.w.T), backward)) for site in sites)


def exact_of_rounded(x, mask, sites, dys):
    """Return the float64 results of sites with fp8 weights, as `exact`: of the numbers that W, x and dy were rounded to
    in the frozen products, and of x and dy themselves everywhere else.
    """

    def f64(t):
        return np.asarray(t, np.float64)

    held = [f64(site.w.values).T * f64(site.w.scale) for site in sites]
    wide = tuple(site._replace(w=w) for site, w in zip(sites, held, strict=True))
    (ys, us), (dx, das, dbs) = exact(x, mask, wide, dys)
    off = stood_for(*quantise(x)) - f64(x)
    ys = tuple(f64(y) + off @ w for y, w in zip(ys, held, strict=True))
    folded, scale = round_gradients(dys, [site.w for site in sites])
    for site, own, dy in zip(sites, folded, dys, strict=True):
        dx = f64(dx) + (stood_for(own, scale) - f64(dy) * f64(site.w.scale)) @ f64(site.w.values)
    return (ys, us), (dx, das, dbs)


def worst(got, want) -> float:
    """Return the largest relative error over two pytrees of the same structure."""
    return max(relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def count_launches(text):
    """Count the launches of the kernel in a lowered program, each function as often as it is called."""
    bodies = {part.split("(")[0]: part for part in re.split(r"func\.func \w+ @", text)[1:]}

    def count(name):
        called = re.findall(r"(?<!custom_)call @([\w.]+)\(", bodies[name])
        return bodies[name].count("stablehlo.custom_call @mosaic_gpu") + sum(map(count, called))

    return count("main")
