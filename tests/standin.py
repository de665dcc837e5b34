"""A worker without a model: it behaves as RUN/mode says. It is run as a worker is: tests.standin RUN --worker ID."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Work until RUN/finish is there, or end as the mode says."""
    run, worker = Path(sys.argv[1]), sys.argv[3]
    mode = (run / "mode").read_text() if (run / "mode").exists() else "work"
    if mode == "stillborn":
        raise RuntimeError("Unable to initialize backend 'cuda': CUDA_ERROR_NO_DEVICE")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: saved(run, worker))
    signal.signal(signal.SIGINT, lambda number, frame: (run / f"interrupted-{worker}").touch())
    seen = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "session": os.getsid(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "env": {name: os.environ.get(name) for name in ENV},
    }
    print(f"worker {worker} is working", flush=True)
    with open(run / f"begun-{worker}", "a") as file:
        file.write(f"{os.getpid()}\n")
    path = run / "workers" / f"{worker}.json"
    path.with_suffix(".tmp").write_text(json.dumps(seen))
    path.with_suffix(".tmp").rename(path)
    if mode == "crash":
        print("the disk is full", file=sys.stderr)
        raise OSError(28, "No space left on device")
    if mode == "forks" and os.fork() == 0:
        (run / "grandchild").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    while not (run / "finish").exists():
        time.sleep(0.02)


ENV = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "NPROC",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def saved(run: Path, worker: str) -> None:
    """Take half a second to write a checkpoint, then end as a worker that was asked to."""
    time.sleep(0.5)
    (run / f"saved-{worker}").touch()
    sys.exit(143)


main()
