"""Memory: hand counts, growth with each size, and what a real step needs."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from planner import (
    MOMENT_BYTES,
    DeviceSpec,
    MemoryModel,
    Options,
    StepShape,
    check_plan,
    cost_model,
    cpu_device,
    decoder_shape,
    fit_memory,
    make_plan,
    read_memory_points,
    step_memory,
)
from planner.check_models import pack_bytes
from planner.devices import DEVICES, Devices
from planner.errors import PlanError
from planner.memory import memory_terms, saved_elements
from planner.signature import fits, signature_of
from tests.planner.problems import QWEN, cluster, instance, job

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
POINTS = RESULTS / "memory-points-h200-2026-12-03.json"
FUSED = RESULTS / "memory-points-h200-fused-2026-12-03.json"
OFFLOAD = RESULTS / "memory-points-h200-offload-2026-12-02.json"
FAMILIES = RESULTS / "memory-points-h200-families-2026-12-03.json"
H200, A100 = DEVICES["H200"], DEVICES["A100-80GB"]
CPU = cpu_device(2**35).spec
STEP = StepShape(1, 8, 1, 1024, 32, "layer")


def test_terms_by_hand():
    """8 × 80.7 M adapter parameters × 20 bytes; 8,192 tokens × 28 layers × 3,584 × 2 bytes; 7.6 B × 2 bytes."""
    terms = memory_terms(QWEN, STEP, "bf16", H200)
    assert terms["adapters"] == 8 * 80_740_352 * (4 * 4 + 2 + 2)
    assert terms["saved_layer"] == 8192 * 28 * 3584 * 2
    assert terms["weights"] == 2 * QWEN.n_params
    assert terms["logits"] == 6 * 1024 * 152_064
    assert terms["attention"] == 0
    terms = memory_terms(QWEN, STEP, "fp32", CPU)
    assert terms["adapters"] == 8 * 80_740_352 * 4 * 5 and terms["logits"] == 8 * 1024 * 152_064


def test_layers_written_out_by_hand():
    """A token's numbers of a layer, whatever multiplies and of however few tokens."""
    step = replace(STEP, policy="none", accumulate=False)
    tokens, own = 8192, 6 * 3584 + 2 * 512 + 3 * 18_944
    for device in (H200, A100):
        terms = memory_terms(QWEN, step, "bf16", device)
        assert terms["saved_none"] == tokens * 28 * own * 2
        assert terms["adapters"] == 8 * 80_740_352 * (
            12 + 2
        )  # gradients take the place of what backward has used
    terms = memory_terms(QWEN, step, "bf16", CPU)
    assert terms["saved_none"] == tokens * 28 * (9 * 3584 + 2 * 512 + 5 * 18_944) * 2
    few = memory_terms(QWEN, replace(step, J=1), "bf16", A100)
    assert few["saved_none"] == 1024 * 28 * own * 2


@pytest.mark.parametrize("rank", (16, 512))
@pytest.mark.parametrize(
    "d_model, d_ff", [(768, 3072), (896, 4864), (3584, 18_944), (4096, 14_300), (2048, 5504 + 64)]
)
def test_the_fused_kernel_is_counted_where_it_is_chosen(d_model, d_ff, rank):
    """As `pallas_kernels.choose` decides for gate and up of an H200, which the planner cannot ask, on an fp8 base: a
    loop that keeps products transposes no weights then but some.
    """
    from pallas_kernels.choice import Device, choose

    device, shape = Device("NVIDIA H200", "9.0", 132), decoder_shape("x", 1, d_model, d_ff, 8, 2, 128, 1000)
    seen = set()
    for J, m, S in product((1, 2, 5, 9, 30), (1, 3), (20, 64, 120, 128, 192, 250, 384, 1024)):
        call = ("bfloat16", J, m * S, d_model, [d_ff, d_ff], [rank, rank])
        chosen = choose(*call, fp8=True, device=device, mode="auto")
        if chosen.name == "xla" and "tiles are fewer" in chosen.reason:
            continue  # given slots enough
        step = StepShape(1, J, m, S, rank, "dots")
        weights = memory_terms(shape, step, "fp8", H200)["weights"]
        without = memory_terms(shape, step, "fp8", replace(H200, fused=0))["weights"]
        assert (weights < without) == (chosen.name == "hopper")
        seen.add(chosen.name)
    serves = rank == 16 and d_model > 800 and d_ff % 128 == 0
    assert seen == ({"hopper", "xla"} if serves else {"xla"})


