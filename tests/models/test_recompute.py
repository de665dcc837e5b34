"""Recomputing, and writing layers out of the scan, change neither a state nor a gradient."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice, using
from plora_jax import adapters as lora
from plora_jax.bench.step import random_batch
from plora_jax.jobs import Job
from plora_jax.models.decoder import LoRA, Runtime
from plora_jax.models.load import abstract_base, load_base
from plora_jax.training.step import empty_pack, make_train_step, pack_spec
from tests.models.tiny import LLAMA
from tests.pallas_kernels.problems import count_launches

VARIANTS = [
    {"recompute": "dots"},
    {"recompute": "layer"},
    {"unroll": 4},
    {"recompute": "dots", "unroll": 3},
    {"recompute": "layer", "unroll": 4},
    {"recompute": "dots", "recomputed": 1},
    {"recomputed": 3, "unroll": 2},
]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Give a function from runtime to (loss, gradients) of four layers in float64, and what the plain one gives."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
    with jax.enable_x64(True):
        base = load_base(str(folder), random_weights=True, dtype=jnp.float64)
        params = jax.tree.map(lambda leaf: leaf * 5 if leaf.ndim > 2 else leaf, base.params)
        job, random = Job(rank=3), np.random.default_rng(0)
        weights = jax.tree.map(
            lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), lora.init_adapter(base.config, job)
        )
        scales = lora.scales(base.config, job)
        tokens = jnp.asarray(random.integers(0, LLAMA["vocab_size"], (2, 6)), jnp.int32)
        at = jnp.broadcast_to(jnp.arange(6), tokens.shape)
        rows = jnp.asarray([[0, 0, 0, 1, 1, -1], [2] * 6], jnp.int32)

        def run(fields):
            def loss(weights, params):
                sites = {name: LoRA(w.a, w.b, scales[name]) for name, w in weights.items()}
                hidden = base.model(params).hidden(
                    tokens, at, rows, sites, runtime=Runtime(dtype=jnp.float64, **fields)
                )
                return jnp.sin(hidden).sum()

            return jax.jit(jax.value_and_grad(loss))(weights, params)

        yield run, run({})


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_states_and_gradients_stay(case, fields):
    run, (plain, slopes) = case
    value, found = run(fields)
    np.testing.assert_allclose(value, plain, rtol=1e-13)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(slopes), strict=True):
        assert jnp.abs(two).max() > 1e-3
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


def test_layer_inputs_on_the_host_change_no_bit_of_a_step(tmp_path):
    """State and metrics of a packed step, against "layer". On a GPU an input goes there and back in each turn."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    base = load_base(str(tmp_path), random_weights=True, precision="fp32")
    spec = pack_spec(base.config, [Job(rank=8, batch_size=2, max_steps=1)] * 2, m=2)
    batch, found = random_batch(base.config.vocab_size, 2, 2, 16), []
    for policy, moves in (("layer", 0), ("offload", 2)):
        random, empty = np.random.default_rng(0), empty_pack(base.config, spec)
        weights = jax.tree.map(lambda w: jnp.asarray(random.normal(size=w.shape), w.dtype), empty.weights)  # noqa: B023
        state = empty._replace(weights=weights, scales=jax.tree.map(lambda s: s + 0.1, empty.scales))
        step = make_train_step(base, spec, Runtime(recompute=policy))
        there = step.trace(state, base.params, batch).lower(lowering_platforms=("cuda",)).as_text()
        assert there.count("annotate_device_placement") == moves
        found.append(step(state, base.params, batch))
    for one, two in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, two)
    assert found[0][1].grad_norm.min() > 0.01


