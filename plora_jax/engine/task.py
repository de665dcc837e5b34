"""What a sweep is made of besides its configuration: rows to train on and to score, adapters to start from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from plora_jax.adapters import Adapter
from plora_jax.config.sweep import Sweep
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples, overlap
from plora_jax.errors import UserError
from plora_jax.evaluation.scorer import EvalSet, read_eval_set
from plora_jax.jobs import Job
from plora_jax.models.config import ModelConfig
from plora_jax.peft import import_adapter


def start_adapters(
    sweep: Sweep, config: ModelConfig, jobs: Sequence[Job]
) -> tuple[list[Job], dict[str, Adapter]]:
    """Read the adapters that jobs start from; such a job takes over the adapter's rank, alpha and targets."""
    out, starts = [], {}
    for job in jobs:
        if job.init_adapter:
            adapter, fields = import_adapter(sweep.path(job.init_adapter), config)
            job = replace(job, **fields)
            starts[job.job_id] = adapter
        out.append(job)
    return out, starts


@dataclass(frozen=True)
class Task:
    """Hold the training rows by job, and the held-out parts; without `test` nothing is scored after the choice."""

    train: dict[str, Examples]  # by job_id; jobs on one file share one object
    eval: EvalSet
    test: EvalSet | None
    digests: dict[str, str] = field(default_factory=dict)  # by file: names its tokens and labels
    starts: dict[str, Adapter] = field(default_factory=dict)  # by job_id: where a job does not start fresh
    files: dict[str, Examples] = field(default_factory=dict)  # by the name that the sweep gives them


def read_task(sweep: Sweep, jobs: Sequence[Job], tokenizer: Any, vocab_size: int, console: Console) -> Task:
    """Read and tokenise all data of a sweep and print one line a file.

    Raises:
      UserError: a file cannot be read as examples, holds nothing to train on, or there are no held-out rows.
    """
    data = sweep.data
    if not data.eval:
        raise UserError("data.eval is missing: a sweep ranks its jobs on held-out rows; name a file of them")
    files: dict[str, Examples] = {}

    def read(name: str) -> Examples:
        if name not in files:
            local = sweep.path(name)
            files[name] = read_examples(
                str(local) if local.exists() or name.count("/") != 1 else name,
                tokenizer,
                max_length=data.max_length,
                on_long=data.on_long,
                on_bad_row=data.on_bad_row,
                format=data.format,
                vocab_size=vocab_size,
            )
            console.print(f"data: {files[name].report}", soft_wrap=True, highlight=False, markup=False)
        return files[name]

    train = {job.job_id: read(job.train or data.train) for job in jobs}
    parts = {part: read(name) for part, name in (("eval", data.eval), ("test", data.test)) if name}
    for name in dict.fromkeys(job.train or data.train for job in jobs):
        for part in parts.values():
            if warning := overlap(files[name], part):
                console.print(f"warning: {warning}", soft_wrap=True, highlight=False, markup=False)
    first = train[jobs[0].job_id]
    held_out = {
        part: read_eval_set(data, examples, first, tokenizer, sweep.model, sweep.base_dir)
        for part, examples in parts.items()
    }
    digests = {name: examples.digest for name, examples in files.items()}
    return Task(train, held_out["eval"], held_out.get("test"), digests, files=files)
