"""`plora bench step`: time the packed step of a model with random weights against what bounds it."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import by_default, compile_lowered, using
from pallas_kernels.choice import asked
from planner import DeviceSpec, StepShape, cost_model, step_memory
from plora_jax.bench.gemms import measure_ceiling
from plora_jax.bench.trace import profile_steps
from plora_jax.errors import UserError
from plora_jax.evaluation.scorer import runtime_for
from plora_jax.jobs import Job
from plora_jax.machine import Gpu
from plora_jax.models.config import ModelConfig
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base, load_base
from plora_jax.planning import find_devices, gpu_spec, model_shape
from plora_jax.training.batch import Batch
from plora_jax.training.recompute import cheapest, device_bytes, needed_bytes, with_policy
from plora_jax.training.step import PackSpec, PackState, empty_pack, make_train_step, pack_spec


def random_batch(vocab: int, J: int, m: int, S: int) -> Batch:
    """Make full sequences of random tokens in which every position but the last is trained."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab, (J, m, S), dtype=np.int32)
    at = np.broadcast_to(np.arange(S, dtype=np.int32), (J, m, S))
    targets = np.concatenate([tokens[..., 1:], np.full((J, m, 1), -1, np.int32)], axis=-1)
    rows = np.broadcast_to(np.arange(m, dtype=np.int32)[:, None], (J, m, S))
    yes = np.ones(J, bool)
    return Batch(*map(jnp.asarray, (tokens, at, rows, at, targets, np.zeros(J, np.int32), yes, yes)))


class Program(NamedTuple):
    """Hold a compiled step with what it was made from."""

    lowered: Any
    compiled: Any
    runtime: Runtime
    spec: PackSpec
    batch: Batch
    compile_s: float


def compile_step(
    base: Base,
    spec: PackSpec,
    batch: Batch,
    runtime: Runtime,
    micro_steps: int = 1,
    options: dict[str, Any] | None = None,
) -> Program:
    """Compile one packed step for a batch; `options` are the compiler's own. Nothing runs."""
    step = make_train_step(base, spec, runtime, micro_steps)
    state = jax.eval_shape(lambda: empty_pack(base.config, spec))
    if micro_steps > 1:
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * micro_steps), batch)
    start = time.perf_counter()
    lowered = step.lower(state, base.params, batch)  # type: ignore[attr-defined]
    compiled = compile_lowered(lowered, options)
    return Program(lowered, compiled, runtime, spec, batch, time.perf_counter() - start)


