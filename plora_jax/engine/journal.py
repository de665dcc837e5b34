"""The journal of a run: every decision as one line of journal.jsonl, and the state of the run as a fold over them.

Driver, workers and the commands `plora add` and `plora stop` meet here alone. Whoever decides something holds the
journal's lock, reads what others wrote, appends its line, flushed to disk, and only then acts. A pack that starts
again from a checkpoint finds the decisions it made before and makes them again, whatever has happened meanwhile.
"""

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import planner
from plora_jax.engine.faults import fault
from plora_jax.engine.rundir import naming
from plora_jax.search.early_stop import Point

MAX_ATTEMPTS = 3  # times a pack is begun and lost before its jobs are given up
BASE, TEST = (
    "base",
    "test",
)  # claimed as packs are: score the base model; score it and the winner on the test rows
RUNG = "rung-"  # with a number, claimed so too: plan the jobs that wait at a rung, when no pack is open


@dataclass
class RunState:
    """Hold what the lines say, in their order."""

    settings: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by job_id: the fields of the job
    packs: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by pack id: a pack of a plan, as plan.json has it
    scale: dict[str, float] = field(
        default_factory=dict
    )  # by pack id: how many times slower than by the cost model its steps are planned
    claims: dict[str, int] = field(default_factory=dict)  # by pack id: how often a worker began it
    causes: dict[str, list[str]] = field(default_factory=dict)  # by pack id: why a worker lost it
    limits: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by pack id: slots, m, policy after out of memory
    done: set[str] = field(default_factory=set)
    orphaned: set[str] = field(default_factory=set)  # device types without any worker
    places: dict[tuple[str, int, int], str] = field(default_factory=dict)  # (pack, micro-step, slot): job_id
    owner: dict[str, str] = field(default_factory=dict)  # by job_id: the pack that placed it last
    points: dict[str, list[Point]] = field(default_factory=dict)  # by job_id: its evaluations
    scores: dict[tuple[str, int], dict[str, Any]] = field(
        default_factory=dict
    )  # (job_id, step): the whole score
    verdicts: dict[tuple[str, int], dict[str, Any]] = field(
        default_factory=dict
    )  # (job_id, step): stop or go on
    stops: dict[tuple[str, int, int], str] = field(
        default_factory=dict
    )  # (pack, micro-step, slot): withdrawn there
    stopping: set[tuple[str, str]] = field(default_factory=set)  # (pack, job_id) of these
    shrinks: dict[tuple[str, int], dict[str, Any]] = field(
        default_factory=dict
    )  # (pack, micro-step): fewer slots
    paused: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by job_id: the pack that it left at a rung last, and at which step
    from_step: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # (pack, job_id): the step it had come to when the pack took it
    withdrawn: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)  # by job_id: status
    # where jobs are drawn as slots fall free: what the search was asked and told, which job stands for which place of
    # the plan, and what has been used
    search: list[tuple[str, Any]] = field(default_factory=list)
    stands: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # by job_id
    device_s: float = 0.0
    begun: dict[str, float] = field(default_factory=dict)  # by pack id: since when a worker has it

    def apply(self, line: dict[str, Any]) -> None:
        """Take in one line; of an unknown kind, from a later version, nothing is taken."""
        handler = getattr(self, f"_{line['kind']}", None)
        if handler:
            handler(line)

    def waiting(self, pack: str) -> list[str]:
        """List the jobs planned into a pack that no pack has placed yet, in the order of their planned starts."""
        places = sorted(self.packs[pack]["assign"], key=lambda a: (a["start_s"], a["slot"]))
        gone = self.owner.keys() | self.withdrawn | self.ended.keys()
        planned = [a["job_id"] for a in places]
        drawn = [
            job_id for job_id, place in self.stands.items() if place in planned
        ]  # and lost their slot again
        return [job_id for job_id in (*drawn, *planned) if job_id not in gone]

    @property
    def at_rung(self) -> list[str]:
        """List the jobs that wait at a rung and are in no pack that is open."""
        held = {
            place["job_id"]
            for name, pack in self.packs.items()
            if name not in self.done
            for place in pack["assign"]
        }
        return [job_id for job_id in self.paused if job_id not in held and job_id not in self.ended]

    @property
    def finished(self) -> bool:
        """Tell whether nothing is left to do."""
        return all(name in self.done for name in (*self.packs, BASE, TEST)) and not self.at_rung

    def is_for(self, pack: str, worker: str) -> bool:
        """Tell whether a worker may take a pack: one planned for its own device type, or for one without any worker.

        Workers are named by the numbers of their devices; one of another name may take any.
        """
        if "devices" not in self.settings or not worker.isdecimal():
            return True
        devices = planner.devices_from(self.settings["devices"])
        kind = self.packs[pack].get("device")
        served = {part.spec.name for part in devices.parts} - self.orphaned
        return kind not in served or int(worker) >= devices.count or devices.type_of(int(worker)).name == kind

    def left_paused(self, pack: str, job_id: str) -> bool:
        """Tell whether a job has left this pack at a rung: what it came to there is on the disk."""
        return self.paused.get(job_id, {}).get("pack") == pack

    def _settings(self, line: dict[str, Any]) -> None:
        self.settings |= line["settings"]
        self.orphaned.clear()
        self.claims.clear()  # whoever starts the run again gives every pack new attempts
        self.causes.clear()

    def _jobs(self, line: dict[str, Any]) -> None:
        for job_id, values in line["jobs"].items():  # a job that is given again runs again
            self.jobs[job_id] = values
            self._forget(job_id)
            self.paused.pop(job_id, None)
        if "asked" in line:
            self.search.append(("ask", line["asked"]))

    def _forget(self, job_id: str, since: int = 0) -> None:
        """Forget what a job has come to after a step."""
        for seen in (self.ended, self.owner):
            seen.pop(job_id, None)  # type: ignore[attr-defined]
        points = [point for point in self.points.pop(job_id, []) if 0 < point.step <= since]
        if points:
            self.points[job_id] = points
        for judged in (self.scores, self.verdicts):
            for key in [key for key in judged if key[0] == job_id and key[1] > since]:
                del judged[key]
        self.withdrawn.discard(job_id)

    def _packs(self, line: dict[str, Any]) -> None:
        for name in line.get("replaces", ()):
            self.packs.pop(name, None)
        self.packs |= line["packs"]
        for pack in line["packs"].values():
            for place in pack["assign"]:
                if place["job_id"] in self.paused:  # it waits for this pack now
                    self.owner.pop(place["job_id"], None)
        self.scale |= dict.fromkeys(line["packs"], line.get("scale", 1.0))
        self.done -= {TEST, *line["packs"]}

    def _claim(self, line: dict[str, Any]) -> None:
        self.claims[line["pack"]] = self.claims.get(line["pack"], 0) + 1
        self.begun[line["pack"]] = line["time"]

    def _lost(self, line: dict[str, Any]) -> None:
        self._count(line)
        self.causes.setdefault(line["pack"], []).append(line["cause"])

    def _yielded(self, line: dict[str, Any]) -> None:
        self._count(line)
        self.claims[line["pack"]] -= 1  # given back on purpose, at a checkpoint: no attempt was lost

    def _saved(self, line: dict[str, Any]) -> None:
        self.claims[line["pack"]] = 1  # it gets on: earlier losses no longer count
        self.causes.pop(line["pack"], None)

    def _limit(self, line: dict[str, Any]) -> None:
        pack = line["pack"]
        self.limits[pack] = {name: line[name] for name in ("slots", "m", "policy")}  # as in the pack itself
        self.claims.pop(pack, None)
        self.causes.pop(pack, None)
        for key in [
            key for key in self.places if key[0] == pack
        ]:  # another program: its decisions are made anew
            job_id = self.places.pop(key)
            if job_id not in self.ended and not self.left_paused(pack, job_id):
                self._forget(job_id, self.from_step.get((pack, job_id), 0))
        self.shrinks = {key: line for key, line in self.shrinks.items() if key[0] != pack}

    def _count(self, line: dict[str, Any]) -> None:
        self.device_s += line["time"] - self.begun.pop(line["pack"], line["time"])

    def _orphaned(self, line: dict[str, Any]) -> None:
        self.orphaned.add(line["device"])

    def _done(self, line: dict[str, Any]) -> None:
        self._count(line)
        self.done.add(line["pack"])

    def _place(self, line: dict[str, Any]) -> None:
        self.places[line["pack"], line["at"], line["slot"]] = line["job_id"]
        self.owner[line["job_id"]] = line["pack"]
        if line["job_id"] in self.paused:
            self.from_step[line["pack"], line["job_id"]] = self.paused[line["job_id"]]["step"]
        if "for" in line:
            self.owner[line["for"]] = line["pack"]
            self.stands[line["job_id"]] = line["for"]
        else:
            self._adopt(line["job_id"], line["pack"], line["slot"])

    def _adopt(self, job_id: str, pack: str, slot: int) -> None:
        """Plan a job into the pack that took it from another one: if it is lost there, it waits there."""
        planned = self.packs[pack]["assign"]
        if job_id not in self.stands and all(place["job_id"] != job_id for place in planned):
            planned.append({"job_id": job_id, "slot": slot, "start_s": math.inf})

    def _score(self, line: dict[str, Any]) -> None:
        self.scores[line["job_id"], line["step"]] = line
        point = Point(*(line[name] for name in ("step", "fraction", "value", "loss", "train_loss")))
        self.points.setdefault(line["job_id"], []).append(point)

    def _verdict(self, line: dict[str, Any]) -> None:
        self.verdicts[line["job_id"], line["step"]] = line

    def _stop(self, line: dict[str, Any]) -> None:
        self.stops[line["pack"], line["at"], line["slot"]] = line["reason"]
        self.stopping.add((line["pack"], line["job_id"]))

    def _shrink(self, line: dict[str, Any]) -> None:
        self.shrinks[line["pack"], line["at"]] = line

    def _pause(self, line: dict[str, Any]) -> None:
        self.paused[line["job_id"]] = {"pack": line["pack"], "step": line["step"]}

    def _withdraw(self, line: dict[str, Any]) -> None:
        self.withdrawn.add(line["job_id"])

    def _ended(self, line: dict[str, Any]) -> None:
        self.ended[line["job_id"]] = line["status"]
        self.tokens[line["job_id"]] = line["tokens"]
        if line["job_id"] in self.stands:
            self.search.append(("tell", [line["job_id"], line["value"], line["fraction"]]))
        if line["status"] == "failed":  # which rules that compare jobs count as the worst there is
            self.points.setdefault(line["job_id"], []).append(Point(0, 1.0, *[float("nan")] * 3))


