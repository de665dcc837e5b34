"""The loss at a vocabulary head and its gradient from one launch, interpreted, against the formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choose_head
from pallas_kernels.choice import Device
from pallas_kernels.head import loss_and_gradient
from pallas_kernels.hopper_gemm import GemmConfig, Softmax, lora_gemm
from plora_jax.training import losses

from .problems import INTERPRET, ONE_BLOCK, count_launches, raced, relative

H200 = Device("NVIDIA H200", "9.0", 132)
TWO_BLOCKS = GemmConfig(sms=2, cluster=2, tile_n=256, stages=2)
RAGGED = GemmConfig(sms=1, cluster=1, tile_n=256, stages=2, out_slots=1)


def problem(n, d, v, scale=1.0, seed=0):
    """Draw states, targets, one of seven of which is −1, and a head."""
    rng = np.random.default_rng(seed)
    h = jnp.asarray(rng.standard_normal((n, d)) * scale, jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((v, d)) * d**-0.5, jnp.bfloat16)
    targets = rng.integers(0, v, n)
    targets[::7] = -1
    return h, jnp.asarray(targets, jnp.int32), w


def exact(h, targets, w, softcap):
    """Return the losses, and their gradients in h, in float64; and the logits."""
    h, w, t = np.asarray(h, np.float64), np.asarray(w, np.float64), np.maximum(targets, 0)
    z, slope = h @ w.T, 1.0
    if softcap:
        z = softcap * np.tanh(z / softcap)
        slope = 1 - (z / softcap) ** 2
    top = z.max(axis=1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(axis=1))
    here = np.arange(len(w)) == t[:, None]
    trained = np.asarray(targets) >= 0
    d = (np.exp(z - lse[:, None]) - here) * slope
    return np.where(trained, lse - z[here], 0), np.where(trained[:, None], d @ w, 0), z


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(
    "n, d, v, config",
    [(136, 128, 448, ONE_BLOCK), (40, 64, 320, TWO_BLOCKS), (101, 64, 64, RAGGED), (264, 64, 576, RAGGED)],
)
def test_losses_and_their_gradients(n, d, v, config, softcap):
    """Rows and columns that fill no tile, rows that fill no eight, and targets that are none."""
    h, targets, w = problem(n, d, v, 3.0)
    loss, dh = loss_and_gradient(h, targets, w, softcap, config=config, interpret=INTERPRET)
    assert not raced()
    assert loss.dtype == jnp.float32 and dh.dtype == jnp.bfloat16
    want, slope, _ = exact(h, targets, w, softcap)
    np.testing.assert_allclose(loss, want, rtol=0, atol=1e-5)
    assert relative(dh, slope) < 3e-3
    assert not np.asarray(dh, np.float32)[::7].any()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_what_is_nearly_learnt_has_a_gradient_as_exact_as_any(softcap):
    """Of 1 − p = 1e-3 and less, which the target's own p, rounded to 16 bits, would drown."""
    h, targets, w = problem(64, 64, 192)
    targets = jnp.arange(64, dtype=jnp.int32)
    h = (16 * w[targets] + 0.1 * h).astype(jnp.bfloat16)
    loss, dh = loss_and_gradient(h, targets, w, softcap, config=ONE_BLOCK, interpret=INTERPRET)
    want, slope, _ = exact(h, targets, w, softcap)
    assert want.min() < 2e-5
    np.testing.assert_allclose(loss, want, rtol=1e-2, atol=5e-6)
    assert relative(dh, slope) < 5e-3
    small = (want > 1e-4) & (want < 1e-3)
    assert small.sum() > 9
    for own, right in zip(np.asarray(dh, np.float64)[small], slope[small], strict=True):
        assert relative(own, right) < 5e-2


def test_far_from_the_target():
    """Losses of 30 to 108 are exact; a logit further above the target than that counts as 108 above, and is pushed."""
    rng = np.random.default_rng(1)
    w = jnp.asarray(rng.standard_normal((192, 64)) * 0.05, jnp.bfloat16).at[7].set(0.25).at[3].set(0)
    sizes = np.array([31, 32, 33, 60, 90, 105, 145, 400]) / (64 * 0.25)
    h = jnp.asarray(np.ones((8, 64)) * sizes[:, None], jnp.bfloat16)
    targets = jnp.full((8,), 3, jnp.int32)
    loss, dh = loss_and_gradient(h, targets, w, config=ONE_BLOCK, interpret=INTERPRET)
    want, slope, z = exact(h, targets, w, 0.0)
    near = z.max(axis=1) - z[:, 3] < 108
    assert near.sum() == 6 and want[near].min() > 25 and want[near].max() > 100
    np.testing.assert_allclose(loss[near], want[near], rtol=1e-6)
    assert relative(dh[near], slope[near]) < 3e-3
    np.testing.assert_allclose(loss[~near], 108, rtol=1e-5)
    assert (
        relative(dh[~near], slope[~near]) < 3e-3
    )  # one logit stands out, so that this is its gradient all the same