def measure_step(
    base: Base,
    *,
    jobs: int,
    m: int,
    length: int,
    rank: int,
    recompute: str = "none",
    repeats: int = 10,
    micro_steps: int = 1,
    runtime: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    accumulate: bool = False,
    optimizer: str = "adamw",
    cached: bool = False,
    parts: bool = False,
    ceiling: bool = False,
) -> dict[str, Any]:
    """Compile one packed step and time it; every micro-step ends an optimizer batch of every job.

    Args:
      recompute: none, dots, layer, offload, or auto: the cheapest whose program fits the device.
      repeats: timed dispatches; with 0 the step is compiled and not run.
      micro_steps: to a dispatch. runtime: fields of `Runtime` to set. options: of the compiler.
      accumulate: sum gradients in a buffer although no batch stays open, as where batches are larger than m.
      optimizer: of every job.
      cached: also compile again from a cache on disk, unless the step has Mosaic kernels, which only another process
        finds there. parts: also profile where the time goes. ceiling: also time the
        frozen products alone.

    Returns:
      Of a micro-step: tokens_s (median), ms (median, least and most of `repeats`), model_flops_s, compile_s, bytes as
      the compiler counts them (`argument_bytes`, `temporary_bytes`, `total_bytes`), as the planner predicts them
      (`predicted_bytes`), and as the device saw at most (`peak_bytes`, where it tells); `compile_cached_s`, `parts`
      (ms), `ceiling` (its tokens_s, flops_s and share, and TFLOP/s of each product) where asked for.
    """
    config = base.config
    job = Job(rank=rank, batch_size=m, max_steps=1000, scheduler="constant", optimizer=optimizer)  # type: ignore[arg-type]
    many = [job] * jobs
    spec = replace(pack_spec(config, many, m=m), accumulate=accumulate)
    plain = runtime_for(base)
    if recompute != "auto":
        plain = with_policy(plain, recompute, config.n_layers)
    chosen = replace(plain, **(runtime or {}))
    batch = random_batch(config.vocab_size, jobs, m, length)
    precision, device = base.precision, _device()
    memory_model = replace(cost_model(device).memory, margin=0.0)

    def predict(runtime: Runtime) -> float:
        shape = StepShape(
            1, jobs, m, length, spec.rank, runtime.recompute, spec.optimizers, accumulate=accumulate
        )
        with by_default(runtime.kernels):
            there = run_with(device, runtime.attention, asked())
        return step_memory(model_shape(config, base.name), shape, precision, there, memory_model)

    def make(runtime: Runtime) -> Program:
        return compile_step(base, spec, batch, runtime, micro_steps, options)

    with _cache_on_disk() if cached else contextlib.nullcontext():
        if recompute == "auto":
            limit = device_bytes()
            if limit is None:
                raise UserError(
                    "recompute auto: this device does not tell its memory; choose none, dots, layer or offload"
                )
            _, program = cheapest(
                chosen,
                config.n_layers,
                limit,
                make,
                size=lambda program: needed_bytes(program.compiled),
                predict=lambda runtime: 0.0 if runtime.recomputed else predict(runtime),
            )
        else:
            program = make(chosen)
        again = None
        # Mosaic numbers the kernels of a process within their programs: compiled twice here they differ.
        if cached and "mosaic_gpu" not in program.compiled.as_text():
            jax.clear_caches()
            again = make(program.runtime).compile_s
    memory = program.compiled.memory_analysis()
    used = program.runtime
    result: dict[str, Any] = {
        "model": base.name,
        "device": jax.devices()[0].device_kind,
        "jobs": jobs,
        "m": m,
        "length": length,
        "rank": rank,
        "rank_bucket": spec.rank,
        "recompute": used.recompute,
        "recomputed": used.recomputed,
        "unroll": used.unroll,
        "kernels": used.kernels,
        "micro_steps": micro_steps,
        "accumulate": accumulate,
        "optimizer": optimizer,
        "attention": used.attention,
        "precision": precision,
        "fp8_backward": used.fp8_backward if precision == "fp8" else None,
        "compile_s": program.compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": needed_bytes(program.compiled),
        "predicted_bytes": predict(used),
    }
    if again is not None:
        result["compile_cached_s"] = again
    if repeats:
        result |= _time(base, program, repeats, micro_steps, parts, options)
        result["model_flops_s"] = step_flops(config, jobs * m, length, spec.rank) / (result["ms"][0] / 1e3)
    if repeats and ceiling:
        tokens = jobs * m * length
        bound = measure_ceiling(config, tokens, tokens, used.dtype, precision == "fp8")
        result["ceiling"] = {
            "tokens_s": tokens / bound["seconds"],
            "flops_s": bound["flops"] / bound["seconds"],
            "share": bound["seconds"] / (result["ms"][0] / 1e3),
            "products": bound["products"],
        }
    return result


def step_flops(config: ModelConfig, sequences: int, S: int, rank: int) -> float:
    """Count a step's own floating-point operations, recomputation left out, for `sequences` of S trained tokens.

    Frozen products and the head: forward and input gradient; adapters: forward and both gradients; causal attention:
    two products of half the scores forward, four backward.
    """
    tokens = sequences * S
    frozen = config.n_layers * sum(site.d_in * site.d_out for site in config.sites)
    products = 4.0 * tokens * (frozen + config.vocab_size * config.d_model)
    adapters = 6.0 * tokens * config.lora_params(rank)
    scores = 6.0 * tokens * S * config.n_layers * config.n_heads * config.head_dim
    return products + adapters + scores


