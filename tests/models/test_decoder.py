"""The decoder's own properties: packed rows, padding, recomputation, the job axis. Parity is test_parity.py's."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.errors import UserError
from plora_jax.models.decoder import LoRA, Norm, Runtime, rotations
from plora_jax.models.load import load_base
from plora_jax.models.rope import Rope, frequencies
from plora_jax.training.dropout import Dropout
from tests.models import tiny

PHI_LONG = {
    **tiny.LLAMA,
    "model_type": "phi3",
    "original_max_position_embeddings": 6,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
}
GEMMA = {**tiny.LLAMA, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}


def load(path, config, dtype=None):
    tiny.write(path, config)
    return load_base(str(path), dtype=dtype)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(tmp_path_factory.mktemp("llama"), tiny.LLAMA)


def tokens_of(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 56, shape), jnp.int32)


def whole(tokens):
    """Give positions and rows of sequences that each hold one example."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[-2], dtype=jnp.int32)[:, None], tokens.shape)
    return positions, rows


def hidden_of(base, **runtime):
    @jax.jit
    def run(tokens, positions, rows, adapters=None):
        return base.model().hidden(tokens, positions, rows, adapters, runtime=Runtime(**runtime))

    return run


@pytest.mark.parametrize("config", [tiny.LLAMA, GEMMA, PHI_LONG], ids=["llama", "gemma2", "phi3-longrope"])
def test_packed_examples_do_not_see_each_other(config, tmp_path):
    run = hidden_of(load(tmp_path, config))
    a, b = tokens_of(1, 9), tokens_of(1, 5, seed=1)
    alone = [run(t, *whole(t)) for t in (a, b)]
    packed = jnp.concatenate([a, b, jnp.zeros((1, 2), jnp.int32)], axis=1)
    positions = jnp.asarray([[*range(9), *range(5), 0, 1]], jnp.int32)
    rows = jnp.asarray([[7] * 9 + [3] * 5 + [-1] * 2], jnp.int32)
    out = run(packed, positions, rows)
    np.testing.assert_allclose(out[:, :9], alone[0], atol=2e-5)
    np.testing.assert_allclose(out[:, 9:14], alone[1], atol=2e-5)
    assert np.isfinite(out).all()
    changed = run(packed.at[:, :9].set(5), positions, rows)
    np.testing.assert_array_equal(changed[:, 9:14], out[:, 9:14])
    merged = run(packed, positions, jnp.where(rows < 0, -1, 3))  # one row: now they see each other
    assert np.abs(merged[:, 9:14] - out[:, 9:14]).max() > 1e-2


def test_without_segments_padding_at_the_end_changes_nothing(llama):
    tokens = tokens_of(2, 8)
    positions, rows = whole(tokens)
    rows = rows.at[0, 5:].set(-1)
    masked = hidden_of(llama)(tokens, positions, rows)
    causal = hidden_of(llama, segments=False)(tokens, positions, rows)
    np.testing.assert_allclose(causal[0, :5], masked[0, :5], atol=1e-5)
    np.testing.assert_allclose(causal[1], masked[1], atol=1e-5)
    np.testing.assert_array_equal(
        causal[0, :5],
        hidden_of(llama, segments=False)(tokens.at[0, 5:].set(9), positions, rows)[0, :5],
    )


def test_later_tokens_do_not_reach_earlier_ones(llama):
    run, tokens = hidden_of(llama), tokens_of(1, 8)
    first = run(tokens, *whole(tokens))
    second = run(tokens.at[0, 5].set((tokens[0, 5] + 1) % 56), *whole(tokens))
    np.testing.assert_array_equal(first[0, :5], second[0, :5])
    assert np.abs(first[0, 5:] - second[0, 5:]).max() > 1e-2


def gradient_of(base, **runtime):
    @jax.jit
    @jax.grad
    def gradient(adapters, tokens, dropout=None):
        model = base.model()
        hidden = model.hidden(tokens, *whole(tokens), adapters, dropout, runtime=Runtime(**runtime))
        return (model.logits(hidden) ** 2).mean()

    return gradient


