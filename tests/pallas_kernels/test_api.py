"""`lora_dense` against autodiff of the formula, in float64, under every nesting of transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lora_delta, lora_dense, lora_dense_group


def formula(x, w, a, b, scale, bias=None, mask=None):
    xm = x if mask is None else x * mask
    y = x @ w + scale * (xm @ a.T) @ b.T
    return y if bias is None else y + bias


def draw(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


D, F, R, T, J = 12, 10, 3, 7, 4
SHAPES = {"x": (T, D), "w": (D, F), "a": (R, D), "b": (F, R), "scale": (), "bias": (F,), "mask": (T, D)}
FULL = ("x", "w", "a", "b", "scale", "bias", "mask")


def batched(names, n=J, seed=0):
    return draw(seed, **{k: ((n, *s) if k in names else s) for k, s in SHAPES.items()})


def axes(names):
    return tuple(0 if k in names else None for k in FULL)


def ours(x, w, a, b, scale, bias, mask):
    return lora_dense(x, w, a, b, scale, bias=bias, mask=mask)


def loss(function):
    def value(*args):
        y = function(*args)
        return jnp.sum(jnp.sin(y) * jnp.arange(1, 1 + y.shape[-1]))

    return value


def close(got, want, tol=1e-11):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tol, atol=tol), got, want)


PATTERNS = [
    ("x", "a", "b", "scale", "mask"),
    ("a", "b", "scale"),  # all adapters on the same tokens
    ("x",),
    ("x", "mask"),
    ("mask",),
    ("a",),
    ("scale",),
    ("b", "x"),
    ("mask", "a", "b", "scale"),
    ("x", "w", "a", "b"),
    ("w",),
    ("bias",),
]


@pytest.mark.parametrize("names", PATTERNS, ids="-".join)
def test_vmap_value_and_gradients(names):
    args = batched(names)
    values = [args[k] for k in FULL]
    got = jax.jit(jax.vmap(ours, in_axes=axes(names)))(*values)
    want = jax.vmap(formula, in_axes=axes(names))(*values)
    close(got, want)

    def total(function):
        mapped = jax.vmap(loss(function), in_axes=axes(names))
        return jax.grad(lambda *v: jnp.sum(mapped(*v)), argnums=(0, 2, 3))(*values)

    close(total(ours), total(formula))
    # per-job gradients inside the vmap
    per_job = [
        jax.vmap(jax.grad(loss(f), argnums=(0, 2, 3)), in_axes=axes(names))(*values) for f in (ours, formula)
    ]
    close(*per_job)


@pytest.mark.parametrize("outer", PATTERNS[:9], ids="-".join)
@pytest.mark.parametrize(
    "inner", [("x", "a", "b", "scale", "mask"), ("a", "b", "scale"), ("x",)], ids="-".join
)
def test_nested_vmap(outer, inner):
    values = []
    for i, k in enumerate(FULL):
        shape = (3,) * (k in outer) + (2,) * (k in inner) + SHAPES[k]
        values.append(draw(i, v=shape)["v"])
    got, want = (
        jax.vmap(jax.vmap(jax.grad(loss(f), argnums=(0, 2, 3)), in_axes=axes(inner)), in_axes=axes(outer))(
            *values
        )
        for f in (ours, formula)
    )
    close(got, want)
    got, want = (
        jax.vmap(jax.vmap(f, in_axes=axes(inner)), in_axes=axes(outer))(*values) for f in (ours, formula)
    )
    close(got, want)


def test_constants_have_no_gradient():
    values = [batched(())[k] for k in FULL]
    for grad in jax.grad(loss(ours), argnums=(1, 4, 5, 6))(*values):
        assert not np.any(grad)


def test_group_equals_single_sites():
    t = draw(
        1,
        x=(2, 5, D),
        mask=(2, 5, D),
        w1=(D, 6),
        w2=(D, 4),
        w3=(D, 8),
        a1=(3, D),
        b1=(6, 3),
        a3=(2, D),
        b3=(8, 2),
    )

    def group(x, a1, b1, a3, b3):
        return lora_dense_group(
            x, (t["w1"], t["w2"], t["w3"]), ((a1, b1, 0.5), None, (a3, b3, 2.0)), mask=t["mask"]
        )

    def single(x, a1, b1, a3, b3):
        m = t["mask"]
        return formula(x, t["w1"], a1, b1, 0.5, mask=m), x @ t["w2"], formula(x, t["w3"], a3, b3, 2.0, mask=m)

    values = [t[k] for k in ("x", "a1", "b1", "a3", "b3")]
    close(group(*values), single(*values))

    def total(f):
        return jax.grad(lambda *v: sum(jnp.sum(jnp.cos(y)) for y in f(*v)), argnums=range(5))(*values)

    close(total(group), total(single))
    stacked = [jnp.stack([v, v[::-1]]) for v in values]
    close(jax.vmap(group)(*stacked), jax.vmap(single)(*stacked))
    # all adapters on the same tokens: the site without adapter has one value, seen by all
    close(
        jax.vmap(group, in_axes=(None, 0, 0, 0, 0))(values[0], *stacked[1:]),
        jax.vmap(single, in_axes=(None, 0, 0, 0, 0))(values[0], *stacked[1:]),
    )


def test_delta():
    t = batched(())
    got = lora_delta(t["x"], t["a"], t["b"], t["scale"], mask=t["mask"])
    close(got, t["scale"] * ((t["x"] * t["mask"]) @ t["a"].T) @ t["b"].T)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_checkpoint_vmap_grad(remat):
    """A stack of layers scanned, rematerialised, vmapped over jobs and differentiated equals plain autodiff."""
    n_layers = 3
    t = draw(
        2, x=(J, T, D), w=(n_layers, D, D), a=(n_layers, J, R, D), b=(n_layers, J, D, R), scale=(n_layers, J)
    )

    def run(f):
        def network(adapters, x):
            def layer(h, args):
                w, (a, b, s) = args
                return jnp.tanh(f(h, w, a, b, s)), None

            h, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (t["w"], adapters))
            return jnp.sum(h**2)

        mapped = jax.vmap(network, in_axes=(1, 0))
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(mapped(p, x)), argnums=(0, 1)))(
            (t["a"], t["b"], t["scale"]), t["x"]
        )

    (value, ((da, db, _), dx)), (want, ((wda, wdb, _), wdx)) = run(lora_dense), run(formula)
    close((value, da, db, dx), (want, wda, wdb, wdx), 1e-10)


def test_one_base_product_over_all_jobs_and_no_weight_gradient():
    """The compiled pack has one product with W forward and one backward, over J·T rows, and none of W's shape."""
    t = batched(("x", "a", "b", "scale"))
    mapped = jax.vmap(lambda x, a, b, s: loss(lora_dense)(x, t["w"], a, b, s))
    jaxpr = str(
        jax.make_jaxpr(jax.grad(lambda *v: jnp.sum(mapped(*v)), argnums=(0, 1, 2)))(
            t["x"], t["a"], t["b"], t["scale"]
        )
    )
    dots = [line.split("=")[0] for line in jaxpr.splitlines() if "dot_general" in line]
    assert sum(f"[{J * T},{F}]" in d for d in dots) == 1
    assert sum(f"[{J * T},{D}]" in d for d in dots) == 1
    assert not any(f"[{D},{F}]" in d or f"[{F},{D}]" in d for d in dots)
    assert len(dots) == 8  # x·W, dy·Wᵀ, and for the adapters shrink, expand, du, du·A, dA, dB


