"""A SLURM cluster of two nodes on this machine: the real daemons, in a directory of their own."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
CredType=cred/munge
SlurmctldPort=26817
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=10
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[27001-27002] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Say what keeps SLURM from running here, empty when nothing does."""
    absent = [name for name in COMMANDS if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "its daemons are started as root"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, int]]:
    """Start the daemons, with $SLURM_CONF set, and end them afterwards; yields each daemon's process id by name."""
    folder.chmod(0o755)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONF.format(host=os.uname().nodename.partition(".")[0], dir=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = {
        "munge": ["munged", "--force", "--foreground", f"--socket={folder}/munge.sock", *munge],
        "slurmctld": ["slurmctld", "-D"],
        "n1": ["slurmd", "-D", "-N", "n1"],
        "n2": ["slurmd", "-D", "-N", "n2"],
    }
    started = {}
    os.environ["SLURM_CONF"] = env["SLURM_CONF"]
    try:
        for name, command in commands.items():
            log = open(folder / f"{name}.out", "w")  # noqa: SIM115  the daemon's
            started[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while idle(env) < 2:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.5)
        yield {name: process.pid for name, process in started.items()}
    finally:
        del os.environ["SLURM_CONF"]
        for process in reversed(started.values()):
            process.kill()
            process.wait()


def idle(env: dict[str, str]) -> int:
    """Count the nodes that wait for jobs."""
    done = subprocess.run(["sinfo", "-h", "-N", "-t", "idle"], env=env, capture_output=True, text=True)
    return len(done.stdout.splitlines())


def lose_node(daemons: dict[str, int], node: str) -> None:
    """Kill a node's daemon, those of its jobs, and all that they run, as a power cut would."""
    doomed = {daemons[node]}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"SLURMD_NODENAME={node}".encode() in (folder / "environ").read_bytes().split(b"\0")
            conf = os.environ["SLURM_CONF"].encode() in (folder / "environ").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if mine and conf:
                step = Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd"
                doomed |= {int(folder.name), *([parent] if step else [])}
        except OSError:  # it has ended
            continue
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
