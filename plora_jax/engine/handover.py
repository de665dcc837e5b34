"""Rows from the driver to its workers: what it has read and tokenised, as one file of the run directory.

So a worker reads no data file, which may have changed meanwhile or lie on another host, and needs no tokenizer before
the first generated answer is to be read. The file goes when the run has ended.
"""

import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from plora_jax.config.sweep import Sweep
from plora_jax.data.choices import Choices
from plora_jax.data.examples import DataReport, Examples
from plora_jax.data.requests import Requests
from plora_jax.engine.faults import fault
from plora_jax.engine.rundir import flush, naming
from plora_jax.engine.task import Task
from plora_jax.evaluation.answers import Questions
from plora_jax.evaluation.scorer import EvalSet, metric_of
from plora_jax.jobs import Job

ROWS = "rows.npz"
Arrays = dict[str, np.ndarray]


def rows_bytes(task: Task) -> int:
    """Count about the bytes of the file: five a token."""
    return sum(5 * int(examples.lengths.sum()) for examples in task.files.values())


def hand_over(run: Path, task: Task) -> None:
    """Write a task into the run directory, whole or not at all."""
    out: Arrays = {}
    said: dict[str, Any] = {"files": {}, "parts": {}}
    for n, (name, examples) in enumerate(task.files.items()):
        _put(out, f"file{n}.tokens", examples.tokens, np.int32)
        _put(out, f"file{n}.trained", examples.trained, np.bool_)
        said["files"][name] = asdict(examples.report)
    for part, evals in (("eval", task.eval), ("test", task.test)):
        if evals is not None:
            said["parts"][part] = _put_eval(out, part, evals)
    out["said"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    path, temporary = run / ROWS, run / f".{ROWS}.tmp"
    with naming(path):
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **out)  # type: ignore[arg-type]
            flush(temporary)
            fault(path.name)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def take_over(run: Path, sweep: Sweep, jobs: Sequence[Job], tokenizer: Callable[[], Any]) -> Task | None:
    """Return the task that the driver handed over, None where there is none that is whole and names all jobs' data.

    `tokenizer` is called when a generated answer is to be read, not before.
    """
    try:
        with np.load(run / ROWS) as held:
            arrays = dict(held)  # checked against the archive's own sums
        said = json.loads(arrays["said"].tobytes())
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile):
        return None  # the last four for damage to the archive's directory
    files = {}
    for n, (name, report) in enumerate(said["files"].items()):
        tokens, trained = (_get(arrays, f"file{n}.{what}") for what in ("tokens", "trained"))
        report = DataReport(**report | {"notes": tuple(report["notes"])})
        files[name] = Examples(tokens, trained, report)
    wanted = {job.job_id: job.train or sweep.data.train for job in jobs}
    if not files.keys() >= set(wanted.values()):  # jobs on other data were added
        return None
    parts = {part: _get_eval(arrays, part, about, sweep, tokenizer) for part, about in said["parts"].items()}
    digests = {name: examples.digest for name, examples in files.items()}
    train = {job_id: files[name] for job_id, name in wanted.items()}
    return Task(train, parts["eval"], parts.get("test"), digests, files=files)


def _put(out: Arrays, name: str, arrays: Sequence[np.ndarray], dtype: Any) -> None:
    out[name] = np.concatenate([np.zeros(0, dtype), *arrays])
    out[f"{name}.lengths"] = np.array([len(array) for array in arrays], np.int64)


def _get(held: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    ends = np.cumsum(held[f"{name}.lengths"])
    return np.split(held[name], ends[:-1]) if len(ends) else []


RESULTS = ("loss", "counts", "options")
REQUESTS = ("sequences", "positions", "targets")
CHOSEN = ("row", "option", "sequence", "position", "target", "correct")


def _put_eval(out: Arrays, part: str, evals: EvalSet) -> dict[str, Any]:
    """Write the arrays of a held-out part, and return the rest."""
    for name in REQUESTS:
        _put(out, f"{part}.{name}", getattr(evals.requests, name), np.int32)
    out |= {f"{part}.{name}": getattr(evals, name) for name in RESULTS}
    about: dict[str, Any] = {}
    if evals.choices is not None:
        _put(out, f"{part}.choices", evals.choices.sequences, np.int32)
        out |= {f"{part}.choices.{name}": getattr(evals.choices, name) for name in CHOSEN}
        about["choices"] = evals.choices.options
    if (asked := evals.questions) is not None:
        _put(out, f"{part}.prompts", asked.prompts, np.int32)
        about["questions"] = {
            "repeated": asked.repeated,
            "references": asked.references,
            "stops": sorted(asked.stops),
            "new_tokens": asked.new_tokens,
        }
    return about


def _get_eval(
    held: Arrays, part: str, about: dict[str, Any], sweep: Sweep, tokenizer: Callable[[], Any]
) -> EvalSet:
    asked_for: dict[str, Any] = {name: _get(held, f"{part}.{name}") for name in REQUESTS}
    requests = Requests(**asked_for, size=sum(map(len, asked_for["targets"])))
    choices = questions = None
    if "choices" in about:
        chosen: dict[str, Any] = {name: held[f"{part}.choices.{name}"] for name in CHOSEN}
        options = [tuple(row) for row in about["choices"]]
        choices = Choices(sequences=_get(held, f"{part}.choices"), options=options, **chosen)
    if "questions" in about:
        asked = about["questions"] | {"stops": frozenset(about["questions"]["stops"])}
        questions = Questions(
            prompts=_get(held, f"{part}.prompts"),
            tokenizer=tokenizer,
            metric=metric_of(sweep.data, sweep.base_dir),
            **asked,
        )
    arrays: dict[str, Any] = {name: held[f"{part}.{name}"] for name in RESULTS}
    return EvalSet(requests, choices=choices, questions=questions, **arrays)