def test_bf16_products_keep_float32_gradients_and_scale():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((T, D)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((D, F)), jnp.bfloat16)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((R, D), (F, R)))
    scale = jnp.float32(1 / 3)
    y, pull = jax.vjp(lambda x, a, b: lora_dense(x, w, a, b, scale), x, a, b)
    dx, da, db = pull(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, da.dtype, db.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    exact = formula(*(np.asarray(t, np.float64) for t in (x, w, a, b, scale)))
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 8e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a": (R, D + 1)}, "a has shape"),
        ({"b": (R, F)}, "b has shape"),
        ({"w": (D + 1, F)}, "w has shape"),
        ({"bias": (F + 1,)}, "bias has shape"),
        ({"mask": (T, D - 1)}, "mask"),
        ({"scale": (2,)}, "scale has shape"),
        ({"a": (J, R, D), "b": (J, F, R)}, r"a has shape \(4, 3, 12\), expected \(R, 12\)"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    t = draw(0, **{**SHAPES, **change})
    with pytest.raises(ValueError, match=message):
        ours(*(t[k] for k in FULL))


def test_whole_numbers_are_refused():
    """In x's dtype the adapters would be whole numbers too."""
    t = batched(())
    with pytest.raises(ValueError, match="x holds int32; floating-point numbers are due"):
        lora_dense(jnp.ones((T, D), jnp.int32), t["w"], t["a"], t["b"], t["scale"])


@pytest.mark.parametrize("tokens, jobs", [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_multiply(tokens, jobs):
    t = draw(0, x=(jobs, tokens, D), w=(D, F), a=(jobs, R, D), b=(jobs, F, R), scale=(jobs,))
    values = [t[k] for k in ("x", "w", "a", "b", "scale")]
    packed = jax.vmap(lora_dense, in_axes=(0, None, 0, 0, 0))
    assert packed(*values).shape == (jobs, tokens, F)
    grads = jax.grad(lambda *v: jnp.sum(packed(*v)), argnums=(0, 2, 3))(*values)
    assert [g.shape for g in grads] == [values[i].shape for i in (0, 2, 3)]
    assert not any(np.any(g) for g in grads)
