"""The run directory: who may write it, and how its files appear whole or not at all."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from plora_jax.engine.faults import fault
from plora_jax.errors import UserError


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file by atomic rename, so that a reader never sees half of it; flushed to disk unless `sync` is off.

    What is no file of its own (a link, a pipe, /dev/stdout) is written through instead of replaced.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            if sync:
                flush(temporary)
            fault(path.name)
            temporary.replace(path)
            if sync:
                flush(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def flush(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk and outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give the errors of the operating system in a block the name of the file that a person knows."""
    try:
        yield
    except OSError as err:
        err.filename, err.filename2 = str(path), None
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write `value` as indented JSON as `write_atomic` does; NaN and infinities become null."""
    write_atomic(path, json.dumps(_finite(value), indent=1, ensure_ascii=False) + "\n", sync=sync)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def keep_lines(path: Path, count: int) -> None:
    """Cut a file after its first `count` lines; one that has fewer, or is not there, is left as it is."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        for _ in range(count):
            if not file.readline().endswith(b"\n"):
                return
        file.truncate()


class JsonLines:
    """Append JSON objects to a file, one whole line a write.

    A torn last line of an earlier run is cut off first, unless others may be writing now (`shared`).
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not shared:
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(path, whole)
        self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()

    def append(self, value: dict[str, Any]) -> None:
        """Append one object as one line, in a single write."""
        line = json.dumps(_finite(value), ensure_ascii=False).encode() + b"\n"
        with naming(Path(self._file.name)):
            if self._file.write(line) < len(line):  # the half line is cut by whoever opens the file next
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, with all lines on the disk."""
        self.flush()
        self._file.close()


class RunDirectory:
    """Name the files of a run, and write its events; any number of processes may hold one on the same run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs = path / "jobs"
        self._events = JsonLines(path / "events.jsonl", shared=True)

    def job(self, job_id: str) -> Path:
        """Return the directory of a job, made if absent."""
        directory = self.jobs / job_id
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def event(self, kind: str, **fields: Any) -> None:
        """Append a machine-readable line to events.jsonl: when (seconds since the epoch), what, and its fields."""
        self._events.append({"time": round(time.time(), 3), "event": kind, **fields})

    def read_json(self, name: str) -> Any:
        """Return the value of a JSON file of the run, None where there is none that can be read."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError:  # damaged, as no write here leaves it
            return None


def is_run(path: Path) -> bool:
    """Tell whether a directory is that of a sweep, however far it came."""
    return any((path / name).exists() for name in ("journal.jsonl", "events.jsonl", ".lock"))


def check_unused(out: Path, resume: bool) -> None:
    """Raise `UserError` if `out` cannot become a run directory: it holds files, or is one, or cannot be made."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: this is a file; name a directory that does not exist yet")
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise UserError(
            f"--out {out}: the directory is already used; name another one, or continue its run with --resume"
        )
    if resume and out.is_dir() and not is_run(out) and any(out.iterdir()):
        raise UserError(f"--out {out}: the directory is used, but not by a sweep; there is nothing to resume")


def is_running(out: Path) -> bool:
    """Tell whether a process holds the run directory's lock."""
    with open(out / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextmanager
def open_run(out: Path, resume: bool) -> Iterator[RunDirectory]:
    """Make or reopen a run directory and hold its lock until the block ends.

    Raises `UserError` when it is used and `resume` is not asked for, when another process holds it, or when it
    cannot be written.
    """
    check_unused(out, resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "w")  # noqa: SIM115  held for the block
    except OSError as err:
        raise UserError(f"--out {out}: cannot write here: {err.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--out {out}: another process is running this sweep") from None
        JsonLines(out / "events.jsonl").close()
        yield RunDirectory(out)
