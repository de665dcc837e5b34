"""Send what jobs log to TensorBoard or Weights & Biases, beside the run's own files.

Workers write `jobs/ID/{metrics,evals}.jsonl` and know nothing of trackers: the driver reads those files as they grow
(`Feed`), so that a slow or failing tracker holds no step up. `trackers.json` says how far each job has been sent, so
that `--resume` goes on from there.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from plora_jax.engine.rundir import RunDirectory, write_json
from plora_jax.errors import UserError
from plora_jax.launch.pool import deaf

NEEDS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
UNSENT = ("step", "time", "fraction", "skipped")


class Tracker(Protocol):
    """Take what the jobs of a run log."""

    def start(self, job_id: str, fields: Mapping[str, Any], first: int) -> None:
        """Begin a job, or go on with it, with its first step that comes."""

    def log(self, job_id: str, step: int, values: Mapping[str, float]) -> None:
        """Take values by name, as of an optimizer step; steps of a job do not fall."""

    def end(self, job_id: str, summary: Mapping[str, Any]) -> None:
        """Take how a job ended; nothing more comes of it."""

    def close(self) -> None:
        """Send what is left; jobs that have not ended may go on another time."""


class TensorBoard:
    """Write event files to RUN/tensorboard, a directory a job; `tensorboard --logdir RUN/tensorboard` shows them."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"
        self.open: dict[str, tuple[Any, Mapping[str, Any]]] = {}

    def start(self, job_id: str, fields: Mapping[str, Any], first: int) -> None:
        """Open the job's event file; what an earlier one has from the step `first` on does not count."""
        from tensorboardX import SummaryWriter

        folder, suffix = str(self.folder / job_id), f".{first}"  # its files are named by the second alone
        writer = SummaryWriter(folder, purge_step=first, flush_secs=10, filename_suffix=suffix)
        self.open[job_id] = writer, fields

    def log(self, job_id: str, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self.open[job_id][0].add_scalar(name, value, step)

    def end(self, job_id: str, summary: Mapping[str, Any]) -> None:
        """Write the job's configuration and final score for the table of hyperparameters."""
        from tensorboardX.summary import hparams

        writer, fields = self.open.pop(job_id)
        scores = {f"final/{name}": value for name, value in summary.items() if isinstance(value, float)}
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in fields.items()}
        for part in hparams(plain | {"status": summary["status"]}, scores):
            writer.file_writer.add_summary(part)
        for name, value in scores.items():
            writer.add_scalar(name, value)
        writer.close()

    def close(self) -> None:
        """Close all event files."""
        for writer, _ in self.open.values():
            writer.close()


