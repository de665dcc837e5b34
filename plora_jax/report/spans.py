"""Who held which pack when, and which job was in which slot: a fold of a run's journal and events, for the eye."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from plora_jax.report.runfiles import entries, job_of, kind, number

ENDS = ("completed", "stopped", "failed", "withdrawn")


class Span(NamedTuple):
    """Say that a worker held a pack from start to end (run clock, seconds), and how that ended."""

    worker: str
    pack: str
    attempt: int
    start: float
    end: float
    how: str  # done | lost | open
    cause: str


class Bar(NamedTuple):
    """Say that a job was in a slot of a pack, on a worker, from start to end (run clock, seconds)."""

    job_id: str
    worker: str
    pack: str
    slot: int
    start: float
    end: float


class Fold:
    """Take in lines in order of time; `end` closes what is still open."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._held: dict[str, tuple[str, float]] = {}  # pack → worker, since
        self._lost: dict[str, int] = {}  # pack → how often
        self._placed: dict[str, tuple[str, int, float]] = {}  # job → pack, slot, since
        self._left: list[tuple[str, str, int, float, float]] = []  # job, pack, slot, from, to

    def apply(self, line: dict[str, Any], at: float) -> None:
        """Take in one line, written at `at` seconds of the run's clock; other kinds than these tell nothing here."""
        what, pack, job = kind(line), str(line.get("pack", "")), job_of(line)
        if what == "claim":
            self._close(pack, at, "lost", "taken over")
            self._held[pack] = (str(line.get("worker", "0")), at)
        elif what == "place" and job:
            self._leave([job], at)
            self._placed[job] = (pack, int(number(line.get("slot")) or 0), at)
        elif what == "shrink":
            keep = [int(number(slot) or 0) for slot in entries(line.get("keep"))]
            for name, (mine, slot, _) in list(self._placed.items()):
                if mine == pack and slot in keep and keep.index(slot) != slot:
                    self._leave([name], at)
                    self._placed[name] = (pack, keep.index(slot), at)
        elif what in ("ended", "pause", *ENDS) and job:
            self._leave([job], at)
        elif what == "worker_lost":
            for name in [
                name for name, (worker, _) in self._held.items() if worker == str(line.get("worker"))
            ]:
                self._close(name, at, "lost", str(line.get("cause", "")))
        elif what in ("lost", "limit"):
            cause = str(line.get("cause", "")) if what == "lost" else "out of device memory"
            self._close(pack, at, "lost", cause)
            if what == "limit":  # its program is another one now, and its jobs begin again
                self._leave(self._in(pack), at)
        elif what in ("done", "yielded"):
            self._close(pack, at, "done")
            if what == "done":
                self._leave(self._in(pack), at)
        elif what == "settings":  # the run was started again: whoever held a pack is gone
            for name in list(self._held):
                self._close(name, at, "lost", "the run was cut off")

    def end(self, at: float) -> list[Bar]:
        """Close what is open and return the bars, cut to the times when somebody held their pack."""
        self._leave(list(self._placed), at)
        for pack in list(self._held):
            self._close(pack, at, "open")
        held: dict[str, list[Span]] = {}
        for span in self.spans:
            held.setdefault(span.pack, []).append(span)
        bars = []
        for job, pack, slot, start, end in self._left:
            for span in held.get(pack, ()):
                a, b = max(start, span.start), min(end, span.end)
                if b > a or start == end == a:
                    bars.append(Bar(job, span.worker, pack, slot, a, b))
        return bars

    def _close(self, pack: str, at: float, how: str, cause: str = "") -> None:
        if pack in self._held:
            worker, start = self._held.pop(pack)
            attempt = 1 + self._lost.get(pack, 0)
            self._lost[pack] = attempt - 1 + (how == "lost")
            self.spans.append(Span(worker, pack, attempt, start, max(start, at), how, cause))

    def _in(self, pack: str) -> list[str]:
        return [job for job, place in self._placed.items() if place[0] == pack]

    def _leave(self, jobs: Iterable[str], at: float) -> None:
        for job in jobs:
            if job in self._placed:
                pack, slot, start = self._placed.pop(job)
                self._left.append((job, pack, slot, start, max(start, at)))


def fold(
    log: Iterable[dict[str, Any]], clock: Callable[[float], float], end: float
) -> tuple[list[Span], list[Bar]]:
    """Return spans and bars of a log in order of time; `clock` turns its times into those of the run."""
    state = Fold()
    for line in log:
        if (when := number(line.get("time"))) is not None:
            state.apply(line, clock(when))
    bars = state.end(end)
    return state.spans, bars
