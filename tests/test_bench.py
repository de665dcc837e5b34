"""`plora bench step` measures the real step: its numbers belong together, and memory is counted, not guessed."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Device, Fp8Weight, lora_dense, using
from planner import CostModel, StepShape, cpu_device, step_memory
from planner.devices import DEVICES
from plora_jax.bench import kernels, profile
from plora_jax.bench import step as bench
from plora_jax.bench.step import measure_step
from plora_jax.bench.trace import PARTS, Instruction, part_of
from plora_jax.cli import main
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.config import SOURCES
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import load_base
from plora_jax.planning import model_shape
from plora_jax.training.recompute import cheapest, choices, needed_bytes, with_policy
from plora_jax.training.step import pack_spec
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
    # 2 jobs × 7 sites × 2 layers: weights and two moments in float32, and the base's parameters
    sites = 16 * 16 + 16 * 8 + 16 * 8 + 16 * 16 + 3 * 16 * 32
    adapters = 2 * 2 * 8 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 32))
    base = 64 * 16 + 2 * (sites + 2 * 16) + 16
    assert result["argument_bytes"] >= 4 * (3 * adapters + base)
    assert result["argument_bytes"] < 4 * (3 * adapters + base) + 20_000
    assert 3.5 < result["loss"] < 5  # random weights: about ln 64
    told = capsys.readouterr().out
    assert "tokens/s" in told and "from the cache" in told
    # 4·16·(16·32 … ) counted by hand: frozen products and head, adapters of bucket 8, causal scores
    tokens, d, f = 2 * 2 * 16, 16, 32
    frozen = 2 * (2 * d * d + 2 * d * 8 + 3 * d * f) + 64 * d
    flops = 4 * tokens * frozen + 6 * tokens * (adapters // 2) + 6 * tokens * 16 * 2 * 2 * 8
    assert result["model_flops_s"] == pytest.approx(flops / (median / 1e3))
    bound = result["ceiling"]
    assert bound["share"] == pytest.approx(result["tokens_s"] / bound["tokens_s"])
    assert list(bound["products"]) == ["attn_in", "attn_out", "mlp_in", "mlp_act", "head"]
    assert bound["flops_s"] > 0 and result["compile_cached_s"] > 0
    assert set(result["parts"]) == {*PARTS, "gaps"}
    # what is sorted is the step: its parts and gaps are no less than half its time, and products are found
    assert sum(result["parts"].values()) > 0.5 * least
    assert result["parts"]["frozen products"] > 0 and result["parts"]["optimizer"] > 0


def test_a_profile_knows_the_kernel_that_rounds():
    """It is neither a frozen product, as other Mosaic kernels are, nor an adapter's, whose scope it may run in."""
    w = Fp8Weight(*(jax.ShapeDtypeStruct(s, t) for s, t in (((128, 128), jnp.float8_e4m3fn), ((128,), "f4"))))
    x, a = jax.ShapeDtypeStruct((1, 128, 128), jnp.bfloat16), jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def run(x, w, a):
        return jax.vmap(lambda x: lora_dense(x, w, a, a.T, 1.0))(x)

    with using("hopper"):
        text = jax.jit(run).trace(x, w, a).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    scopes = [path for path in re.findall(r'loc\("([^"]*)"', text) if re.search(r"\brounding\b", path)]
    assert scopes
    for name in (*scopes, "jit(step)/lora/rounding/kernel"):
        assert part_of("rounding_mosaic_gpu_kernel", Instruction((), "mosaic_gpu_v2", name)) == "elementwise"
    assert part_of("body", Instruction((), "mosaic_gpu_v2", "jit(step)/kernel")) == "frozen products"