@pytest.mark.parametrize("d_model, vocabulary", [(896, 151_936), (768, 50_257), (1000, 32_000)])
@pytest.mark.parametrize("precision", ("bf16", "fp8", "fp32"))
def test_the_head_is_counted_as_it_is_chosen(d_model, vocabulary, precision):
    """Two bytes a logit where `pallas_kernels.choose_head` says so; never less for more tokens."""
    from pallas_kernels.choice import Device, choose_head

    device = Device("NVIDIA H200", "9.0", 132)
    shape = replace(decoder_shape("x", 1, d_model, 3072, 8, 2, 128, 1000), vocab_size=vocabulary)
    dtype, a_logit = ("float32", 8) if precision == "fp32" else ("bfloat16", 6)
    before = 0
    for tokens in (1, 200, 255, 256, 700, 800, 1024, 5000):
        positions = min(tokens, 1024)
        serves = (
            choose_head(dtype, positions, (vocabulary, d_model), mode="auto", device=device).name == "hopper"
        )
        sizes = {}
        for policy in ("none", "dots", "layer", "offload"):
            step = StepShape(1, 1, 1, tokens, 16, policy)
            sizes[policy] = memory_terms(shape, step, precision, H200)["logits"] / vocabulary
        assert sizes["layer"] == sizes["offload"] == a_logit * positions
        assert (
            sizes["none"] == sizes["dots"] == (max(255 * 6, 2 * positions) if serves else a_logit * positions)
        )
        assert sizes["none"] >= before
        before = sizes["none"]


def test_layers_of_other_families_by_hand():
    """Second norms keep their inputs, and products of q, k and v; norms of q and k theirs."""
    step, tokens = replace(STEP, policy="none"), 8192

    def kept(device=H200, precision="bf16", term="saved_none", **facts):
        terms = memory_terms(replace(QWEN, **facts), step, precision, device)
        return terms[term] / tokens / 2 / (28 if term == "saved_none" else 1)

    for device in (H200, A100):
        for term in ("saved_none", "working"):
            plain = kept(device, term=term)
            assert kept(device, term=term, norms=4) - plain == 2 * 3584 + 3584 + 2 * 512
            assert kept(device, term=term, qk_norm=True) - plain == 3584 + 512
            assert kept(device, term=term, flash=False) == plain


def test_scores_that_cudnn_cannot_serve_by_hand():
    """Six bytes a score: of every layer and once more, or of one recomputed, and again beyond its MLP's numbers."""
    shape, one = replace(QWEN, flash=False), 6 * 8192 * 28 * 1024
    for policy, layers in (("none", 29), ("dots", 1), ("layer", 1)):
        step = replace(STEP, policy=policy)
        assert memory_terms(shape, step, "bf16", H200)["attention"] == layers * one
        assert memory_terms(shape, step, "bf16", CPU) == memory_terms(QWEN, step, "bf16", CPU)
    longer = memory_terms(shape, replace(STEP, J=1, S=8192), "bf16", H200)["attention"]
    assert longer == 2 * 8 * one - 5 * 8192 * 18_944 * 2


