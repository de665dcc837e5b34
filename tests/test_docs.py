"""The page on SWEEP.yaml says what the code does."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from plora_jax.cli import _parser
from plora_jax.config.sweep import parse_sweep
from plora_jax.jobs import JOB_FIELDS
from plora_jax.launch.slurm import WORKERS
from plora_jax.search.configurations import search_jobs
from plora_jax.search.early_stop import EarlyStop, expected_fraction
from scripts.docs_config import PAGE, page

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_fields() -> None:
    assert page(TEXT) == TEXT, "run: python -m scripts.docs_config"


def test_every_job_field_is_described_with_its_default() -> None:
    for name, field in JOB_FIELDS.items():
        [row] = re.findall(rf"^\| `{name}` \|.*\| {re.escape(field.metadata['doc'])} \|$", TEXT, re.MULTILINE)
        assert isinstance(field.default, (bool, tuple, str, type(None))) or f"`{field.default}`" in row


def test_the_sweep_of_the_readme_is_one() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", (PAGE.parent.parent / "README.md").read_text(), re.DOTALL)
    assert len(search_jobs(parse_sweep(example))) == 3 * 2 * 2


def test_the_example_is_a_sweep() -> None:
    example = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0]
    jobs = search_jobs(parse_sweep(example))
    assert len(jobs) == 40 and {job.warmup_ratio for job in jobs} == {0.03}


def test_the_page_on_search_holds_a_sweep_and_true_costs() -> None:
    text = (PAGE.parent / "search.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    sweep = parse_sweep("model: m\ndata: {train: a, eval: b}\n" + example)
    assert len(search_jobs(sweep)) == 64 and sweep.early_stop.rungs() == (1 / 9, 1 / 3)
    told = re.search(
        r"(\d+) % with η = 2, (\d+) % with 3,\s+(\d+) % with 4; (\d+) % with η = 3 and two", text
    )
    rules = [EarlyStop("asha", reduction_factor=eta) for eta in (2, 3, 4)] + [EarlyStop("asha", brackets=2)]
    costs = [expected_fraction(rule, 100_000, 100_000) or 0 for rule in rules]
    assert told and [round(100 * cost) for cost in costs] == [int(n) for n in told.groups()]


CLUSTER = (PAGE.parent / "cluster.md").read_text(encoding="utf-8")


def test_the_commands_on_clusters_are_ones() -> None:
    commands = re.findall(r"^(?:sbatch scripts/slurm/sweep.sbatch|plora sweep) .*$", CLUSTER, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)[2:]
        _parser().parse_args(["sweep", *words])
    assert (PAGE.parent.parent / "scripts" / "slurm" / "sweep.sbatch").exists()


def test_the_manifest_of_kubernetes() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", CLUSTER, re.DOTALL)
    job, claim = yaml.safe_load_all(block)
    assert (job["apiVersion"], job["kind"], claim["kind"]) == ("ray.io/v1", "RayJob", "PersistentVolumeClaim")
    command, _, check = job["spec"]["entrypoint"].partition(" || ")
    args = _parser().parse_args(shlex.split(command)[1:])
    assert args.launcher == "ray" and args.resume and check == f"test -e {args.out}/leaderboard.json"
    cluster = job["spec"]["rayClusterSpec"]
    locked = (PAGE.parent.parent / "scripts" / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in locked
    assert f"rayproject/ray:{cluster['rayVersion']}-py312" in CLUSTER
    [group] = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for part in (cluster["headGroupSpec"], group):  # driver and workers see one run directory
        spec = part["template"]["spec"]
        [volume], [container] = spec["volumes"], spec["containers"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"] and str(args.out).startswith(mount["mountPath"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_slurm_scripts_are_sound(tmp_path) -> None:
    written = tmp_path / "workers.sbatch"
    options = {"last": 3, "run": "/r", "python": "/p", "path": "/a:/b", "module": "m", "devices": "auto"}
    written.write_text(
        WORKERS.format(resources="\n#SBATCH --gres=gpu:1", options="\n#SBATCH -p x", **options)
    )
    driver = PAGE.parent.parent / "scripts" / "slurm" / "sweep.sbatch"
    done = subprocess.run(["shellcheck", driver, written], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
