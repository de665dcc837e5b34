"""One optimizer step against float64 arithmetic written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.adapters import Factors
from plora_jax.jobs import Job
from plora_jax.training.optim import apply_update, hyper, init_optimizer, learning_rate, warmup_steps


def run(job, grads, params, total=10):
    """Take one step per gradient and return the parameters after each."""
    kinds = frozenset({job.optimizer})
    state, h, out = init_optimizer(jnp.asarray(params), kinds), hyper(job, total), []
    params = jnp.asarray(params, jnp.float32)
    for step, grad in enumerate(grads):
        params, state, _, _ = apply_update(params, jnp.asarray(grad, jnp.float32), state, h, jnp.int32(step))
        out.append(np.asarray(params))
    return out


def adamw(job, grads, params, rates):
    """torch.optim.AdamW in float64: decoupled decay, bias correction, eps outside the root."""
    p = np.asarray(params, np.float64)
    m, v, out = np.zeros_like(p), np.zeros_like(p), []
    for t, (g, rate) in enumerate(zip(np.asarray(grads, np.float64), rates, strict=True), 1):
        norm = np.sqrt((g**2).sum())
        if job.max_grad_norm:
            g = g * min(1.0, job.max_grad_norm / (norm + 1e-6))
        p = p * (1 - rate * job.weight_decay)
        m, v = job.beta1 * m + (1 - job.beta1) * g, job.beta2 * v + (1 - job.beta2) * g**2
        p = p - rate * (m / (1 - job.beta1**t)) / (np.sqrt(v / (1 - job.beta2**t)) + job.eps)
        out.append(p)
    return out


GRADS = np.random.default_rng(0).normal(size=(8, 5, 3))
START = np.random.default_rng(1).normal(size=(5, 3))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight_decay": 0.3},
        {"max_grad_norm": 0.1},
        {"max_grad_norm": 0.0},
        {"beta1": 0.0, "beta2": 0.5, "eps": 1e-3},
    ],
)
def test_adamw_equals_float64(fields):
    job = Job(learning_rate=0.01, scheduler="constant", **fields)
    got = run(job, GRADS, START)
    for one, want in zip(got, adamw(job, GRADS, START, [0.01] * 8), strict=True):
        np.testing.assert_allclose(one, want, rtol=3e-6, atol=3e-7)


def bf16_neighbours(value):
    """The bfloat16 numbers around positive float64 ones: 8 bits of a significand, as float64."""
    exponent = np.floor(np.log2(value))
    step = 2.0 ** (exponent - 7)
    return np.floor(value / step) * step, np.ceil(value / step) * step


def test_short_moments_are_neighbours_of_float64s_and_right_on_average():
    """One gradient for 2^16 elements: every moment is one of two numbers, in the shares that make their mean exact."""
    job, size = Job(optimizer="adamw_bf16", max_grad_norm=0, scheduler="constant"), (64, 1024)
    gradient = 0.7345
    params = jnp.zeros(size)
    state = init_optimizer(params, frozenset({"adamw_bf16"}))
    state = apply_update(params, jnp.full(size, gradient), state, hyper(job, 10), jnp.int32(0))[1]
    raised = []
    for moment, want in (
        (state["adamw_bf16"].mu, 0.1 * gradient),
        (state["adamw_bf16"].nu, 0.001 * gradient**2),
    ):
        assert moment.dtype == jnp.bfloat16
        got = np.asarray(moment, np.float64)
        low, high = bf16_neighbours(want)
        assert low < want < high and set(np.unique(got)) == {low, high}
        # the mean of n independent draws: 5 standard deviations, of at most half the distance each
        assert abs(got.mean() - want) < 5 * (high - low) / 2 / np.sqrt(got.size)
        up = got == high  # neighbours in memory and along the other axis have nothing to do with each other
        for a, b in ((up[1:], up[:-1]), (up[:, 1:], up[:, :-1])):
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
        raised.append(up.ravel())
    assert abs(np.corrcoef(*raised)[0, 1]) < 5 / np.sqrt(params.size)  # nor the two moments of an element


def test_short_moments_draw_anew_at_every_step_and_for_every_seed():
    def nu(seed, step):
        job, params = Job(optimizer="adamw_bf16", seed=seed), jnp.zeros((8, 512))
        state = init_optimizer(params, frozenset({"adamw_bf16"}))
        out = apply_update(params, jnp.full((8, 512), 0.01), state, hyper(job, 10), jnp.int32(step))
        return np.asarray(out[1]["adamw_bf16"].nu, np.float32)

    first = nu(0, 0)
    assert (first == nu(0, 0)).all()
    for other in (nu(0, 1), nu(1, 0)):
        assert 0.2 < (first != other).mean() < 0.8


def test_the_rounding_of_an_element_does_not_depend_on_the_padding_of_its_rank_or_on_other_sites():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 3, 40)).astype(np.float32), rng.normal(size=(2, 24, 3)).astype(np.float32)
    job = Job(optimizer="adamw_bf16", max_grad_norm=0)

    def moments(grads):
        params = jax.tree.map(jnp.zeros_like, grads)
        state = init_optimizer(params, frozenset({"adamw_bf16"}))
        return apply_update(params, grads, state, hyper(job, 10), jnp.int32(3))[1]["adamw_bf16"]

    alone = moments({"q_proj": Factors(a, b)})
    wide = Factors(np.pad(a, ((0, 0), (0, 5), (0, 0))), np.pad(b, ((0, 0), (0, 0), (0, 5))))
    packed = moments({"down_proj": wide, "q_proj": wide})
    for got, want in ((packed.mu, alone.mu), (packed.nu, alone.nu)):
        np.testing.assert_array_equal(got["q_proj"].a[:, :3], want["q_proj"].a)
        np.testing.assert_array_equal(got["q_proj"].b[:, :, :3], want["q_proj"].b)
        assert not np.asarray(got["q_proj"].a[:, 3:], np.float32).any()  # zero stays zero
    assert (np.asarray(packed.nu["q_proj"].a) != np.asarray(packed.nu["down_proj"].a)).any()


def test_a_short_second_moment_follows_a_gradient_that_shrinks():
    """nu decays to the new gradient's square; to the nearest it could not leave the old one, 0.1 % being too little."""
    job = Job(optimizer="adamw_bf16", max_grad_norm=0, scheduler="constant")
    params = jnp.zeros((4, 256))
    state = init_optimizer(params, frozenset({"adamw_bf16"}))
    state["adamw_bf16"] = state["adamw_bf16"]._replace(nu=jnp.ones((4, 256), jnp.bfloat16))

    def step(state, at):
        return apply_update(params, jnp.full((4, 256), 0.1), state, hyper(job, 9999), at)[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(2000)))(state)
    want = 0.01 + (1 - 0.01) * 0.999**2000  # closed form: 0.144
    assert abs(float(state["adamw_bf16"].nu.astype(jnp.float32).mean()) - want) < 0.02 * want