def test_recompute_auto_takes_the_least_that_fits(tmp_path, monkeypatch):
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=4)
    base = load_base(str(model), random_weights=True, precision="fp32")
    jobs = [Job(rank=8, targets=("q_proj", "down_proj"))] * 2  # each site is a cost to compile
    batch, spec = bench.random_batch(64, 2, 4, 64), pack_spec(base.config, jobs)
    programs: dict = {}

    def make(runtime):
        if runtime not in programs:
            programs[runtime] = bench.compile_step(base, spec, batch, runtime).compiled
        return programs[runtime]

    every = list(choices(Runtime(segments=False), 4))
    assert [(r.recompute, r.recomputed) for r in every] == [
        ("none", 0), ("dots", 0), ("dots", 1), ("dots", 2), ("dots", 3), ("layer", 0)
    ]  # fmt: skip
    sizes = [needed_bytes(make(runtime)) for runtime in every]
    assert sizes[0] > sizes[1] > sizes[-1] and sizes[2] > sizes[-1]
    for size in sizes:
        runtime, program = cheapest(Runtime(segments=False), 4, size, make)
        assert runtime == every[[s <= size for s in sizes].index(True)] and program is make(runtime)
    with pytest.raises(UserError, match="every layer recomputed"):
        cheapest(Runtime(segments=False), 4, min(sizes) - 1, make)
    asked = []
    cheapest(
        Runtime(segments=False),
        4,
        sizes[0],
        make,
        lambda r: asked.append(r) or (2**40 if len(asked) < 3 else 0),
    )
    assert len(asked) == 3  # two were predicted far too large and not compiled
    monkeypatch.setattr(bench, "device_bytes", lambda: None)
    with pytest.raises(UserError, match="does not tell"):
        measure_step(base, jobs=1, m=1, length=8, rank=8, recompute="auto", repeats=0)


def test_on_a_gpu_only_what_recomputes_whole_layers_has_a_loop(monkeypatch):
    assert with_policy(Runtime(), "none", 4) == Runtime()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert with_policy(Runtime(), "none", 4) == Runtime(unroll=4, kernels="auto")
    assert with_policy(Runtime(recomputed=2), "dots", 4) == Runtime(
        recompute="dots", unroll=4, kernels="auto"
    )
    assert with_policy(Runtime(), "layer", 4) == Runtime(recompute="layer")
    assert with_policy(Runtime(), "offload", 4) == Runtime(recompute="offload")
    with pytest.raises(UserError, match="every layer recomputed, inputs on the host, and the"):
        cheapest(Runtime(), 4, 1, lambda runtime: runtime, lambda runtime: 2)


def test_on_a_gpu_auto_writes_out_all_but_the_last_resort(tmp_path, monkeypatch):
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=4)
    base = load_base(str(model), random_weights=True, precision="fp32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "device_bytes", lambda: 2**40)
    tried = []

    def none_fits(chosen, layers, *_, **__):
        tried.extend(choices(chosen, layers))
        raise UserError("none fits")

    monkeypatch.setattr(bench, "cheapest", none_fits)
    with pytest.raises(UserError):
        measure_step(base, jobs=1, m=1, length=8, rank=8, recompute="auto", repeats=0)
    assert [(r.recompute, r.unroll, r.kernels) for r in tried] == [
        ("none", 4, "auto"), *[("dots", 4, "auto")] * 4, ("layer", 1, "xla"), ("offload", 1, "xla")
    ]  # fmt: skip


def test_bench_predicts_with_the_kernel_that_was_asked_for(tmp_path, monkeypatch):
    """As on an H200; what compiles is the same on a CPU, so that one program serves."""
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    base = load_base(str(model), random_weights=True, precision="fp32")
    asked = []
    monkeypatch.setattr(bench, "_device", lambda: DEVICES["H200"])
    monkeypatch.setattr(bench, "step_memory", lambda *args: asked.append(args[3]) or 0)
    program = bench.compile_step(
        base,
        pack_spec(base.config, [Job(rank=8, batch_size=1, max_steps=1)], m=1),
        bench.random_batch(64, 1, 1, 8),
        Runtime(),
    )
    monkeypatch.setattr(bench, "compile_step", lambda *args: program._replace(runtime=args[3]))
    for chosen, forced in (("auto", None), ("xla", None), ("auto", "xla"), ("xla", "auto")):
        with using(forced) if forced else nullcontext():
            measure_step(base, jobs=1, m=1, length=8, rank=8, repeats=0, runtime={"kernels": chosen})
    assert [device.fused for device in asked] == [132, 0, 0, 132]
    assert {device.attention for device in asked} == {"xla"}


def test_bench_refuses_what_it_does_not_know(tmp_path, capsys):
    assert main(["bench", "step", "--model", str(tmp_path / "absent"), "--jobs", "1"]) == 2
    assert "absent" in capsys.readouterr().err
    for what in ("step", "kernels"):
        assert main(["bench", what, "--model", "Qwen/Qwen2.5-7B-Instruct", "--kernels", "hopper"]) == 2
        assert "the kernel is for H100 and H200, not for cpu; use auto" in capsys.readouterr().err


def test_bench_says_in_words_that_memory_is_too_small(tmp_path, capsys):
    model = tiny.write_model(tmp_path / "model")
    case = ["--model", str(model), "--batch", "1", "--rank", "8", "--length", "1000000000"]
    assert main(["bench", "kernels", *case, "--jobs", "1000"]) == 2  # tokens alone are too large
    told = capsys.readouterr().err
    assert "cpu has not the memory for it: take fewer --jobs" in told and "Traceback" not in told


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
    monkeypatch.setattr(bench, "cost_model", lambda spec: cost)
    measured = measure_step(base, jobs=5, m=1, length=32, rank=8, repeats=0)
    step, cpu = StepShape(1, 5, 1, 32, 8, "none", accumulate=False), cpu_device(2**34).spec
    real, predicted = measured["total_bytes"], step_memory(shape, step, "fp32", cpu, cost.memory)
    assert real <= predicted < 1.3 * real
    alone = replace(cost.memory, margin=0.0)  # of the device's own table
    assert measured["predicted_bytes"] == step_memory(shape, step, "fp32", cpu, alone)
    sweep = tiny.write_sweep(tmp_path)
    arguments = ["plan", str(sweep), "--devices", "cpu", "--cost-model", str(out)]
    assert main(arguments) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "--model", str(model), "--json", str(tmp_path / "no" / "cost.json")])


