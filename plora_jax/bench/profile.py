"""`plora profile`: measure the packed step of one model on this device and fit the planner's cost model to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import planner
from planner.fit import Fit, MemoryPoint, TimePoint, fit_memory, fit_time
from plora_jax.bench.step import measure_step, run_with
from plora_jax.engine.rundir import write_atomic
from plora_jax.errors import UserError
from plora_jax.models.load import Base, load_base
from plora_jax.planning import find_devices, model_shape

# (jobs, share of the longest length, rank): what is fitted, and what judges the fit
FITTED = (
    (1, 1.0, 8),
    (4, 1.0, 8),
    (4, 1.0, 64),
    (1, 0.5, 32),
    (8, 0.5, 8),
    (8, 0.5, 64),
    (2, 0.25, 16),
    (16, 0.25, 32),
    (8, 1.0, 16),
    (1, 0.25, 64),
    (4, 0.5, 32),
    (12, 0.5, 16),
)
HELD_OUT = ((2, 1.0, 32), (6, 0.5, 16), (12, 0.25, 64), (3, 1.0, 16))


def profile_step(
    base: Base, length: int, recompute: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure the steps of FITTED and HELD_OUT, one sequence a job, lengths as shares of `length`."""

    def measure(cases: tuple[tuple[int, float, int], ...]) -> list[dict[str, Any]]:
        out = []
        for jobs, share, rank in cases:
            tokens = max(8, int(length * share) // 8 * 8)
            out.append(
                measure_step(base, jobs=jobs, m=1, length=tokens, rank=rank, recompute=recompute, repeats=5)
            )
            print(
                f"{jobs} jobs × {tokens} tokens, rank {rank}: {out[-1]['ms'][0]:.1f} ms, "
                f"{out[-1]['total_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
        return out

    return measure(FITTED), measure(HELD_OUT)


def fit_cost_model(
    base: Base, devices: planner.Devices, fitted: list[dict[str, Any]], held_out: list[dict[str, Any]]
) -> tuple[planner.CostModel, Fit, Fit]:
    """Return the device's shipped cost model with time and memory fitted, and how each does on the held-out steps."""
    shape = model_shape(base.config, base.name)

    def times(results: list[dict[str, Any]]) -> list[TimePoint]:
        return [
            TimePoint(r["jobs"], r["m"], r["length"], r["rank_bucket"], r["ms"][0] / 1e3) for r in results
        ]

    def memories(results: list[dict[str, Any]]) -> list[MemoryPoint]:
        out = []
        for r in results:
            device = run_with(devices.spec, r["attention"], r["kernels"])
            sizes = (r["jobs"], r["m"], r["length"], r["rank_bucket"])
            step = planner.StepShape(1, *sizes, r["recompute"], accumulate=r["accumulate"])
            out.append(MemoryPoint(shape, step, r["precision"], device, r["total_bytes"]))
        return out

    cost, on_time = fit_time(times(fitted), times(held_out))
    memory, on_memory = fit_memory(memories(fitted), memories(held_out))
    first = fitted[0]
    key = f"{base.name}/1/{first['recompute']}/{first['precision']}"
    shipped = planner.cost_model(devices.spec)
    source = f"measured: plora profile on {first['device']}, jax {jax.__version__}"
    model = replace(
        shipped,
        fitted={**shipped.fitted, key: list(cost)},
        memory=memory,
        sources={**shipped.sources, key: source, "memory": source},
    )
    return model, on_time, on_memory


def profile_command(model: str, length: int, recompute: str, precision: str, target: Path) -> int:
    """Profile a model with random weights, write the cost model and say how good it is; return the exit code."""
    if not target.parent.is_dir():
        raise UserError(f"--json {target}: the directory {target.parent} does not exist")
    devices = find_devices("auto" if jax.default_backend() != "cpu" else "cpu").parts[
        0
    ]  # JAX takes the first
    base = load_base(model, random_weights=True, precision=precision)  # type: ignore[arg-type]
    fitted, held_out = profile_step(base, length, recompute)
    cost, on_time, on_memory = fit_cost_model(base, devices, fitted, held_out)
    write_atomic(target, cost.to_json() + "\n")
    for what, fit in (("time", on_time), ("memory", on_memory)):
        print(
            f"{what}: mean error {100 * fit.mean:.1f} %, worst {100 * fit.worst:.1f} % on {fit.points} held-out steps"
        )
    print(f"cost model written to {target}; use it with plora plan --cost-model {target}")
    return 0
