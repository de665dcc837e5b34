"""A worker: one process with one device, the base model resident, that runs packs until none is left.

Workers and driver meet in the run directory alone (journal.py). A pack is a worker's for as long as it holds the lock
`claims/PACK.lock`; when the worker dies, by whatever cause, the next one takes the pack up from its checkpoint.
"""

import argparse
import fcntl
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import jax
from rich.console import Console

from planner.signature import LAST_RESORT, POLICIES
from plora_jax.config.sweep import Sweep, parse_sweep
from plora_jax.engine.handover import take_over
from plora_jax.engine.journal import BASE, MAX_ATTEMPTS, RUNG, TEST, Journal, RunState, try_lock
from plora_jax.engine.monitor import sample
from plora_jax.engine.packrun import PackRun
from plora_jax.engine.progress import make_console
from plora_jax.engine.rundir import RunDirectory, write_json
from plora_jax.engine.rung import plan_rung
from plora_jax.engine.task import Task, read_task, start_adapters
from plora_jax.errors import UserError
from plora_jax.evaluation.leaderboard import rank, read_results
from plora_jax.evaluation.metrics import higher_is_better
from plora_jax.evaluation.scorer import Score, Scorer, runtime_for
from plora_jax.jobs import Job
from plora_jax.models.load import Base, abstract_base, load_base
from plora_jax.peft import import_adapter
from plora_jax.planning import trained_rows
from plora_jax.search.drawing import Drawer
from plora_jax.search.early_stop import Rule, make_rule
from plora_jax.training.compiled import keep_programs
from plora_jax.training.program import Program
from plora_jax.training.trainer import Trained, Work

STATUS_S = 1.0  # seconds between two states written for whoever watches
RATE_S = 30.0  # seconds over which tokens/s are counted


class Preempted(Exception):
    """The worker was asked to end; its pack is in a checkpoint."""


