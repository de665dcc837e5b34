"""Products with fp8 weights against float64: of the exact numbers that the 8-bit ones stand for."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import Device, Fp8Weight, choose, lora_dense_group, quantise, quantise_weight, using
from pallas_kernels.fp8 import round_gradients, why_not
from tests.pallas_kernels.problems import count_launches, relative, stood_for

# bits of the fraction, exponent of the least normal number, largest number: OCP 8-bit floating point, table 1
FORMATS = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_within_the_formats_bound_and_to_the_nearest(name):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 500)) * 2.0 ** rng.uniform(-18, 18, (64, 500))).astype(np.float32)
    values, scale = quantise(x, jnp.dtype(name))
    assert values.dtype == name and scale.dtype == jnp.float32
    fraction, least, top = FORMATS[name]
    np.testing.assert_allclose(scale, np.abs(x.astype(np.float64)).max(-1) / top, rtol=1e-7)
    unit = x.astype(np.float64) / np.asarray(scale, np.float64)[:, None]
    error = np.abs(np.asarray(values, np.float64) - unit)
    bound = np.maximum(np.abs(unit) * 2.0 ** -(fraction + 1), 2.0 ** (least - fraction - 1))
    assert np.all(error <= bound * (1 + 1e-6)) and (error / bound).max() > 0.99
    assert np.all(np.abs(np.asarray(values, np.float64)).max(-1) == top)  # the largest is kept
    nearest = unit.astype(getattr(ml_dtypes, name)).astype(np.float64)
    assert np.mean(np.asarray(values, np.float64) == nearest) > 0.9999  # ties may fall to either side


def test_rows_of_zeros_of_tiny_numbers_and_of_none():
    rows = np.zeros((5, 8), np.float32)
    rows[1], rows[2, 3], rows[3, 3], rows[4, 0] = 1e-37, np.inf, np.nan, 3
    values, scale = quantise(rows)
    product = np.asarray(values, np.float32) @ np.ones((8, 2), np.float32) * np.asarray(scale)[:, None]
    assert np.all(product[:2] == 0) and not np.isfinite(product[2:4]).any() and product[4] == pytest.approx(3)


def test_weights_have_scales_that_bfloat16_holds_and_stay_within_the_format():
    """For largest numbers all over an octave of bfloat16: none above the format's, none a step of its below it."""
    largest = np.linspace(1, 2, 1001, dtype=np.float32) * 2.0**-40
    w = np.random.default_rng(0).uniform(-1, 1, (1001, 64)).astype(np.float32) * largest[:, None]
    w[:, 7] = largest
    values, scale = quantise_weight(w)
    assert scale.dtype == jnp.bfloat16
    assert np.all(np.asarray(values, np.float32)[:, 7] == 448)
    assert np.all(largest / np.asarray(scale, np.float32) <= 448)
    # half a unit in the last place of three bits, of numbers near the format's largest
    near = np.abs(w) > largest[:, None] / 2
    assert np.abs(stood_for(values, scale) / w - 1)[near].max() <= 2.0**-4
    assert np.isfinite(np.asarray(quantise_weight(np.zeros((1, 64), np.float32))[1], np.float32)).all()


T, D, F, R, J = 6, 64, 48, 4, 3


def weights(seed=0, backward="e4m3"):
    w = np.random.default_rng(seed).standard_normal((F, D)) * np.logspace(-3, 0, F)[:, None] / D**0.5
    return Fp8Weight(*quantise_weight(jnp.asarray(w, jnp.float32)), backward), w


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
def test_y_and_dx_are_those_of_the_rounded_operands(backward):
    """Exact up to the float32 sums: W by its rows, x by tokens, dy by tokens with W's scales folded in."""
    w8, w = weights(backward=backward)
    held = stood_for(w8.values, w8.scale)
    assert w8.shape == (D, F) and 0.015 < relative(held, w) < 0.035
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((T, D), (T, F)))
    (y,), pull = jax.vjp(lambda x: lora_dense_group(x, (w8,), (None,)), x)
    assert relative(y, stood_for(*quantise(x)) @ held.T) < 1e-6
    name = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[backward]
    folded = stood_for(*quantise(dy * w8.scale, name))
    (dx,) = pull((dy,))
    assert relative(dx, folded @ np.asarray(w8.values, np.float64)) < 1e-6
    exact = np.asarray(dy, np.float64) @ held
    low, high = {"e4m3": (0.015, 0.035), "e5m2": (0.03, 0.07)}[backward]  # relative rounding of 3 or 2 bits
    assert low < relative(dx, exact) < high


