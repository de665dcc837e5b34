"""`plora bench step` measures the real step: its numbers belong together, and memory is counted, not guessed."""

import json

import pytest

from planner import CostModel, StepShape, step_memory
from plora_jax import profile
from plora_jax.bench import measure_step
from plora_jax.cli import main
from plora_jax.models.load import load_base
from plora_jax.planning import model_shape
from tests import tiny


def test_bench_step_measures_the_real_step(tmp_path, capsys):
    model = tiny.write_model(tmp_path / "model")
    out = tmp_path / "bench.json"
    case = ["--jobs", "2", "--batch", "2", "--length", "16", "--rank", "3", "--recompute", "layer"]
    assert main(["bench", "step", "--model", str(model), *case, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    median, least, most = result["ms"]
    assert 0 < least <= median <= most
    assert abs(result["tokens_s"] - 2 * 2 * 16 / (median / 1e3)) < 1e-6 * result["tokens_s"]
    assert result["rank_bucket"] == 8
    # 2 jobs × 7 sites × 2 layers: weights, gradients and two moments in float32, and the base's parameters
    sites = 16 * 16 + 16 * 8 + 16 * 8 + 16 * 16 + 3 * 16 * 32
    adapters = 2 * 2 * 8 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 32))
    base = 64 * 16 + 2 * (sites + 2 * 16) + 16
    assert result["argument_bytes"] >= 4 * (4 * adapters + base)
    assert result["argument_bytes"] < 4 * (4 * adapters + base) + 20_000
    assert 3.5 < result["loss"] < 5  # random weights: about ln 64
    assert "tokens/s" in capsys.readouterr().out


def test_bench_refuses_what_it_does_not_know(tmp_path, capsys):
    assert main(["bench", "step", "--model", str(tmp_path / "absent"), "--jobs", "1"]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_profile_becomes_a_cost_model_that_plans(tmp_path, capsys, monkeypatch):
    # as few as tell the factors: each is a compilation
    monkeypatch.setattr(profile, "FITTED", profile.FITTED[:7])
    monkeypatch.setattr(profile, "HELD_OUT", profile.HELD_OUT[:1])
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    out = tmp_path / "cost.json"
    assert main(["profile", "--model", str(model), "--length", "32", "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert "held-out" in told and told.count(" ms, ") == 8
    cost = CostModel.load(out)
    (key,) = cost.fitted
    assert key == f"{model}/1/none/fp32" and cost.memory.source == "7 points"
    base = load_base(str(model), random_weights=True, precision="fp32")
    shape = model_shape(base.config, str(model))
    real = measure_step(base, jobs=5, m=1, length=32, rank=8, repeats=0)["total_bytes"]
    predicted = step_memory(shape, StepShape(1, 5, 1, 32, 8, "none"), "fp32", cost.memory, "xla")
    assert real <= predicted < 1.3 * real
    sweep = tiny.write_sweep(tmp_path)
    arguments = ["plan", str(sweep), "--devices", "cpu", "--cost-model", str(out)]
    assert main(arguments) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "--model", str(model), "--json", str(tmp_path / "no" / "cost.json")])
