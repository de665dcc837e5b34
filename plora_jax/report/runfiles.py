"""Read a run directory from outside, again and again: whole lines only, what grew alone, and never an error."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

MAX_SAMPLES = 20_000  # resource samples kept of one read; of more, every k-th
MARKS = (
    "journal.jsonl",
    "events.jsonl",
    "leaderboard.json",
    "plan.json",
)  # one of them makes a run of a directory
STATE = (*MARKS, "base.json", "test.json", "sweep.yaml", ".lock")


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for all else (text, truth values, NaN, infinities)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if float(value) - float(value) == 0.0 else None
    except OverflowError:
        return None


def mapping(value: Any) -> dict[str, Any]:
    """Return an object as it is; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def entries(value: Any) -> list[Any]:
    """Return a list as it is; an empty one for anything else."""
    return value if isinstance(value, list) else []


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none where it is no list."""
    return [one for one in entries(value) if isinstance(one, dict)]


def kind(line: dict[str, Any]) -> str:
    """Return what a line of the journal or of the events tells."""
    return str(line.get("kind") or line.get("event") or "")


def job_of(line: dict[str, Any]) -> str:
    """Return the job that a line is about, empty if none."""
    name = line.get("job_id") or line.get("job")
    return name if isinstance(name, str) else ""


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of whole lines; lines that are none are passed over."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    samples = [at for at, line in enumerate(lines) if b'"sample"' in line]
    if len(samples) > MAX_SAMPLES:
        kept = set(samples[:: -(-len(samples) // MAX_SAMPLES)])
        dropped = set(samples) - kept
        lines = [line for at, line in enumerate(lines) if at not in dropped]
    try:  # one call for all of them is several times faster
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        rows = [_parsed(line) for line in lines]
    return [row for row in rows if isinstance(row, dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Columns:
    """Hold named columns of a growing .jsonl file as arrays of doubles; NaN where a line has no number."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.of = {name: np.zeros(0) for name in names}

    def extend(self, rows: list[dict[str, Any]]) -> None:
        """Add lines."""
        for name, column in self.of.items():
            self.of[name] = np.concatenate([column, _column(rows, name)])


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    values = [row.get(name) for row in rows]
    if all(type(value) in (float, int) for value in values):
        try:
            return np.array(values, float)
        except OverflowError:
            pass
    return np.array([np.nan if (found := number(value)) is None else found for value in values], float)


class RunFiles:
    """Read the files of one run; a `.jsonl` file that grew is read from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, int], Any]] = {}
        self._values: dict[str, tuple[tuple[int, ...], Any]] = {}

    def _place(self, name: str) -> Path:
        """Return where a file of the run is; a name made of another's text cannot lead out of the directory."""
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise FileNotFoundError(name)
        return self.path / name

    def value(self, name: str) -> Any:
        """Return the value of a JSON file; None where there is none that can be read."""
        try:
            with open(self._place(name), "rb") as file:
                stat = os.fstat(file.fileno())
                key = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if self._values.get(name, ((), None))[0] != key:
                    self._values[name] = key, json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return None
        return self._values[name][1]

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the value of a JSON file that holds an object; an empty one where it does not."""
        value = self.value(name)
        return value if isinstance(value, dict) else {}

    def text(self, name: str) -> str:
        """Return a text file, empty where there is none."""
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a `.jsonl` file, its torn last line left out."""
        found: list[dict[str, Any]] = self._grown(name, (), list)
        return found

    def columns(self, name: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Return columns of a `.jsonl` file."""
        found: Columns = self._grown(name, names, lambda: Columns(names))
        return found.of

    def _grown(self, name: str, names: tuple[str, ...], make: Any) -> Any:
        key = (name, names)
        (inode, end), held = self._read.get(key, ((0, 0), None))
        try:
            with open(self._place(name), "rb") as file:
                stat = os.fstat(file.fileno())
                if held is None or stat.st_ino != inode or stat.st_size < end:
                    held, end = make(), 0
                if stat.st_size > end:
                    file.seek(end)
                    data = file.read(stat.st_size - end)
                    whole = data.rfind(b"\n") + 1
                    held.extend(parse_lines(data[:whole]))
                    end += whole
                self._read[key] = (stat.st_ino, end), held
        except (OSError, ValueError):  # there is none, or no file can have such a name
            return make()
        return held

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """List what a folder of the run holds, sorted; names alone, so that nothing outside it can be meant."""
        try:
            return sorted(name for name in os.listdir(self.path / folder) if name.endswith(suffix))
        except OSError:
            return []

    def written(self) -> float:
        """Return when a file of the run's state was last written (seconds since the epoch), 0 if never."""
        names = [*STATE, *(f"workers/{name}" for name in self.names("workers"))]
        return max((stat.st_mtime for stat in map(self._stat, names) if stat), default=0.0)

    def version(self) -> str:
        """Return a text that changes whenever a file that the report shows does."""
        names = [*STATE, *(f"workers/{name}" for name in self.names("workers", ".json"))]
        for job in self.names("jobs"):
            names += [f"jobs/{job}/{name}" for name in ("job.json", "metrics.jsonl", "evals.jsonl")]
        seen = [(name, s.st_ino, s.st_size, s.st_mtime_ns) for name in names if (s := self._stat(name))]
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(self.path / name)
        except OSError:
            return None

    def locked(self) -> bool:
        """Say whether a process of this machine holds the run's lock, without touching it."""
        stat = self._stat(".lock")
        try:
            table = Path("/proc/locks").read_text() if stat else ""
        except OSError:
            return False
        # the device number is left out: layered file systems show another one here than stat does
        return any(f":{stat.st_ino} " in line and " FLOCK " in line for line in table.splitlines() if stat)
