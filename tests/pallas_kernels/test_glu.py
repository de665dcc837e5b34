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
    lora_dense_group,
    lora_mlp,
    quantise_weight,
    reference,
    using,
)
from pallas_kernels.fp8 import round_gradients, rounded
from pallas_kernels.glu import ACTIVATIONS, glu, glu_back
from pallas_kernels.hopper_gemm import Softmax, Unit, lora_gemm

from .problems import INTERPRET, ONE_BLOCK, count_launches, exact, in_fp8, packed, raced, relative, worst

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
        return lora_mlp(x, ws, (None,) * 3, activation=activation)
    gate, up = lora_dense_group(x, ws[:2], (None, None))
    return lora_dense_group(ACTIVATIONS[activation](gate) * up, ws[2:], (None,))[0]


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


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_as_one_function_it_is_that_of_separate_ones_whatever_falls_on_it(missing, keep):
    """Each job's dropout masks of both inputs, biases, and a site without adapter: values and gradients, in float64."""
    rng = np.random.default_rng(0)
    shapes = ((F, D), (F, D), (D, F))
    with jax.enable_x64(True):
        ws = tuple(jnp.asarray(rng.standard_normal(shape[::-1])) for shape in shapes)
        biases = tuple(jnp.asarray(rng.standard_normal(out)) for out, _ in shapes)
        adapters = [
            (
                jnp.asarray(rng.standard_normal((J, 4, i))),
                jnp.asarray(rng.standard_normal((J, o, 4))),
                jnp.full(J, 0.5),
            )
            for o, i in shapes
        ]
        if missing is not None:
            adapters[missing] = None
        x, dy = (jnp.asarray(rng.standard_normal((J, T, D))) for _ in range(2))
        masks = tuple(jnp.asarray((rng.random((J, T, width)) > 0.3) / 0.7) for width in (D, F))

        def both(x, adapters):
            def one(x, adapters, masks):
                return lora_mlp(x, ws, adapters, activation="silu", biases=biases, masks=masks, keep=keep)

            y, pull = jax.vjp(lambda x, adapters: jax.vmap(one)(x, adapters, masks), x, adapters)
            return y, pull(dy)

        with using("xla"):
            want = both(x, tuple(adapters))
        with using("auto"):
            got = both(x, tuple(adapters))
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9), got, want
        )


def test_backward_reads_what_forward_made():
    """Behind a barrier: else XLA keeps for backward what gate and up are sums of."""
    ws = tuple(draw(seed, *shape) for seed, shape in enumerate(((D, F), (D, F), (F, D))))

    def loss(x):
        return jnp.sum(lora_mlp(x, ws, (None,) * 3, activation="silu"))

    with using("auto"):
        text = jax.jit(jax.grad(loss)).lower(draw(4, T, D)).as_text()
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count(f"tensor<1x{T}x{F}xf32>") == 3


def test_bases_of_their_own():
    x, bases = draw(4, T, D), [problem(seed) for seed in (0, 20)]
    grad = jax.grad(lambda x, ws: jnp.sum(jnp.sin(mlp(x, ws, "silu", True))))
    each = jax.vmap(grad, in_axes=(None, 0))(x, jax.tree.map(lambda *w: jnp.stack(w), *bases))
    for own, ws in zip(each, bases, strict=True):
        assert relative(own, grad(x, ws)) < 2e-2


def test_what_makes_no_sense_is_refused():
    x, (gate, up, down) = draw(0, T, D), problem()
    with pytest.raises(ValueError, match="activation 'relu': allowed are silu, gelu_tanh"):
        lora_mlp(x, (gate, up, down), (None,) * 3, activation="relu")
    narrow = Fp8Weight(up.values[:1], up.scale[:1])
    for ins in ((gate, narrow), (gate, up, up), ()):
        with pytest.raises(ValueError, match="give gate and up, alike"):
            lora_mlp(x, (*ins, down), (None,) * (len(ins) + 1), activation="silu")
    with pytest.raises(ValueError, match=r"w has shape \(64, 48\), expected \(48, 48\)"):
        lora_mlp(x, (gate, up, gate), (None,) * 3, activation="silu")
    with pytest.raises(ValueError, match="3 weights, 2 adapters"):
        lora_mlp(x, (gate, up, down), (None,) * 2, activation="silu")


def launches(policy, fp8):
    """Count the kernels of an MLP's gradients, lowered for CUDA."""

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer(x, adapters, ws):
        return lora_mlp(x, ws, adapters, activation="silu", keep=policy is None)

    def loss(x, adapters, ws):
        def run(x, adapters):
            return layer(x, adapters, ws)

        return jnp.sum(jnp.sin(jax.vmap(jax.checkpoint(run, policy=policy) if policy else run)(x, adapters)))

    sites = [(128, 256)] * 2 + [(256, 128)]
    ws = tuple(
        Fp8Weight(struct(o, i, dtype=jnp.float8_e4m3fn), struct(o, dtype=jnp.bfloat16))
        if fp8
        else struct(i, o, dtype=jnp.bfloat16)
        for i, o in sites
    )
    adapters = tuple((struct(2, 8, i), struct(2, o, 8), struct(2)) for i, o in sites)
    with using("hopper"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
            struct(2, 256, 128, dtype=jnp.bfloat16), adapters, ws
        )
        return count_launches(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_nothing_is_rounded_twice_nor_multiplied_again():
    """Three products each way but one dx for gate and up: five; on an fp8 base x and dy rounded, and the unit both
    ways: nine. Where only gate and up are kept, no launch more.
    """
    keep = jax.checkpoint_policies.save_only_these_names(SHRUNK, GATED)
    assert [launches(policy, fp8) for policy in (None, keep) for fp8 in (False, True)] == [5, 9, 5, 9]


ACTIVE = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}


