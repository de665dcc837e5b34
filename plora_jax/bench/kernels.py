"""`plora bench kernels`: which implementation serves each product of a layer with its adapters, and what each takes."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import Fp8Weight, choose, default_device, lora_dense_group, quantise_weight, using
from pallas_kernels.fp8 import why_not
from plora_jax.errors import UserError
from plora_jax.models.config import SOURCES, Site
from plora_jax.models.find import load_config
from plora_jax.training.compiled import Options, quick_options

REPEATS = 7
BUSY_S = 0.05  # calls of about so long are under way at once, so that a GPU does not wait for the host


def measure_kernels(
    model: str,
    jobs: int,
    m: int,
    length: int,
    rank: int,
    dtype: Any,
    kernels: str = "auto",
    fp8: bool = False,
) -> list[dict[str, Any]]:
    """Time the products of one layer, forward and backward, those that read the same input together.

    Args:
      model: whose shapes they have. jobs, m, length, rank: J adapters of that rank with m · length tokens each.
      dtype: of tokens and frozen weights. kernels: the implementation to ask for, as `pallas_kernels.using` takes it.
      fp8: whether frozen weights are `Fp8Weight`s instead.

    Returns:
      For each input: {"sites", "shapes" [[D, F], …], "implementation", "reason", "frozen_ms", "xla_ms"} and, where
      another implementation than XLA's serves, "kernel_ms". Wall time of a call among those under way, median of seven
      runs; frozen_ms is that of the products without adapters.
    """
    config, options = load_config(model), quick_options() if fp8 else ()
    rows = []
    for source in SOURCES:
        sites = config.sites_of(source)
        d_in, d_outs = sites[0].d_in, [site.d_out for site in sites]
        ranks = [rank] * len(sites)
        choice = choose(dtype, jobs, m * length, d_in, d_outs, ranks, fp8=fp8, mode=kernels)
        inputs = _random(sites, jobs, m * length, rank, dtype, fp8)
        row = {
            "sites": [site.name for site in sites],
            "shapes": [[d_in, d_out] for d_out in d_outs],
            "implementation": choice.name,
            "reason": choice.reason,
            "frozen_ms": _milliseconds(_frozen, inputs, options),
        }
        asked = {"xla_ms": "xla"} | ({"kernel_ms": kernels} if choice.name != "xla" else {})
        for name, mode in asked.items():
            with using(mode):
                row[name] = _milliseconds(_adapted, inputs, options)
        rows.append(row)
    return rows


def _random(
    sites: Sequence[Site], jobs: int, tokens: int, rank: int, dtype: Any, fp8: bool
) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 3 * len(sites)))

    def draw(*shape: int, kind: Any = jnp.float32, scale: float = 0.02) -> Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(kind)

    x = draw(jobs, tokens, sites[0].d_in, kind=dtype, scale=1.0)
    ws: list[Any] = [draw(site.d_in, site.d_out, kind=dtype) for site in sites]
    if fp8:
        ws = [Fp8Weight(*quantise_weight(w.T)) for w in ws]
    factors = [(draw(jobs, rank, site.d_in), draw(jobs, site.d_out, rank)) for site in sites]
    return x, ws, factors


def _adapted(x: Array, ws: list[Any], factors: list[tuple[Array, Array]]) -> Any:
    """Return all outputs of all jobs, and the gradients of x and of the adapters."""

    def one(x: Array, factors: list[tuple[Array, Array]]) -> Any:
        return lora_dense_group(x, ws, [(a, b, 1.0) for a, b in factors])

    ys, back = jax.vjp(jax.vmap(one), x, factors)
    return ys, back(ys)


def _frozen(x: Array, ws: list[Any], factors: Any) -> Any:
    """Return the frozen products of all tokens, and the gradient of x."""
    flat = x.reshape(-1, x.shape[-1])
    ys, back = jax.vjp(lambda x: lora_dense_group(x, ws, [None] * len(ws)), flat)
    return ys, back(ys)


def _milliseconds(function: Callable[..., Any], inputs: tuple[Any, ...], options: Options = ()) -> float:
    run = jax.jit(function, compiler_options=dict(options))

    def seconds(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            last = run(*inputs)
        jax.block_until_ready(last)
        return (time.perf_counter() - began) / calls

    seconds(1)  # compiles
    calls = max(1, min(50, round(BUSY_S / seconds(1))))
    return 1e3 * statistics.median(seconds(calls) for _ in range(REPEATS))


def bench_kernels_command(
    model: str,
    json_path: Path | None,
    precision: str,
    kernels: str | None,
    *,
    jobs: int,
    m: int,
    length: int,
    rank: int,
) -> int:
    """Measure the products of a layer of `model`, print a line for each input and write them as JSON; return 0.

    Raises:
      UserError: the model is not known, or its base is to be fp8 and this GPU has no such products.
    """
    fp8, on_cpu = precision == "fp8", jax.default_backend() == "cpu"
    if fp8 and (reason := why_not(default_device().capability)):
        raise UserError(f"--base fp8: {reason}; use bf16")
    dtype = jnp.float32 if precision == "fp32" or (precision == "auto" and on_cpu) else jnp.bfloat16
    rows = measure_kernels(model, jobs, m, length, rank, dtype, kernels or "auto", fp8)
    device = jax.devices()[0].device_kind
    print(
        f"one layer of {model} on {device}: {jobs} jobs × {m} × {length} tokens, rank {rank}, "
        f"{jnp.dtype(dtype).name}{' beside fp8 weights' if fp8 else ''}, forward and backward, ms"
    )
    for row in rows:
        kernel = f", {row['implementation']} {row['kernel_ms']:.3f}" if "kernel_ms" in row else ""
        print(
            f"  {'/'.join(row['sites']):24s} frozen {row['frozen_ms']:.3f}, with adapters: xla {row['xla_ms']:.3f}"
            f"{kernel}  [{row['implementation']}: {row['reason']}]"
        )
    if json_path:
        case = {"model": model, "device": device, "jobs": jobs, "m": m, "length": length, "rank": rank}
        result = case | {"dtype": jnp.dtype(dtype).name, "fp8": fp8, "products": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
