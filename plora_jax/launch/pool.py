"""Start the workers of a run, tell of those that die, start them again, and end them.

A worker is `python -m plora_jax.engine.worker RUN --worker ID`; it and the driver meet in the run directory alone.
`Pool` keeps workers running as processes of this machine, or on a Ray cluster by another way to start one (ray.py); in
a SLURM job array, SLURM does (slurm.py). What a worker computes on is found in site.py.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from plora_jax.launch.process import Exit, Group, WorkerProcess

GRACE_S = 60.0  # for a worker to write its checkpoint when it is asked to end
KILL_S = 10.0  # for the system to end a killed worker, which a driver call may hold up


class Ended(NamedTuple):
    """Tell that a worker ended: `cause` is empty when its work was done; `left` when it is not started again."""

    worker: str
    cause: str
    tail: str
    left: bool


class Launcher(Protocol):
    """Start workers, tell of those that ended, and end the others."""

    def start(self, run: Path, groups: Sequence[Group]) -> None:
        """Start one worker for each group."""

    def poll(self) -> list[Ended]:
        """Return what ended since the last call, and start again what should; to be called about once a second."""

    def alive(self) -> list[str]:
        """Name the workers that run or will be started again."""

    def stop(self) -> None:
        """Ask all workers to save and to end, wait, and end those that do not."""


class Handle(Protocol):
    """Hold one started worker."""

    def poll(self) -> Exit | None:
        """Return how it ended, None while it runs."""

    def terminate(self) -> None:
        """Ask it to save and to end."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class Restarts:
    """Bound how often one worker is started again: `next` waits longer each time, and a long life counts as a success.

    A worker that dies before it has worked is given fewer chances: its device or its driver is at fault.
    """

    limit: int = 5
    starts: int = 2
    first_s: float = 1.0
    most_s: float = 60.0
    steady_s: float = 600.0
    failed: int = 0
    stillborn: int = 0

    def next(self, started: bool, lived_s: float) -> float | None:
        """Return the seconds to wait after a failure, None when it was the last that is borne."""
        self.stillborn = 0 if started else self.stillborn + 1
        self.failed = 1 if started and lived_s >= self.steady_s else self.failed + 1
        if self.failed > self.limit or self.stillborn > self.starts:
            return None
        return min(self.first_s * 2 ** (self.failed - 1), self.most_s)


@dataclass
class _Member:
    group: Group
    restarts: Restarts
    handle: Handle | None = None
    since: float = 0.0
    due: float | None = None  # when it is started again


@dataclass
class Pool:
    """Launch workers through `spawn`, which starts one; by default as processes of this machine.

    A worker that fails is started again after a while, and leaves the pool after too many failures. One that dies
    before it has worked is told of once, when it leaves.
    """

    spawn: Callable[[Path, Group], Handle] = WorkerProcess
    grace_s: float = GRACE_S
    restarts: Callable[[], Restarts] = Restarts
    lost: Callable[[Group], str] = lambda group: ""  # why a group's devices cannot be used again
    _members: list[_Member] = field(default_factory=list)
    _run: Path = Path()

    def start(self, run: Path, groups: Sequence[Group]) -> None:
        """Start one worker for each group."""
        self._run = run
        for group in groups:
            self._members.append(_Member(group, self.restarts(), due=0.0))
        self._start_due()

    def poll(self) -> list[Ended]:
        """Return what ended since the last call, and start again what is due."""
        ended = []
        for member in list(self._members):
            found = member.handle.poll() if member.handle else None
            if found is None:
                continue
            member.handle = None
            worker = member.group.worker
            if not found.cause:
                self._members.remove(member)
                ended.append(Ended(worker, "", found.tail, left=True))
                continue
            gone = self.lost(member.group)
            wait = None if gone else member.restarts.next(found.started, time.monotonic() - member.since)
            if wait is None:
                self._members.remove(member)
            else:
                member.due = time.monotonic() + wait
            if found.started or wait is None:
                cause = "; ".join(text for text in (found.cause, gone) if text)
                ended.append(Ended(worker, cause, found.tail, left=wait is None))
        self._start_due()
        return ended

    def alive(self) -> list[str]:
        """Name the workers that run or will be started again."""
        return [member.group.worker for member in self._members]

    def stop(self) -> None:
        """Ask all workers to save and to end; end them at once after the grace, or on another Ctrl-C."""
        running = [member.handle for member in self._members if member.handle]
        self._members.clear()
        with deaf():
            try:
                for handle in running:
                    handle.terminate()
                _wait(running, self.grace_s)
            finally:
                for handle in running:
                    if handle.poll() is None:
                        handle.kill()
                _wait(running, KILL_S)

    def _start_due(self) -> None:
        for member in self._members:
            if member.due is not None and time.monotonic() >= member.due:
                member.due, member.since = None, time.monotonic()
                member.handle = self.spawn(self._run, member.group)


def _wait(handles: Sequence[Handle], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(handle.poll() is None for handle in handles) and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def deaf() -> Iterator[None]:
    """Hold back SIGTERM, and the alarm by which the command line repeats a signal, while workers are being ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