def by_differences(activation, z):
    """Return an activation and its derivative in float64."""
    f, step = ACTIVE[activation], 1e-5
    return f(z), (f(z + step) - f(z - step)) / (2 * step)


@pytest.mark.parametrize(
    "activation, tokens, d_ff, ranks, dropout",
    [
        ("silu", 128, 256, (8, 16), False),
        ("gelu_tanh", 72, 192, (8, 8), False),  # rows and columns beyond the tiles
        ("silu", 72, 128, (72, 72), False),  # more ranks than a leader's: XLA shrinks
        ("silu", 72, 128, (0, 8), False),  # up leads, gate is XLA's
        ("silu", 72, 128, (8, 0), False),  # up is XLA's, and the unit too
        ("silu", 72, 128, (8, 8), True),
    ],
)
def test_the_unit_in_the_launch_of_up(activation, tokens, d_ff, ranks, dropout):
    x, mask, sites, dys = packed(2, tokens, 64, (d_ff, d_ff), ranks, dropout=dropout)
    (gate, up, h), us = hopper.forward_glu(
        activation, x, mask, sites, config=lambda site: ONE_BLOCK, interpret=INTERPRET
    )
    assert not raced()
    want, _ = exact(x, mask, sites, dys)
    assert worst(((gate, up), us), want) < 8e-3
    g, u = (np.asarray(t, np.float64) for t in (gate, up))
    assert relative(h, by_differences(activation, g)[0] * u) < 3e-3


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("activation, tokens, d_ff", [("silu", 128, 256), ("gelu_tanh", 72, 192)])
def test_its_gradients_in_the_launch_of_dx(activation, tokens, d_ff, kept, dropout):
    gate, up = packed(2, tokens, 64, (d_ff, d_ff), (8, 8))[3]
    g, u = (np.asarray(t, np.float64) for t in (gate, up))
    value, slope = by_differences(activation, g)
    h = jnp.asarray(value * u, jnp.bfloat16)
    _, mask, sites, dys = packed(2, tokens, d_ff, (64,), (8,), dropout=dropout)
    (_, us), (dh, *grads) = exact(h, mask, sites, dys)
    (dgate, dup), rounded, *got = hopper.backward_glu(
        activation,
        h if kept else None,
        mask,
        sites,
        us=tuple(jnp.asarray(u, jnp.bfloat16) for u in us),
        dys=dys,
        ys=(gate, up),
        ws=(None, None),
        config=ONE_BLOCK,
        interpret=INTERPRET,
    )
    assert not raced() and rounded is None
    dh = np.asarray(dh)
    assert worst((dgate, dup), (dh * u * slope, dh * value)) < 8e-3
    assert worst(got, grads) < 8e-3


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


def test_on_an_fp8_base_the_launches_are_those_of_xla():
    """Gate, up and the rounded unit, and the rounded gradients: each by the kernels, against the reference's."""
    x, _, ins, _ = packed(2, 128, 128, (256, 256), (8, 8))
    h, _, outs, dys = packed(2, 128, 256, (128,), (8,), seed=1)
    ins, outs = in_fp8(ins, "e4m3"), in_fp8(outs, "e4m3")
    call = {"config": lambda site: ONE_BLOCK, "interpret": INTERPRET}
    (gate, up, unit), us = hopper.forward_glu("silu", x, None, ins, **call)
    (_, _, want), want_us = reference.forward_glu("silu", x, None, ins)
    assert worst((gate, up, us), (*reference.forward(x, None, ins)[0], want_us)) < 8e-3
    assert relative(unit.x, want.x) < 8e-3 and relative(unit.values, want.values) < 3e-2
    _, own_us = reference.forward(h, None, outs)
    back = (h, None, outs, own_us, dys, (gate, up), [site.w for site in ins])
    got = hopper.backward_glu("silu", *back, config=ONE_BLOCK, interpret=INTERPRET)
    want = reference.backward_glu("silu", *back)
    assert worst((got[0], got[2:]), (want[0], want[2:])) < 1.5e-2
    assert relative(got[1][1], want[1][1]) < 1e-2


@pytest.mark.parametrize("given", [{"transposed": False}, {"softmax": Softmax(jnp.zeros((1, 64)))}])
def test_a_unit_of_other_products_is_refused(given):
    x = jnp.zeros((1, 64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="a unit is made of 16-bit products"):
        lora_gemm([(x, x[0])], unit=Unit("silu", x, x), **{"transposed": True, **given})


def test_rows_longer_than_a_copy_and_none():
    x = draw(0, 1, 128 * 258).astype(jnp.bfloat16)
    (got,), _ = hopper_rows.round_rows((x,), (None,), jnp.float8_e4m3fn, interpret=INTERPRET)
    (want,), _ = fp8.round_rows((x,), (None,), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    (none,), scale = hopper_rows.round_rows((x[:0],), (None,), jnp.float8_e4m3fn)
    assert none.shape == x[:0].shape and scale.shape == (0,)
