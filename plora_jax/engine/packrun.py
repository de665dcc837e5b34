"""One pack from its first micro-step to its last job: train, score, stop, refill, export, checkpoint."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from plora_jax.data.layout import steps_per_epoch, total_steps
from plora_jax.engine.checkpoint import Checkpoints
from plora_jax.engine.faults import fault
from plora_jax.engine.journal import RunState
from plora_jax.engine.monitor import Pace
from plora_jax.engine.rundir import JsonLines, keep_lines
from plora_jax.engine.rung import conclude, export, read_waiting, write_waiting
from plora_jax.evaluation.metrics import higher_is_better
from plora_jax.search.early_stop import rung_steps
from plora_jax.training.trainer import Trainer, Work

if TYPE_CHECKING:
    from plora_jax.engine.worker import Worker

PAYS_AFTER = 200  # micro-steps that earn back what compiling the step for fewer slots costs
LOOK_S = 2.0  # seconds between two looks at what other processes decided


@dataclass
class Held:
    """Keep what is known of a slot's job beside its training; saved with every checkpoint."""

    job_id: str
    due: list[int]  # optimizer steps after which the job is scored, the last one included
    judged: int = 0  # the last of them that is done
    evals: int = 0  # lines of evals.jsonl
    loss_sum: float = 0.0  # over the optimizer batches since the last evaluation
    loss_count: int = 0
    best_step: int = 0