class WandB:
    """Send each job as a run of Weights & Biases, grouped by sweep; WANDB_MODE=offline keeps them in RUN/wandb."""

    def __init__(self, run: Path, project: str, token: str) -> None:
        self.folder, self.project, self.token = run, project, token
        self.open: dict[str, Any] = {}

    def start(self, job_id: str, fields: Mapping[str, Any], first: int) -> None:
        """Open the job's run, again if it was open before."""
        import wandb

        self.open[job_id] = wandb.init(
            project=self.project,
            group=f"{self.folder.name}-{self.token}",
            id=f"{job_id}-{self.token}",
            name=job_id,
            dir=self.folder,
            config={name: value for name, value in fields.items() if value is not None},
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )

    def log(self, job_id: str, step: int, values: Mapping[str, float]) -> None:
        """Log the values together."""
        self.open[job_id].log(dict(values), step=step)

    def end(self, job_id: str, summary: Mapping[str, Any]) -> None:
        """Set the run's summary, and finish it; one that failed is shown as such."""
        run = self.open.pop(job_id)
        run.summary.update(dict(summary))
        run.finish(exit_code=int(summary["status"] == "failed"))

    def close(self) -> None:
        """Finish all runs."""
        for run in self.open.values():
            run.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Check that each tracker can be used, before anything runs.

    Raises:
      UserError: a package is missing, or nobody is logged in to Weights & Biases.
    """
    for name in names:
        if find_spec(NEEDS[name]) is None:
            raise UserError(f"log.to: {name}: not installed; pip install 'plora-jax[{name}]'")
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise UserError("log.to: wandb: nobody is logged in; run wandb login, or set WANDB_MODE=offline")


class Feed:
    """Send what the jobs of a run have logged since the last `poll`.

    Args:
      run: the run directory.
      jobs: the jobs' fields by job_id; looked at anew each time, since jobs may be added.
      names: the trackers.
      project: of Weights & Biases.
      say: told when a tracker fails, which ends that tracker alone.
    """

    def __init__(
        self,
        run: RunDirectory,
        jobs: Mapping[str, Mapping[str, Any]],
        names: Sequence[str],
        project: str,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.jobs, self.say = run, jobs, say
        state = run.read_json("trackers.json") or {}
        self.token: str = state.get("token") or secrets.token_hex(3)
        self.sent: dict[str, int] = state.get("sent", {})  # by file: the last step
        self.over: set[str] = set(state.get("over", ()))
        self.begun: set[str] = set()
        self.at: dict[str, int] = {}  # by file: the bytes read
        made = {"tensorboard": lambda: TensorBoard(run.path)}
        made["wandb"] = lambda: WandB(run.path, project or "plora", self.token)  # type: ignore[assignment,return-value]
        self.trackers: dict[str, Tracker] = {name: made[name]() for name in names}

    def poll(self) -> None:
        """Read what is new, and send it in the order of its steps."""
        changed = False
        for job_id in [name for name in self.jobs if self.trackers and name not in self.over]:
            ended = self.run.read_json(f"jobs/{job_id}/job.json")  # read first: nothing is logged after it
            first = self.sent.get(f"{job_id}/metrics.jsonl", -1) + 1
            for step, values in sorted(self._new(job_id).items()):
                self._begin(job_id, first)
                self._tell("log", job_id, step, values)
                changed = True
            if ended:
                self._begin(job_id, first)
                self._tell("end", job_id, _summary(ended))
                self.over.add(job_id)
                changed = True
        if changed:
            state = {"token": self.token, "sent": self.sent, "over": sorted(self.over)}
            write_json(self.run.path / "trackers.json", state)

    def close(self) -> None:
        """Send what is left, and close the trackers; only another Ctrl-C keeps it from that."""
        with deaf():
            self.poll()
            self._tell("close")

    def _begin(self, job_id: str, first: int) -> None:
        if job_id not in self.begun:
            self.begun.add(job_id)
            self._tell("start", job_id, self.jobs[job_id], first)

    def _tell(self, what: str, *values: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                getattr(tracker, what)(*values)
            except Exception as error:  # whatever another's library raises
                del self.trackers[name]
                cause = str(error).splitlines()[0] if str(error) else ""
                self.say(f"warning: {name} gets nothing more of this run: {type(error).__name__}: {cause}")

    def _new(self, job_id: str) -> dict[int, dict[str, float]]:
        """Return the values by step that were not sent yet."""
        found: dict[int, dict[str, float]] = {}
        for prefix, name in (("train", "metrics.jsonl"), ("eval", "evals.jsonl")):
            file = f"{job_id}/{name}"
            for line in self._lines(file):
                if line["step"] > self.sent.get(file, -1):
                    values = {f"{prefix}/{k}": v for k, v in line.items() if k not in UNSENT}
                    numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
                    found.setdefault(line["step"], {}).update(numbers)
                    self.sent[file] = line["step"]
        return found

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return the whole lines that are new; from the start, when the file was cut because its job went back."""
        try:
            with open(self.run.jobs / name, "rb") as file:
                size, at = file.seek(0, os.SEEK_END), self.at.get(name, 0)
                start = file.seek(at if size >= at else 0)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self.at[name] = start + len(data)
        lines = []
        for text in data.splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the file was cut and grew again between two looks: in the middle of a line
                continue
        return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a job ended: status, reason, and the numbers of its score."""
    score = {k: float(v) for k, v in (record.get("score") or {}).items() if isinstance(v, int | float)}
    kept = {k: v for k, v in score.items() if math.isfinite(v)}
    return {"status": record["status"], "reason": record.get("reason", ""), **kept}
