"""What TensorBoard and Weights & Biases get of a run: read back by their own readers."""

import json
import struct

import pytest

from plora_jax.config.sweep import parse_sweep, resolved
from plora_jax.engine import trackers
from plora_jax.engine.rundir import JsonLines, RunDirectory, write_json
from plora_jax.engine.trackers import Feed, check_trackers
from plora_jax.errors import UserError

JOBS = {"r4-a": {"learning_rate": 1e-3, "rank": 4, "targets": "all-linear", "max_steps": None}}


def log(run: RunDirectory, steps: range, job_id: str = "r4-a", file: str = "metrics.jsonl") -> None:
    lines = JsonLines(run.job(job_id) / file)
    for step in steps:
        line = {"step": step, "loss": 5 - step / 10, "lr": 1e-3, "grad_norm": None, "tokens": 7, "skipped": 0}
        if file == "evals.jsonl":
            line = {"step": step, "fraction": 0.5, "score": step / 100, "loss": 4.0, "rows": 3, "time": 1.0}
        lines.append(line)
    lines.close()


def end(run: RunDirectory, job_id: str = "r4-a", status: str = "completed") -> None:
    score = {"score": 0.75, "loss": 1.5, "rows": 3} if status == "completed" else None
    write_json(run.job(job_id) / "job.json", {"status": status, "reason": "", "score": score})


def feed(run: RunDirectory, *names: str, jobs=JOBS, said=None) -> Feed:
    return Feed(run, jobs, names, "", (said if said is not None else []).append)


class Recorder:
    """Keep what a tracker is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *values: self.told.append((name, *values))

    def steps(self, prefix):
        return [
            call[2] for call in self.told if call[0] == "log" and any(k.startswith(prefix) for k in call[3])
        ]


def recorded(run: RunDirectory, jobs=JOBS) -> tuple[Feed, Recorder]:
    made, recorder = feed(run, jobs=jobs), Recorder()
    made.trackers = {"recorder": recorder}
    return made, recorder


def test_each_step_is_sent_once_and_in_order(tmp_path):
    run = RunDirectory(tmp_path)
    made, told = recorded(run)
    made.poll()
    assert told.told == []
    log(run, range(1, 4))
    with open(run.jobs / "r4-a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a line that is being written
    made.poll()
    assert told.told[0] == ("start", "r4-a", JOBS["r4-a"], 0)
    assert told.told[1] == ("log", "r4-a", 1, {"train/loss": 4.9, "train/lr": 0.001, "train/tokens": 7})
    log(run, range(4, 6))
    log(run, range(3, 6, 2), file="evals.jsonl")
    made.poll()
    made.poll()
    assert told.steps("train/") == [1, 2, 3, 4, 5] and told.steps("eval/") == [3, 5]
    assert [call[2] for call in told.told[4:]] == [3, 4, 5]  # an evaluation comes with its step
    assert told.told[-1][3]["eval/score"] == 0.05 and told.told[-1][3]["train/loss"] == 4.5


def test_a_job_that_goes_back_to_its_checkpoint_is_not_sent_again(tmp_path):
    run = RunDirectory(tmp_path)
    made, told = recorded(run)
    log(run, range(1, 8))
    made.poll()
    path = run.jobs / "r4-a" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:3]))
    made.poll()
    log(run, range(4, 11))
    made.poll()
    assert told.steps("train/") == list(range(1, 11))


def test_another_driver_goes_on_where_the_last_one_was(tmp_path):
    run, jobs = RunDirectory(tmp_path), {"a": {}, "b": {}, "c": {}}
    made, told = recorded(run, jobs)
    log(run, range(1, 4), "a")
    log(run, range(1, 3), "b")
    end(run, "a")
    made.poll()
    log(run, range(3, 6), "b")  # after the first driver's last look
    end(run, "c", "failed")  # before its first step
    again, told_again = recorded(run, jobs)
    again.close()
    assert again.token == made.token
    assert [call[:2] for call in told.told if call[0] == "end"] == [("end", "a")]
    assert told_again.steps("train/") == [3, 4, 5]
    assert told_again.told[0] == ("start", "b", {}, 3)
    assert told_again.told[-2:] == [("end", "c", {"status": "failed", "reason": ""}), ("close",)]


def test_a_tracker_that_fails_is_named_once_and_left_out(tmp_path):
    run, said = RunDirectory(tmp_path), []
    made, told = recorded(run)
    made.say = said.append

    class Broken(Recorder):
        def log(self, *values):
            raise ConnectionError("no route to host\nmore")

    made.trackers = {"broken": Broken()} | made.trackers
    log(run, range(1, 4))
    made.poll()
    log(run, range(4, 6))
    made.close()
    assert said == ["warning: broken gets nothing more of this run: ConnectionError: no route to host"]
    assert told.steps("train/") == [1, 2, 3, 4, 5]


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams import plugin_data_pb2

    run = RunDirectory(tmp_path)
    made = feed(run, "tensorboard")
    log(run, range(1, 6))
    log(run, range(5, 6), file="evals.jsonl")
    made.close()
    log(run, range(6, 9))
    end(run)
    made = feed(run, "tensorboard")  # after --resume
    made.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard" / "r4-a"))
    found.Reload()
    loss = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert loss == [(step, pytest.approx(5 - step / 10)) for step in range(1, 9)]
    assert [(e.step, e.value) for e in found.Scalars("eval/score")] == [(5, pytest.approx(0.05))]
    assert [e.value for e in found.Scalars("final/score")] == [pytest.approx(0.75)]
    contents = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(contents).session_start_info
    assert (
        started.hparams["rank"].number_value == 4 and started.hparams["targets"].string_value == "all-linear"
    )


def wandb_records(data: bytes):
    """Read a .wandb file: 7 bytes of header, then LevelDB's log format (blocks of 32 KiB; crc, length, type, data)."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] == b":W&B"
    found, whole, at = [], b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(whole))
            whole = b""
    return found


