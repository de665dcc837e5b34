"""Step times: the formula, tables, files, fits."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from planner import (
    CostModel,
    Effort,
    Options,
    PlanError,
    StepCost,
    check_plan,
    cost_model,
    explain_plan,
    fit_time,
    make_plan,
)
from planner.devices import DEVICES, cpu_device
from planner.fit import TimePoint
from tests.planner.problems import QWEN, TINY, cluster, job


def test_a_step_is_affine_in_slots_tokens_and_ranks():
    cost = StepCost(0.03, 5e-5, 2e-5, 3e-8)
    assert cost.seconds(8, 2, 100, 32) == pytest.approx(0.03 + 8 * (5e-5 * 200 + (2e-5 + 3e-8 * 200) * 32))


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_has_a_table_that_says_where_its_numbers_are_from(name):
    model = cost_model(DEVICES[name])
    assert model.device == name and model.sources
    assert all(source.startswith(("measured", "estimated")) for source in model.sources.values())
    assert CostModel.from_json(model.to_json()) == model
    assert model.step_cost(QWEN, 1, "dots", "bf16", 512).c > 0


@pytest.mark.parametrize(
    "policy, J, S, ms",
    [("dots", 8, 1024, 428.8), ("none", 8, 1024, 420.1), ("none", 32, 128, 241.5), ("none", 32, 256, 433.6)],
)
def test_the_h200_table_meets_the_measured_steps(policy, J, S, ms):
    """Qwen2.5-7B, rank 32: step-head-h200-2026-12-03.jsonl, dots step-table-h200-2026-12-01c.jsonl."""
    cost = cost_model(DEVICES["H200"]).step_cost(QWEN, 1, policy, "bf16", S)
    assert cost.seconds(J, 1, S, 32) * 1000 == pytest.approx(ms, rel=0.05)


def test_more_devices_are_faster_but_never_as_much():
    model = cost_model(DEVICES["A100-40GB"])
    times = [model.step_cost(QWEN, d, "none", "bf16", 512).seconds(8, 1, 512, 16) for d in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert all(a / b < 2 for a, b in pairwise(times))


@pytest.mark.parametrize("fitted", [{}, {"Qwen2.5-7B/1/none/bf16": [0.03, 5e-5, 2e-5, 3e-8]}])
def test_a_slowed_device_takes_so_many_times_as_long_for_a_step_and_for_nothing_else(fitted):
    model = replace(cost_model(DEVICES["H200"]), fitted=fitted)
    slow = model.slowed(1.7)
    for S in (64, 1024):
        before, after = (m.step_cost(QWEN, 1, "none", "bf16", S).seconds(8, 1, S, 32) for m in (model, slow))
        assert after == pytest.approx(1.7 * before)
    same = ("compile_s", "export_s", "load_s", "load_bytes_s", "memory", "scaling", "recompute")
    assert all(getattr(model, name) == getattr(slow, name) for name in same)


def test_cpu_speed_grows_with_cores():
    one, four = (cost_model(cpu_device(8 * 10**9, n).spec) for n in (1, 4))
    assert four.flops == 4 * one.flops


def test_a_fitted_entry_wins(tmp_path):
    model = replace(cost_model(DEVICES["A100-40GB"]), fitted={"tiny-1B/1/none/bf16": [0.5, 1e-6, 0.0, 0.0]})
    path = tmp_path / "mine.json"
    path.write_text(model.to_json(), encoding="utf-8")
    loaded = CostModel.load(path)
    assert loaded.step_cost(TINY, 1, "none", "bf16", 90) == StepCost(0.5, 1e-6, 0.0, 0.0)
    plan = make_plan(
        [job(0, 8, 1)],
        TINY,
        cluster(1),
        cost_model=loaded,
        options=Options(baselines=False, policies=("none",)),
    )
    assert plan.packs[0].step_s == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("values", [[0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 1e-4, 0.0], [0.0, 0.0, 1e-4, 0.0]])
@pytest.mark.parametrize("count", [5, 40])
def test_a_step_may_cost_nothing_a_token(values, count):
    """Non-negative least squares on noisy points may find c = 0: a baseline's step is then its launch alone."""
    on = cluster(2)
    fitted = {f"tiny-1B/{d}/{policy}/bf16": values for d in (1, 2) for policy in ("none", "dots", "layer")}
    model = CostModel.from_json(replace(cost_model(on.spec), fitted=fitted).to_json())
    jobs = [job(i, 8 * 2 ** (i % 3), 2 ** (i % 3)) for i in range(count)]
    plan = make_plan(jobs, TINY, on, cost_model=model, options=Options(effort=Effort(2, 60)))
    launch = model.launch_s * 16 / 28
    free = [0.0, 0.0]
    for batch in (j.batch_size for j in jobs):
        free[free.index(min(free))] += -(-900 // batch) * launch
    assert plan.baselines["min_gpu_s"] == pytest.approx(max(free), rel=0.3)
    assert check_plan(plan, jobs, TINY, on, model) == []
    assert explain_plan(plan, jobs, TINY, on, cost_model=model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "schema 1"),
        ('{"device": "x"}', "missing"),
        ('{"schema": 2}', "schema 1"),
        (json.dumps({"device": "x", "speed": 3}), "unknown fields"),
        (
            json.dumps({"device": "x", "flops": -1, "adapter_flops": 1, "bandwidth": 1, "layer_s": 0}),
            "flops is -1",
        ),
        (replace(cost_model(DEVICES["A100-40GB"]), compile_s=-5.0).to_json(), "compile_s is -5"),
        (replace(cost_model(DEVICES["A100-40GB"]), fitted={"x": [0, 0, 0, 0]}).to_json(), "fitted x"),
        (replace(cost_model(DEVICES["A100-40GB"]), fitted={"x": [1, -1, 0, 0]}).to_json(), "fitted x"),
    ],
)
def test_a_bad_cost_model_is_refused(text, words):
    with pytest.raises(PlanError, match=words):
        CostModel.from_json(text)
    with pytest.raises(PlanError, match="No such file"):
        CostModel.load("/nowhere/x.json")


def test_the_time_fit_recovers_coefficients_and_judges_unseen_points():
    """Noise of 2 %: unseen packs within 5 % on average and 12 % at worst."""
    rng = random.Random(0)
    true = StepCost(0.03, 5e-5, 2e-5, 3e-8)

    def point(noise: float) -> TimePoint:
        J, m, S = rng.choice((1, 2, 4, 8, 16, 32)), rng.choice((1, 2, 4)), rng.choice((90, 152, 512, 1024))
        bucket = rng.choice((8, 16, 32, 64, 128))
        return TimePoint(J, m, S, bucket, true.seconds(J, m, S, bucket) * (1 + rng.gauss(0, noise)))

    exact, fit = fit_time([point(0) for _ in range(12)], [point(0) for _ in range(6)])
    assert exact == pytest.approx(true, rel=1e-4) and fit.worst < 1e-6
    _, fit = fit_time([point(0.02) for _ in range(30)], [point(0.02) for _ in range(20)])
    assert fit.mean <= 0.05 and fit.worst <= 0.12
    with pytest.raises(PlanError, match="at least four"):
        fit_time([point(0)] * 3)


def test_a_cost_model_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"c\.json: not JSON: not valid UTF-8"):
        CostModel.load(tmp_path / "c.json")