def test_recomputation_changes_no_gradient(llama):
    adapters, tokens = tiny.adapters(llama.config, 3, 2.0), tokens_of(2, 8)
    dropout = Dropout(jnp.int32(1), jnp.float32(0.3), jnp.int32(0))
    gradient = gradient_of(llama)
    kept = gradient(adapters, tokens, dropout)
    for policy in ("dots", "layer"):
        again = gradient_of(llama, recompute=policy)(adapters, tokens, dropout)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), again, kept)
    without = gradient(adapters, tokens, dropout._replace(rate=jnp.float32(0)))
    assert np.abs(without["down_proj"].a - kept["down_proj"].a).max() > 1e-4


def test_dots_keeps_the_products_and_layer_keeps_nothing(llama):
    adapters, tokens = tiny.adapters(llama.config, 3, 2.0), tokens_of(4, 32)

    def saved(policy):
        def loss(adapters):
            hidden = llama.model().hidden(tokens, *whole(tokens), adapters, runtime=Runtime(recompute=policy))
            return hidden.sum()

        residuals = jax.tree.leaves(jax.eval_shape(lambda a: jax.vjp(loss, a)[1], adapters))
        return sum(leaf.size for leaf in residuals if leaf.shape[:1] == (llama.config.n_layers,))

    c, per_token = llama.config, 4 * 32 * llama.config.n_layers
    # the layer's input alone; or also q, k, v, attention, o, gate, up
    assert saved("layer") < saved("dots") < saved("none")
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    assert saved("dots") - saved("layer") == per_token * (q + 2 * kv + q + c.d_model + 2 * c.d_ff)


AXES = LoRA(1, 1, 1)


def stacked(config, jobs, rank, dtype=jnp.float32):
    each = [tiny.adapters(config, rank, 0.5 + j, dtype, name=f"job{j}") for j in range(jobs)]
    return each, jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)


def test_vmap_over_jobs_equals_each_job_alone(llama):
    each, stack = stacked(llama.config, 3, 4)
    tokens = tokens_of(3, 2, 8)

    def loss(adapters, tokens):
        model = llama.model()
        return (model.logits(model.hidden(tokens, *whole(tokens), adapters)) ** 2).mean()

    axes = dict.fromkeys(stack, AXES)
    packed = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(axes, 0), out_axes=(0, axes)))
    values, grads = packed(stack, tokens)
    single = jax.jit(jax.value_and_grad(loss))
    for j in range(3):
        value, grad = single(each[j], tokens[j])
        np.testing.assert_allclose(values[j], value, rtol=1e-5)
        job = jax.tree.map(lambda leaf, j=j: leaf[:, j], grads)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), job, grad)


def test_one_product_over_all_jobs_and_no_transposed_adapters(llama):
    jobs, rank = 3, 4
    _, stack = stacked(llama.config, jobs, rank)
    tokens = tokens_of(jobs, 2, 8)
    axes = dict.fromkeys(stack, AXES)

    def loss(adapters, params, tokens):
        return (llama.model(params).hidden(tokens, *whole(tokens), adapters) ** 2).mean()

    step = jax.jit(jax.vmap(jax.grad(loss), in_axes=(axes, None, 0), out_axes=axes))
    text = step.lower(stack, llama.params, tokens).as_text()
    c, all_tokens = llama.config, jobs * 2 * 8
    for site in c.sites:
        product = rf"dot_general .*tensor<{all_tokens}x{site.d_in}xf32>, tensor<{site.d_in}x{site.d_out}xf32>"
        assert re.search(product, text), site
    # nothing that has a layer and a job axis is transposed
    moved = re.findall(r"transpose .*: \(tensor<([0-9x]+)xf32>\)", text)
    assert moved and not [shape for shape in moved if shape.startswith(f"{c.n_layers}x{jobs}x")]


def test_evaluation_shares_tokens_between_jobs(llama):
    each, stack = stacked(llama.config, 3, 4)
    tokens = tokens_of(2, 8)
    run = hidden_of(llama)
    shared = jax.vmap(run, in_axes=(None, None, None, dict.fromkeys(stack, AXES)))(
        tokens, *whole(tokens), stack
    )
    for j in range(3):
        np.testing.assert_allclose(shared[j], run(tokens, *whole(tokens), each[j]), atol=2e-5)