def test_float16_tokens_do_not_overflow():
    """Their products are summed in float32: numbers of up to 448 each would not fit into float16."""
    w8, _ = weights()
    held, x = (
        stood_for(w8.values, w8.scale),
        jnp.asarray(np.random.default_rng(1).standard_normal((T, D)), jnp.float16),
    )
    (y,), pull = jax.vjp(lambda x: lora_dense_group(x, (w8,), (None,)), x)
    (dx,) = pull((y,))
    assert y.dtype == dx.dtype == jnp.float16 and np.isfinite(dx).all()
    assert relative(y, stood_for(*quantise(x)) @ held.T) < 1e-3


def packed_loss(x, sites, ws, mask=None):
    def one(x, adapters):
        ys = lora_dense_group(x, ws, adapters, mask=mask)
        return sum(jnp.sum(jnp.sin(y) * jnp.arange(1, 1 + y.shape[-1])) for y in ys)

    return jnp.sum(jax.vmap(one)(x, sites))


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def problem():
    adapter = (draw(2, J, R, D), 0.1 * draw(3, J, F, R), jnp.asarray([0.5, 1.0, 2.0]))
    return draw(4, J, T, D), (adapter, None), (weights(0)[0], weights(5)[0])


def test_packed_adapters_beside_it_get_the_gradients_of_each_job_alone():
    x, sites, ws = problem()
    got = jax.jit(jax.grad(packed_loss, argnums=(0, 1)))(x, sites, ws)
    for j in range(J):
        own = jax.tree.map(lambda t, j=j: t[j : j + 1], (x, sites))
        want = jax.grad(packed_loss, argnums=(0, 1))(*own, ws)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative(a[j], b[0]) < 1e-6 and (b.ndim == 1 or np.abs(b).max() > 1e-3)


@pytest.mark.parametrize(("backward", "operand"), [("e4m3", "f8E4M3FN"), ("e5m2", "f8E5M2")])
def test_one_product_of_fp8_numbers_over_all_jobs_each_way_and_no_gradient_of_w(backward, operand):
    x, sites, ws = problem()
    ws = tuple(Fp8Weight(w.values, w.scale, backward) for w in ws)
    text = jax.jit(jax.grad(packed_loss, argnums=(0, 1, 2), allow_int=True)).lower(x, sites, ws).as_text()
    found = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>", text)
    fp8 = sorted(dots for dots in found if "f8" in dots[0] + dots[1])
    forward = (f"{J * T}x{D}xf8E4M3FN", f"{F}x{D}xf8E4M3FN", f"{J * T}x{F}xf32")
    dx = (f"{J * T}x{F}x{operand}", f"{F}x{D}xf8E4M3FN", f"{J * T}x{D}xf32")
    assert fp8 == sorted([forward, forward, dx, dx])
    assert not any(result in (f"{F}x{D}xf32", f"{D}x{F}xf32") for _, _, result in found)
    dw = jax.grad(packed_loss, argnums=2, allow_int=True)(x, sites, ws)
    assert all(np.all(np.asarray(leaf, np.float32) == 0) for leaf in jax.tree.leaves(dw))