class PackRun:
    """Run a claimed pack; everything is restored from its newest checkpoint when it has one."""

    def __init__(self, worker: "Worker", name: str) -> None:
        self.worker, self.name = worker, name
        self.run_dir, self.journal, self.sweep = worker.run, worker.journal, worker.sweep
        self.rule = worker.rule
        state = self.journal.refresh()
        self.pack = state.packs[name]
        self.program = program = worker.program(name)
        self.trainer = Trainer(
            worker.base,
            program.spec,
            program.m,
            program.shapes,
            packing=program.packing,
            runtime=program.runtime,
            on_step=self._on_step,
        )
        self.folder = self.run_dir.path / "checkpoints" / name
        self.checkpoints = Checkpoints(self.folder / str(self.trainer.spec.slots))
        self.held: list[Held | None] = [None] * self.trainer.spec.slots
        self.metrics: dict[str, JsonLines] = {}
        self.evals: dict[str, JsonLines] = {}
        self.sign = 1.0 if higher_is_better(self.sweep.data.metric, self.sweep.base_dir) else -1.0
        self.looked = self.saved = time.monotonic()
        self.exhausted = False  # the search has no more jobs
        self.written = 0  # micro-step of the last checkpoint
        self.asked_at = 0.0  # when other packs' jobs were looked at
        self.slot_of = {a["job_id"]: a["slot"] for a in self.pack["assign"]}
        self.pace = Pace(self.pack["step_s"])
        self.as_planned = name not in state.limits
        self.pauses = self.pack.get("rung") is not None  # jobs that pass a rung leave the pack there
        self.compiled: set[Any] = set()  # slots and shapes of the steps that were dispatched

    def run(self) -> None:
        """Train until no slot has work and none is left for it.

        Raises:
          Preempted: the worker was asked to end; a checkpoint is written.
        """
        every_s = float(self.journal.state.settings.get("checkpoint_s", 120.0))
        try:
            self._restore()
            self._fill()
            while self.trainer.slots:
                self._micro_step()
                if self.worker.asked:
                    self._save()
                    self.checkpoints.wait()
                    self.worker.check_asked()
                if self.trainer.slots and time.monotonic() - self.saved >= every_s:
                    self._save()
        finally:
            self.trainer.close()
            self.checkpoints.close()
            for log in (*self.metrics.values(), *self.evals.values()):
                log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- one micro-step -------------------------------------------------------------------------------------------

    def _micro_step(self) -> None:
        started, trainer, waited = time.perf_counter(), self.trainer, self.trainer.unread
        tokens = trainer.advance()
        fault("step")
        at, shape = trainer.micro_step, trainer.unread
        self._tell_compiled(at, shape, time.perf_counter() - started)
        due = [j for j in trainer.slots if self._due(j)]
        if due:
            trainer.sync()
        over = trainer.over()
        if due or over:
            self._judge(due, over)
        self._look(at)
        for j, reason in [(j, self.journal.state.stops.get((self.name, at, j))) for j in trainer.slots]:
            if reason is not None:
                trainer.sync()
                if self.sweep.train.keep == "last" and 0 < self._held(j).judged < trainer.step_of(j):
                    self._score([j])  # the adapter it has now is the one that is kept
                self._end(j, "stopped", reason)
        self._fill()
        self._shrink(at)
        seconds = time.perf_counter() - started
        if trainer.unread:  # it was not waited for
            self.pace.add(shape, waited, seconds)
        self._report(tokens, seconds)

    def _tell_compiled(self, at: int, shape: Any, seconds: float) -> None:
        """Write down how long the first micro-step of a program took to dispatch: to compile it, or to find it kept."""
        if (program := (self.trainer.spec.slots, shape)) not in self.compiled:
            self.compiled.add(program)
            what = {"micro_step": at, "slots": program[0], "length": shape.S, "compile_s": round(seconds, 6)}
            self.run_dir.event("compiled", pack=self.name, worker=self.worker.name, **what)

    def _due(self, j: int) -> bool:
        held, step = self.held[j], self.trainer.step_of(j)
        return held is not None and step > held.judged and step in held.due

    def _judge(self, due: Sequence[int], over: Sequence[int]) -> None:
        """Score the slots that are due, all at once, and let those go that have ended or will not win."""
        sound = [j for j in due if not self._running(j).reason]
        self._score(sound)
        going = []
        for j in dict.fromkeys((*due, *over)):
            run, held, step = self._running(j), self._held(j), self.trainer.step_of(j)
            if run.reason:
                self._end(j, "failed", run.reason)
                continue
            line = self.journal.state.scores[held.job_id, step]
            if not math.isfinite(line["loss"]):
                self._end(j, "failed", "the loss on held-out rows is not finite")
            elif j in over:
                self._end(j, "completed", "")
            elif (reason := self._verdict(held.job_id, step)) is not None:
                self._end(j, "stopped", reason)
            elif self.pauses and step in rung_steps(self.sweep.early_stop, held.job_id, run.steps):
                going.append(j)
        if going:
            self._pause(going)

    def _score(self, slots: Sequence[int]) -> None:
        """Score slots after the step they have made, and write it down; a score in the journal is not replaced.

        Where some of them are not in the journal, as after a line cut short, all are scored, by the same program as
        before: the size of a group is one.
        """
        known = self.journal.state.scores
        keys = {j: (self._held(j).job_id, self.trainer.step_of(j)) for j in slots}
        new = [j for j in slots if keys[j] not in known]
        if new:
            self.worker.status(phase=f"scoring, {self.name}")
            state = self.trainer.state
            scorer, at_once = self.worker.scorer, self.program.scored_at_once
            scores = scorer.score_slots(
                state.weights, state.scales, slots, self.worker.task().eval, tokens=at_once
            )
            lines = []
            for j, score in zip(slots, scores, strict=True):
                if j not in new:
                    continue
                held, (job_id, step) = self._held(j), keys[j]
                line = {"job_id": job_id, "step": step, "fraction": step / self._running(j).steps}
                line |= {"value": score.score, "loss": score.loss, "score": vars(score)}
                line |= {"train_loss": held.loss_sum / max(held.loss_count, 1)}
                lines.append(("score", line))
            self.journal.extend(lines)
        for j in slots:
            held, step, run = self._held(j), self.trainer.step_of(j), self._running(j)
            line = known[keys[j]]
            held.judged, held.evals = step, held.evals + 1
            held.loss_sum, held.loss_count = 0.0, 0
            shown = {"step": step, "fraction": line["fraction"], "score": line["value"], "loss": line["loss"]}
            shown |= {
                "train_loss": line["train_loss"],
                "rows": line["score"]["rows"],
                "time": round(time.time(), 3),
            }
            self._log(self.evals, held.job_id, "evals.jsonl").append(shown)
            best = known.get((held.job_id, held.best_step))
            better = best is None or self._rank(line) > self._rank(best)
            if better and math.isfinite(line["loss"]):
                held.best_step = step
                over = held.job_id in self.journal.state.ended  # before a kill; its adapter is in place
                if self.sweep.train.keep == "best" and step < run.steps and not over:
                    export(self.worker, self.trainer.take(j), "best")

    def _rank(self, line: dict[str, Any]) -> tuple[float, float]:
        """Order a job's scores as the leaderboard does: of equal ones the lower held-out loss is better."""
        return self.sign * line["value"], -line["loss"]

    def _verdict(self, job_id: str, step: int) -> str | None:
        """Say why a job is stopped at this evaluation, None when it goes on; decided once, then looked up."""
        with self.journal.locked() as state:
            known = state.verdicts.get((job_id, step))
            if known is None:
                mine = state.settings.get("scope") == "pack"
                history = {
                    name: points
                    for name, points in state.points.items()
                    if not mine or state.owner.get(name) == self.name
                }
                verdict = self.rule.decide(job_id, history)
                self.journal.append(
                    "verdict", job_id=job_id, step=step, stop=verdict.stop, reason=verdict.reason
                )
                known = state.verdicts[job_id, step]
        return known["reason"] if known["stop"] else None

    def _look(self, at: int) -> None:
        """See, now and then, which jobs were withdrawn, and write down at which micro-step that takes effect."""
        if time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        with self.journal.locked() as state:
            for j in self.trainer.slots:
                job_id = self._held(j).job_id
                if job_id in state.withdrawn and (self.name, job_id) not in state.stopping:
                    where = {"pack": self.name, "at": at, "slot": j}
                    self.journal.append("stop", **where, job_id=job_id, reason="withdrawn")

    # ---- slots ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give every free slot its next job, while there is one."""
        at, state = self.trainer.micro_step, self.journal.state
        for j in range(self.trainer.spec.slots):
            while self.held[j] is None:
                job_id = state.places.get((self.name, at, j)) or self._next(at, j)
                if job_id is None:
                    break
                self._start(j, job_id)

    def _next(self, at: int, j: int) -> str | None:
        """Decide which job takes slot j: the next one planned for it, else for the pack, else one of another pack."""
        asked, self.asked_at = self.asked_at, time.monotonic()
        idle = self.exhausted or not self.journal.state.waiting(self.name)
        if idle and (self.asked_at - asked < LOOK_S or self._closed()):
            self.asked_at = asked
            return None
        with self.journal.locked() as state:
            mine = state.waiting(self.name)
            where = {"pack": self.name, "at": at, "slot": j}
            if mine and mine[0] not in state.jobs:  # a place whose job is drawn now
                drawn = self.worker.drawer.draw(state, where | {"for": mine[0]})
                self.exhausted = drawn is None
                return drawn
            planned = [name for name in mine if self.slot_of.get(name) == j]
            found = next(iter([*planned, *mine]), None) or self._foreign(state)
            if found:
                self.journal.append("place", **where, job_id=found)
            return found

    def _closed(self) -> bool:
        """Tell whether only this pack's own jobs may enter it: always where results must not depend on timing."""
        return self.journal.state.settings.get("scope") == "pack" or not self._other_packs(self.journal.state)

    def _other_packs(self, state: RunState) -> list[str]:
        """List the packs that nobody has begun and that this worker may take."""
        begun, worker = state.done | state.claims.keys(), self.worker.name
        return [name for name in state.packs if name not in begun and state.is_for(name, worker)]

    def _foreign(self, state: RunState) -> str | None:
        """Find a job of a pack nobody has begun, the last planned first, that this compiled step can take."""
        if self._closed():
            return None
        for other in reversed(self._other_packs(state)):
            for job_id in reversed(state.waiting(other)):
                if job_id in state.jobs and self.program.fits(self.worker.item(job_id)):
                    return job_id
        return None

    def _shrink(self, at: int) -> None:
        """Go on with half the slots or fewer, once none of the others will be filled again and it pays."""
        line, used = self.journal.state.shrinks.get((self.name, at)), self.trainer.slots
        if line is None:
            slots = 1 << (len(used) - 1).bit_length() if used else 0
            more = self.journal.state.waiting(self.name) and not self.exhausted
            if not used or slots > self.trainer.spec.slots // 2 or more:
                return
            left = max(self._micro_steps_left(j) for j in used)
            if left < PAYS_AFTER or not self._closed():
                return
            line = {"at": at, "keep": used, "slots": slots}
            self.journal.append("shrink", pack=self.name, **line)
        self.trainer.shrink(line["keep"], line["slots"])
        self.checkpoints.close()
        self.checkpoints = Checkpoints(self.folder / str(self.trainer.spec.slots))
        self.held = [self.held[j] for j in line["keep"]] + [None] * (line["slots"] - len(line["keep"]))
        self.slot_of = {}
        self.run_dir.event("shrunk", pack=self.name, micro_step=at, slots=line["slots"])

    def _micro_steps_left(self, j: int) -> int:
        run = self._running(j)
        return (run.steps - self.trainer.step_of(j)) * run.job.batch_size // self.program.m

    def _start(self, j: int, job_id: str) -> None:
        item = self.worker.item(job_id)
        total = total_steps(item.job, len(item.examples))
        held, logged, waited = Held(job_id, self._due_steps(item, total)), 0, None
        if step := self.journal.state.from_step.get((self.name, job_id)):
            waited = read_waiting(self.worker, item.job, step)
        if waited:  # without what it had come to it begins anew
            held, logged = Held(**waited.meta["held"]), waited.meta["running"]["logged"]
        self.trainer.put(j, item, waited)
        self.held[j] = held
        for logs, file, kept in (
            (self.metrics, "metrics.jsonl", logged),
            (self.evals, "evals.jsonl", held.evals),
        ):
            keep_lines(self.run_dir.job(job_id) / file, kept)  # a job that starts again starts its logs again
            logs.pop(job_id, None)
        self.run_dir.event(
            "placed", pack=self.name, slot=j, job_id=job_id, micro_step=self.trainer.micro_step
        )

    def _due_steps(self, item: Work, total: int) -> list[int]:
        """List the optimizer steps after which a job is scored."""
        per_epoch = steps_per_epoch(len(item.examples), item.job.batch_size)
        return self.sweep.eval.steps(total, per_epoch, self.rule.rungs())

    def _end(self, j: int, status: str, reason: str) -> None:
        """Export and record what a slot's job has come to, unless that was done before, and free the slot."""
        held, run, trained = self._held(j), self._running(j), self.trainer.take(j)
        self._free(j)
        if held.job_id not in self.journal.state.ended:
            conclude(self.worker, trained, run.steps, held.best_step, status, reason)

    def _free(self, j: int) -> None:
        job_id, self.held[j] = self._held(j).job_id, None
        self.trainer.put(j, None)
        for logs in (self.metrics, self.evals):
            if log := logs.pop(job_id, None):
                log.close()

    def _pause(self, slots: Sequence[int]) -> None:
        """Free slots whose jobs wait for the next plan; their states are on the disk before the journal says so."""
        names = {j: self._held(j).job_id for j in slots}
        new = [j for j in slots if not self.journal.state.left_paused(self.name, names[j])]
        lines = [
            ("pause", {"pack": self.name, "job_id": names[j], "step": self.trainer.step_of(j)}) for j in new
        ]
        if new:
            fault("pause")
        for j in new:
            waiting = self.trainer.pause(j)
            waiting.meta["held"] = asdict(self._held(j))
            write_waiting(self.worker, names[j], waiting)
        for j in slots:
            self._free(j)  # with its logs on the disk
        if lines:
            fault("pause-journal")
            self.journal.extend(lines)
        for _, line in lines:
            self.run_dir.event("paused", **line)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        for log in (*self.metrics.values(), *self.evals.values()):
            log.flush()  # a checkpoint counts the lines before it
        arrays, meta = self.trainer.snapshot()
        meta |= {"held": [asdict(held) if held else None for held in self.held]}
        self.checkpoints.save(self.trainer.micro_step, arrays, meta)
        if self.written:  # which the save that has just begun waited for
            self.journal.append("saved", pack=self.name, at=self.written)
        self.written, self.saved = self.trainer.micro_step, time.monotonic()

    def _restore(self) -> None:
        """Go back to the newest checkpoint, which is of the fewest slots the pack had come to; without one, begin."""
        made = sorted(int(folder.name) for folder in self.folder.glob("[0-9]*"))
        for slots in made:
            self.checkpoints.close()
            self.checkpoints = Checkpoints(self.folder / str(slots))
            if found := self.checkpoints.restore(self.trainer.like(slots)):
                break
        else:
            return
        _, arrays, meta = found
        self.held = [Held(**held) if held else None for held in meta["held"]]
        work = {held.job_id: self.worker.item(held.job_id) for held in self.held if held}
        self.trainer.restore(arrays, meta, work)
        for j in self.trainer.slots:  # what was logged after the checkpoint is logged again
            held, folder = self._held(j), self.run_dir.job(self._held(j).job_id)
            keep_lines(folder / "metrics.jsonl", self._running(j).logged)
            keep_lines(folder / "evals.jsonl", held.evals)
        self.run_dir.event(
            "restored", pack=self.name, micro_step=self.trainer.micro_step, worker=self.worker.name
        )

    # ---- reporting ------------------------------------------------------------------------------------------------

    def _on_step(self, job: Any, line: dict[str, Any]) -> None:
        self._log(self.metrics, job.job_id, "metrics.jsonl").append(line)
        for held in self.held:
            if held and held.job_id == job.job_id:
                held.loss_sum, held.loss_count = held.loss_sum + line["loss"], held.loss_count + 1

    def _log(self, logs: dict[str, JsonLines], job_id: str, file: str) -> JsonLines:
        if job_id not in logs:
            logs[job_id] = JsonLines(self.run_dir.job(job_id) / file)
        return logs[job_id]

    def _report(self, tokens: int, seconds: float) -> None:
        done = {
            self._held(j).job_id: self.trainer.step_of(j) / self._running(j).steps for j in self.trainer.slots
        }
        whole = self.as_planned and self.trainer.spec.slots == len(self.pack["slots"])
        pace, phase = self.pace.factor() if whole else None, f"training, {self.name}"
        self.worker.trained(tokens, seconds)
        self.worker.status(
            phase=phase, pack=self.name, micro_step=self.trainer.micro_step, jobs=done, pace=pace
        )

    def _held(self, j: int) -> Held:
        held = self.held[j]
        assert held
        return held

    def _running(self, j: int) -> Any:
        run = self.trainer.running[j]
        assert run
        return run