def test_float64_end_to_end(tmp_path):
    tokens = tokens_of(1, 8)
    single = load(tmp_path, GEMMA)
    rounded = hidden_of(single)(tokens, *whole(tokens), tiny.adapters(single.config, 3, 2.0))
    with jax.enable_x64(True):
        base = load(tmp_path, GEMMA, dtype=jnp.float64)
        adapters = tiny.adapters(base.config, 3, 2.0, jnp.float64)
        out = hidden_of(base, dtype=jnp.float64)(tokens, *whole(tokens), adapters)
        assert out.dtype == base.model().logits(out).dtype == jnp.float64
        assert 1e-9 < np.abs(out - rounded).max() < 1e-4
        gradient = gradient_of(base, dtype=jnp.float64)
        double = gradient(adapters, tokens)
        step = 1e-6  # central difference along one feature of B: what float32 anywhere inside would spoil
        loss = jax.jit(
            lambda b: _loss(base, tokens, {**adapters, "up_proj": adapters["up_proj"]._replace(b=b)})
        )
        b = adapters["up_proj"].b
        slope = (loss(b.at[1, 3, 2].add(step)) - loss(b.at[1, 3, 2].add(-step))) / (2 * step)
        np.testing.assert_allclose(double["up_proj"].b[1, 3, 2], slope, rtol=1e-6)


def _loss(base, tokens, adapters):
    model = base.model()
    hidden = model.hidden(tokens, *whole(tokens), adapters, runtime=Runtime(dtype=jnp.float64))
    return (model.logits(hidden) ** 2).mean()


def test_bf16_runs_near_fp32(llama):
    tokens = tokens_of(2, 8)
    exact = hidden_of(llama)(tokens, *whole(tokens))
    rounded = hidden_of(llama, dtype=jnp.bfloat16)(tokens, *whole(tokens))
    assert rounded.dtype == jnp.bfloat16
    error = np.linalg.norm(rounded.astype(jnp.float32) - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 3e-2


@pytest.mark.parametrize(
    ("dtype", "error"), [(jnp.float64, 1e-12), (jnp.float32, 1e-5), (jnp.bfloat16, 1e-5)]
)
def test_angles_are_at_least_float32(dtype, error):
    rope, positions = Rope("default", dim=8), jnp.arange(50, dtype=jnp.int32)[None]
    with jax.enable_x64(dtype == jnp.float64):
        cos, sin = rotations(rope, positions, jnp.zeros_like(positions), dtype)
    angles = np.arange(50)[:, None] * frequencies(rope)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=error)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=error)


@pytest.mark.parametrize(("inside", "outside"), [("highest", None), (None, "highest")])
def test_precision_of_the_runtime_or_of_jax(inside, outside, llama):
    tokens = tokens_of(1, 4)

    def logits():
        model, runtime = llama.model(), Runtime(precision=inside)
        return model.logits(model.hidden(tokens, *whole(tokens), runtime=runtime), runtime=runtime)

    with jax.default_matmul_precision(outside):
        text = str(jax.make_jaxpr(logits)())
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 8


def test_norm_rounds_bf16_once():
    x = jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, (8, 256)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    out = Norm((), 256, 1e-6, 0.0, jnp.float32)(x)
    assert out.dtype == jnp.bfloat16
    assert (out == jnp.asarray(exact, jnp.bfloat16)).mean() > 0.99


@pytest.mark.parametrize(
    ("config", "implementation", "message"),
    [
        (GEMMA, "cudnn", "cudnn cannot run this gemma2: its attention scores have a softcap; use xla"),
        (tiny.LLAMA, "flash", "attention must be xla or cudnn, found 'flash'"),
        ({**tiny.LLAMA, "head_dim": 12}, "cudnn", "its head size 12 is not a multiple of 8 up to 256"),
    ],
)
def test_attention_that_cannot_serve_the_model_is_refused(config, implementation, message, tmp_path):
    base = load(tmp_path, config)
    tokens = tokens_of(1, 4)
    with pytest.raises(UserError, match=message):
        base.model().hidden(tokens, *whole(tokens), runtime=Runtime(attention=implementation))