def test_a_job_that_is_not_finite_leaves_the_others_their_bits():
    x, sites, ws = problem()
    grad = jax.jit(jax.grad(packed_loss, argnums=(0, 1)))
    before, after = grad(x, sites, ws), grad(x.at[1, 2, 3].set(jnp.nan), sites, ws)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[2], b[2])
    assert np.isnan(after[0][1]).any()


def test_who_serves_it():
    h200 = Device("NVIDIA H200", "9.0", 132)
    case = ("bfloat16", 8, 1024, 3584, (3584, 512), (32,))
    assert choose(*case, device=h200, mode="auto", fp8=True).name == "hopper"
    half = choose("float16", *case[1:], device=h200, mode="hopper", fp8=True)
    assert half == ("xla", "beside fp8 weights the kernel takes bfloat16, not float16")
    narrow = choose("bfloat16", 8, 1024, 3584, (3584, 192), (32,), device=h200, mode="hopper", fp8=True)
    assert narrow == ("xla", "output features 192 are no multiple of 128")


def lowered(*ws):
    """Lower a layer's gradients for CUDA, of sites [128, 256] with adapters each."""
    site = sd(2, 8, 128), sd(2, 256, 8), sd(2)
    with using("hopper"):
        grad = jax.jit(lambda x, adapters, ws: jax.grad(packed_loss, argnums=(0, 1))(x, adapters, ws))
        traced = grad.trace(sd(2, 256, 128, dtype=jnp.bfloat16), (site,) * len(ws), ws)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def sd(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def eight_bits(backward="e4m3"):
    return Fp8Weight(sd(256, 128, dtype=jnp.float8_e4m3fn), sd(256), backward)


def test_sites_of_unlike_weights_are_left_to_xla():
    wide = sd(128, 256, dtype=jnp.bfloat16)
    assert count_launches(lowered(wide, wide)) == 3
    assert count_launches(lowered(eight_bits(), eight_bits())) == 5  # and one each way that rounds
    mixed = lowered(eight_bits(), wide)
    assert count_launches(mixed) == 0 and "f8E4M3FN" in mixed
    with pytest.raises(ValueError, match="in e4m3 and e5m2"):
        lowered(eight_bits("e4m3"), eight_bits("e5m2"))


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
def test_one_product_each_way_and_one_rounding(backward):
    """Lowered for CUDA: with the gradients' format that the weights ask for."""
    text = lowered(eight_bits(backward))
    assert count_launches(text) == 4 and ("f8E5M2" in text) == (backward == "e5m2")


@pytest.mark.parametrize(("backward", "within"), [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_gradients_of_several_sites_are_rounded_alike(backward, within):
    """With W's scales folded in by feature, and one scale a token in all sites: its largest number is kept."""
    rng = np.random.default_rng(0)
    dys = [jnp.asarray(size * rng.standard_normal((T, F)), jnp.float32) for size in (1, 30)]
    ws = [
        Fp8Weight(jnp.zeros((F, D)), jnp.asarray(rng.lognormal(size=F), jnp.float32), backward) for _ in dys
    ]
    values, scale = round_gradients(dys, ws)
    exact = [
        np.asarray(dy, np.float64) * np.asarray(w.scale, np.float64) for dy, w in zip(dys, ws, strict=True)
    ]
    top = {"e4m3": 448.0, "e5m2": 57344.0}[backward]
    np.testing.assert_allclose(scale, np.abs(np.concatenate(exact, 1)).max(1) / top, rtol=1e-6)
    least = 2.0**-9 * np.asarray(scale, np.float64)[:, None]  # half of the formats' least number, or less
    for own, want in zip(values, exact, strict=True):
        assert np.all(np.abs(stood_for(own, scale) - want) <= within * np.abs(want) * (1 + 1e-6) + least)


def test_gpus_that_have_no_fp8_say_so():
    assert [why_not(c) for c in ("", "8.9", "9.0", "12.0")] == [None] * 4
    assert "compute capability 8.6, and fp8 products need 8.9" in why_not("8.6")
    assert why_not("8.0") and why_not("7.5")
