"""`lora_dense`: a frozen Linear with a LoRA adapter, written for one job and packed over jobs by `jax.vmap`.

The functions are `custom_vjp`s whose forward and backward are `custom_vmap` functions. The batching rule is the
packed computation: jobs stack on a leading axis J, and the frozen product sees all jobs' tokens as one matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from . import fp8, reference
from .choice import asked, glu_implementation, implementation
from .fp8 import Fp8Weight, Rounded
from .glu import ACTIVATIONS
from .reference import Site

# names for the policies of `jax.checkpoint`
SHRUNK = "lora_shrunk"  # of scale·x·Aᵀ, [T, R]: keep it
GATED = "lora_gated"  # of the gate and up of `lora_dense_glu`


def lora_dense(x, w, a, b, scale, *, bias=None, mask=None):
    """Apply a frozen Linear and its LoRA adapter: y = x·W + bias + scale·((x·mask)·Aᵀ)·Bᵀ.

    Under `jax.checkpoint` let the policy keep the small values named `SHRUNK`: they come out of the frozen product's
    launch, which would otherwise run again for them.

    Gradients flow to x, a and b only: W, bias, scale and mask are constants, and no gradient of W is ever formed. They
    are first derivatives, in reverse mode. On a mesh use `shard_map`, or axes of type Auto.
    Products run in x.dtype with float32 accumulation; scale stays float32. `jax.vmap` over the adapters (and x)
    is the packed computation of all jobs; W must not be batched there (it still works, by one product a job).

    Args:
      x: [..., D] in the compute dtype. w: [D, F], or an `Fp8Weight` of that shape. a: [R, D] and b: [F, R], float32
        masters as PEFT stores them.
      scale: float32 scalar, alpha/r (rsLoRA: alpha/√r). bias: [F] or None. mask: dropout mask [..., D] with values
        0 or 1/(1-p), or None.

    Returns:
      [..., F] in x.dtype. Gradients of a and b have their own dtype.

    Raises:
      ValueError: when the shapes do not fit together, or x holds no floating-point numbers.

    References:
      Hu et al., LoRA: https://arxiv.org/abs/2106.09685
    """
    (y,) = lora_dense_group(x, (w,), ((a, b, scale),), biases=(bias,), mask=mask)
    return y


def lora_delta(x, a, b, scale, *, mask=None):
    """Apply the adapter alone, scale·((x·mask)·Aᵀ)·Bᵀ, for a Linear computed elsewhere (quantised or sharded).

    Args and gradients are those of `lora_dense`; returns [..., F] in x.dtype.
    """
    (y,) = lora_dense_group(x, (None,), ((a, b, scale),), mask=mask)
    return y


def lora_dense_group(x, ws, adapters, *, biases=None, mask=None):
    """Apply several `lora_dense` that read the same x (q/k/v, gate/up), sharing the read of x, mask and shrink.

    Args:
      x: [..., D], or what `lora_dense_glu` returns. ws: one [D, F] per site (None: the adapter alone). adapters: one
        (a, b, scale) per site, or None. biases: one [F] or None per site, or None. mask: one dropout mask for all
        sites, or None.

    Returns:
      One [..., F] per site.

    Raises:
      ValueError: when the shapes do not fit together, or x holds no floating-point numbers.
    """
    return _group(x, ws, adapters, biases, mask, None)


def lora_dense_glu(x, ws, adapters, *, activation, biases=None, mask=None):
    """Apply gate and up as `lora_dense_group`, and multiply: activation(gate)·up.

    Args:
      x, adapters, biases, mask: as for `lora_dense_group`. ws: of gate and of up, or one that holds both, gate first.
      activation: "silu" or "gelu_tanh".

    Returns:
      [..., F] in x.dtype, as it is or as a `Rounded`, for the `lora_dense_group` of the MLP's last site. On fp8 weights
      the unit is computed in float32, and rounded for that site, as its gradients are for these.

    Raises:
      ValueError: as `lora_dense_group`, or the activation is none of these, or gate and up are not alike.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: allowed are {', '.join(ACTIVATIONS)}")
    if len(ws) not in (1, 2) or len({w.shape[-1] for w in ws if w is not None}) > 1:
        shapes = [None if w is None else tuple(w.shape) for w in ws]
        raise ValueError(f"weights {shapes}: give gate and up, alike, or one that holds both")
    if len(ws) == 2 and all(isinstance(w, Fp8Weight) for w in ws):
        return _group(x, ws, adapters, biases, mask, activation)
    ys = tuple(checkpoint_name(y, GATED) for y in _group(x, ws, adapters, biases, mask, None))
    gate, up = ys if len(ys) == 2 else jnp.split(ys[0], 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def _group(x, ws, adapters, biases, mask, activation):
    biases = (None,) * len(ws) if biases is None else tuple(biases)
    if not len(ws) == len(adapters) == len(biases):
        raise ValueError(
            f"{len(ws)} weights, {len(adapters)} adapters and {len(biases)} biases: give one per site"
        )
    sites = []
    for w, adapter, bias in zip(ws, adapters, biases, strict=True):
        if adapter is None:
            if w is None:
                raise ValueError("a site needs a weight or an adapter")
            sites.append(Site(w, bias, None, None, None))
        else:
            a, b, scale = (jnp.asarray(t) for t in adapter)
            sites.append(Site(w, bias, a[None], b[None], scale[None]))
    if isinstance(x, Rounded) and not any(isinstance(w, Fp8Weight) for w in ws):
        x = x.x
    lead = x.shape[:-1]
    _check(x, mask, sites)
    x, sites = _alike(x, mask, sites)
    flat = jax.tree.map(lambda t: t.reshape(1, -1, t.shape[-1]), (x, mask))
    out = _lora(asked(), activation)(*flat, tuple(sites))
    return jax.tree.map(lambda y: y.reshape(*lead, y.shape[-1]), out)


def _alike(x, mask, sites):
    """Let x and the adapters vary over the same axes of a `shard_map`; gradients are summed over those they did not."""
    axes = [jax.typeof(t).manual_axis_type.varying for t in jax.tree.leaves((x, mask, sites))]

    def cast(t):
        missing = frozenset().union(*axes) - jax.typeof(t).manual_axis_type.varying
        return jax.lax.pcast(t, tuple(sorted(missing)), to="varying") if missing else t

    return jax.tree.map(cast, x), [s if s.a is None else s._replace(a=cast(s.a), b=cast(s.b)) for s in sites]


def _check(x, mask, sites):
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # adapters would be rounded to it
        raise ValueError(f"x holds {x.dtype}; floating-point numbers are due")
    d_in = x.shape[-1]
    if mask is not None and mask.shape != x.shape:
        raise ValueError(f"mask {mask.shape} must have the shape of x {x.shape}")
    for site in sites:
        expected = {}
        if site.w is not None:
            expected["w"] = (site.w.shape, (d_in, site.d_out))
        if site.bias is not None:
            expected["bias"] = (site.bias.shape, (site.d_out,))
        if site.a is not None:
            rank = site.a.shape[1] if site.a.ndim == 3 else "R"
            expected["a"] = (site.a.shape[1:], (rank, d_in))
            expected["b"] = (site.b.shape[1:], (site.d_out, rank))
            expected["scale"] = (site.scale.shape[1:], ())
        for name, (got, want) in expected.items():
            if tuple(got) != want:
                shown = str(want).replace("'", "")
                raise ValueError(f"{name} has shape {tuple(got)}, expected {shown} for x {x.shape}")


# --- one job: gradients ---------------------------------------------------------------------------------------


@functools.cache
def _lora(asked, activation):
    """Return the function of one asked implementation: JAX remembers by the function what it has traced of it.

    With an `activation` it gives the gated linear unit of its two sites.
    """

    @custom_vmap
    def forward(x, mask, sites):
        return implementation(x, sites, asked).forward(x, mask, sites)

    @custom_vmap
    def backward(x, mask, sites, us, dys, rounded):
        return implementation(x, sites, asked).backward(x, mask, sites, us, dys, rounded)

    @custom_vmap
    def unit(gate, up, ws):
        del ws  # as `_rows_rule` wants it
        own = glu_implementation(gate, asked)
        return jax.jit(own.round_glu, static_argnums=0)(activation, gate, up)

    @custom_vmap
    def unit_back(gate, up, dh, ws):
        columns, kind = [w.scale for w in ws], fp8.gradient_format(ws)
        own = glu_implementation(gate, asked)
        return jax.jit(own.round_glu_back, static_argnums=(0, 5))(activation, gate, up, dh, columns, kind)

    forward.def_vmap(functools.partial(_forward_rule, forward))
    backward.def_vmap(functools.partial(_backward_rule, backward))
    unit.def_vmap(functools.partial(_rows_rule, unit))
    unit_back.def_vmap(functools.partial(_rows_rule, unit_back))

    @jax.custom_vjp
    def lora(x, mask, sites):
        ys, _ = forward(x, mask, sites)
        return unit(*ys, ()) if activation else ys

    def lora_fwd(x, mask, sites):
        ys, us = forward(x, mask, sites)
        # small, and made inside the launch of a whole frozen product: not to be computed again for dB
        us = jax.tree.map(lambda u: checkpoint_name(u, SHRUNK), us)
        if isinstance(x, Rounded):
            x = Rounded(x.x, None, None)
        if not activation:
            return ys, (x, mask, sites, us, None)
        ys = tuple(checkpoint_name(y, GATED) for y in ys)
        return unit(*ys, ()), (x, mask, sites, us, ys)

    def lora_bwd(residuals, dys):
        x, mask, sites, us, ys = residuals
        rounded = None
        if activation:
            dys, rounded = unit_back(*ys, dys.x, tuple(site.w for site in sites))
        dx, das, dbs = backward(x, mask, sites, us, dys, rounded)

        def cast(site, da, db):
            return (None, None) if da is None else (da.astype(site.a.dtype), db.astype(site.b.dtype))

        grads = tuple(Site(None, None, *cast(*each), None) for each in zip(sites, das, dbs, strict=True))
        return Rounded(dx, None, None) if isinstance(x, Rounded) else dx, None, grads

    lora.defvjp(lora_fwd, lora_bwd)
    return lora


# --- J jobs: batching -----------------------------------------------------------------------------------------


def _any(batched) -> bool:
    return any(jax.tree.leaves(batched))


def _base_batched(sites) -> bool:
    return any(_any((site.w, site.bias)) for site in sites)


def _adapters(sites):
    return [(site.a, site.b, site.scale) for site in sites]


def _jobs(n, value, batched, jobs):
    """Merge a new axis of size n in front of the job axis: [n, J, …] -> [n·J, …], broadcasting what lacks either."""
    value = value if batched else jnp.broadcast_to(value, (n, *value.shape))
    value = jnp.broadcast_to(value, (n, jobs, *value.shape[2:]))
    return value.reshape(n * jobs, *value.shape[2:])


def _shared(n, tree, batched, jobs):
    """As `_jobs`, but leave tokens that all jobs read as they are: their frozen product is computed once."""

    def share(value, is_batched):
        shared = not is_batched and value.shape[0] == 1
        return value if shared else _jobs(n, value, is_batched, jobs)

    return jax.tree.map(share, tree, batched)


def _adapters_as_jobs(n, sites, batched, jobs):
    return tuple(
        site._replace(
            **{
                name: _jobs(n, getattr(site, name), getattr(flags, name), jobs)
                for name in ("a", "b", "scale")
                if site.a is not None
            }
        )
        for site, flags in zip(sites, batched, strict=True)
    )


def _split_jobs(n, jobs, tree):
    return jax.tree.map(lambda t: t.reshape(n, jobs, *t.shape[1:]), tree)


def _vmap_reference(function, n, batched, args):
    """Batch over W itself (unusual: the base is shared by all jobs): plain XLA, one product a weight."""
    out = jax.vmap(function, in_axes=jax.tree.map(lambda b: 0 if b else None, batched), axis_size=n)(*args)
    return out, jax.tree.map(lambda _: True, out)


def _job_count(values, batched) -> int:
    """Return the size of the job axis, which the new axis precedes where a value is batched."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(batched), strict=True)
    return max(value.shape[1 if is_batched else 0] for value, is_batched in pairs)


def _rows_rule(function, n, batched, *args):
    """Batch what treats rows alike, with the frozen weights as last argument: those of more jobs are more rows."""
    everywhere = [
        jax.tree.map(lambda t, flag: t if flag else jnp.broadcast_to(t, (n, *t.shape)), arg, flags)
        for arg, flags in zip(args, batched, strict=True)
    ]
    if _any(batched[-1]):  # weights of their own (unusual): one after another
        out = jax.lax.map(lambda each: function(*each), everywhere)
    else:
        out = function(*everywhere[:-1], args[-1])
    return out, jax.tree.map(lambda _: True, out)


def _forward_rule(forward, n, batched, x, mask, sites):
    x_batched, mask_batched, sites_batched = batched
    if _base_batched(sites_batched):
        return _vmap_reference(reference.forward, n, batched, (x, mask, sites))
    jobs = _job_count((x, mask, _adapters(sites)), (x_batched, mask_batched, _adapters(sites_batched)))
    if _any(sites_batched):
        packed = _adapters_as_jobs(n, sites, sites_batched, jobs)
        ys, us = forward(_shared(n, x, x_batched, jobs), _shared(n, mask, mask_batched, jobs), packed)
        # a site without adapter that reads shared tokens has one result for all jobs
        ys = tuple(jnp.broadcast_to(y, (n * jobs, *y.shape[1:])) for y in ys)
        out = _split_jobs(n, jobs, (ys, us))
        return out, jax.tree.map(lambda _: True, out)

    # The same adapters on more tokens: the new axis joins the tokens, [n, J, T, D] -> [J, n·T, D].
    def join(value, is_batched):
        value = value if is_batched else jnp.broadcast_to(value, (n, *value.shape))
        return jnp.moveaxis(value, 0, 1).reshape(value.shape[1], -1, value.shape[-1])

    def part(value):
        return jnp.moveaxis(value.reshape(value.shape[0], n, -1, value.shape[-1]), 1, 0)

    joined = jax.tree.map(join, (x, mask), (x_batched, mask_batched))
    out = jax.tree.map(part, forward(*joined, sites))
    return out, jax.tree.map(lambda _: True, out)


def _backward_rule(backward, n, batched, x, mask, sites, us, dys, rounded):
    x_batched, mask_batched, sites_batched, us_batched, dys_batched, rounded_batched = batched
    if _base_batched(sites_batched):
        return _vmap_reference(reference.backward, n, batched, (x, mask, sites, us, dys, rounded))
    # Every element of the new axis owes its own dA and dB, so all of them become jobs here.
    jobs = _job_count((x, mask, us, dys), (x_batched, mask_batched, us_batched, dys_batched))
    out = backward(
        _shared(n, x, x_batched, jobs),
        _shared(n, mask, mask_batched, jobs),
        _adapters_as_jobs(n, sites, sites_batched, jobs),
        *jax.tree.map(
            lambda value, flag: _jobs(n, value, flag, jobs),
            (us, dys, rounded),
            (us_batched, dys_batched, rounded_batched),
        ),
    )
    out = _split_jobs(n, jobs, out)
    return out, jax.tree.map(lambda _: True, out)