def test_written_out_layers_that_recompute_hold_less(tmp_path):
    """XLA would make one of a layer's forward pass and its recomputation; barriers keep both, no copies of weights."""
    wide = {"intermediate_size": 512, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wide))
    base = abstract_base(str(tmp_path), dtype=jnp.float32)
    job = Job(rank=8, batch_size=2, max_steps=1, targets=("down_proj",))
    spec = pack_spec(base.config, [job], m=2)

    def temporary(**fields):
        step = make_train_step(base, spec, Runtime(unroll=8, **fields))
        state, batch = (
            jax.eval_shape(lambda: empty_pack(base.config, spec)),
            jax.eval_shape(lambda: random_batch(base.config.vocab_size, 1, 2, 128)),
        )
        return step.lower(state, base.params, batch).compile().memory_analysis().temp_size_in_bytes

    none, dots, layer = (temporary(recompute=policy) for policy in ("none", "dots", "layer"))
    act = 8 * 2 * 128 * 512 * 4  # what SwiGLU gives in all layers; gate and up are twice as much
    assert none - dots > act and dots - layer > act


def test_sums_of_squares_and_leaves_wait_for_one_another(tmp_path):
    """Of fourteen leaves each sum, of a layer's piece where layers are written out, and each leaf's weights and moments
    wait for those before, so that no kernel works on two leaves.
    """
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    base = abstract_base(str(tmp_path), dtype=jnp.float32)
    spec = pack_spec(base.config, [Job(rank=8, batch_size=2, max_steps=1)] * 3, m=2)
    state = jax.eval_shape(lambda: empty_pack(base.config, spec))

    def barriers(**fields):
        batch = jax.eval_shape(lambda: random_batch(base.config.vocab_size, 3, 2, 64))
        step = make_train_step(base, spec, Runtime(**fields)).trace(state, base.params, batch)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
        lines = [line for line in text.splitlines() if "optimization_barrier" in line]
        return [len(re.findall(r"tensor<(?:2x3|3x2)x\d+x\d+xf", line.split(" : ")[1])) for line in lines]

    leaves = [3] * 14
    assert barriers() == [0] * 14 + leaves
    assert barriers(unroll=2) == [0] * 28 + leaves


def test_the_runtime_chooses_the_kernels_of_both_passes(tmp_path, monkeypatch):
    """Lowered for CUDA, a layer launches the fused kernel for seven products forward and four backward, or never; and
    no product again where these are kept.
    """
    monkeypatch.setattr(choice, "default_device", lambda: choice.Device("NVIDIA H200", "9.0", 132))
    monkeypatch.setattr(choice, "MIN_WAVES", 0)
    monkeypatch.setattr(choice, "MIN_DEPTH", 0)
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wide))
    base = abstract_base(str(tmp_path), precision="bf16")
    spec = pack_spec(base.config, [Job(rank=8, batch_size=1, max_steps=1)] * 2, m=1)
    state = jax.eval_shape(lambda: empty_pack(base.config, spec))
    batch = jax.eval_shape(lambda: random_batch(base.config.vocab_size, 2, 1, 128))

    def launches(**fields):
        step = make_train_step(base, spec, Runtime(dtype=jnp.bfloat16, **fields))
        lowered = step.trace(state, base.params, batch).lower(lowering_platforms=("cuda",))
        return count_launches(lowered.as_text())

    assert launches() == 0
    assert launches(kernels="auto") == launches(kernels="auto", recompute="dots") == 11
    with using("xla"):
        assert launches(kernels="auto") == 0


def test_on_an_fp8_base_with_dots_gradients_are_joined_first(tmp_path):
    """All fourteen stacks pass one barrier there, and nowhere else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))

    def joined(precision, **fields):
        base = abstract_base(str(tmp_path), precision=precision)
        spec = pack_spec(base.config, [Job(rank=8, batch_size=2, max_steps=1)] * 3, m=2)
        state = jax.eval_shape(lambda: empty_pack(base.config, spec))
        batch = jax.eval_shape(lambda: random_batch(base.config.vocab_size, 3, 2, 64))
        runtime = Runtime(dtype=jnp.bfloat16, **fields)
        step = make_train_step(base, spec, runtime).trace(state, base.params, batch)
        lines = step.lower(lowering_platforms=("cuda",)).as_text().splitlines()
        types = [line.split(" : ")[1] for line in lines if "optimization_barrier" in line]
        return [len(re.findall(r"tensor<(?:2x3|3x2)x\d+x\d+xb?f", own)) for own in types].count(14)

    assert joined("fp8", unroll=2, recompute="dots") == 1
    assert joined("fp8", unroll=2) == joined("bf16", unroll=2, recompute="dots") == 0
