"""Measure what the engine does on the host for each micro-step: dispatch, reading metrics, journal, logs, status.

    python -m benchmarks.overhead --jobs 8 --length 1024

A tiny model is swept on the CPU with the batches of a large one: so many jobs of one row of so many tokens, every
micro-step an optimizer step of each, which is the most that there is to log. What the host does is the same for every
model, and the step computes in threads of XLA's own: the processor time of the engine's thread bounds what a step on an
accelerator waits for. The bare step is dispatched in the same process.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from plora_jax.config.sweep import load_sweep
from plora_jax.data.loader import PackLoader
from plora_jax.engine.driver import run_sweep
from plora_jax.engine.packrun import PackRun
from plora_jax.launch.site import LaunchOptions
from plora_jax.search.configurations import search_jobs
from tests import tiny

WARM = 20  # micro-steps that are not counted


def timed(owner: Any, name: str, times: list[float]) -> None:
    """Have a method's processor time, of its own thread alone, appended to `times` at each call."""
    method: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **more)
        finally:
            times.append(time.thread_time() - began)

    setattr(owner, name, wrapped)


def bare(run: PackRun, calls: int) -> tuple[list[float], list[float]]:
    """Dispatch the pack's step on one batch again and again; return processor times of this thread, and elapsed."""
    trainer, dispatch, whole = run.trainer, [], []
    batch, state = next(trainer._loader), trainer.state
    for _ in range(calls):
        began, started = time.thread_time(), time.perf_counter()
        state, metrics = trainer._step(state, trainer.base.params, batch)
        dispatch.append(time.thread_time() - began)
        jax.block_until_ready(metrics)
        whole.append(time.perf_counter() - started)
    trainer.state = state
    return dispatch[WARM:], whole[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine's host time for each micro-step")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--steps", type=int, default=200, help="micro-steps")
    parser.add_argument("--out", type=Path, help="append the result to this file as a line of JSON")
    args = parser.parse_args()
    engine: list[float] = []
    loader: list[float] = []
    found: dict[str, list[float]] = {}

    def measure(run: PackRun) -> None:
        if not found and run.trainer.micro_step > WARM:
            found["dispatch"], found["step"] = bare(run, args.steps)

    timed(PackLoader, "_make", loader)
    timed(PackRun, "_micro_step", engine)
    step = PackRun._micro_step
    setattr(PackRun, "_micro_step", lambda run: (step(run), measure(run)))  # noqa: B010

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tiny.write_model(root / "model", num_hidden_layers=1, max_position_embeddings=args.length)
        tiny.write_weights(root / "model")
        words = [word for word in tiny.WORDS if word.isalpha()]
        text = " ".join(words[i % len(words)] for i in range(args.length - 4))
        tiny.write_rows(root / "train.jsonl", [{"prompt": text, "completion": f" {w}"} for w in words])
        tiny.write_rows(root / "eval.jsonl", [{"prompt": "what is one ?", "completion": " red"}])
        path = tiny.write_sweep(
            root,
            data={"train": "train.jsonl", "eval": "eval.jsonl", "max_length": args.length},
            search={"jobs": [{"rank": 8, "learning_rate": 1e-4 * (1 + n)} for n in range(args.jobs)]},
            train={"batch_size": 1, "max_steps": args.steps, "targets": ["q_proj"]},
        )
        sweep = load_sweep(path)
        run_sweep(sweep, search_jobs(sweep), root / "run", launch=LaunchOptions("inline"))
    counted = engine[WARM:-1]  # in the last one all jobs are scored, exported and recorded
    ms = {name: 1e3 * statistics.median(times) for name, times in found.items()}
    result = {
        "jobs": args.jobs,
        "length": args.length,
        "micro_steps": len(engine),
        "engine_ms": round(1e3 * statistics.fmean(counted), 3),
        "engine_median_ms": round(1e3 * statistics.median(counted), 3),
        "loader_ms": round(1e3 * statistics.fmean(loader[WARM:]), 3),
        "bare_dispatch_ms": round(ms["dispatch"], 3),
        "bare_step_ms": round(ms["step"], 3),
    }
    print(json.dumps(result))
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