def test_what_is_learnt_loses_nothing_and_what_is_no_target_everything():
    """Losses are never below 0, however the target's logit was summed; a target that is none spoils its row."""
    _, _, w = problem(64, 64, 192)
    targets = jnp.arange(64, dtype=jnp.int32).at[5].set(192)
    h = (160 * w[jnp.minimum(targets, 191)]).astype(jnp.bfloat16)
    loss, dh = loss_and_gradient(h, targets, w, config=ONE_BLOCK, interpret=INTERPRET)
    assert np.isnan(loss[5]) and np.isnan(np.asarray(dh[5], np.float32)).any()
    others = np.arange(64) != 5
    assert loss[others].min() >= 0 and loss[others].max() < 1e-4
    assert np.abs(np.asarray(dh, np.float32)[others]).max() < 1e-4


def test_exponentials_and_sums_of_several_jobs():
    """The launch itself, of jobs whose rows fill no tile."""
    h, _, w = problem(3 * 72, 64, 320)
    h = h.reshape(3, 72, 64)
    shift = jnp.asarray(np.random.default_rng(2).standard_normal((3, 72)), jnp.float32)
    softmax = Softmax(shift)
    (e, sums), _ = lora_gemm(
        [(h, w)], softmax=softmax, transposed=True, config=TWO_BLOCKS, interpret=INTERPRET
    )
    assert not raced()
    want = np.exp(np.asarray(h, np.float64) @ np.asarray(w, np.float64).T - np.asarray(shift)[..., None])
    assert relative(e, want) < 3e-3
    np.testing.assert_allclose(sums.sum(axis=1)[:, :72], want.sum(axis=2), rtol=1e-5)


def test_jobs_share_the_launch(monkeypatch):
    """By vmap, as the step does: one product of all jobs' positions, in pieces; no other of the head's size."""
    h, targets, w = problem(3 * 90, 64, 192, 2.0)
    h, targets = h.reshape(3, 90, 64), targets.reshape(3, 90)
    seen = []

    def kernel(states, head, softcap, mode):
        seen.append((states.shape, mode))
        return functools.partial(loss_and_gradient, softcap=softcap, config=ONE_BLOCK, interpret=INTERPRET)

    monkeypatch.setattr(losses, "head_kernel", kernel)
    both = losses.with_gradient(4.0, "hopper")
    loss, dh = jax.jit(jax.vmap(both, in_axes=(0, 0, None)))(h, targets, w)
    assert seen[-1] == ((270, 64), "hopper")
    want, slope, _ = exact(h.reshape(-1, 64), targets.reshape(-1), w, 4.0)
    np.testing.assert_allclose(loss.reshape(-1), want, atol=1e-5)
    assert relative(dh.reshape(-1, 64), slope) < 3e-3

    shared = jax.vmap(both, in_axes=(None, 0, None))(
        h[0], targets, w
    )  # the same states, each job's own targets
    for j in range(3):
        want, slope, _ = exact(h[0], targets[j], w, 4.0)
        np.testing.assert_allclose(shared[0][j], want, atol=1e-5)
        assert relative(shared[1][j], slope) < 3e-3

    heads = jnp.stack([w, w[::-1], w * 2])  # a head each: XLA's products
    loss, _ = jax.vmap(both)(h, targets, heads)
    assert {shape for shape, _ in seen} == {(90, 64), (270, 64)}
    for j in range(3):
        np.testing.assert_allclose(loss[j], exact(h[j], targets[j], heads[j], 4.0)[0], atol=2e-2)


def test_one_launch_for_a_chunk_of_all_jobs(monkeypatch):
    """Lowered for CUDA: a launch, and one product with the head, where XLA has two and float32 logits."""
    monkeypatch.setattr("pallas_kernels.choice.default_device", lambda: H200)
    shapes = ((8, 64, 128), jnp.bfloat16), ((8, 64), jnp.int32), ((1024, 128), jnp.bfloat16)
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def text(kernels):
        traced = jax.jit(jax.vmap(losses.with_gradient(0.0, kernels), in_axes=(0, 0, None))).trace(*given)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert count_launches(text("auto")) == 1 and count_launches(text("xla")) == 0
    assert "1024xf32>" in text("xla") and "512x1024xf32>" not in text("auto")


@pytest.mark.parametrize(
    "dtype, rows, shape, mode, device, name, why",
    [
        ("bfloat16", 256, (151_936, 896), "auto", H200, "hopper", "fused kernel"),
        ("bfloat16", 255, (151_936, 896), "auto", H200, "xla", "255 rows are fewer than 256"),
        ("bfloat16", 8, (151_936, 896), "hopper", H200, "hopper", "fused kernel"),
        ("bfloat16", 1024, (151_936, 896), "xla", H200, "xla", "the default"),
        ("float16", 1024, (151_936, 896), "auto", H200, "xla", "range of float16"),
        ("float32", 1024, (151_936, 896), "auto", H200, "xla", "16-bit"),
        ("bfloat16", 1024, (50_257, 768), "auto", H200, "xla", "vocabulary of 50257 is no multiple of 64"),
        ("bfloat16", 1024, (32_000, 100), "auto", H200, "xla", "features 100 is no multiple of 64"),
        ("bfloat16", 1024, (32_000, 768), "auto", Device("NVIDIA A100", "8.0", 108), "xla", "no kernel for"),
    ],
)
def test_the_choice(dtype, rows, shape, mode, device, name, why):
    choice = choose_head(dtype, rows, shape, mode=mode, device=device)
    assert choice.name == name and why in choice.reason


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation 'triton'"):
        choose_head("bfloat16", 1024, (64, 64), mode="triton")
