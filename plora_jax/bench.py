"""`plora bench step`: time the packed step of a preset with random weights, and compare its memory with predictions."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import using
from planner import StepShape, step_memory
from planner.memory import MemoryModel
from plora_jax.batch import Batch
from plora_jax.evaluate import runtime_for
from plora_jax.jobs import Job
from plora_jax.models.decoder import Decoder
from plora_jax.models.find import load_config
from plora_jax.models.load import Base, load_base
from plora_jax.planning import model_shape
from plora_jax.step import PackState, empty_pack, make_train_step, pack_spec


def _random_batch(vocab: int, J: int, m: int, S: int) -> Batch:
    """Make full sequences of random tokens in which every position but the last is trained."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab, (J, m, S), dtype=np.int32)
    at = np.broadcast_to(np.arange(S, dtype=np.int32), (J, m, S))
    targets = np.concatenate([tokens[..., 1:], np.full((J, m, 1), -1, np.int32)], axis=-1)
    rows = np.broadcast_to(np.arange(m, dtype=np.int32)[:, None], (J, m, S))
    yes = np.ones(J, bool)
    return Batch(*map(jnp.asarray, (tokens, at, rows, at, targets, np.zeros(J, np.int32), yes, yes)))


def abstract_base(model: str, dtype: Any = jnp.bfloat16) -> Base:
    """Return a base model whose parameters are shapes alone: enough to compile a step, in no memory."""
    config = load_config(model)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    return Base(model, config, graphdef, params, None)


def measure_step(
    base: Base, *, jobs: int, m: int, length: int, rank: int, recompute: str = "none", repeats: int = 10
) -> dict[str, Any]:
    """Compile one packed step and time it; every micro-step ends an optimizer batch of every job.

    Returns:
      tokens_s (median), ms (median, least and most of `repeats`), compile_s, bytes as the compiler counts them
      (`argument_bytes`, `temporary_bytes`, `total_bytes`), as the planner predicts them (`predicted_bytes`), and as the
      device saw at most (`peak_bytes`, where it tells). With `repeats` 0 the step is compiled and not run.
    """
    config = base.config
    many = [Job(rank=rank, batch_size=m, max_steps=1000, scheduler="constant")] * jobs
    spec = pack_spec(config, many)
    runtime = runtime_for(base, recompute)
    step = make_train_step(base, spec, runtime)
    shapes = jax.eval_shape(lambda: empty_pack(config, spec))
    batch = _random_batch(config.vocab_size, jobs, m, length)
    start = time.perf_counter()
    compiled = step.lower(shapes, base.params, batch).compile()  # type: ignore[attr-defined]
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    shape = StepShape(1, jobs, m, length, spec.rank, recompute)
    precision = "fp32" if runtime.dtype == jnp.float32 else "bf16"
    no_margin = MemoryModel(margin=0.0)
    result: dict[str, Any] = {
        "model": base.name,
        "device": jax.devices()[0].device_kind,
        "jobs": jobs,
        "m": m,
        "length": length,
        "rank": rank,
        "rank_bucket": spec.rank,
        "recompute": recompute,
        "attention": runtime.attention,
        "precision": precision,
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "predicted_bytes": step_memory(
            model_shape(config, base.name), shape, precision, no_margin, runtime.attention
        ),
    }
    if repeats:
        state = _random_state(empty_pack(config, spec))
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            state, metrics = compiled(state, base.params, batch)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - start)
        times = times[2:]
        result["ms"] = [1e3 * f(times) for f in (statistics.median, min, max)]
        result["tokens_s"] = jobs * m * length / statistics.median(times)
        result["loss"] = float(np.mean(metrics.loss))
        result["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result


def _random_state(state: PackState) -> PackState:
    """Fill A with small random numbers, so that no product works on zeros."""
    keys = iter(jax.random.split(jax.random.key(0), len(state.weights)))
    weights = {
        name: f._replace(a=0.02 * jax.random.normal(next(keys), f.a.shape, f.a.dtype))
        for name, f in state.weights.items()
    }
    hyper = state.hyper._replace(learning_rate=jnp.full_like(state.hyper.learning_rate, 1e-4))
    return state._replace(weights=weights, hyper=hyper)


def bench_step_command(
    model: str, json_path: Path | None, precision: str, kernels: str = "xla", **case: Any
) -> int:
    """Measure one case with random weights, print it in words and write it as JSON; return the exit code.

    `kernels` is an implementation as `pallas_kernels.using` knows them.
    """
    base = load_base(model, random_weights=True, precision=precision)  # type: ignore[arg-type]
    with using(kernels):
        result = measure_step(base, **case) | {"kernels": kernels}
    gib = 2**30
    print(
        f"{model} on {result['device']}: {result['jobs']} jobs × {result['m']} × {result['length']} tokens, rank "
        f"{result['rank']}, {result['precision']}, {result['attention']} attention, recompute {result['recompute']}"
    )
    middle, least, most = result["ms"]
    print(f"  {result['tokens_s']:,.0f} tokens/s; {middle:.1f} ms a step ({least:.1f} to {most:.1f})")
    print(f"  compiled in {result['compile_s']:.1f} s")
    print(
        f"  memory: {result['total_bytes'] / gib:.2f} GiB by the compiler, "
        f"{result['predicted_bytes'] / gib:.2f} GiB predicted by the planner (without its margin)"
    )
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
