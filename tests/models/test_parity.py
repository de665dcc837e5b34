"""Every family against transformers, peft and torch: scripts/goldens/models.py made the files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.models.config import SOURCES, config_from_hf
from plora_jax.models.decoder import Runtime
from plora_jax.models.families import FAMILIES
from plora_jax.models.load import load_base
from tests.models import tiny

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
CASES = sorted(path.stem for path in GOLDENS.glob("*.npz"))


def test_every_family_has_a_golden():
    seen = {json.loads(str(np.load(GOLDENS / f"{case}.npz")["config"]))["model_type"] for case in CASES}
    assert seen == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_lora_gradients(case, tmp_path):
    golden = np.load(GOLDENS / f"{case}.npz")
    config = tiny.write(tmp_path, json.loads(str(golden["config"])))
    assert config.n_params == golden["n_params"]
    base = load_base(str(tmp_path), precision="fp32")
    tokens = jnp.asarray(golden["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    rows = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[:, None], tokens.shape)
    adapters = tiny.adapters(config, int(golden["rank"]), float(golden["alpha"] / golden["rank"]))
    runtime = Runtime(precision="highest")

    @jax.jit
    def run(adapters, strength):
        def loss(adapters):
            scaled = {name: lora._replace(scale=lora.scale * strength) for name, lora in adapters.items()}
            model = base.model()
            hidden = model.hidden(tokens, positions, rows, scaled, runtime=runtime)
            logits = model.logits(hidden, runtime=runtime)
            at_target = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
            return -at_target.mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(adapters)

    (value, logits), grads = run(adapters, 1.0)
    (_, plain), _ = run(adapters, 0.0)
    assert np.abs(golden["logits"] - golden["base_logits"]).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(plain, golden["base_logits"], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-5)
    expected = {k.removeprefix("grad/"): golden[k] for k in golden.files if k.startswith("grad/")}
    assert len(expected) == 2 * config.n_layers * len(config.sites)
    for site in config.sites:
        for layer in range(config.n_layers):
            for factor, gradient in (("lora_A", grads[site.name].a), ("lora_B", grads[site.name].b)):
                want = expected[f"{config.module_path(site, layer)}.{factor}.weight"]
                error = np.linalg.norm(gradient[layer] - want) / np.linalg.norm(want)
                assert error < 1e-3, (site.name, layer, factor, error)


def test_sources_name_every_input():
    for family in FAMILIES:
        config = config_from_hf({**tiny.LLAMA, "model_type": family, "sliding_window": 8, "head_dim": 8})
        assert [s for s in SOURCES if config.sites_of(s)] == list(SOURCES)
