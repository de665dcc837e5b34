"""Run a sweep: read the data, plan, train pack by pack, score, rank and export."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from planner import Pack, Plan, render_plan
from plora_jax.adapters import Adapter, max_rank, pad_adapter, rank_bucket, stack_adapters, stack_scales
from plora_jax.config import DataConfig, Sweep, resolved
from plora_jax.data.choices import make_choices
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples, overlap
from plora_jax.data.layout import total_steps
from plora_jax.data.shapes import MAX_SHAPES, Shape, choose_shapes, split_lengths
from plora_jax.errors import UserError
from plora_jax.evaluate import EvalSet, Score, log_probabilities, make_eval_set, make_eval_step, score
from plora_jax.jobs import Job
from plora_jax.leaderboard import Result, print_leaderboard, rank, write_leaderboard
from plora_jax.models.config import ModelConfig
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base, load_base, load_config, load_tokenizer
from plora_jax.peft import export_adapter, import_adapter
from plora_jax.planning import plan_jobs
from plora_jax.progress import Progress
from plora_jax.rundir import JsonLines, RunDirectory, check_unused, open_run, write_atomic, write_json
from plora_jax.step import pack_spec
from plora_jax.train import Trained, Work, train_pack

STEPS_PER_SHAPE = 64  # micro-steps that make one more compiled length worth its compilation
EVAL_TOKENS = {"cpu": 8_192, "gpu": 65_536}  # tokens scored at once, over all adapters


@dataclass(frozen=True)
class Task:
    """Hold a sweep's rows, read and tokenised: training rows by the path that names them, and the held-out parts."""

    train: dict[str, Examples]
    eval: EvalSet
    test: EvalSet | None


def run_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    out: Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    base: Base | None = None,
    console: Console | None = None,
) -> int:
    """Run a sweep into the directory `out` and return the exit code: 0 done, 1 some jobs failed.

    Everything that can be wrong with the input is found before `out` is made. With `resume`, finished jobs of an
    earlier run are kept and the others start again. `dry_run` shows the plan and writes nothing.

    Raises:
      UserError: the model, a job, the data or the directory cannot be used.
    """
    console = console or Console()
    check_unused(out, resume)
    config = base.config if base else load_config(sweep.model)
    tokenizer = base.tokenizer if base and base.tokenizer else load_tokenizer(sweep.model)
    jobs, starts = _start_adapters(sweep, config, jobs)
    task = read_task(sweep, jobs, config, tokenizer, console)
    plan = plan_jobs(sweep, config, jobs, task.train, eval_tokens=_tokens(task.eval))
    console.print(render_plan(plan), soft_wrap=True, highlight=False, markup=False)
    if dry_run:
        return 0
    with open_run(out, resume) as run:
        done = _begin(run, sweep, plan, jobs)
        base = base or load_base(sweep.model, precision=sweep.precision.base)  # type: ignore[arg-type]
        run.event("started", jobs=len(jobs), done=len(done), devices=[str(d) for d in jax.devices()])
        results = dict(done)
        with Progress(console, "training", _training_tokens(jobs, task.train, set(done))) as progress:
            scorer = _Scorer(base, task, console)
            for pack in plan.packs:
                _run_pack(run, sweep, base, pack, jobs, starts, task, scorer, progress, results)
        return _finish(run, sweep, base, task, jobs, results, scorer, console)
