"""make_plan on the sweeps a user starts with."""

from dataclasses import replace

import pytest

from planner import (
    Devices,
    JobSpec,
    Options,
    Plan,
    PlanError,
    cpu_device,
    decoder_shape,
    devices,
    make_plan,
    render_plan,
)
from planner.devices import DEVICES
from tests.planner.problems import instance, job

SMOL = decoder_shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, tied=True)
QWEN = decoder_shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064)


def quickstart() -> list[JobSpec]:
    """Make the eight jobs of `plora quickstart`."""
    return [
        JobSpec(f"r{r}b{b}l{lr}", r, b, 64, 30.0, 47, "sentiment", eval_tokens=1920)
        for r in (8, 16) for b in (4, 8) for lr in (1, 2)
    ]  # fmt: skip


def test_quickstart_is_one_pack_of_all_jobs():
    plan = make_plan(quickstart(), SMOL, cpu_device(6 * 10**9, 2), precision="fp32")
    (pack,) = plan.packs
    assert len(pack.jobs) == 8 and 4 % pack.m == 0 and set(pack.slots) == {16}
    assert pack.memory_bytes <= pack.memory_limit_bytes == int(6e9 * 0.8)
    assert plan.lower_bound_s <= plan.makespan_s


def test_published_parameter_counts():
    """Qwen2.5-7B has 7.61 B parameters and SmolLM2-135M 134.5 M (their model cards); r = 32 adds 80.7 M."""
    assert QWEN.n_params == pytest.approx(7.6156e9, rel=1e-3)
    assert SMOL.n_params == 134_515_008
    assert QWEN.adapter_params(32) == 80_740_352


def test_plan_survives_json_and_renders():
    plan = make_plan(quickstart(), SMOL, cpu_device(6 * 10**9, 2), precision="fp32")
    assert Plan.from_json(plan.to_json()) == plan
    assert "8 jobs of SmolLM2-135M" in render_plan(plan)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: make_plan([], SMOL, devices("A10")), "no jobs"),
        (lambda: make_plan(quickstart(), QWEN, devices("1xA10"), precision="fp32"), "devices would hold it"),
        (lambda: make_plan(quickstart(), QWEN, devices("RTX4090"), precision="fp32"), "bf16 would fit"),
        (lambda: devices("8xTPU"), "A100-40GB"),
        (lambda: make_plan(quickstart(), SMOL, devices("A10"), options=Options(policies=("all",))), "none, dots"),
        (lambda: make_plan(quickstart(), SMOL, devices("A10"), options=Options(policies=())), "choose some"),
        (lambda: Options(policies="dots"), "'dots'; choose"),
        (lambda: devices("0xA10"), "between 1 and"),
        (lambda: JobSpec("a", 0, 1, 1, 1, 1), "rank is 0"),
        (lambda: JobSpec("a", 8, 1, 1, 9, 8), "exceeds max_row_tokens"),
    ],
)  # fmt: skip
def test_bad_input_says_what_is_wrong(run, words):
    with pytest.raises(PlanError, match=words):
        run()


def test_a_job_that_fits_by_whole_batches_alone_is_planned():
    """No sum of gradients is kept where a micro-step is a whole batch; with rank 128 that outweighs a row more."""
    one = replace(job(0, rank=128, batch=2), row_tokens=60.0, max_row_tokens=64, accumulate=False)
    problem = instance([one], "1xH200", QWEN)
    need = problem.need(((0, 1),))
    whole, split = (problem.memory(1, 1, m, "layer", need) for m in (2, 1))
    assert whole < split
    spec = replace(DEVICES["H200"], memory_bytes=int((whole + split) / 2 / DEVICES["H200"].usable))
    plan = make_plan([one], QWEN, Devices(spec, 1), options=Options(baselines=False))
    assert [pack.m for pack in plan.packs] == [2] and plan.packs[0].memory_bytes <= spec.limit_bytes < split