class Worker:
    """Run the packs of one run directory that this process can claim.

    Args:
      path: the run directory, made by the driver.
      name: names the worker's files, and its place among the plan's devices when it is a number.
      base: the model, when the caller has it loaded.
      on_status: told what is written to workers/NAME.json.
    """

    def __init__(
        self,
        path: Path,
        name: str = "0",
        *,
        base: Base | None = None,
        task: Task | None = None,
        console: Console | None = None,
        on_status: Callable[[dict[str, Any]], None] = lambda status: None,
    ) -> None:
        self.run, self.name = RunDirectory(path), name
        self.journal = Journal(path / "journal.jsonl")
        self.sweep: Sweep = parse_sweep(
            (path / "sweep.yaml").read_text(encoding="utf-8"), source="sweep.yaml"
        )
        self.console = console or make_console()
        keep_programs()
        self._task = task
        self.base = base or self._load()
        self.scorer = Scorer(self.base, runtime_for(self.base))
        self.higher_is_better = higher_is_better(self.sweep.data.metric, self.sweep.base_dir)
        self.on_status, self.asked = on_status, 0
        self._status: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname()}
        self._wrote, self.tokens = 0.0, 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=1000)

    def _load(self) -> Base:
        """Load the model, and beside its weights the compiled step of the pack that is probably the first."""
        began = time.monotonic()
        with suppress(Exception):  # whatever is wrong is told when the pack is taken up
            self.base = abstract_base(self.sweep.model, precision=self.sweep.precision.base)
            with self.journal.locked() as state:
                first = next(self._packs(state), None)
            if first:
                self.program(first).seek()
        ahead = time.monotonic()
        base = load_base(self.sweep.model, precision=self.sweep.precision.base)  # type: ignore[arg-type]
        seconds = {"ahead_s": round(ahead - began, 3), "load_s": round(time.monotonic() - ahead, 3)}
        self.run.event("loaded", worker=self.name, **seconds)
        return base

    # ---- what to run -------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run what can be claimed until the run is finished or this process is asked to end.

        Raises:
          Preempted: the process was asked to end (SIGTERM or Ctrl-C); all is saved.
        """
        with self._signals():
            while not self.journal.refresh().finished:
                self.check_asked()
                claimed = self._claim()
                if claimed is None:
                    self.status(phase="waiting for other workers")
                    time.sleep(0.2)
                    continue
                name, lock = claimed
                with lock:
                    self._do(name)
            self.status(phase="done", pack=None)

    def _claim(self) -> tuple[str, IO[bytes]] | None:
        """Take the first thing to do that nobody is doing: packs of this device first, scores last."""
        claims = self.run.path / "claims"
        claims.mkdir(exist_ok=True)
        with self.journal.locked() as state:
            packs = list(self._packs(state))
            names = [*packs, BASE] if BASE not in state.done else [*packs]
            left = any(name not in state.done for name in state.packs)
            if state.at_rung and not left:
                names = [f"{RUNG}{1 + sum(name.startswith(RUNG) for name in state.done)}", *names]
            names += [TEST] if TEST not in state.done and not names and not left else []
            for name in names:
                lock = try_lock(claims / f"{name}.lock")
                if lock is None or name in state.done:
                    continue
                causes = state.causes.get(name, [])
                if state.claims.get(name, 0) > len(causes):
                    self.journal.append("lost", pack=name, cause="its worker was killed")
                if state.claims.get(name, 0) >= MAX_ATTEMPTS:
                    self._give_up(name, state)
                    lock.close()
                    continue
                self.journal.append("claim", pack=name, worker=self.name)
                return name, lock
        return None

    def _packs(self, state: RunState) -> Iterator[str]:
        """Yield the packs that are not done, those of this device first; of packs planned for devices of another
        type, only those whose workers are gone.
        """
        packs = [name for name in state.packs if name not in state.done and state.is_for(name, self.name)]
        mine = [name for name in packs if self.name in map(str, state.packs[name]["devices"])]
        yield from dict.fromkeys([*mine, *packs])

    def _give_up(self, name: str, state: RunState) -> None:
        """Fail the jobs of a pack that was begun and lost too often."""
        cause, given_up, what = state.causes.get(name, ["unknown"])[-1], [], "its pack was begun"
        if name in state.packs:
            placed = [job_id for job_id, pack in state.owner.items() if pack == name]
            given_up = [
                job_id
                for job_id in dict.fromkeys([*placed, *state.waiting(name)])
                if not state.left_paused(name, job_id)
            ]
        elif name.startswith(RUNG):
            given_up, what = state.at_rung, "what comes after its rung was planned"
        for job_id in given_up:
            if job_id in state.jobs and job_id not in state.ended:
                reason = f"{what} {MAX_ATTEMPTS} times and lost; the last time: {cause}"
                self.record(Trained(self._job(job_id), {}, 0, 0, reason), "failed", None, reason, own=False)
        self.journal.append("done", pack=name)

    def _do(self, name: str) -> None:
        try:
            if name == BASE:
                self.score_base()
            elif name == TEST:
                self.score_test()
            elif name.startswith(RUNG):
                plan_rung(self)
            else:
                PackRun(self, name).run()
        except Preempted:
            self.journal.append("yielded", pack=name)
            raise
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or name not in self.journal.state.packs:
                self._lost(name, error)
            else:
                self._out_of_memory(name, error)
        except Exception as error:  # one pack's fault is not the others'
            if isinstance(error, OSError):  # a full disk or a lost file system is everybody's
                raise
            self._lost(name, error)
        else:
            self.journal.append("done", pack=name)

    def _lost(self, name: str, error: Exception) -> None:
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        self.run.event("error", worker=self.name, pack=name, cause=cause, trace=traceback.format_exc())
        self.journal.append("lost", pack=name, cause=cause)

    def _out_of_memory(self, name: str, error: Exception) -> None:
        """Shrink the pack's program, and remember how."""
        state = self.journal.state
        now = smaller(state.packs[name] | state.limits.get(name, {}))
        if now is None:
            self._lost(name, error)
            return
        shutil.rmtree(self.run.path / "checkpoints" / name, ignore_errors=True)
        self.run.event("out_of_memory", worker=self.name, pack=name, slots=len(now["slots"]), m=now["m"])
        self.journal.append("limit", pack=name, **now)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()

    # ---- what is asked of this process ---------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the first SIGTERM or Ctrl-C as a request to end at the next micro-step; a second one ends at once."""
        before: dict[int, Any] = {}

        def handler(number: int, frame: Any) -> None:
            self.asked = number
            for one, old in before.items():
                signal.signal(one, old)

        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: signals are the caller's
            pass
        try:
            yield
        finally:
            for one, old in before.items():
                signal.signal(one, old)

    def check_asked(self) -> None:
        if self.asked:
            raise Preempted(self.asked)

    def trained(self, tokens: int, seconds: float) -> None:
        """Count the real tokens of a micro-step for tokens/s; one that took long, as it compiled, is no measure."""
        self._steps.append((tokens, seconds))
        while len(self._steps) > 2 and sum(s for _, s in self._steps) > RATE_S:
            self._steps.popleft()
        usual = sorted(s for _, s in self._steps)[len(self._steps) // 2]
        counted = [(n, s) for n, s in self._steps if s <= 5 * usual]
        self.tokens += tokens
        rate = sum(n for n, _ in counted) / max(sum(s for _, s in counted), 1e-9)
        self._status |= {
            "tokens": self.tokens,
            "tokens_per_s": round(rate, 1),
            "step_ms": round(1e3 * usual, 2),
        }

    def status(self, **values: Any) -> None:
        """Write what this worker is doing, at most once a second unless the phase changes."""
        now, changed = time.time(), "phase" in values and values["phase"] != self._status.get("phase")
        self._status |= values
        if changed or now - self._wrote >= STATUS_S:
            self._wrote = now
            self._status |= {"time": round(now, 3)} | sample(jax.local_devices())
            (self.run.path / "workers").mkdir(exist_ok=True)
            write_json(self.run.path / "workers" / f"{self.name}.json", self._status, sync=False)
            self.on_status(self._status)

    # ---- jobs and their data --------------------------------------------------------------------------------------

    def _job(self, job_id: str) -> Job:
        return Job.from_dict(self.journal.state.jobs[job_id])

    def task(self) -> Task:
        """Return the data of the run, on first use as the driver handed it over; what it did not have is read.

        Raises:
          UserError: a file that has to be read is not the one that the run was started with.
        """
        if self._task is None:
            named = [self._job(job_id) for job_id in self.journal.state.jobs]
            corners = [pack["corners"] for pack in self.journal.state.packs.values() if "corners" in pack]
            named += [Job.from_dict(values) for values in chain(*corners)]
            jobs, starts = start_adapters(self.sweep, self.base.config, named)
            task = take_over(self.run.path, self.sweep, jobs, lambda: self.base.tokenizer)
            self._task = task or self._read(jobs)
            self._task.starts.update(starts)
        return self._task

    def _read(self, jobs: Sequence[Job]) -> Task:
        vocab = self.base.config.vocab_size
        task = read_task(self.sweep, jobs, self.base.tokenizer, vocab, self.console)
        then = self.run.read_json("inputs.json") or {}
        for name, digest in task.digests.items():
            if digest != then.get(name, digest):
                raise UserError(f"{name} changed since this run was started: then {then[name]}, now {digest}")
        return task

    def work_of(self, job: Job) -> Work:
        """Return what a job needs to start; data that no job named before is read now."""
        file = job.train or self.sweep.data.train
        if file not in self.task().files or (job.init_adapter and job.job_id not in self.task().starts):
            self._task = None  # jobs were added since
        return Work(job, self.task().files[file], self.task().starts.get(job.job_id))

    def item(self, job_id: str) -> Work:
        """Return what a job of the journal needs to start."""
        return self.work_of(self._job(job_id))

    def program(self, name: str) -> Program:
        """Return the program of a pack, as what was learnt of it since it was planned has made it."""
        state = self.journal.state
        pack = state.packs[name]
        if "corners" in pack:
            planned = [self.work_of(Job.from_dict(values)) for values in pack["corners"]]
        else:
            planned = [self.item(job_id) for job_id in pack["jobs"]]
        return Program.of(self.sweep, self.base, pack | state.limits.get(name, {}), planned)

    @cached_property
    def rule(self) -> Rule:
        """Return what stops jobs; one that compares with the base model has that scored first, whoever comes to it."""
        stop, loss = self.sweep.early_stop, None
        if stop.method == "plateau":
            self.score_base()
            loss = self.run.read_json("base.json")["loss"]
        return make_rule(stop, self.higher_is_better, loss)

    @cached_property
    def drawer(self) -> Drawer:
        """Return what draws the jobs of a sweep that does not know them beforehand."""
        return Drawer(self.sweep, self.journal, self.higher_is_better, self._tokens)

    def _tokens(self, job_id: str) -> float:
        item = self.item(job_id)
        return trained_rows(item.job, len(item.examples)) * float(item.examples.counts.mean())

    # ---- scores that are not a job's -----------------------------------------------------------------------------

    def score_base(self) -> None:
        """Score the base model on the held-out rows, unless it is done; a worker that does it is waited for."""
        with open(self.run.path / "claims" / "base.json.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.run.read_json("base.json"):
                self.status(phase="scoring the base model", pack=BASE)
                write_json(self.run.path / "base.json", vars(self.scorer.score([None], self.task().eval)[0]))

    def score_test(self) -> None:
        """Score base and winner on the test rows, which nothing was chosen by."""
        task, results = self.task(), read_results(self.run, self.journal.state.jobs)
        if task.test is None or not results:
            return
        best = rank(results, self.sweep.data.metric)[0]
        if best["status"] == "failed":
            return
        self.status(phase="scoring base and best on the test rows", pack=TEST)
        adapter, _ = import_adapter(self.run.path / best["adapter"], self.base.config)
        on_base, on_best = self.scorer.score([None, (self._job(best["job_id"]), adapter)], task.test)
        found = {"job_id": best["job_id"], **vars(on_best)}
        write_json(self.run.path / "test.json", {"rows": on_base.rows, "base": vars(on_base), "best": found})

    def record(
        self,
        trained: Trained,
        status: str,
        score: Score | None,
        reason: str,
        *,
        own: bool = True,
        **more: Any,
    ) -> None:
        """Write how a job ended: its record, then the journal's line; `own` is off where the fault is not its own.

        `more` goes into the record.
        """
        job_id = trained.job.job_id
        record = {
            "job_id": job_id,
            "status": status,
            "score": vars(score) if score else None,
            "steps": trained.steps,
            "tokens": trained.tokens,
            "reason": reason,
            "adapter": f"jobs/{job_id}/adapter" if score else "",
            **more,
            "job": trained.job.to_dict(),
        }
        write_json(self.run.job(job_id) / "job.json", record)
        value = score.score if score else float("nan") if own else None
        told = {"tokens": trained.tokens, "value": value, "fraction": more.get("fraction", 1.0)}
        self.journal.append("ended", job_id=job_id, status=status, **told)
        self.run.event(status, job_id=job_id, reason=reason, worker=self.name)


def smaller(was: dict[str, Any]) -> dict[str, Any] | None:
    """Return the next smaller program of a pack, by its slots, m and policy; None where there is none.

    First more is recomputed, then slots get fewer, then the rows of each; last, on a GPU, layer inputs go to the host.
    """
    now = {name: was[name] for name in ("slots", "m", "policy")}
    if now["policy"] in POLICIES[:-1]:
        now["policy"] = POLICIES[POLICIES.index(now["policy"]) + 1]
    elif len(now["slots"]) > 1:
        now["slots"] = now["slots"][: len(now["slots"]) // 2]
    elif now["m"] > 1:
        now["m"] = next(d for d in range(now["m"] // 2, 0, -1) if now["m"] % d == 0)
    elif now["policy"] != LAST_RESORT and jax.default_backend() != "cpu":
        now["policy"] = LAST_RESORT
    else:
        return None
    return now


def main(argv: Sequence[str] | None = None) -> int:
    """Be a worker of the run directory given on the command line; launchers start this.

    Exit codes: 0 nothing is left to do, 1 something failed (in workers/NAME.log), 143 asked to end, and resumable.
    """
    parser = argparse.ArgumentParser(prog="python -m plora_jax.engine.worker", description=main.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of a sweep")
    parser.add_argument("--worker", default="0", metavar="ID", help="number of the worker's device")
    args = parser.parse_args(argv)
    worker = Worker(args.run, args.worker, console=Console(file=sys.stderr, width=160))
    try:
        worker.work()
    except Preempted as asked:
        return 128 + int(asked.args[0])
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
