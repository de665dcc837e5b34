"""A base in fp8: loaded, trained in packs, scored, exported, and refused where it cannot run."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Device, quantise_weight
from planner.devices import DEVICES
from plora_jax import adapters as lora
from plora_jax.cli import main
from plora_jax.config.sweep import load_sweep
from plora_jax.errors import UserError
from plora_jax.models import load
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base, load_base
from plora_jax.peft import CONFIG
from plora_jax.planning import sweep_problem
from plora_jax.search.configurations import search_jobs
from plora_jax.training.step import empty_pack, fresh_slot, make_load_slot, make_train_step, pack_spec
from tests import tiny
from tests.peft_cases import micro_batch
from tests.test_equivalence import JOBS, relative, rows_of, start

WIDE = {"hidden_size": 32, "intermediate_size": 48, "attention_bias": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write_model(tmp_path_factory.mktemp("base") / "model", **WIDE)
    tiny.write_weights(directory)
    return directory


@pytest.fixture(scope="module")
def base(model: Path) -> Base:
    return load_base(str(model), precision="fp8", dtype=jnp.float32)


def test_the_layers_weights_are_rounded_and_nothing_else(model: Path) -> None:
    rounded, plain = load_base(str(model), precision="fp8"), load_base(str(model), precision="bf16")
    exact = load_base(str(model), precision="fp32")
    assert (rounded.precision, plain.precision, exact.precision) == ("fp8", "bf16", "fp32")
    sites = {site.name for site in rounded.config.sites}
    found = dict(rounded.params.flat_state())
    for path, leaf in plain.params.flat_state():
        if path[-1] != "w":
            np.testing.assert_array_equal(found.pop(path)[...], leaf[...])
            continue
        sites.remove(path[1])
        whole = exact.params["layers"][path[1]]["w"][...]
        values, scale = quantise_weight(whole.swapaxes(1, 2))
        held, own_scale = found.pop(path)[...], found.pop((*path[:-1], "scale"))[...]
        assert held.dtype == jnp.float8_e4m3fn and own_scale.shape == held.shape[:2]  # one an output feature
        np.testing.assert_array_equal(held, values)
        np.testing.assert_array_equal(own_scale, scale)
    assert not sites and not found


def test_random_weights_are_those_of_bf16_rounded(model: Path) -> None:
    rounded, plain = (load_base(str(model), precision=p, random_weights=True) for p in ("fp8", "bf16"))
    values, scale = quantise_weight(plain.model().layers.up_proj.w[...].swapaxes(1, 2))
    np.testing.assert_array_equal(rounded.model().layers.up_proj.w[...], values)
    np.testing.assert_array_equal(rounded.model().layers.up_proj.scale[...], scale)


def gradients(base: Base, jobs: list[lora.Job], runtime: Runtime) -> list[lora.Adapter]:
    spec = pack_spec(base.config, jobs)
    load_slot, state = make_load_slot(spec), empty_pack(base.config, spec)
    for slot, job in enumerate(jobs):
        state = load_slot(state, slot, *fresh_slot(base.config, spec, job, 10, start(base.config, job)))
    batch = micro_batch([rows_of(job)[:2] for job in jobs], [False] * len(jobs), 0)
    state, _ = make_train_step(base, spec, runtime)(state, base.params, batch)
    return [lora.unstack_adapter(base.config, job, state.grads, slot) for slot, job in enumerate(jobs)]


def test_a_job_in_a_pack_has_the_gradients_it_has_alone(base: Base) -> None:
    packed, (alone,) = gradients(base, JOBS, Runtime()), gradients(base, JOBS[:1], Runtime())
    assert relative(packed[0], alone) < 1e-5
    assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(alone))


@pytest.mark.parametrize(
    "change", [{"unroll": 2}, {"recompute": "dots"}, {"recompute": "layer"}, {"recomputed": 1}]
)
def test_layers_written_out_or_recomputed_give_the_same_gradients(base: Base, change: dict) -> None:
    (plain,) = gradients(base, JOBS[:1], Runtime())
    (other,) = gradients(base, JOBS[:1], dataclasses.replace(Runtime(), **change))
    assert relative(other, plain) < 1e-5


@pytest.mark.parametrize(("backward", "operand"), [("e4m3", "f8E4M3FN"), ("e5m2", "f8E5M2")])
def test_every_frozen_product_of_a_step_is_of_fp8_numbers(base: Base, backward: str, operand: str) -> None:
    """Seven forward, seven for dx, each over the tokens of all jobs; no other product has a whole weight in it."""
    spec = pack_spec(base.config, JOBS)
    batch = micro_batch([rows_of(job)[:2] for job in JOBS], [True] * len(JOBS), 0)
    step = make_train_step(base, spec, Runtime(fp8_backward=backward))  # type: ignore[arg-type]
    text = step.lower(empty_pack(base.config, spec), base.params, batch).as_text()  # type: ignore[attr-defined]
    found = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>", text)
    tokens = batch.tokens.size
    sites = base.config.sites
    want = [
        (f"{tokens}x{s.d_in}xf8E4M3FN", f"{s.d_out}x{s.d_in}xf8E4M3FN", f"{tokens}x{s.d_out}xf32")
        for s in sites
    ]
    want += [
        (f"{tokens}x{s.d_out}x{operand}", f"{s.d_out}x{s.d_in}xf8E4M3FN", f"{tokens}x{s.d_in}xf32")
        for s in sites
    ]
    assert sorted(dots for dots in found if "f8" in "".join(dots)) == sorted(want) and len(want) == 14


def test_a_sweep_on_it_is_trained_scored_and_exported(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = model.parent
    data = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16, "metric": "exact_match"}
    path = tiny.write_sweep(
        root,
        data=data,
        search={"rank": [4], "learning_rate": [1e-2]},
        train={"batch_size": 2, "epochs": 4},
        precision="fp8",
    )
    assert main(["sweep", str(path), "--out", str(root / "run")]) == 0
    assert main(["sweep", str(path), "--out", str(root / "run"), "--resume"]) == 0
    plan = json.loads((root / "run" / "plan.json").read_text())
    board = json.loads((root / "run" / "leaderboard.json").read_text())
    adapter = root / "run" / board["jobs"][0]["adapter"]
    assert plan["precision"] == "fp8" and board["jobs"][0]["status"] == "completed"
    assert (
        "fp8" not in (adapter / CONFIG).read_text()
        and "rounded to fp8" in (adapter / "README.md").read_text()
    )
    losses = {}
    for precision in ("fp8", "bf16"):
        out = root / f"{precision}.json"
        command = [
            "eval",
            "--model",
            str(model),
            "--adapter",
            str(adapter),
            "--data",
            str(root / "eval.jsonl"),
        ]
        assert main([*command, "--max-length", "16", "--base", precision, "--json", str(out)]) == 0
        losses[precision] = [row["loss"] for row in json.loads(out.read_text())]
    assert losses["fp8"] == pytest.approx([board["base"]["loss"], board["jobs"][0]["loss"]], rel=1e-3)
    assert losses["bf16"] != pytest.approx(losses["fp8"], rel=1e-3)


def test_gpus_without_it_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_sweep(model.parent, precision="fp8")
    sweep = load_sweep(path)
    jobs = search_jobs(sweep)
    with pytest.raises(UserError, match=r"fp8 cannot run on A100-40GB: it has no fp8 products; use bf16"):
        sweep_problem(sweep, jobs, devices="8xA100-40GB")
    assert sweep_problem(sweep, jobs, devices="L40S").precision == "fp8"
    assert {name for name, spec in DEVICES.items() if not spec.fp8} == {
        "A100-40GB",
        "A100-80GB",
        "A10",
    }
    monkeypatch.setattr(load, "default_device", lambda: Device("NVIDIA A100", "8.0", 108))
    with pytest.raises(UserError, match=r"fp8 cannot run on NVIDIA A100: compute capability 8\.0"):
        load_base(str(model), precision="fp8")
    assert load_base(str(model), precision="bf16").precision == "bf16"
