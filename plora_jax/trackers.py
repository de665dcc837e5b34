"""Send what jobs log to TensorBoard or Weights & Biases, beside the run's own files.

Workers write `jobs/ID/{metrics,evals}.jsonl` and know nothing of trackers: the driver reads those files as they grow
(`Feed`), so that a slow or failing tracker holds no step up. On `--resume` everything is sent again, from the start;
both trackers end up with each step once.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from plora_jax.errors import UserError
from plora_jax.rundir import RunDirectory

Values = Mapping[str, float]


class Tracker(Protocol):
    """Take what the jobs of a run log."""

    def start(self, run: Path, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin: `jobs` are the jobs' fields by job_id; more may come with another call."""

    def log(self, job_id: str, step: int, values: Values) -> None:
        """Take the values of one optimizer step; steps of a job come in order."""

    def end(self, job_id: str, summary: Mapping[str, Any]) -> None:
        """Take how a job ended; nothing more comes of it."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Write event files to RUN/tensorboard, a directory a job; `tensorboard --logdir RUN/tensorboard` shows them."""

    def start(self, run: Path, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin anew: what an earlier driver wrote is written again."""
        self.folder, self.jobs, self.writers = run / "tensorboard", dict(jobs), {}
        shutil.rmtree(self.folder, ignore_errors=True)
