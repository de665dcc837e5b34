"""The ceiling of a packed step: how fast this device multiplies with the frozen weights alone."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from plora_jax.models.config import SOURCES, ModelConfig
from plora_jax.training.compiled import Options, quick_options

WORK = 4e12  # FLOP of one timed call, so that its launch does not count


def frozen_products(config: ModelConfig, tokens: int, trained: int) -> list[tuple[str, int, int, int, int]]:
    """List a step's products with frozen weights: (name, rows, features in, features out, how many of each).

    Sites that read one input count as one product. Each is run forward and, transposed, for the gradient of its input.
    """
    out = []
    for source in SOURCES:
        sites = config.sites_of(source)
        out.append((source, tokens, sites[0].d_in, sum(site.d_out for site in sites), config.n_layers))
    return [*out, ("head", trained, config.d_model, config.vocab_size, 1)]


def measure_ceiling(
    config: ModelConfig, tokens: int, trained: int, dtype: Any, fp8: bool = False
) -> dict[str, Any]:
    """Time the frozen products of a step on random numbers, nothing between them.

    Args:
      tokens, trained: positions that the layers and the head see in a step. dtype: of the products. fp8: the layers'
        are of E4M3 numbers, each weight lying as its product reads it.

    Returns:
      {"seconds": of all, "flops": of all, "products": {name: [TFLOP/s forward, TFLOP/s backward]}}.
    """
    seconds = flops = 0.0
    products = {}
    for name, rows, d_in, d_out, count in frozen_products(config, tokens, trained):
        keys = jax.random.split(jax.random.key(0), 3)
        draw = partial(jax.random.normal, dtype=dtype)
        kind = jnp.float8_e4m3fn if fp8 and name != "head" else dtype
        one = 2.0 * rows * d_in * d_out
        # several copies of a weight, so that none stays in the cache from one product to the next
        copies = 1 if name == "head" else min(64, max(4, math.ceil(WORK / one)))
        w = (draw(keys[0], (copies, d_in, d_out)) * 0.02).astype(kind)
        pairs = (("td,df->tf", keys[1], d_in, w), ("tf,df->td", keys[2], d_out, w))
        if kind != dtype:
            pairs = (("td,fd->tf", keys[1], d_in, w.reshape(copies, d_out, d_in)), pairs[1])
        options = quick_options() if kind != dtype else ()  # as the step on such a base is compiled
        each = [
            _seconds(partial(_products, spec, dtype), draw(key, (rows, size)).astype(kind), weights, options)
            / copies
            for spec, key, size, weights in pairs
        ]
        products[name] = [one / s / 1e12 for s in each]
        seconds, flops = seconds + count * sum(each), flops + count * 2 * one
    return {"seconds": seconds, "flops": flops, "products": products}


def _products(spec: str, dtype: Any, x: Array, w: Array) -> Array:
    """Multiply x with each weight in turn, keeping the last result: what a scan over layers does."""
    product = partial(jnp.einsum, spec, x, preferred_element_type=dtype)
    return jax.lax.scan(lambda _, one: (product(one), None), product(w[0]), w[1:])[0]


def _seconds(
    function: Callable[[Array, Array], Array], x: Array, w: Array, options: Options = (), calls: int = 3
) -> float:
    run = jax.jit(function, compiler_options=dict(options))
    jax.block_until_ready(run(x, w))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([run(x, w) for _ in range(calls)][-1])
        times.append((time.perf_counter() - start) / calls)
    return min(times)
