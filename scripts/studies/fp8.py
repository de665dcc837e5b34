"""Train the same jobs on a base in full precision and in fp8, and compare their loss curves.

usage: python -m scripts.studies.fp8 --model GGUF --data ROWS.jsonl --out FILE.json
           [--jobs J] [--batch N] [--length S] [--steps N]

The reference is fp32 on a CPU and bf16 on a GPU; what fp8 leaves unrounded has the same dtype. No row is seen twice, so
that every step's loss is one of rows not yet trained on. Jobs alternate learning rates 3e-4 and 1e-3, ranks 8 and 16.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples
from plora_jax.data.layout import Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import choose_shapes
from plora_jax.engine.rundir import write_json
from plora_jax.evaluation.scorer import runtime_for
from plora_jax.jobs import Job
from plora_jax.machine import versions
from plora_jax.models.load import Base, load_base
from plora_jax.training.compiled import keep_programs
from plora_jax.training.step import init_pack, make_train_step, pack_spec
from scripts.studies.common import table

WINDOW = 10  # steps, over which a curve is averaged to be compared


def jobs_of(count: int, batch: int, steps: int) -> list[Job]:
    """Return the jobs, which all see the same rows in the same order."""
    return [
        Job(
            rank=(8, 16)[j // 2 % 2],
            learning_rate=(3e-4, 1e-3)[j % 2],
            alpha=16.0,
            batch_size=batch,
            max_steps=steps,
            warmup_ratio=0.05,
            seed=j // 4,
        )
        for j in range(count)
    ]


def curves(base: Base, jobs: Sequence[Job], examples: Examples, **runtime: Any) -> list[list[float]]:
    """Train the jobs in one pack and return each one's loss at every step."""
    m = jobs[0].batch_size
    spec = pack_spec(base.config, jobs, m=m)
    step = make_train_step(base, spec, dataclasses.replace(runtime_for(base), recompute="dots", **runtime))
    slots = [Slot.of(job, examples) for job in jobs]
    state, losses = init_pack(base, jobs, spec=spec), []
    for batch in PackLoader(slots, m, choose_shapes([(examples, 0)], m, limit=1)):
        state, metrics = step(state, base.params, batch)
        losses.append(metrics.loss)
    return np.stack(losses, axis=1).tolist()


def compared(curve: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return relative differences to the reference: of single steps and of means over WINDOW steps, all jobs."""
    got, want = np.asarray(curve), np.asarray(reference)
    kernel = np.full(min(WINDOW, want.shape[1]), 1 / min(WINDOW, want.shape[1]))
    smooth = [np.stack([np.convolve(one, kernel, "valid") for one in both]) for both in (got, want)]
    single, mean = np.abs(got / want - 1), np.abs(smooth[0] / smooth[1] - 1)
    return {
        "step_mean": float(single.mean()),
        "step_worst": float(single.max()),
        "window_mean": float(mean.mean()),
        "window_worst": float(mean.max()),
        "end": float(np.abs(smooth[0][:, -1] / smooth[1][:, -1] - 1).max()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code: 1 where a curve leaves the reference's by over 1 %."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", required=True, help="model with weights")
    cli.add_argument("--data", type=Path, required=True, help="training rows")
    cli.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    for flag, default in (("--jobs", 4), ("--batch", 8), ("--length", 128), ("--steps", 150)):
        cli.add_argument(flag, type=int, default=default, metavar="N")
    args = cli.parse_args(argv)
    keep_programs()
    plain = "fp32" if jax.default_backend() == "cpu" else "bf16"
    dtype = {"fp32": np.float32, "bf16": jax.numpy.bfloat16}[plain]
    device = jax.devices()[0].device_kind
    settings = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    result: dict[str, Any] = {
        "settings": settings,
        "device": device,
        "versions": versions(),
        "reference": plain,
    }
    jobs, rows, base, examples = jobs_of(args.jobs, args.batch, args.steps), [], None, None
    head = ["base", "first loss", "last loss", "seconds", "step, mean", "worst"]
    rows.append([*head, f"mean of {WINDOW}, mean", "worst", "at the end"])
    for name, backward in ((plain, None), ("fp8", "e4m3"), ("fp8", "e5m2")):
        start = time.monotonic()
        if base is None or base.precision != name:
            base = load_base(args.model, precision=name, dtype=dtype)  # type: ignore[arg-type]
        if examples is None:
            examples = read_examples(args.data, base.tokenizer, max_length=args.length)
            if len(examples) < args.batch * args.steps:
                cli.error(
                    f"{args.data}: {len(examples)} rows, fewer than --batch × --steps, would be seen twice"
                )
        losses = curves(base, jobs, examples, **({"fp8_backward": backward} if backward else {}))
        label = f"{name}, dx in {backward}" if backward else name
        one: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "losses": losses}
        result[label] = one
        ends = [f"{np.mean([curve[i] for curve in losses]):.4f}" for i in (0, -1)]
        row = [label, *ends, f"{one['seconds']:.0f}"]
        if backward:
            one["difference"] = compared(losses, result[plain]["losses"])
            row += [f"{value:.2%}" for value in one["difference"].values()]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
        write_json(args.out, result)
    print(table(rows))
    worst = max(one["difference"]["window_worst"] for one in result.values() if "difference" in one)  # type: ignore[operator]
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
