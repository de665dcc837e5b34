"""A worker's process has its own devices and cores, dies with its parent, and tells why it died."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plora_jax.launch.process import Group, WorkerProcess, cause_of, last_text, lock_gpu, tail_of, worker_env

STANDIN = "tests.standin"


def wait_for(true: Callable[[], Any], seconds: float = 20) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return value


def status(run: Path, worker: str = "0") -> Any:
    path = run / "workers" / f"{worker}.json"
    return wait_for(lambda: path.exists() and json.loads(path.read_text()))


def gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_worker_has_its_cores_and_a_session_of_its_own(tmp_path):
    core = min(os.sched_getaffinity(0))
    worker = WorkerProcess(tmp_path, Group("0", cores=(core,), threads=1), STANDIN)
    seen = status(tmp_path)
    assert (seen["pid"], seen["session"], seen["cores"]) == (worker.pid, worker.pid, [core])
    assert worker.poll() is None
    (tmp_path / "finish").touch()
    ended = wait_for(worker.poll)
    assert ended == ("", "worker 0 is working", True)


def test_xla_computes_with_the_threads_it_is_given():
    program = (
        "import os, jax; jax.numpy.ones(8).block_until_ready();"
        "names = [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')];"
        "print(names.count('tf_XLAEigen'))"
    )
    env = worker_env(Group("0", threads=3), os.environ)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["3"], done.stderr


def test_the_environment_shows_the_groups_devices_alone():
    cpu = worker_env(Group("0", threads=2), {"CUDA_VISIBLE_DEVICES": "0", "A": "b"})
    wanted = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "NPROC": "2", "A": "b"}
    assert wanted.items() <= cpu.items()
    gpu = worker_env(Group("0", 2, ("GPU-a", "GPU-b"), memory_fraction=0.9), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert gpu["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b" and gpu["JAX_PLATFORMS"] == "cuda,cpu"
    assert gpu["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.900"
    scheduled = worker_env(Group("0", 1), {"CUDA_VISIBLE_DEVICES": "3"})  # what a scheduler has set stays
    assert scheduled["CUDA_VISIBLE_DEVICES"] == "3"
    asked = worker_env(Group("0", 1), {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})
    assert asked["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


DRIVER = """
import sys, time
from pathlib import Path
from plora_jax.launch.process import Group, WorkerProcess
worker = WorkerProcess(Path(sys.argv[1]), Group("0"), "tests.standin")
print(worker.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "import os; os._exit(0)"])
def test_a_worker_dies_with_its_driver(tmp_path, then):
    """Killed while the worker works; and gone before the worker's first line has run."""
    (tmp_path / "mode").write_text("deaf")  # so that SIGTERM would not do
    command = [sys.executable, "-c", DRIVER.format(then=then), str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    pid = int(driver.stdout.readline())
    if "sleep" in then:
        status(tmp_path)
        driver.kill()
    driver.wait()
    wait_for(lambda: gone(pid), 5)


@pytest.mark.parametrize("way", ["pipe", "kernel"])
def test_either_way_of_dying_does_alone(tmp_path, way):
    take_away = {"pipe": "os.close(worker._process.stdin.fileno())", "kernel": "os.kill(os.getpid(), 9)"}
    keep = {
        "pipe": "",
        # a child that holds the pipe's other end, as a process forked by a library would
        "kernel": "end = os.dup(worker._process.stdin.fileno()); os.set_inheritable(end, True);"
        "subprocess.Popen(['sleep', '8'], close_fds=False)",
    }
    then = f"import os, subprocess; {keep[way]}\ninput(); {take_away[way]}\ntime.sleep(8)"
    command = [sys.executable, "-c", DRIVER.format(then=then), str(tmp_path)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout and driver.stdin
    pid = int(driver.stdout.readline())
    status(tmp_path)
    driver.stdin.write("go on\n")
    driver.stdin.flush()
    wait_for(lambda: gone(pid), 5)
    driver.kill()
    driver.wait()


def test_the_end_of_a_worker_is_the_end_of_all_it_started(tmp_path):
    (tmp_path / "mode").write_text("forks")
    worker = WorkerProcess(tmp_path, Group("0"), STANDIN)
    child = int(
        wait_for(lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text())
    )
    os.kill(worker.pid, signal.SIGSEGV)
    assert wait_for(worker.poll).cause == "killed by SIGSEGV: Fatal Python error: Segmentation fault"
    wait_for(lambda: gone(child), 5)


@pytest.mark.parametrize(
    ("mode", "cause", "started"),
    [
        (
            "stillborn",
            "exit code 1: RuntimeError: Unable to initialize backend 'cuda': CUDA_ERROR_NO_DEVICE",
            False,
        ),
        ("crash", "exit code 1: OSError: [Errno 28] No space left on device", True),
    ],
)
def test_why_a_worker_ended(tmp_path, mode, cause, started):
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "0.log").write_text("ValueError: of an earlier life\n")
    (tmp_path / "mode").write_text(mode)
    ended = wait_for(WorkerProcess(tmp_path, Group("0"), STANDIN).poll)
    assert (ended.cause, ended.started) == (cause, started)
    assert "Traceback" in ended.tail and "earlier life" not in ended.tail


def test_causes():
    assert cause_of(0, "anything") == ""
    assert cause_of(-9, "x").startswith("killed by SIGKILL (")
    assert cause_of(-15, "x") == "killed by SIGTERM"
    assert cause_of(-6, "terminate called\n") == "killed by SIGABRT: terminate called"
    assert cause_of(-35, "") == "killed by signal 35"
    jax = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\n---\nFor simplicity, JAX has removed …"
    assert cause_of(1, jax) == "exit code 1: jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert cause_of(3, "") == "exit code 3"


def test_the_tail_of_a_long_log(tmp_path):
    log = tmp_path / "0.log"
    log.write_bytes(b"".join(b"line %d\xff\n" % i for i in range(5000)))
    assert tail_of(last_text(log)).split("\n")[0] == "line 4980\ufffd"
    assert last_text(log, log.stat().st_size - 5) == "999\ufffd\n"
    assert last_text(tmp_path / "absent") == ""
    # a traceback longer than the tail
    assert cause_of(-11, "Fatal Python error: Bus error\n" + 30 * "  File …\n").endswith("Bus error")


def test_one_gpu_is_one_workers(tmp_path):
    uuid = f"test-{os.getpid()}"
    try:
        code = f"import time; from plora_jax.launch import process; process.lock_gpu('{uuid}'); print(1, flush=True)"
        code += "; time.sleep(60)"
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert other.stdout and other.stdout.readline() == b"1\n"
        with pytest.raises(SystemExit, match=f"{uuid} is in use by another plora worker"):
            lock_gpu(uuid, wait_s=0.2)
        threading.Timer(0.5, other.kill).start()  # a worker that is being killed is waited for
        os.close(lock_gpu(uuid, wait_s=20))
        other.wait()
    finally:
        Path(f"/tmp/plora-{uuid}.lock").unlink()