def test_the_products_of_a_layer_are_timed_and_told_apart(tmp_path, capsys, monkeypatch):
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    out = tmp_path / "kernels.json"
    sizes = ["--jobs", "2", "--length", "8", "--rank", "4", "--json", str(out)]
    assert main(["bench", "kernels", "--model", str(model), *sizes]) == 0
    told, found = capsys.readouterr().out, json.loads(out.read_text())
    config = load_base(str(model), random_weights=True).config
    sites = [[site.name for site in config.sites_of(source)] for source in SOURCES]
    assert [row["sites"] for row in found["products"]] == sites and found["dtype"] == "float32"
    assert found["products"][-1]["shapes"] == [[config.d_ff, config.d_model]]
    for row in found["products"]:
        assert (
            row["implementation"] == "xla" and "no kernel for cpu" in row["reason"] and row["reason"] in told
        )
        assert row["frozen_ms"] > 0 and row["xla_ms"] > 0 and "kernel_ms" not in row
    assert main(["bench", "kernels", "--model", str(model), *sizes, "--base", "fp8"]) == 0
    assert "bfloat16 beside fp8 weights" in capsys.readouterr().out and json.loads(out.read_text())["fp8"]
    monkeypatch.setattr(kernels, "default_device", lambda: Device("NVIDIA A100", "8.0", 108))
    for option, words in ((["--base", "fp8"], "use bf16"), (["--compare", "peft"], "plora bench step")):
        assert main(["bench", "kernels", "--model", str(model), *option]) == 2
        assert words in capsys.readouterr().err
    assert main(["bench", "step", "--model", str(model), "--compare", "peft", "--optimizer", "sgd"]) == 2
    assert "PEFT is timed with AdamW" in capsys.readouterr().err


def test_what_is_timed_is_the_layer_with_its_gradients(tmp_path):
    config = load_base(str(tiny.write_model(tmp_path / "model")), random_weights=True).config
    x, ws, factors = kernels._random(config.sites_of("mlp_in"), 2, 3, 4, np.float32, False)
    ys, (dx, dfactors) = jax.jit(kernels._adapted)(x, ws, factors)
    wide = [np.asarray(t, np.float64) for t in (x, *ws, *jax.tree.leaves(factors))]
    x, (w, v), (a, b, c, d) = wide[0], wide[1:3], wide[3:]
    y, z = x @ w + x @ a.mT @ b.mT, x @ v + x @ c.mT @ d.mT
    np.testing.assert_allclose(ys[0], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ys[1], z, rtol=1e-4, atol=1e-5)
    gradient = y @ w.T + y @ b @ a + z @ v.T + z @ d @ c  # of (|y|² + |z|²)/2
    np.testing.assert_allclose(dx, gradient, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(dfactors[1][1], z.mT @ (x @ c.mT), rtol=1e-3, atol=1e-4)
    alone, [back] = jax.jit(kernels._frozen)(x.astype(np.float32), ws, None)
    flat = x.reshape(-1, x.shape[-1])
    np.testing.assert_allclose(alone[0], flat @ w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back, flat @ w @ w.T + flat @ v @ v.T, rtol=1e-3, atol=1e-4)