@pytest.mark.parametrize("change", [{"degree": 2}, {"precision": "fp32"}])
def test_the_fused_kernel_serves_one_device_and_no_wider_numbers(change):
    step, precision = (
        replace(STEP, policy="none", degree=change.get("degree", 1)),
        change.get("precision", "bf16"),
    )
    kept = [memory_terms(QWEN, step, precision, d)["saved_none"] for d in (H200, A100)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("device", (H200, A100, CPU), ids=lambda d: d.name)
@pytest.mark.parametrize("m, S", [(1, 128), (1, 8), (4, 1024), (1, 192)])
def test_more_slots_never_take_less(device, m, S):
    for policy, rank in product(("none", "dots", "layer", "offload"), (8, 128)):
        sizes = [
            step_memory(QWEN, StepShape(1, J, m, S, rank, policy), "bf16", device) for J in range(1, 200)
        ]
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("change", [{"J": 9}, {"m": 2}, {"S": 1032}, {"rank_bucket": 64}, {"policy": "dots"}])
def test_more_of_anything_needs_more(change):
    assert step_memory(QWEN, replace(STEP, **change), "bf16", H200) > step_memory(QWEN, STEP, "bf16", H200)


def test_what_saves_memory():
    for change in ({"degree": 2}, {"optimizers": frozenset({"sgd"})}, {"targets": frozenset({"q_proj"})}):
        assert step_memory(QWEN, replace(STEP, **change), "bf16", H200) < step_memory(
            QWEN, STEP, "bf16", H200
        )
    sizes = [step_memory(QWEN, STEP, p, H200) for p in ("nf4", "int8", "bf16", "fp32")]
    assert sizes == sorted(sizes)
    assert saved_elements(QWEN, "layer") < saved_elements(QWEN, "dots") < saved_elements(QWEN, "none")


@pytest.mark.parametrize("kinds, number", [(("adamw_bf16",), 4), (("sgd",), 4), (("adamw", "sgd"), 12)])
def test_a_pack_holds_the_moments_of_every_optimizer_in_it(kinds, number):
    """By hand: 8 jobs of rank 32 are 8 × 80,740,352 parameters; AdamW keeps 8 bytes for each, bfloat16 moments 4."""

    def need(optimizers):
        return memory_terms(
            QWEN, replace(STEP, J=8, rank_bucket=32, optimizers=frozenset(optimizers)), "bf16", H200
        )

    assert need(kinds)["adapters"] - need(("adamw",))["adapters"] == 8 * 80_740_352 * (number - 8)
    jobs = [replace(job(i, 8, 4, i), optimizer=kind) for i, kind in enumerate(kinds)]
    problem = instance(jobs, "1xA100-80GB", QWEN)
    assert problem.need(problem.counts).optimizers == set(kinds)
    on = cluster(1, "A100-80GB")
    plan = make_plan(jobs, QWEN, on, options=Options(baselines=False))
    assert check_plan(plan, jobs, QWEN, on, cost_model(on.spec)) == []
    mode = signature_of(jobs, 4, 4, "none", "bf16")
    assert {kind for kind in MOMENT_BYTES if fits(mode, replace(jobs[0], optimizer=kind))} == set(kinds)


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
    model = cost_model(A100).memory
    buffer = 4 * QWEN.adapter_params(16) * model.adapters * (1 + model.margin)
    for other, m, summed in ((direct, 4, False), (direct, 2, True), (longer, 4, True), (shared, 4, True)):
        jobs = [direct] if other is direct else [direct, other]
        problem = instance(jobs, "1xA100-80GB", QWEN)
        need = problem.need(problem.counts)
        step = StepShape(1, 6, m, need.S_max, need.bucket, "dots", accumulate=False)
        least = step_memory(QWEN, step, "bf16", A100, model)
        assert problem.memory(1, 6, m, "dots", need) == pytest.approx(least + 6 * buffer * summed, abs=2)
        mode = signature_of(jobs, 6, m, "dots", "bf16")
        assert mode.accumulate == summed
        assert fits(mode, longer) == (summed and 8 % m == 0)


def test_a_pack_that_sums_no_gradients_holds_more_slots_and_the_bound_knows():
    direct, on = [job(i, 128, 1, 1) for i in range(11)], cluster(1, "A100-80GB")
    summed = [replace(j, accumulate=True) for j in direct]
    plans = [make_plan(jobs, QWEN, on, options=Options(baselines=False)) for jobs in (direct, summed)]
    assert [len(pack.slots) for pack in plans[0].packs] == [11] and len(plans[1].packs[0].slots) < 11
    assert plans[0].makespan_s < plans[1].lower_bound_s
    mixed = [job(i, 128, 1) for i in range(18)] + [job(18, 128, 2)]
    plans.append(make_plan(mixed, QWEN, on, options=Options(baselines=False)))
    for jobs, plan in zip((direct, summed, mixed), plans, strict=True):
        assert check_plan(plan, jobs, QWEN, on, cost_model(on.spec)) == []


def error(p, model) -> float:
    """Return prediction / compiled − 1."""
    return step_memory(p.shape, p.step, p.precision, p.device, model) / p.bytes - 1


def test_fit_on_compiled_steps_holds_on_held_out_ones():
    """Steps compiled for an H200, fused kernel or not: held-out ones are within 5 %, and none is under."""
    lists = [read_memory_points(path) for path in (POINTS, FUSED, OFFLOAD)]
    points, held_out = [p for made in lists for p in made], [p for made in lists for p in made[2::3]]
    model, fit = fit_memory([p for p in points if p not in held_out], held_out)
    assert fit.points >= 22 and fit.worst <= 0.05 and fit.mean <= 0.02
    assert min(error(p, model) for p in points) >= -1e-6
    shipped = cost_model(H200).memory
    assert "measured" in shipped.source
    assert 0.02 < model.margin <= shipped.margin < 0.05  # other points asked for more
    assert replace(shipped, source="", margin=0.0) == replace(model, source="", margin=0.0)


def test_predictions_of_steps_that_ran_on_an_h200():
    """Bytes as the card's compiler counted them, of each step that ran as steps run now: within 5 % without the margin,
    never under with it; a model narrower than the fused kernel serves is up to 12 % above.
    """
    shipped, bare = cost_model(H200).memory, replace(cost_model(H200).memory, margin=0.0)
    shapes = {p.shape.name: p.shape for path in (POINTS, FAMILIES) for p in read_memory_points(path)}
    rows = []
    for name in (
        "step-head",
        "step-kept",
        "step-adapters",
        "step-table-h200-2026-12-01b",
        "step-table-h200-2026-12-02e",
    ):
        name = name if name[-1].isalpha() and "2026" in name else f"{name}-h200-2026-12-03"
        for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            current = "12-03" in name and row.get("tree") in (None, "now", "with it")
            # layers that are recomputed run as before
            if (
                row.get("model") in shapes
                and "total_bytes" in row
                and (current or row["recompute"] == "layer")
            ):
                rows.append(row)
    seen = set()
    for row in rows:
        sizes = [row[name] for name in ("jobs", "m", "length", "rank_bucket")]
        step, shape = (
            StepShape(1, *sizes, row["recompute"], accumulate=row["accumulate"]),
            shapes[row["model"]],
        )
        predicted, safe = (step_memory(shape, step, row["precision"], H200, m) for m in (bare, shipped))
        above = 1.12 if shape.d_model < 896 else 1.05
        assert (
            0.95 * row["total_bytes"] <= predicted <= above * row["total_bytes"]
            and safe >= row["total_bytes"]
        ), row
        seen.add((row["model"], row["precision"], row["recompute"], row["length"]))
    assert len(seen) >= 15 and {policy for *_, policy, _ in seen} == {"none", "dots", "layer"}
    assert len({(model, precision) for model, precision, *_ in seen}) >= 8


def test_steps_whose_adapters_are_read_as_they_are_kept_take_no_more_than_predicted():
    """Written-out steps compiled for an H200 after the points that the model is fitted to."""
    shipped, bare = cost_model(H200).memory, replace(cost_model(H200).memory, margin=0.0)
    points = read_memory_points(RESULTS / "memory-points-h200-adapters-2026-12-03.json")
    assert len(points) == 27 and {p.precision for p in points} == {"bf16", "fp8"}
    errors = [error(p, bare) for p in points]
    assert min(errors) > -0.04 and sum(map(abs, errors)) / len(errors) < 0.012
    assert sorted(errors)[-2] < 0.03 and max(errors) < 0.06  # 3B, 12 × 512, rank 64, dots
    assert min(error(p, shipped) for p in points) > 0


def test_steps_on_an_fp8_base_take_no_more_than_predicted():
    """Beside the weights there are transposed copies where layers are recomputed."""
    shipped = cost_model(H200).memory
    for p in read_memory_points(RESULTS / "memory-points-h200-fp8-2026-12-03.json"):
        predicted = step_memory(p.shape, p.step, p.precision, p.device, shipped)
        above = {"layer": 1.1, "dots": 1.1, "none": 1.06}[p.step.policy]
        assert p.precision == "fp8" and p.bytes <= predicted <= p.bytes * above


def test_other_families_take_what_is_predicted():
    """Gemma, Qwen3, OLMo 2 and Phi-3, compiled: within 7 % without the margin, and never under with it.

    Two kinds are up to a seventh above: layers recomputed on an fp8 base, which are not seen to be transposed here, and
    a model narrower than the fused kernel serves.
    """
    shipped, seen, higher = cost_model(H200).memory, set(), 0
    for p in read_memory_points(FAMILIES):
        bare, whole = error(p, replace(shipped, margin=0.0)), error(p, shipped)
        above = (p.step.policy, p.precision) == ("layer", "fp8") or p.shape.d_model < 896
        assert -0.05 <= bare <= (0.15 if above else 0.07) and whole >= 0, (p.shape.name, p.step, p.precision)
        higher += above
        assert p.shape.flash == (p.device.attention == "cudnn")
        assert (
            error(p._replace(device=replace(p.device, attention="cudnn")), shipped) == whole
        )  # as it is planned
        seen.add((p.shape.name.split("-")[0], p.step.policy))
    assert len(seen) >= 8 and higher == 5


def test_the_checker_counts_the_same_for_every_family():
    shapes = {p.shape.name: p.shape for path in (POINTS, FAMILIES) for p in read_memory_points(path)}
    sizes = product((1, 2, 16), (1, 4), (104, 512, 8192), (1, 2))
    for shape, device, (J, m, S, degree) in product(shapes.values(), (H200, A100, CPU), sizes):
        cost, on = cost_model(device), Devices(device, 2)
        for policy, precision in product(("none", "dots", "layer"), ("bf16", "fp8", "fp32")):
            step = StepShape(degree, J, m, S, 32, policy)
            ours = step_memory(shape, step, precision, device, cost.memory)
            slots = [32] * J
            theirs = pack_bytes(shape, cost, on, precision, degree, slots, m, S, policy, 8, None, True)
            assert theirs == pytest.approx(ours, rel=1e-7)


def test_a_plan_of_a_gemma_holds_its_scores():
    """The checker agrees with packs and bound of its plan, and not with those of a plan without the scores."""
    shape = next(p.shape for p in read_memory_points(FAMILIES) if not p.shape.flash)
    jobs, on = [job(i, 16, 4, 2) for i in range(12)], cluster(1, "A100-40GB")
    for known in (shape, replace(shape, flash=True)):
        plan = make_plan(jobs, known, on, options=Options(baselines=False))
        assert (check_plan(plan, jobs, shape, on, cost_model(on.spec)) == []) == (known is shape)


@pytest.mark.parametrize(
    "device, sizes",
    [
        (H200, {"none": 66812790614, "dots": 55179061492, "layer": 34043889607, "offload": 32364962369}),
        (A100, {"none": 67344182202, "dots": 55710453080, "layer": 34043889607, "offload": 32364962369}),
        (CPU, {"none": 124273042790, "dots": 61630273689, "layer": 37707641395, "offload": 35981265868}),
    ],
)  # fmt: skip
def test_a_model_of_llamas_layers_is_predicted_as_before(device, sizes):
    for policy, size in sizes.items():
        model = cost_model(device).memory
        assert step_memory(QWEN, replace(STEP, policy=policy), "bf16", device, model) == size


def test_fit_recovers_factors_it_was_made_from():
    points = read_memory_points(POINTS)
    true = MemoryModel(1.1, 0.9, 1.3, 0.8, 1.2, 1.4, 1.0, 0.875, 3e8, 0.0)
    made = [p._replace(bytes=step_memory(p.shape, p.step, p.precision, p.device, true)) for p in points]
    model, fit = fit_memory([p for n, p in enumerate(made) if n % 3 != 2], made[2::3])
    assert fit.worst < 0.01 and model.adapters == pytest.approx(0.9, rel=0.05)


def test_bad_points_are_refused(tmp_path):
    path = tmp_path / "points.json"
    path.write_text(json.dumps([{"model": {}}]), encoding="utf-8")
    with pytest.raises(PlanError, match="memory points"):
        read_memory_points(path)
    with pytest.raises(PlanError, match="cannot tell"):
        fit_memory(read_memory_points(POINTS)[:3], [])


def test_a_step_may_use_a_share_of_the_device():
    assert DeviceSpec("x", 100, 0.9).limit_bytes == 90