@pytest.mark.slow
@pytest.mark.long  # wandb writes from a process of its own, in its own time
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])
    run, said = RunDirectory(tmp_path), []
    made = feed(run, "wandb", said=said)
    log(run, range(1, 6))
    log(run, range(5, 6), file="evals.jsonl")
    made.poll()
    end(run)
    made.close()
    assert said == []
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(file.read_bytes())
    [begun] = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name, begun.run_id) == ("plora", "r4-a", f"r4-a-{made.token}")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(s, 5 - s / 10) for s in range(1, 6)]
    assert rows[-1]["eval/score"] == 0.05


def test_what_cannot_be_used_is_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log\.to: wandb: not installed; pip install 'plora-jax\[wandb\]'"):
        check_trackers(["wandb"])
    check_trackers([])


@pytest.mark.slow
def test_nobody_logged_in(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(UserError, match="nobody is logged in; run wandb login, or set WANDB_MODE=offline"):
        check_trackers(["wandb"])


SWEEP = "model: m\ndata: {train: a.jsonl}\nsearch: {rank: [4]}\n"


def test_the_section_of_the_sweep():
    sweep = parse_sweep(SWEEP + "log: {to: [tensorboard, wandb], project: p}\n")
    assert (sweep.log.to, sweep.log.project) == (("tensorboard", "wandb"), "p")
    assert parse_sweep(resolved(sweep)).log == sweep.log and parse_sweep(SWEEP).log.to == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{to: [mlflow]}",
            "'mlflow' is not known; expected a list of one of|expected one of tensorboard, wandb",
        ),
        ("{to: wandb}", "log.to"),
        ("{to: [tensorboard], project: p}", "has no effect without wandb in log.to"),
        ("{too: [wandb]}", "did you mean to?"),
    ],
)
def test_faults_of_the_section(text, message):
    with pytest.raises(UserError, match=message):
        parse_sweep(f"{SWEEP}log: {text}\n")
