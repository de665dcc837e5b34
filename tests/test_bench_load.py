"""`benchmarks/load.py` writes a checkpoint that loads and rows of the length it says, and reads a run's own words."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import load
from plora_jax.models.find import load_tokenizer
from plora_jax.models.load import load_base
from tests.models import tiny


def test_the_checkpoint_loads_and_its_rows_have_the_length(tmp_path):
    sizes = load.write_checkpoint(tmp_path / "model", {**tiny.LLAMA, "vocab_size": 300})
    assert len(sizes) == load.SHARDS and max(sizes.values()) < 2 * min(sizes.values())
    base = load_base(str(tmp_path / "model"), precision="bf16")
    assert base.params["layers"]["up_proj"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(base.params["norm"]["weight"][...], 1)
    assert np.std(base.params["embed"][...].astype(np.float32)) == pytest.approx(0.02, rel=0.05)
    load.write_sweep(tmp_path, tmp_path / "model", 40)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    lengths = {len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) for row in rows}
    assert len(rows) == load.ROWS and lengths == {39}  # and the end of text


def test_shards_are_of_about_the_same_size_and_keep_the_order():
    assert load.plan_shards({"a": 9, "b": 1, "c": 5, "d": 5, "e": 20}, 4) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_log_is_added_up_to_the_first_step():
    log = """
Finished tracing write for jit in 0.5 sec
Finished jaxpr to MLIR module conversion jit(write) in 0.25 sec
Finished XLA compilation of jit(write) in 2e-1 sec
Finished tracing step for jit in 1.5 sec
Finished XLA compilation of jit(step) in 3.0 sec
Finished XLA compilation of jit(late) in 9.0 sec
"""
    found = load.compiled_in(log)
    assert found.pop("longest") == [["jit(step)", 3.0], ["jit(write)", 0.2]]
    assert found == {"programs": 2, "traced_s": 2.0, "lowered_s": 0.25, "compiled_s": 3.2}


def test_a_step_that_was_kept_whole_ends_the_sum():
    log = """
Finished XLA compilation of jit(write) in 0.5 sec
a kept step: Finished loading jit(step) in 0.25 sec
Finished XLA compilation of jit(step) in 9.0 sec
"""
    found = load.compiled_in(log)
    assert (
        found["programs"] == 2 and found["compiled_s"] == 0.75 and found["longest"][0] == ["jit(write)", 0.5]
    )


def test_a_start_is_split_by_its_events(tmp_path):
    events = [
        {"event": "started", "time": 100.0},
        {"event": "loaded", "time": 110.0, "ahead_s": 3.0, "load_s": 5.0},
        {"event": "placed", "time": 110.25},
        {"event": "placed", "time": 112.0},
        {"event": "compiled", "time": 112.5, "compile_s": 0.4, "slots": 2},
        {"event": "placed", "time": 120.0},
        {"event": "finished", "time": 130.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "0.json").write_text("{}")
    found = load.start_of(tmp_path, 90.0)
    parts = {name: found[name] for name in ("import_s", "load_s", "rows_s", "slots_s", "step_s")}
    assert parts == {"import_s": 2.0, "load_s": 5.0, "rows_s": 3.25, "slots_s": 1.75, "step_s": 0.5}
    assert found["start_s"] == sum(parts.values()) == 12.5 and found["driver_s"] == 10.0


def test_micro_steps_beside_the_bare_step():
    ends = [0.0, 9.0, 9.1, 9.2, 9.3, *(9.3 + 0.101 * n for n in range(1, 6))]
    found = load.pace(ends, [0.01] * len(ends), [0.0] * 4 + [0.05, 0.04] * 3, 0.1)
    assert found["micro_steps"] == 5 and found["overhead"] == pytest.approx(0.01)
    assert found["engine_share"] == pytest.approx(0.1) and found["least_wait_s"] == 0.04


@pytest.mark.long
def test_every_part_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({**tiny.LLAMA, "vocab_size": 300}))
    out = tmp_path / "load.jsonl"
    arguments = ["--model", str(tmp_path / "tiny"), "--work", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["load", *arguments, "--length", "32"])
    assert load.main() == 0
    rows = {row["part"]: row for row in map(json.loads, out.read_text().splitlines())}
    kept = rows["sweep, programs kept"]
    whole = sum(kept[name] for name in ("import_s", "load_s", "rows_s", "slots_s", "step_s"))
    assert kept["start_s"] == pytest.approx(whole, abs=0.01) and kept["slots"] == load.JOBS
    assert kept["compiled_s"] < rows["sweep, programs new"]["compiled_s"] / 2
    assert (
        rows["load, cached"]["of_raw"] > 0 and rows["micro-steps"]["micro_steps"] == load.ROWS - 2 - load.WARM
    )