def test_adamw_of_short_moments_stays_near_float64():
    """Each rounding moves a moment by less than 2^-7 of itself: eight steps stay within this."""
    job = Job(optimizer="adamw_bf16", learning_rate=0.01, scheduler="constant", weight_decay=0.3)
    got = run(job, GRADS, START)
    for one, want in zip(got, adamw(job, GRADS, START, [0.01] * 8), strict=True):
        np.testing.assert_allclose(one, want, atol=8 * 0.01 * 2 * 2**-7)
    np.testing.assert_allclose(
        got[0], adamw(job, GRADS, START, [0.01] * 8)[0], rtol=3e-6
    )  # nothing is rounded yet


def test_sgd_with_momentum_adds_decay_to_the_gradient():
    job = Job(
        optimizer="sgd",
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.2,
        max_grad_norm=0,
        scheduler="constant",
    )
    p, velocity = START.copy(), np.zeros_like(START)
    for got, g in zip(run(job, GRADS, START), GRADS, strict=True):
        velocity = 0.9 * velocity + (g + 0.2 * p)
        p = p - 0.1 * velocity
        np.testing.assert_allclose(got, p, rtol=2e-6, atol=1e-6)


def test_a_non_finite_gradient_changes_nothing_and_is_not_counted_by_adam():
    job = Job(learning_rate=0.01, scheduler="constant")
    bad = np.full_like(START, np.nan)
    clean = run(job, GRADS[:2], START)
    holed = run(job, [GRADS[0], bad, GRADS[1]], START)
    np.testing.assert_array_equal(holed[1], holed[0])
    np.testing.assert_array_equal(holed[2], clean[1])


def test_zero_is_a_value_of_warmup():
    assert warmup_steps(Job(warmup_steps=0, warmup_ratio=0.5), 10) == 0
    assert warmup_steps(Job(warmup_ratio=0.03), 100) == 3 and warmup_steps(Job(warmup_ratio=0.031), 100) == 4
    rate = learning_rate(hyper(Job(learning_rate=1.0, scheduler="linear"), 4), jnp.int32(0))
    assert float(rate) == 1.0  # no warmup: the first step is not lost


def test_an_absurd_number_of_steps_is_held_at_the_largest_there_is():
    h = hyper(Job(warmup_ratio=1.0), 10**12)
    assert h.total == h.warmup == 2**31 - 1


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_norm_is_of_the_mean_gradient(by_layer, dtype):
    """Leaves whose sizes share no factor, and sums so large that their squares would overflow before the division."""
    rng, count = np.random.default_rng(0), 1e4
    shapes = [(3, 8, 5), (3, 7, 11)]
    params = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    grads = [jnp.asarray(1e20 * rng.standard_normal(shape), dtype) for shape in shapes]
    h = hyper(Job(scheduler="constant", max_grad_norm=1.0), 10, np.float32)
    state = init_optimizer(params, frozenset({"adamw"}))
    _, _, norm, finite = apply_update(
        params, grads, state, h, jnp.int32(3), jnp.float32(count), by_layer=by_layer
    )
    want = np.sqrt(sum(np.sum((np.asarray(g, np.float64) / count) ** 2) for g in grads))
    np.testing.assert_allclose(float(norm), want, rtol=1e-6)
    assert finite
    poisoned = [grads[0].at[1, 0, 0].set(jnp.nan), grads[1]]
    after, _, _, finite = apply_update(
        params, poisoned, state, h, jnp.int32(3), jnp.float32(count), by_layer=by_layer
    )
    assert not finite
    for one, other in zip(after, params, strict=True):
        np.testing.assert_array_equal(one, other)
