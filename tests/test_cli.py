"""The command line: quick, without JAX where nothing is computed, and with exit codes that mean something."""

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from planner import cost_model
from planner.devices import device_spec
from plora_jax import cli, planning
from plora_jax.config.sweep import load_sweep
from plora_jax.jobs import JOB_FIELDS
from plora_jax.search.configurations import search_jobs
from tests.clock import slowness
from tests.tiny import write_sweep, write_weights

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "scripts" / "sweeps" / "paper.yaml"
COMMANDS = (
    "quickstart",
    "plan",
    "sweep",
    "add",
    "stop",
    "eval",
    "report",
    "watch",
    "merge",
    "bench",
    "profile",
    "doctor",
)


def plora(*argv: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; `code` runs before it."""
    script = f"import sys; {code}\nfrom plora_jax.cli import main\nsys.exit(main({[str(a) for a in argv]!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=600
    )


def cpu_seconds() -> float:
    """Return the processor time of all finished child processes: wall time without what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    heavy = ("jax", "numpy", "transformers", "cvxpy", "yaml", "rich")
    seconds = []
    for _ in range(5):
        started = cpu_seconds()
        done = plora(
            "--help",
            code=f"import atexit; atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))",
        )
        seconds.append(cpu_seconds() - started)
        assert done.returncode == 0 and done.stdout.endswith("[]\n")
    assert min(seconds) < 0.3 * slowness()


def test_help_lists_what_there_is() -> None:
    shown = plora("--help").stdout
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line[4] != " "]
    assert tuple(listed) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0 and f"usage: plora {name}" in capsys.readouterr().out


def test_the_help_of_a_sweep_has_every_job_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    shown = capsys.readouterr().out
    assert "  rank           LoRA rank r (a whole number from 1 to 1024; default 16)\n" in shown
    assert all(
        f"\n  {name} " in shown and field.metadata["doc"] in shown for name, field in JOB_FIELDS.items()
    )


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "plora_jax", "plan", "gone.yaml"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (2, "plora plan: gone.yaml: no such file\n")


