"""Gate, up and their product as one function, against JAX's derivatives in float64 and the separate functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GATED,
    SHRUNK,
    Fp8Weight,
    fp8,
    hopper,
    hopper_rows,
    lora_dense_glu,
    lora_dense_group,
    quantise_weight,
    using,
)
from pallas_kernels.fp8 import round_gradients, rounded
from pallas_kernels.glu import ACTIVATIONS, glu, glu_back

from .problems import INTERPRET, ONE_BLOCK, count_launches, in_fp8, packed, relative, worst

J, T, D, F = 3, 6, 64, 48


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_unit_and_its_gradients(activation):
    with jax.enable_x64(True):
        gate, up, dh = jnp.asarray(np.random.default_rng(0).standard_normal((3, 200)) * 3, jnp.float64)
        want, pull = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
        assert relative(glu(activation, gate, up), want) < 1e-12
        assert worst(glu_back(activation, gate, up, dh), pull(dh)) < 1e-12


def problem(seed=0, backward="e4m3"):
    """Draw gate, up, whose features have unlike scales, and down, on an fp8 base."""
    unlike = jnp.logspace(-3, 0, F)[:, None] / D**0.5
    shapes = (draw(seed, F, D) * unlike, draw(seed + 5, F, D) * unlike[::-1], draw(seed + 9, D, F))
    return tuple(Fp8Weight(*quantise_weight(w), backward) for w in shapes)


def mlp(x, ws, activation, together):
    if together:
        h = lora_dense_glu(x, ws[:2], (None, None), activation=activation)
    else:
        gate, up = lora_dense_group(x, ws[:2], (None, None))
        h = ACTIVATIONS[activation](gate) * up
    return lora_dense_group(h, ws[2:], (None,))[0]


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_an_fp8_base_it_is_that_of_separate_functions(activation, backward):
    """And backward keeps no 8-bit numbers but the weights'."""
    x, dy, ws = draw(4, J, T, D), draw(7, J, T, D), problem(0, backward)
    got, want = (jax.vjp(lambda x, t=t: mlp(x, ws, activation, t), x) for t in (True, False))
    assert relative(got[0], want[0]) < 2e-3
    assert relative(got[1](dy)[0], want[1](dy)[0]) < 2e-3
    kept = [leaf for leaf in jax.tree.leaves(got[1]) if leaf.dtype == jnp.float8_e4m3fn]
    assert all(leaf.shape in ((F, D), (D, F)) for leaf in kept)


def test_bases_of_their_own():
    x, bases = draw(4, T, D), [problem(seed) for seed in (0, 20)]
    grad = jax.grad(lambda x, ws: jnp.sum(jnp.sin(mlp(x, ws, "silu", True))))
    each = jax.vmap(grad, in_axes=(None, 0))(x, jax.tree.map(lambda *w: jnp.stack(w), *bases))
    for own, ws in zip(each, bases, strict=True):
        assert relative(own, grad(x, ws)) < 2e-2


def test_what_makes_no_sense_is_refused():
    x, (gate, up, _) = draw(0, T, D), problem()
    with pytest.raises(ValueError, match="activation 'relu': allowed are silu, gelu_tanh"):
        lora_dense_glu(x, (gate, up), (None, None), activation="relu")
    narrow = Fp8Weight(up.values[:1], up.scale[:1])
    for ws in ((gate, narrow), (gate, up, up)):
        with pytest.raises(ValueError, match="give gate and up, alike"):
            lora_dense_glu(x, ws, (None,) * len(ws), activation="silu")


def launches(policy):
    """Count the kernels of an MLP's gradients, lowered for CUDA."""

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer(x, adapters, ws):
        h = lora_dense_glu(x, ws[:2], adapters[:2], activation="silu")
        return lora_dense_group(h, ws[2:], adapters[2:])[0]

    def loss(x, adapters, ws):
        def run(x, adapters):
            return layer(x, adapters, ws)

        return jnp.sum(jnp.sin(jax.vmap(jax.checkpoint(run, policy=policy) if policy else run)(x, adapters)))

    sites = [(128, 256)] * 2 + [(256, 128)]
    ws = tuple(
        Fp8Weight(struct(o, i, dtype=jnp.float8_e4m3fn), struct(o, dtype=jnp.bfloat16)) for i, o in sites
    )
    adapters = tuple((struct(2, 8, i), struct(2, o, 8), struct(2)) for i, o in sites)
    with using("hopper"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
            struct(2, 256, 128, dtype=jnp.bfloat16), adapters, ws
        )
        return count_launches(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_nothing_is_rounded_twice_nor_multiplied_again():
    """Three products each way but one dx for gate and up, tokens and dy rounded, and the unit both ways: nine; where
    gate and up are kept the unit once more.
    """
    keep = jax.checkpoint_policies.save_only_these_names(SHRUNK, GATED)
    assert (launches(None), launches(keep)) == (9, 10)


def test_what_is_rounded_already_is_read_as_it_is():
    x, mask, sites, dys = packed(1, 128, 128, (128,), (8,))
    sites = in_fp8(sites, "e4m3")
    ys, us = hopper.forward(x, mask, sites, config=lambda site: ONE_BLOCK, interpret=INTERPRET)
    again, _ = hopper.forward(rounded(x), mask, sites, config=lambda site: ONE_BLOCK, interpret=INTERPRET)
    assert worst(again, ys) < 1e-3
    back = hopper.backward(x, mask, sites, us, dys, config=ONE_BLOCK, interpret=INTERPRET)
    given = round_gradients(dys, [site.w for site in sites])
    again = hopper.backward(x, mask, sites, us, dys, given, config=ONE_BLOCK, interpret=INTERPRET)
    assert worst(again, back) < 1e-3


def test_rows_longer_than_a_copy_and_none():
    x = draw(0, 1, 128 * 258).astype(jnp.bfloat16)
    (got,), _ = hopper_rows.round_rows((x,), (None,), jnp.float8_e4m3fn, interpret=INTERPRET)
    (want,), _ = fp8.round_rows((x,), (None,), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    (none,), scale = hopper_rows.round_rows((x[:0],), (None,), jnp.float8_e4m3fn)
    assert none.shape == x[:0].shape and scale.shape == (0,)