class Journal:
    """Append to a journal and keep its state up to date; any number of processes may hold one on the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = RunState()
        self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115  closed by close()
        self._read_to = 0
        self._depth = 0

    @contextmanager
    def locked(self) -> Iterator[RunState]:
        """Hold the lock for a block that decides; the state is up to date in it."""
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._cut_torn_line()
            self.refresh()
        self._depth += 1
        try:
            yield self.state
        finally:
            self._depth -= 1
            if self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def append(self, kind: str, **fields: Any) -> None:
        """Append one decision, flushed to disk, and take it into the state."""
        self.extend([(kind, fields)])

    def extend(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        """Append decisions that belong together, flushed to disk once."""
        with self.locked():
            now = round(time.time(), 3)  # for the reader of a report: nothing is decided by it
            made = [
                json.dumps({"kind": kind, "time": now, **fields}, ensure_ascii=False)
                for kind, fields in lines
            ]
            fault("journal")
            data = "".join(line + "\n" for line in made).encode()
            with naming(self.path):
                if self._file.write(data) < len(data):  # the half line is cut by whoever appends next
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            self._read_to += len(data)
            for line in made:
                self.state.apply(json.loads(line))  # as everyone else reads it
        fault("journal-act")

    def add_plan(
        self,
        jobs: dict[str, dict[str, Any]],
        packs: list[dict[str, Any]],
        *,
        replaces: Sequence[str] = (),
        scale: float = 1.0,
    ) -> None:
        """Add jobs (their fields, by job_id) and the packs they are planned into, as plan.json has them.

        Packs that nobody has begun can be replaced; `scale` is how much slower than the cost model they are planned.
        """
        with self.locked() as state:
            first = 1 + max((int(name.split("-")[1]) for name in state.packs), default=0)
            named = {f"pack-{number:03d}": pack for number, pack in enumerate(packs, first)}
            added = ("packs", {"packs": named, "replaces": list(replaces), "scale": scale})
            self.extend([("jobs", {"jobs": jobs}), added] if jobs else [added])

    @property
    def devices(self) -> planner.Devices | planner.Mixture:
        """Return the devices that the run was planned for."""
        return planner.devices_from(self.refresh().settings["devices"])

    def refresh(self) -> RunState:
        """Read what others appended and return the state; a line that is still being written waits."""
        size = os.fstat(self._file.fileno()).st_size
        if size > self._read_to:
            self._file.seek(self._read_to)
            data = self._file.read(size - self._read_to)
            whole = data[: data.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for line in whole.splitlines():
                self.state.apply(json.loads(line))
        return self.state

    def close(self) -> None:
        """Close the file, and with it let go of the lock."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        """Cut what a writer that was killed left without its end; under the lock nobody else is writing."""
        size = os.fstat(self._file.fileno()).st_size
        if size > self._read_to:
            self._file.seek(self._read_to)
            data = self._file.read(size - self._read_to)
            whole = self._read_to + data.rfind(b"\n") + 1
            if whole < size:
                os.ftruncate(self._file.fileno(), whole)


def try_lock(path: Path) -> IO[bytes] | None:
    """Lock a file for as long as the returned object is open, None if another process holds it.

    The kernel lets go of the lock when its holder dies, however it dies.
    """
    file = open(path, "ab")  # noqa: SIM115  held by the caller
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
