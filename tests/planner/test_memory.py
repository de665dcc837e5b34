"""Memory: hand counts, growth with each size, and what a real step needs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner import (
    DeviceSpec,
    MemoryModel,
    Options,
    StepShape,
    check_plan,
    cost_model,
    fit_memory,
    make_plan,
    read_memory_points,
    step_memory,
)
from planner.devices import DEVICES
from planner.errors import PlanError
from planner.memory import memory_terms, saved_elements
from planner.signature import fits, signature_of
from tests.planner.problems import QWEN, cluster, instance, job

POINTS = Path(__file__).parents[2] / "benchmarks/results/memory-points-h200-2026-12-01.json"
STEP = StepShape(1, 8, 1, 1024, 32, "layer")


def test_terms_by_hand():
    """8 × 80.7 M adapter parameters × 22 bytes; 8,192 tokens × 28 layers × 3,584 × 2 bytes; 7.6 B × 2 bytes."""
    terms = memory_terms(QWEN, STEP, "bf16")
    assert terms["adapters"] == 8 * 80_740_352 * (4 * 5 + 2)
    assert terms["saved_layer"] == 8192 * 28 * 3584 * 2
    assert terms["weights"] == 2 * QWEN.n_params
    assert terms["logits"] == 12 * 1024 * 152_064
    assert terms["attention"] == 0


@pytest.mark.parametrize("change", [{"J": 9}, {"m": 2}, {"S": 1032}, {"rank_bucket": 64}, {"policy": "dots"}])
def test_more_of_anything_needs_more(change):
    assert step_memory(QWEN, replace(STEP, **change), "bf16") > step_memory(QWEN, STEP, "bf16")


def test_what_saves_memory():
    for change in ({"degree": 2}, {"optimizer": "sgd"}, {"targets": frozenset({"q_proj"})}):
        assert step_memory(QWEN, replace(STEP, **change), "bf16") < step_memory(QWEN, STEP, "bf16")
    sizes = [step_memory(QWEN, STEP, p) for p in ("nf4", "int8", "bf16", "fp32")]
    assert sizes == sorted(sizes)
    assert saved_elements(QWEN, "layer") < saved_elements(QWEN, "dots") < saved_elements(QWEN, "none")


@pytest.mark.parametrize("policy", ("none", "dots", "layer"))
@pytest.mark.parametrize("m", (1, 4))
def test_slot_limit_is_the_last_that_fits(policy, m):
    """The closed form against trying every J."""
    problem = instance([job(0, 64, 8, 2), job(1, 16, 8, 0)], "1xA100-80GB", QWEN)
    need = problem.need(problem.counts)
    fitting = [J for J in range(1, 200) if problem.memory(1, J, m, policy, need) <= problem.limit]
    assert problem.slot_limit(1, m, policy, need) == max(fitting, default=0)


def test_a_pack_is_charged_a_buffer_of_summed_gradients_where_it_keeps_one():
    """At m = 4: batches of 4 end with their micro-step; beside a batch of 8, or in rows that share, none does."""
    direct, longer = replace(job(0, 16, 4, 1), accumulate=False), job(1, 16, 8, 1)
    shared = replace(direct, job_id="job-2", accumulate=True)
    model = cost_model(DEVICES["A100-80GB"]).memory
    buffer = 4 * QWEN.adapter_params(16) * model.adapters * (1 + model.margin)
    for other, m, summed in ((direct, 4, False), (direct, 2, True), (longer, 4, True), (shared, 4, True)):
        jobs = [direct] if other is direct else [direct, other]
        problem = instance(jobs, "1xA100-80GB", QWEN)
        need = problem.need(problem.counts)
        step = StepShape(1, 6, m, need.S_max, need.bucket, "dots", accumulate=False)
        least = step_memory(QWEN, step, "bf16", model)
        assert problem.memory(1, 6, m, "dots", need) == pytest.approx(least + 6 * buffer * summed, abs=2)
        mode = signature_of(jobs, 6, m, "dots", "bf16")
        assert mode.accumulate == summed
        assert fits(mode, longer) == (summed and 8 % m == 0)


def test_a_pack_that_sums_no_gradients_holds_more_slots_and_the_bound_knows():
    direct, on = [job(i, 128, 1, 1) for i in range(9)], cluster(1, "A100-80GB")
    summed = [replace(j, accumulate=True) for j in direct]
    plans = [make_plan(jobs, QWEN, on, options=Options(baselines=False)) for jobs in (direct, summed)]
    assert [len(pack.slots) for pack in plans[0].packs] == [9] and len(plans[1].packs[0].slots) < 9
    assert plans[0].makespan_s < plans[1].lower_bound_s
    mixed = [job(i, 128, 1) for i in range(18)] + [job(18, 128, 2)]
    plans.append(make_plan(mixed, QWEN, on, options=Options(baselines=False)))
    for jobs, plan in zip((direct, summed, mixed), plans, strict=True):
        assert check_plan(plan, jobs, QWEN, on, cost_model(on.spec)) == []


def test_fit_on_compiled_steps_holds_on_held_out_ones():
    """Steps compiled for an H200: ten held out are within 6.5 %, and none is under the prediction with margin."""
    points = read_memory_points(POINTS)
    held_out = points[2::3]
    model, fit = fit_memory([p for p in points if p not in held_out], held_out)
    assert fit.points == 10 and fit.worst <= 0.065 and fit.mean <= 0.025
    for p in points:
        assert step_memory(p.shape, p.step, p.precision, model, p.attention) >= p.bytes * (1 - 1e-6)


def test_the_shipped_factors_are_that_fit():
    points = read_memory_points(POINTS)
    shipped = cost_model(DEVICES["H200"]).memory
    assert "measured" in shipped.source
    # the fused kernel keeps less, and its own margin
    fused = read_memory_points(POINTS.with_name(POINTS.name.replace("h200", "h200-fused")))
    for p in (*points, *fused):
        assert step_memory(p.shape, p.step, p.precision, shipped, p.attention) >= p.bytes * (1 - 1e-6)


def test_steps_on_an_fp8_base_take_no_more_than_predicted():
    """In a loop XLA keeps a transposed copy of the weights; where layers are recomputed, less of it at the peak."""
    shipped = cost_model(DEVICES["H200"]).memory
    for p in read_memory_points(POINTS.with_name(POINTS.name.replace("h200", "h200-fp8"))):
        predicted = step_memory(p.shape, p.step, p.precision, shipped, p.attention)
        assert p.precision == "fp8" and p.bytes <= predicted <= p.bytes * (
            1.25 if p.step.policy == "layer" else 1.1
        )


def test_fit_recovers_factors_it_was_made_from():
    points = read_memory_points(POINTS)
    true = MemoryModel(1.1, 0.9, 1.3, 0.8, 1.2, 0.7, 1.0, 0.6, 3e8, 0.0)
    made = [p._replace(bytes=step_memory(p.shape, p.step, p.precision, true, p.attention)) for p in points]
    model, fit = fit_memory(made[:20], made[20:])
    assert fit.worst < 0.02 and model.adapters == pytest.approx(0.9, rel=0.05)


def test_bad_points_are_refused(tmp_path):
    path = tmp_path / "points.json"
    path.write_text(json.dumps([{"model": {}}]), encoding="utf-8")
    with pytest.raises(PlanError, match="memory points"):
        read_memory_points(path)
    with pytest.raises(PlanError, match="cannot tell"):
        fit_memory(read_memory_points(POINTS)[:3], [])


def test_a_step_may_use_a_share_of_the_device():
    assert DeviceSpec("x", 100, 0.9).limit_bytes == 90
