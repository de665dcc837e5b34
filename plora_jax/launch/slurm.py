"""Run workers as a SLURM job array: a task each, which SLURM places, and puts back into the queue when a node is lost.

The driver writes RUN/workers/slurm.sbatch, submits it, and watches it. A task starts its worker again on the spot when
that dies; two minutes before its time is up it saves and goes back into the queue. Should the driver die, the tasks go
on without it, and a job that waits for them all writes the leaderboard.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import planner
from plora_jax.engine.rundir import write_atomic, write_json
from plora_jax.errors import UserError
from plora_jax.launch.pool import Ended, Pool, deaf
from plora_jax.launch.process import WORKER, Group, WorkerProcess, cause_of, last_text, python_path, tail_of
from plora_jax.launch.site import LaunchOptions, Site, local_site

POLL_S = 10.0  # the controller serves the whole cluster
TASK_GRACE_S = 90.0  # of the two minutes that a task is told of its end before
GRACE_S = TASK_GRACE_S + 30.0
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "UNKNOWN",
)

WORKERS = """\
#!/usr/bin/env bash
#SBATCH --job-name=plora
#SBATCH --array=0-{last}
#SBATCH --ntasks=1{resources}
#SBATCH --output={run}/workers/slurm-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120{options}
# One worker of the sweep in {run}; written by plora sweep --launcher slurm.
export PYTHONPATH={path}
exec {python} -P -m plora_jax.launch.slurm {run} --devices {devices} --module {module}
"""

FINISH = """\
#!/usr/bin/env bash
#SBATCH --job-name=plora-finish
#SBATCH --ntasks=1{resources}
#SBATCH --output={run}/workers/slurm-finish.log
#SBATCH --open-mode=append{options}
# Finish the sweep in {run} when its workers are gone and its driver died: train what is left, rank, report.
export PYTHONPATH={path}
exec {python} -P -m plora_jax sweep {run}/sweep.yaml --out {run} --resume --launcher inline
"""


def slurm_site(options: LaunchOptions, devices: str) -> Site:
    """Share a SLURM cluster among workers, one array task each; what a task gets must be said, SLURM does not tell.

    Raises:
      UserError: there is no sbatch here, or `devices` does not name a number of devices of one type.
    """
    if not shutil.which("sbatch"):
        raise UserError("--launcher slurm: there is no sbatch on this machine; start it on a login node")
    if devices in ("auto", "cpu"):
        raise UserError(
            f"devices: {devices}: SLURM does not tell what a job will get; name it, such as 8xA100-40GB or 4xcpu-16GB"
        )
    if "\n" in options.slurm:
        raise UserError(f"--slurm {options.slurm!r}: give the options of sbatch in one line")
    try:
        asked = planner.devices(devices)
    except planner.PlanError as error:
        raise UserError(f"devices: {error}") from None
    if isinstance(asked, planner.Mixture):
        raise UserError(
            f"devices: {devices}: the tasks of a SLURM job array are all alike; name devices of one type, or give each "
            "type a sweep of its own"
        )
    count = options.workers or asked.count
    groups = [Group(str(i), gpus=int(asked.spec.name != "cpu")) for i in range(count)]
    launcher = SlurmArray(options.slurm)
    return Site(launcher, groups, planner.Devices(asked.spec, count), f"{count} tasks of a SLURM job array")


def slurm(*command: str, text: str | None = None) -> str:
    """Run one of SLURM's commands and return what it printed.

    Raises:
      SlurmError: it failed; the message is its own.
    """
    # within a job, what SLURM says of that job would be taken for wishes
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()


class SlurmError(UserError):
    """A command of SLURM failed: the message says which, and why."""


@dataclass
class _Task:
    log: Path
    seen_from: int  # byte of the log
    requeued: int = 0  # as SLURM counts it


@dataclass
class SlurmArray:
    """Launch workers as a job array; `options` are sbatch's, as one would type them."""

    options: str = ""
    poll_s: float = POLL_S
    grace_s: float = GRACE_S
    module: str = WORKER
    _job: str = ""
    _finish: str = ""
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _looked: float = 0.0

    def start(self, run: Path, groups: Sequence[Group]) -> None:
        """Submit the array, and the job that finishes the sweep should this driver die.

        Raises:
          SlurmError: SLURM refuses.
        """
        folder = run.absolute() / "workers"
        folder.mkdir(exist_ok=True)
        if (folder / "slurm.json").exists():  # the workers of a driver that died
            old = json.loads((folder / "slurm.json").read_text())
            self._job, self._finish = old["workers"], old["finish"]
            self.stop()
        fill = {
            "last": len(groups) - 1,
            "run": shlex.quote(str(run.absolute())),
            "python": shlex.quote(sys.executable),
            "path": shlex.quote(python_path()),
            "resources": "\n#SBATCH --gres=gpu:1" if groups[0].gpus else "",
            "options": f"\n#SBATCH {self.options}" if self.options else "",
            "devices": "auto" if groups[0].gpus else "cpu",
            "module": self.module,
        }
        script = WORKERS.format(**fill)
        write_atomic(folder / "slurm.sbatch", script)
        self._job = self._submit(script)
        self._finish = self._submit(FINISH.format(**fill), f"--dependency=afterany:{self._job}")
        write_json(folder / "slurm.json", {"workers": self._job, "finish": self._finish})
        for group in groups:
            log = folder / f"slurm-{group.worker}.log"
            self._tasks[group.worker] = _Task(log, _size(log))

    def _submit(self, script: str, *more: str) -> str:
        return slurm("sbatch", "--parsable", *more, text=script).partition(";")[0]

    def poll(self) -> list[Ended]:
        """Return what ended since the last call, asking SLURM every `poll_s` seconds."""
        if time.monotonic() - self._looked < self.poll_s or not self._tasks:
            return []
        self._looked = time.monotonic()
        ended = []
        for worker, (state, code, requeued) in self._states().items():
            task = self._tasks.get(worker)
            if task is None or (state not in ENDED and requeued == task.requeued):
                continue
            text = last_text(task.log, task.seen_from)
            if state in ENDED:
                cause = cause_of(code, text)
                if state not in ("COMPLETED", "FAILED"):
                    cause = f"{state} by SLURM's account{f': {cause}' if cause else ''}"
                del self._tasks[worker]
                ended.append(Ended(worker, cause, tail_of(text), left=True))
            else:
                cause = "SLURM has put it back into the queue: its time was up, or its node was lost"
                ended.append(Ended(worker, cause, tail_of(text), left=False))
                task.requeued, task.seen_from = requeued, _size(task.log)
        return ended

    def alive(self) -> list[str]:
        """Name the workers that run, wait in the queue or were put back into it."""
        return list(self._tasks)

    def stop(self) -> None:
        """Ask all workers to save and to end; cancel what is left after the grace, or on another Ctrl-C."""
        self._tasks.clear()
        if not self._job:
            return
        with deaf():
            try:
                self._cancel(self._finish)
                self._cancel("--state=PENDING", self._job)
                self._cancel("--signal=TERM", "--batch", self._job)
                deadline = time.monotonic() + self.grace_s
                while time.monotonic() < deadline and any(
                    state not in ENDED for state, _, _ in self._states().values()
                ):
                    time.sleep(1.0)
            finally:
                self._cancel(self._job)

    def _cancel(self, *which: str) -> None:
        with contextlib.suppress(SlurmError):  # it has ended
            slurm("scancel", *which)

    def _states(self) -> dict[str, tuple[str, int, int]]:
        """Return each task's state, exit code and count of requeues; nothing while SLURM does not answer."""
        try:
            text = slurm("scontrol", "show", "job", "--oneliner", self._job)
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                return {}
            return self._accounted()
        found = {}
        for line in text.splitlines():
            values = dict(re.findall(r"\b(ArrayTaskId|JobState|ExitCode|Restarts)=(\S+)", line))
            for worker in _expand(values.get("ArrayTaskId", "")):
                found[worker] = (values["JobState"], _code(values["ExitCode"]), int(values["Restarts"]))
        return found

    def _accounted(self) -> dict[str, tuple[str, int, int]]:
        """Return what SLURM's accounting knows of tasks that the controller has forgotten; unknown ones are over."""
        found = dict.fromkeys(self._tasks, ("UNKNOWN", 0, 0))
        try:
            fields = "--format=JobID%40,State,ExitCode"
            text = slurm("sacct", "-n", "-P", "-X", fields, "-j", self._job)
        except SlurmError:  # a cluster without accounting
            text = ""
        for job, state, code in (line.split("|") for line in text.splitlines()):
            for worker in _expand(job.partition("_")[2].strip("[]")):
                found[worker] = (state.split()[0], _code(code), 0)
        return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _code(text: str) -> int:
    """Read SLURM's `exit code:signal` as one number, below 0 for a signal; a shell's 128 + n is a signal too."""
    code, _, number = text.partition(":")
    if int(number or 0):
        return -int(number)
    return 128 - int(code) if int(code) > 128 else int(code)


