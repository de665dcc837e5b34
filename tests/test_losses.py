"""The loss at trained positions against log-softmax and its derivative written out, in float64."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.models.load import Base, load_base
from plora_jax.training.losses import log_sum_exp, token_losses
from tests.models.tiny import LLAMA


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Give a tiny model whose logits reach beyond a softcap of 2, in float64."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with jax.enable_x64(True):
        base = load_base(str(folder), random_weights=True, dtype=jnp.float64)
        return dataclasses.replace(base, params=jax.tree.map(lambda leaf: leaf * 20, base.params))


def capped(base: Base, softcap: float):
    """Give the model under another softcap of its logits."""
    model = base.model()
    model.config = dataclasses.replace(base.config, final_softcap=softcap)
    return model


def case(base: Base):
    """Draw states, trained positions and targets, some of them padding."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(3, 7, base.config.d_model))
    at = random.integers(0, 7, (3, 5)).astype(np.int32)
    targets = random.integers(-1, base.config.vocab_size, (3, 5)).astype(np.int32)
    targets[0, 1] = targets[2, 4] = -1
    return hidden, at, targets


def written_out(head, softcap, hidden, at, targets, weight):
    """Return the losses and the gradient of their weighted sum in the hidden states, by numpy."""
    losses, slope = np.zeros(targets.shape), np.zeros_like(hidden)
    for b, p in np.argwhere(targets >= 0):
        z = head @ hidden[b, at[b, p]]
        cap = softcap * np.tanh(z / softcap) if softcap else z
        softmax = np.exp(cap - cap.max()) / np.exp(cap - cap.max()).sum()
        losses[b, p] = -np.log(softmax[targets[b, p]])
        d = softmax - (np.arange(len(z)) == targets[b, p])
        if softcap:
            d = d / np.cosh(z / softcap) ** 2
        slope[b, at[b, p]] += weight[b, p] * (d @ head)
    return losses, slope


@pytest.mark.parametrize("width", [1, 2, 5, 1000])
def test_log_sum_exp_reads_once_what_numpy_sums_in_float64(width):
    """Rising, falling and shuffled rows, far from zero, far apart, and all alike."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(6, width)) * np.array([1, 1, 1, 100, 1e4, 0])[:, None]
    rows += np.array([0, 500, -500, 0, 0, 7])[:, None]
    rows[0], rows[1] = np.sort(rows[0]), np.sort(rows[1])[::-1]
    rows = rows.astype(np.float32)
    wide = rows.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    want = (top + np.log(np.exp(wide - top).sum(axis=1, keepdims=True)))[:, 0]
    got = jax.jit(log_sum_exp)(rows)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-6)


def test_on_a_gpu_logits_are_read_once(base):
    """A CPU's program has two reductions of the logits, to the largest and to the sum; a GPU's one to both."""
    model = base.model()

    def lowered(platform):
        text = jax.jit(lambda *a: token_losses(model, *a, chunk=8)).trace(*map(jnp.asarray, case(base)))
        return text.lower(lowering_platforms=(platform,)).as_text()

    cpu, gpu = [len(re.findall(r"stablehlo\.reduce\(", lowered(platform))) for platform in ("cpu", "cuda")]
    assert cpu == gpu + 1


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk", [4, 15, 100])
def test_losses_and_their_gradient_are_those_of_the_formula(base, chunk, softcap):
    hidden, at, targets = case(base)
    weight = np.random.default_rng(1).normal(size=targets.shape)
    with jax.enable_x64(True):
        model = capped(base, softcap)
        head = np.asarray(model.head_weights)

        def total(h):
            losses = token_losses(model, h, at, targets, chunk)
            return (losses * weight).sum(), losses

        (_, losses), slope = jax.value_and_grad(total, has_aux=True)(jnp.asarray(hidden))
        plain = token_losses(model, jnp.asarray(hidden), at, targets, chunk)
    want, want_slope = written_out(head, softcap, hidden, at, targets, weight)
    np.testing.assert_allclose(losses, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slope, want_slope, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(plain, losses)  # the same with and without a gradient


def test_jobs_are_packed_by_vmap(base):
    hidden, at, targets = case(base)
    many = [np.stack([t, t[::-1], np.roll(t, 1, 0)]) for t in (hidden, at, targets)]

    def slope(h, a, t):
        return jax.grad(lambda x: token_losses(base.model(), x, a, t, 4).sum())(h)

    with jax.enable_x64(True):
        packed = jax.vmap(slope)(*map(jnp.asarray, many))
        for j in range(3):
            np.testing.assert_allclose(packed[j], slope(*(jnp.asarray(m[j]) for m in many)), rtol=1e-12)


def test_the_head_is_multiplied_twice_and_logits_of_a_chunk_alone_exist(base):
    """Count products with the vocabulary in the lowered gradient: the logits and the way back, none again."""
    hidden, at, targets = (
        jnp.asarray(t, t.dtype if t.dtype == np.int32 else jnp.float32) for t in case(base)
    )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base.params)
    grad = jax.grad(lambda h: token_losses(base.model(params), h, at, targets, 4).sum())
    text = jax.jit(grad).lower(hidden).as_text()
    V, D = base.config.vocab_size, base.config.d_model
    products = [line for line in text.splitlines() if "dot_general" in line and f"{V}x{D}x" in line]
    assert len(products) == 2
    assert not re.search(rf"tensor<15x{V}x|tensor<4x4x{V}x|tensor<16x{V}x", text)


def test_sixteen_bit_states_keep_sixteen_bit_products(base):
    """The way back through the head multiplies bf16: float32 there would double its time and copy the head."""
    hidden, at, targets = case(base)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base.params)
    states = jnp.asarray(hidden, jnp.bfloat16)
    grad = jax.grad(lambda h: token_losses(base.model(params), h, at, targets, 4).sum())
    text = jax.jit(grad).lower(states).as_text()
    V, D = base.config.vocab_size, base.config.d_model
    for line in text.splitlines():
        if "dot_general" in line and f"{V}x{D}x" in line:
            assert line.count("xbf16>") >= 2, line
    exact = jax.grad(lambda h: token_losses(base.model(params), h, at, targets, 4).sum())(
        states.astype(jnp.float32)
    )
    got = np.asarray(grad(states), np.float32)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 1e-2