def _time(
    base: Base,
    program: Program,
    repeats: int,
    micro_steps: int,
    parts: bool,
    options: dict[str, Any] | None,
) -> dict[str, Any]:
    """Run a program as training does, waiting for each call when the next is under way."""
    state = _random_state(empty_pack(base.config, program.spec))
    last, times = None, []
    start = time.perf_counter()
    for _ in range(repeats + 3):
        state, metrics = program.compiled(state, base.params, program.batch)
        if last is not None:
            jax.block_until_ready(last)
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        last = metrics
    jax.block_until_ready(last)
    times = [seconds / micro_steps for seconds in times[2:]]
    tokens = program.batch.tokens.size / micro_steps
    result = {
        "ms": [1e3 * f(times) for f in (statistics.median, min, max)],
        "tokens_s": tokens / statistics.median(times),
        "loss": float(np.mean(metrics.loss)),
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    if parts:
        held, profiled = [state], program.compiled
        if (
            jax.default_backend() == "gpu"
        ):  # within a command buffer a profile does not tell whose a kernel is
            apart = {**(options or {}), "xla_gpu_enable_command_buffer": ""}
            profiled = program.lowered.compile(compiler_options=apart)

        def once() -> Any:
            held[0], metrics = profiled(held[0], base.params, program.batch)
            return metrics

        found = profile_steps(profiled, once)
        result["parts"] = {name: ms / micro_steps for name, ms in found.items()}
    return result


def _device() -> DeviceSpec:
    """Return the device that JAX runs on as the planner knows it."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return find_devices("cpu").parts[0].spec
    total = (device.memory_stats() or {}).get("bytes_limit", 0)
    return gpu_spec(Gpu(device.device_kind, total // 2**20, ""))


def run_with(device: DeviceSpec, attention: str, kernels: str) -> DeviceSpec:
    """Return the device with the attention, and without the fused kernel where XLA's products were asked for."""
    return replace(device, attention=attention, fused=0 if kernels == "xla" else device.fused)


@contextlib.contextmanager
def _cache_on_disk() -> Iterator[None]:
    """Keep compiled programs in an empty directory meanwhile, so that cold is cold and cached is cached."""
    from jax.experimental.compilation_cache import compilation_cache

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "jax_compilation_cache_dir": folder,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_enable_compilation_cache": True,
        }
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


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
    model: str,
    json_path: Path | None,
    precision: str,
    kernels: str | None = None,
    compare: str | None = None,
    **case: Any,
) -> int:
    """Measure one case with random weights, print it in words and write it as JSON; return the exit code.

    `kernels` is an implementation as `pallas_kernels.using` knows them, None the policy's own; `compare` "peft" also
    times PEFT.
    """
    peft = None
    if compare:  # before JAX takes the device's memory
        from plora_jax.bench.peft import run_peft

        asked = "bf16" if precision == "fp8" else precision
        (peft,) = run_peft(model, [(case["m"], case["length"])], case["rank"], asked)
    base = load_base(model, random_weights=True, precision=precision)  # type: ignore[arg-type]
    with using(kernels) if kernels else contextlib.nullcontext():
        result = measure_step(base, cached=True, parts=True, ceiling=True, **case)
    if peft:
        result["peft"] = peft | {"times": result["tokens_s"] / peft["tokens_s"]}
    print(describe(result))
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def describe(result: dict[str, Any]) -> str:
    """Say in words what `measure_step` found."""
    gib = 2**30
    middle, least, most = result["ms"]
    ceiling, parts = result["ceiling"], result["parts"]
    peak = result["peak_bytes"]
    lines = [
        f"{result['model']} on {result['device']}: {result['jobs']} jobs × {result['m']} × {result['length']} tokens, "
        f"rank {result['rank']}, {result['precision']}, {result['attention']} attention, "
        f"recompute {result['recompute']}",
        f"  {result['tokens_s']:,.0f} tokens/s; {middle:.1f} ms a step ({least:.1f} to {most:.1f}); "
        f"{result['model_flops_s'] / 1e12:.2f} TFLOP/s of the model's own",
        f"  {100 * ceiling['share']:.0f} % of the {ceiling['tokens_s']:,.0f} tokens/s that the frozen products alone "
        f"would allow ({ceiling['flops_s'] / 1e12:.2f} TFLOP/s here)",
        "  ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()),
        f"  compiled in {result['compile_s']:.1f} s"
        + (f", from the cache in {result['compile_cached_s']:.1f} s" if "compile_cached_s" in result else ""),
        f"  memory: {result['total_bytes'] / gib:.2f} GiB by the compiler, "
        f"{result['predicted_bytes'] / gib:.2f} GiB predicted by the planner (without its margin)"
        + (f", {peak / gib:.2f} GiB at most on the device" if peak else ""),
    ]
    if peft := result.get("peft"):
        lines.append(
            f"  PEFT, one job after another: {peft['tokens_s']:,.0f} tokens/s; {peft['times']:.1f} × that here"
        )
    return "\n".join(lines)
