"""One optimizer step against float64 arithmetic written out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

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