def _expand(tasks: str) -> list[str]:
    """List the tasks in SLURM's `0-3,7%2`."""
    out = []
    for part in tasks.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            out += [str(i) for i in range(int(first), int(last or first) + 1)]
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Be one task of the array: keep a worker running on what SLURM gave this job.

    Exit codes: 0 nothing is left to do, 1 the worker failed too often, 143 asked to end. Before the job's time is up,
    it saves and goes back into the queue.
    """
    parser = argparse.ArgumentParser(prog="python -m plora_jax.launch.slurm", description=main.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of a sweep")
    parser.add_argument("--devices", choices=["auto", "cpu"], default="auto", help="auto: a GPU")
    parser.add_argument("--module", default=WORKER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    worker = os.environ["SLURM_ARRAY_TASK_ID"]
    pool = Pool(partial(WorkerProcess, module=args.module), grace_s=TASK_GRACE_S)
    cause = ""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, _asked)
    try:
        pool.start(args.run, [task_group(worker, args.devices)])
        while pool.alive():
            time.sleep(0.2)
            for ended in pool.poll():
                cause = ended.cause
                print(f"worker {worker}: {cause or 'done'}", flush=True)
    except _Asked as asked:
        pool.stop()
        if asked.args[0] == signal.SIGUSR1:
            slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)  # until SLURM ends this process: by its own end it would end the task
        return 143
    except UserError as error:
        cause = f"error: {error}"
        print(cause, flush=True)
    return int(bool(cause))


class _Asked(BaseException):
    """A signal asked this process to end."""


def _asked(number: int, frame: Any) -> None:
    for one in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise _Asked(number)


def task_group(worker: str, devices: str) -> Group:
    """Return what this SLURM job may compute on: its GPU, or as many threads as it has CPUs.

    Raises:
      UserError: a GPU is wanted, and there is none that JAX can use.
    """
    site = local_site(devices, 1)
    [group] = site.groups
    if devices == "auto" and not group.gpus:
        raise UserError(f"{os.uname().nodename}: {site.note}")
    cpus = int(
        os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or len(group.cores)
    )
    bound = (
        len(group.cores) <= cpus
    )  # else SLURM counts cores without binding to them: none are this job's own
    return group._replace(worker=worker, cores=group.cores if bound else (), threads=cpus)


if __name__ == "__main__":
    sys.exit(main())
