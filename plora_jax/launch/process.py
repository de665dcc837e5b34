"""One worker as an operating system's process: its devices and cores are its own, and it dies with whoever started it.

A worker is started as `python -m plora_jax.launch.process SETTINGS MODULE RUN --worker ID`. Before MODULE runs, this
file has locked the worker's GPUs, set its cores, and seen to it that the process ends when its parent does: its
standard input is a pipe whose other end only the parent holds, and the kernel kills it when the parent dies (Linux).
Either alone would leave a gap: the pipe is read by a thread, which code that never lets go of the interpreter would
starve; and a parent that died before the kernel was asked is told by the pipe.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

WORKER = "plora_jax.engine.worker"
TAIL_LINES, TAIL_BYTES = 20, 16_384
LOCK_WAIT_S = 30.0  # for the last worker of a GPU to be gone
PR_SET_PDEATHSIG = 1  # prctl(2)
ERROR = re.compile(
    r"^([\w.]*(Error|Exception|Interrupt|Exit)\b|.*\b(CUDA_ERROR|RESOURCE_EXHAUSTED|error:)).*"
)


class Group(NamedTuple):
    """Say what one worker computes on.

    `worker` names it and its files. `gpus` counts its GPUs, 0 for a CPU worker; `devices` names them by UUID, or is
    empty where a scheduler chooses them. `cores` are its CPU cores by number, empty where a scheduler chooses them;
    `threads` is how many it computes with, 0 for what the scheduler leaves it. `memory_fraction` is the share of each
    GPU's memory that JAX takes at start. `kind` is a GPU type as Ray names it, empty for any.
    """

    worker: str
    gpus: int = 0
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    threads: int = 0
    memory_fraction: float = 0.95
    kind: str = ""


class Exit(NamedTuple):
    """Say how a process ended: `cause` is empty when it ended as it should; `started` tells whether it ever worked."""

    cause: str
    tail: str
    started: bool


def worker_env(group: Group, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment, in which JAX sees the group's devices alone and none in place of them.

    XLA's pool of CPU threads is as large as NPROC, else as the cores that the process may use.
    """
    env = {**environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env["PYTHONPATH"] = python_path()
    if group.threads:
        env["NPROC"] = str(group.threads)
    if not group.gpus:
        return env | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env["JAX_PLATFORMS"] = "cuda,cpu"  # a CUDA that does not start is an error, not a run on the CPU
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{group.memory_fraction:.3f}")
    if group.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(group.devices)
    return env


def python_path() -> str:
    """Return PYTHONPATH for another Python to find what this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


class WorkerProcess:
    """Run one worker on this machine; what it prints goes to RUN/workers/ID.log.

    It is the leader of a session of its own, so that Ctrl-C in a terminal reaches its parent alone.
    """

    def __init__(self, run: Path, group: Group, module: str = WORKER) -> None:
        self.group = group
        self.log, self.status = (run / "workers" / f"{group.worker}.{kind}" for kind in ("log", "json"))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        settings = json.dumps({"cores": group.cores, "gpus": group.devices})
        command = [sys.executable, "-P", "-m", "plora_jax.launch.process", settings, module, str(run)]
        with open(self.log, "ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(
                [*command, "--worker", group.worker],
                env=worker_env(group, os.environ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """Return how the process ended, None while it runs."""
        if self._exit is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.kill()  # what it started and left behind; not reaped yet, it still holds the group's number
            code = self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
            text = last_text(self.log, self._from)
            self._exit = Exit(cause_of(code, text), tail_of(text), has_worked(self.status, self.pid))
        return self._exit

    def terminate(self) -> None:
        """Ask the process to save what it does and to end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process, and all it has started, at once."""
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # PermissionError: macOS, of a dead group
            os.killpg(self.pid, signal.SIGKILL)


def has_worked(status: Path, pid: int) -> bool:
    """Tell whether a worker's status file was written by the process `pid`."""
    try:
        return bool(json.loads(status.read_text(encoding="utf-8"))["pid"] == pid)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def last_text(log: Path, start: int = 0) -> str:
    """Return the end of a log, of what was written after byte `start`; empty where there is no log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def tail_of(text: str) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def cause_of(code: int, text: str) -> str:
    """Say why a process ended: its signal or its exit code, and the last line that tells an error; empty for code 0.

    `code` is below 0 for a signal, as in `subprocess`; `text` is the end of what the process printed.
    """
    if code == 0:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1] if lines else "")
    if code > 0:
        return f"exit code {code}{f': {told}' if told else ''}"
    try:
        number = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"
    if number == signal.SIGKILL:
        return "killed by SIGKILL (by hand, or by the system for want of memory)"
    crashed = number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    return f"killed by {number.name}{f': {told}' if crashed and told else ''}"


def _die_with_parent() -> None:
    """End this process, and all it starts, when the process that started it is gone."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the pipe alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    line, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(line, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def lock_gpu(uuid: str, wait_s: float = LOCK_WAIT_S) -> int:
    """Lock a GPU against every other worker on this machine for as long as the process lives.

    JAX takes nearly all of a GPU's memory at start, and two processes on one GPU would both fail, late and obscurely.

    Raises:
      SystemExit: another worker still holds it after `wait_s` seconds.
    """
    path = f"/tmp/plora-{uuid}.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # another user's file
            os.fchmod(file, 0o666)
    except PermissionError:
        file = os.open(path, os.O_RDONLY)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                sys.exit(f"error: {uuid} is in use by another plora worker on this machine")
        time.sleep(0.1)


def main(argv: Sequence[str]) -> None:
    """Run a worker's module within its settings."""
    settings, module = json.loads(argv[0]), argv[1]
    _die_with_parent()
    if settings["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings["cores"])
    for uuid in settings["gpus"]:
        lock_gpu(uuid)
    sys.argv = list(argv[1:])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
