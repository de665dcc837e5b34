"""The packed step against PEFT + torch: fifteen settings, 20 optimizer steps, one pack a model.

The goldens come from `scripts/goldens/peft.py`, which names the versions. Every setting of a model shares its
pack with all the others: other ranks, schedules, optimizers, batch sizes (so some slots end early and idle).
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from plora_jax import adapters as lora
from plora_jax import peft
from plora_jax.jobs import Job
from plora_jax.models.decoder import LoRA
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import GOLDENS, base_of, job_of, probe_logits, run_pack

GOLDEN = json.loads((GOLDENS / "peft.json").read_text())
FAMILIES = {f: [n for n, s in recipe.SETTINGS.items() if s["model"] == f] for f in recipe.MODELS}


class Trained(NamedTuple):
    """What one setting's slot recorded at each optimizer step, and its final adapter by PEFT key."""

    loss: list[float]
    grad_norm: list[float]
    lr: list[float]
    tokens: list[int]
    start: dict[str, np.ndarray]
    final: dict[str, np.ndarray]


def start_of(config: lora.ModelConfig, job: Job) -> lora.Adapter:
    """Return the recipe's starting adapter: A from numpy, B zero."""
    zeros = {
        site.name: lora.Factors(
            np.zeros((len(r), r.max(), site.d_in)), np.zeros((len(r), site.d_out, r.max()))
        )
        for site in config.sites
        if (r := lora.ranks(config, job).get(site.name)) is not None
    }
    shapes = {key: value.shape for key, value in peft.adapter_tensors(config, job, zeros).items()}
    drawn = recipe.adapter(shapes)
    for site, layer, path in lora.modules(config):
        if (key := f"base_model.model.{path}.lora_A.weight") in drawn:
            zeros[site.name].a[layer, : len(drawn[key])] = drawn[key]
    return zeros


def train(family: str, names: list[str], m: int, directory: Path) -> dict[str, Trained]:
    """Train settings in one pack with m sequences a slot and micro-step."""
    base, jobs = base_of(directory, family), [job_of(name) for name in names]
    starts = [start_of(base.config, job) for job in jobs]
    state, records = run_pack(base, jobs, [recipe.rows(name) for name in names], m, starts)
    assert np.asarray(state.step).tolist() == [recipe.STEPS] * len(names)
    assert not np.asarray(state.skipped).any()
    out = {}
    for slot, (name, job) in enumerate(zip(names, jobs, strict=True)):
        final = lora.unstack_adapter(base.config, job, state.weights, slot)
        tensors = (peft.adapter_tensors(base.config, job, adapter) for adapter in (starts[slot], final))
        fields = (records[slot][field] for field in ("loss", "grad_norm", "learning_rate", "tokens"))
        out[name] = Trained(*fields, *tensors)
    return out


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    out = {}
    for family, names in FAMILIES.items():
        out |= train(family, names, 1, tmp_path_factory.mktemp(family))
    return out


@pytest.fixture(scope="module")
def finals() -> dict[str, np.ndarray]:
    return load_file(GOLDENS / "peft_adapters.safetensors")


def distance(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Return |ours - theirs| / |theirs|, both as one long vector."""
    assert ours.keys() == theirs.keys()
    square = sum(float(np.square(ours[k].astype(np.float64) - theirs[k]).sum()) for k in theirs)
    return (square / sum(float(np.square(theirs[k].astype(np.float64)).sum()) for k in theirs)) ** 0.5


def of_setting(finals: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(f"{name}/"): value for key, value in finals.items() if key.startswith(f"{name}/")
    }


def test_numpy_draws_what_it_drew_for_the_goldens() -> None:
    ours = {family: recipe.checksum(recipe.weights(config)) for family, config in recipe.MODELS.items()}
    assert ours == GOLDEN["checksums"]


@pytest.mark.parametrize("name", recipe.SETTINGS)
def test_losses_equal_pefts(packs: dict[str, Trained], name: str) -> None:
    golden = GOLDEN["settings"][name]
    np.testing.assert_allclose(packs[name].loss, golden["loss"], rtol=1e-4)
    assert packs[name].tokens == golden["tokens"]


@pytest.mark.parametrize("name", recipe.SETTINGS)
def test_final_adapters_equal_pefts(
    packs: dict[str, Trained], finals: dict[str, np.ndarray], name: str
) -> None:
    theirs = of_setting(finals, name)
    assert distance(packs[name].final, theirs) < 1e-3
    ours_b, theirs_b = ({k: v for k, v in t.items() if ".lora_B." in k} for t in (packs[name].final, theirs))
    assert distance(ours_b, theirs_b) < 1e-3  # B starts at zero, so this is all training


@pytest.mark.parametrize("name", recipe.SETTINGS)
def test_rates_and_norms_equal_transformers_and_torchs(packs: dict[str, Trained], name: str) -> None:
    golden = GOLDEN["settings"][name]
    peak = recipe.SETTINGS[name]["learning_rate"]  # 1 + cos(x) loses digits in float32 near the end
    np.testing.assert_allclose(packs[name].lr, golden["lr"], rtol=1e-6, atol=1e-7 * peak)
    np.testing.assert_allclose(packs[name].grad_norm, golden["grad_norm"], rtol=1e-3)


def test_the_settings_can_tell_right_from_wrong(
    packs: dict[str, Trained], finals: dict[str, np.ndarray]
) -> None:
    """Training must have moved adapters by far more than the tolerance, and clipping must have acted."""
    for name, trained in packs.items():
        assert distance(trained.start, of_setting(finals, name)) > 0.01, name
    assert min(GOLDEN["settings"]["tight_clip"]["grad_norm"]) > 0.05
    assert max(GOLDEN["settings"]["sgd_momentum"]["grad_norm"]) > 1.0
    labels = [int(mask[1:].sum()) for _, mask in recipe.rows("unclipped_warmup")]
    assert labels.count(0) >= 10, "rows without a label are among the data"
    assert 0 in GOLDEN["settings"]["unclipped_warmup"]["tokens"], "and a whole batch without one"


@pytest.mark.parametrize("family", recipe.MODELS)
def test_adapters_made_by_peft_give_the_logits_they_give_in_peft(family: str, tmp_path: Path) -> None:
    golden = load_file(GOLDENS / "peft_logits.safetensors")
    base = base_of(tmp_path, family)
    adapter, fields = peft.import_adapter(GOLDENS / f"peft_made_{family}", base.config)
    scales = lora.scales(base.config, Job(**fields))
    logits = probe_logits(base, {name: LoRA(f.a, f.b, scales[name]) for name, f in adapter.items()})
    assert np.abs(golden[family] - golden[f"{family}_base"]).max() > 0.1
    np.testing.assert_allclose(probe_logits(base), golden[f"{family}_base"], atol=1e-4)
    np.testing.assert_allclose(logits, golden[family], atol=1e-4)