def test_the_paper_sweep_is_planned_offline_without_jax_in_six_seconds(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    no_jax = "sys.modules['jax'] = None"  # importing it raises
    slow, started = slowness(), cpu_seconds()
    done = plora("plan", PAPER, "--json", target, code=no_jax)
    seconds = cpu_seconds() - started
    assert done.returncode == 0, done.stderr
    assert seconds < 6 * max(slow, slowness())
    plan = json.loads(target.read_text())
    assert plan["schema"] == 1 and len(plan["jobs"]) == 120
    placed = [place["job_id"] for pack in plan["packs"] for place in pack["assign"]]
    assert sorted(placed) == sorted(plan["jobs"])
    assert {device for pack in plan["packs"] for device in pack["devices"]} == set(range(8))
    assert all(pack["memory_bytes"] <= pack["memory_limit_bytes"] for pack in plan["packs"])
    fields = next(iter(plan["jobs"].values()))
    assert fields["scheduler"] == "cosine" and fields["rows"] == 1000 and fields["row_tokens"] == 1024
    assert 0 < plan["lower_bound_s"] <= plan["makespan_s"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts" / "sweeps").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_sample_sweep_is_planned_offline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(path)]) == 0
    assert f"{len(search_jobs(load_sweep(path)))} jobs of " in capsys.readouterr().out


def test_a_plan_is_explained_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "plan.svg"
    argv = ["plan", str(write_sweep(tmp_path)), "--devices", "cpu-16GB", "--explain", "--svg", str(chart)]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "no plan is shorter than" in said and "J = 4: number of jobs: every job has a slot" in said
    drawn = ElementTree.parse(chart).getroot()
    assert drawn.tag.endswith("svg") and all(
        job.job_id in chart.read_text() for job in search_jobs(load_sweep(argv[1]))
    )


def test_the_plan_is_the_same_every_time(tmp_path: Path) -> None:
    plans = []
    for name in ("a.json", "b.json"):
        assert cli.main(["plan", str(PAPER), "--json", str(tmp_path / name)]) == 0
        plan = json.loads((tmp_path / name).read_text())
        plans.append({key: value for key, value in plan.items() if key not in ("planning_s", "baselines_s")})
    assert plans[0] == plans[1]


def test_devices_and_rows_of_the_command_line_win(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    argv = ["plan", str(PAPER), "--devices", "2xH200", "--rows", "77", "--json", str(target)]
    assert cli.main(argv) == 0
    plan = json.loads(target.read_text())
    assert (plan["device"], plan["device_count"]) == ("H200", 2)
    assert {job["rows"] for job in plan["jobs"].values()} == {77}


def test_a_mixture_of_devices_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, cost = tmp_path / "plan.json", tmp_path / "cost.json"
    argv = ["plan", str(PAPER), "--devices", "2xA100-40GB+2xH200", "--json", str(target), "--explain"]
    assert cli.main(argv) == 0
    plan, told = json.loads(target.read_text()), capsys.readouterr().out
    assert plan["schema"] == 1 and plan["device_types"] == {"A100-40GB": 2, "H200": 2}
    assert {(pack["device"], n) for pack in plan["packs"] for n in pack["devices"]} == {
        ("A100-40GB", 0), ("A100-40GB", 1), ("H200", 2), ("H200", 3)
    }  # fmt: skip
    assert "on 2 × A100-40GB + 2 × H200" in told and "2 × H200: " in told
    files = []
    for name in ("A100-40GB", "H200"):
        files += ["--cost-model", str(cost.with_suffix(f".{name}"))]
        Path(files[-1]).write_text(cost_model(device_spec(name)).slowed(2.0).to_json())
    assert cli.main([*argv, *files]) == 0
    assert json.loads(target.read_text())["makespan_s"] > 1.8 * plan["makespan_s"]
    capsys.readouterr()
    assert cli.main([*argv, *files, *files[:2]]) == 2
    assert f"{files[1]}, {files[1]}, all of A100-40GB, 0 are fitted to Qwen" in capsys.readouterr().err
    measured = cost_model(device_spec("A100-40GB")).slowed(3.0)
    for name, model in (("own", "Qwen/Qwen2.5-7B-Instruct"), ("other", "meta-llama/Llama-3.1-8B-Instruct")):
        files += ["--cost-model", str(cost.with_suffix(f".{name}"))]
        fitted = {f"{model}/1/{policy}/bf16": [0.01, 1e-4, 0.0, 0.0] for policy in ("none", "dots", "layer")}
        Path(files[-1]).write_text(replace(measured, fitted=fitted).to_json())
    assert cli.main([*argv, *files]) == 0, "of three for a type, the one fitted to the model"


def test_several_sweeps_get_devices_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = tmp_path / "a", tmp_path / "b c"
    for directory, ranks in ((first, [4, 8]), (second, [4, 8, 16, 32, 64])):
        directory.mkdir()
        write_sweep(directory, search={"rank": ranks}, devices="3xH200")
    files = [str(directory / "sweep.yaml") for directory in (first, second)]
    target, chart = tmp_path / "plan.json", tmp_path / "plan.svg"
    argv = ["plan", *files, "--json", str(target), "--svg", str(chart), "--explain"]
    assert cli.main(argv) == 0
    said, plan = capsys.readouterr().out, json.loads(target.read_text())
    shares = [share["devices"] for share in plan["sweeps"]]
    assert sorted(n for own in shares for n in own) == [0, 1, 2] and all(shares)
    assert plan["makespan_s"] == max(share["plan"]["makespan_s"] for share in plan["sweeps"])
    assert plan["lower_bound_s"] <= plan["makespan_s"] and plan["device_count"] == 3
    assert [len(share["plan"]["jobs"]) for share in plan["sweeps"]] == [2, 5]
    assert all("learning_rate" in job for share in plan["sweeps"] for job in share["plan"]["jobs"].values())
    assert said.startswith("2 sweeps on 3 × H200, each on devices of its own: makespan ")
    assert said.count("no plan is shorter than") == 2
    lines = [line for line in said.splitlines() if "plora sweep" in line]
    for n, (line, file, own) in enumerate(zip(lines, files, shares, strict=True), 1):
        visible, *command = shlex.split(line)
        assert visible == "CUDA_VISIBLE_DEVICES=" + ",".join(map(str, own))
        assert command == ["plora", "sweep", file, "--out", f"runs/sweep-{n}", "--workers", str(len(own))]
        assert cli._parser().parse_args(command[1:]).workers == len(own)
    drawn = ElementTree.parse(chart).getroot()
    tops = [
        (float(one.get("y", "")), float(one.get("height", ""))) for one in drawn if one.tag.endswith("svg")
    ]
    assert tops[0][0] == 0 and tops[1][0] == tops[0][1] and float(drawn.get("height", "")) == sum(tops[1])
    firsts = [
        share["devices"][pack["devices"][0]] for share in plan["sweeps"] for pack in share["plan"]["packs"]
    ]
    assert {element.text for element in drawn.iter()} >= {f"device {n}" for n in firsts}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")  # in which the sweep's numbers count
    assert cli.main(["plan", *files]) == 0
    told = re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+) ", capsys.readouterr().out)
    assert ",".join(told) == "5,6,7"
    assert cli.main(["plan", *files, "--devices", "2xH200"]) == 0
    assert re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+) ", capsys.readouterr().out) == ["5", "6"]
    assert cli.main(["plan", *files, "--devices", "12xA100-40GB"]) == 0
    said = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES" not in said and said.count("--launcher ray") == 2
    assert said.count("with devices: auto in ") == 2


def test_several_sweeps_that_cannot_be_planned_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, devices in (("a", "2xH200"), ("b", "3xH200")):
        (tmp_path / name).mkdir()
        write_sweep(tmp_path / name, devices=devices)
    files = [str(tmp_path / name / "sweep.yaml") for name in ("a", "b")]
    for more, words in (
        ([], f"different ones ({files[0]}: 2xH200, {files[1]}: 3xH200); say which with --devices"),
        (["--devices", "4xcpu-16GB"], "are planned on GPUs"),
        (
            ["--devices", "1xH200"],
            f"1 × H200 are too few for devices of their own: the sweeps need at least {files[0]} 1",
        ),
        (["--devices", "2xA100-40GB+2xH200"], "devices of one type"),
    ):
        assert cli.main(["plan", *files, *more]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["plan", files[0], files[0], "--devices", "2xH200"]) == 2
    assert "a file is named twice" in capsys.readouterr().err


def test_interrupts_are_told_from_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    argv = ["plan", str(write_sweep(tmp_path))]

    def outcome(happens: Any) -> tuple[int, str]:
        monkeypatch.setattr(planning, "plan_command", happens)
        code = cli.main(argv)
        return code, capfd.readouterr().err

    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    def terminate(*_: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return 0

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")

    before = signal.getsignal(signal.SIGTERM)
    assert outcome(interrupt) == (130, "plora plan: interrupted\n")
    assert outcome(terminate) == (143, "plora plan: terminated\n")
    assert outcome(full) == (1, "plora plan: run/metrics.jsonl: No space left on device\n")
    assert outcome(lambda *_: 1) == (1, "")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(planning, "plan_command", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["plan", str(write_sweep(tmp_path))])


def test_a_reader_that_goes_away_is_no_fault() -> None:
    script = f"import sys; from plora_jax.cli import main; sys.exit(main(['plan', {str(PAPER)!r}]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert (process.wait(timeout=600), said) == (0, b"")


def test_notes_of_the_search_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path, search={"rank": [4, 4, 8]})
    assert cli.main(["plan", str(sweep), "--devices", "cpu-16GB"]) == 0
    assert "note: 1 of 3 jobs are given twice and trained once" in capsys.readouterr().out


def test_a_sweep_from_file_to_merged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands as a user chains them: sweep, again (refused), resume, changed (refused), eval, merge."""
    path = write_sweep(tmp_path, search={"rank": [4, 8]})
    write_weights(tmp_path / "model")
    sweep, out = ["sweep", str(path), "--out", str(tmp_path / "run")], tmp_path / "run"
    assert cli.main([*sweep, "--dry-run"]) == 0 and not out.exists()
    assert cli.main(sweep) == 0
    board = json.loads((out / "leaderboard.json").read_text())
    assert [job["status"] for job in board["jobs"]] == ["completed"] * 2
    assert {job["job_id"] for job in board["jobs"]} == {job.job_id for job in search_jobs(load_sweep(path))}
    assert search_jobs(load_sweep(out / "sweep.yaml")) == search_jobs(load_sweep(path))
    assert cli.main(sweep) == 2 and "already used" in capsys.readouterr().err
    assert cli.main([*sweep, "--resume"]) == 0
    write_sweep(tmp_path, search={"rank": [4, 8]}, train={"batch_size": 1})
    assert cli.main([*sweep, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "another configuration" in said and "batch_size: 1" in said

    adapter = out / board["jobs"][0]["adapter"]
    on = write_sweep(tmp_path, search={"learning_rate": [1e-4, 1e-3]}, train={"init_adapter": str(adapter)})
    assert cli.main(["sweep", str(on), "--out", str(tmp_path / "on"), "--dry-run"]) == 0
    assert cli.main(["plan", str(on), "--json", str(tmp_path / "plan.json")]) == 0
    planned = json.loads((tmp_path / "plan.json").read_text())["jobs"].values()
    assert [(job["rank"], job["alpha"]) for job in planned] == [(board["jobs"][0]["rank"], 16.0)] * 2

    scores = tmp_path / "scores.json"
    rows = ["--data", str(tmp_path / "eval.jsonl"), "--max-length", "16", "--json", str(scores)]
    assert cli.main(["eval", "--model", str(tmp_path / "model"), "--adapter", str(adapter), *rows]) == 0
    base, best = json.loads(scores.read_text())
    assert base["loss"] == pytest.approx(board["base"]["loss"], rel=1e-5)
    assert best["loss"] == pytest.approx(board["jobs"][0]["loss"], rel=1e-5) and best["rows"] == 3

    merged = tmp_path / "merged"
    assert cli.main(["merge", str(adapter), "--out", str(merged)]) == 0
    assert {path.name for path in merged.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("plora_jax ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ray-address=h:1"], "--ray-address h:1: has no effect without --launcher ray"),
        (["--slurm=--time=4", "--launcher=ray"], "--slurm --time=4: has no effect without --launcher slurm"),
        (["--launcher=inline", "--workers=2"], "--workers 2: with --launcher inline there is one"),
        (["--workers=4096"], "--workers 4096: this process may use"),
    ],
)
def test_launch_options_that_cannot_be(flags, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    write_sweep(tmp_path)
    out = tmp_path / "out"
    assert cli.main(["sweep", str(tmp_path / "sweep.yaml"), "--out", str(out), *flags]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_a_budget_of_tokens_counts_the_jobs_that_run(tmp_path: Path) -> None:
    """A job is begun while less than the budget is spent or promised to jobs that run, however many slots are free."""
    write_weights(write_sweep(tmp_path).parent / "model")
    begun = []
    for name, tokens in (("one", 1), ("two", 0)):
        space = {"rank": [4], "learning_rate": {"log_uniform": [1e-4, 1e-3]}, "method": "random"}
        tokens = tokens or begun[0][0] + 1
        path = write_sweep(tmp_path, search=space | {"budget": {"tokens": tokens}})
        assert cli.main(["sweep", str(path), "--out", str(tmp_path / name)]) == 0
        board = json.loads((tmp_path / name / "leaderboard.json").read_text())
        begun.append([job["tokens"] for job in board["jobs"]])
    assert [len(jobs) for jobs in begun] == [1, 2]
