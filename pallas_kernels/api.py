"""`lora_dense`: a frozen Linear with a LoRA adapter, written for one job and packed over jobs by `jax.vmap`.

The functions are `custom_vjp`s whose forward and backward are `custom_vmap` functions. The batching rule is the
packed computation: jobs stack on a leading axis J, and the frozen product sees all jobs' tokens as one matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from . import mlp
from .choice import asked, implementation
from .fp8 import Fp8Weight, Rounded
from .glu import ACTIVATIONS
from .reference import Site

# names for the policies of `jax.checkpoint`
SHRUNK = "lora_shrunk"  # of scale·x·Aᵀ, [T, R]: keep it
GATED = "lora_gated"  # of the gate and up of `lora_mlp`


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
      x: [..., D]. ws: one [D, F] per site (None: the adapter alone). adapters: one
        (a, b, scale) per site, or None. biases: one [F] or None per site, or None. mask: one dropout mask for all
        sites, or None.

    Returns:
      One [..., F] per site.

    Raises:
      ValueError: when the shapes do not fit together, or x holds no floating-point numbers.
    """
    return _packed(x, mask, _sites(ws, adapters, biases))


def lora_mlp(x, ws, adapters, *, activation, biases=None, masks=(None, None), keep=True):
    """Apply a gated MLP, down(activation(gate)·up), each product as `lora_dense`.

    With gate and up apart, and all weights fp8 or another implementation than "xla" asked for, it is one function to
    autodiff, which keeps gate, up and what down reads; the unit and its gradients are computed in float32: where the
    fused kernel serves in the launches of the products beside it, on fp8 weights in one that also rounds them.

    Args:
      x: [..., D]. ws: of gate [D, F], up [D, F] and down [F, D'], or one that holds both [D, 2F], gate first, and down.
      adapters, biases: one per weight, as for `lora_dense_group`. activation: "silu" or "gelu_tanh".
      masks: dropout masks of x and of what down reads. keep: whether what down reads stays in memory for backward; else
        it is made again of gate and up, as suits a `jax.checkpoint` whose policy keeps these by their name, `GATED`.

    Returns:
      [..., D'] in x.dtype.

    Raises:
      ValueError: as `lora_dense_group`, or the activation is none of these, or gate and up are not alike.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: allowed are {', '.join(ACTIVATIONS)}")
    *ins, down = ws
    if len(ins) not in (1, 2) or len({w.shape[-1] for w in ins}) > 1:
        shapes = [tuple(w.shape) for w in ins]
        raise ValueError(f"weights {shapes} before the last: give gate and up, alike, or one that holds both")
    biases = (None,) * len(ws) if biases is None else tuple(biases)
    eight = [isinstance(w, Fp8Weight) for w in ws]
    if len(ins) == 2 and (all(eight) or (not any(eight) and asked() != "xla")):
        return _packed(x, masks, _sites(ws, adapters, biases), activation, keep)
    ys = lora_dense_group(x, ins, adapters[:-1], biases=biases[:-1], mask=masks[0])
    ys = tuple(checkpoint_name(y, GATED) for y in ys)
    gate, up = ys if len(ys) == 2 else jnp.split(ys[0], 2, axis=-1)
    h = ACTIVATIONS[activation](gate) * up
    return lora_dense_group(h, (down,), adapters[-1:], biases=biases[-1:], mask=masks[1])[0]


def _sites(ws, adapters, biases):
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
    return sites


def _packed(x, masks, sites, activation=None, keep=True):
    """Call the packed function for one job, with an `activation` that of a gated MLP, whose masks are two."""
    lead = x.shape[:-1]
    if activation:
        _check(x, masks[0], sites[:2])
        _check(jax.ShapeDtypeStruct((*lead, sites[0].d_out), x.dtype), masks[1], sites[2:])
    else:
        _check(x, masks, sites)
    x, sites = _alike(x, masks, sites)
    flat = jax.tree.map(lambda t: t.reshape(1, -1, t.shape[-1]), (x, masks))
    out = _lora(asked(), activation, keep)(*flat, tuple(sites))
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
def _lora(asked, activation, keep):
    """Return the function of one asked implementation: JAX remembers by the function what it has traced of it."""

    def forward_by(asked):
        def forward(x, mask, sites):
            if activation:
                return mlp.forward(activation, x, mask, sites, asked)
            return implementation(x, sites, asked).forward(x, mask, sites)

        return forward

    def backward_by(asked):
        def backward(x, mask, sites, us, dys, kept):
            if activation:
                return mlp.backward(activation, x, mask, sites, us, dys, kept, asked)
            return implementation(x, sites, asked).backward(x, mask, sites, us, dys)

        return backward

    forward, backward = custom_vmap(forward_by(asked)), custom_vmap(backward_by(asked))
    forward.def_vmap(functools.partial(_forward_rule, forward, forward_by("xla")))
    backward.def_vmap(functools.partial(_backward_rule, backward, backward_by("xla")))

    @jax.custom_vjp
    def lora(x, mask, sites):
        ys, _ = forward(x, mask, sites)
        return ys[0] if activation else ys

    def lora_fwd(x, mask, sites):
        ys, us = forward(x, mask, sites)
        # small, and made inside the launch of a whole frozen product: not to be computed again for dB
        us = jax.tree.map(lambda u: checkpoint_name(u, SHRUNK), us)
        if not activation:
            return ys, (x, mask, sites, us, None)
        y, gate, up, h = ys
        gate, up = (checkpoint_name(t, GATED) for t in (gate, up))
        return y, (x, mask, sites, us, (gate, up, (h.x if isinstance(h, Rounded) else h) if keep else None))

    def lora_bwd(residuals, dys):
        x, mask, sites, us, kept = residuals
        # else XLA keeps what gate and up are made of, or makes them wider for both passes
        kept = jax.lax.optimization_barrier(kept)
        dx, das, dbs = backward(x, mask, sites, us, (dys,) if activation else dys, kept)

        def cast(site, da, db):
            return (None, None) if da is None else (da.astype(site.a.dtype), db.astype(site.b.dtype))

        grads = tuple(Site(None, None, *cast(*each), None) for each in zip(sites, das, dbs, strict=True))
        return dx, None, grads

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


def _forward_rule(forward, by_xla, n, batched, x, mask, sites):
    x_batched, mask_batched, sites_batched = batched
    if _base_batched(sites_batched):
        return _vmap_reference(by_xla, n, batched, (x, mask, sites))
    jobs = _job_count((x, mask, _adapters(sites)), (x_batched, mask_batched, _adapters(sites_batched)))
    if _any(sites_batched):
        packed = _adapters_as_jobs(n, sites, sites_batched, jobs)
        ys, us = forward(_shared(n, x, x_batched, jobs), _shared(n, mask, mask_batched, jobs), packed)
        # a site without adapter that reads shared tokens has one result for all jobs
        ys = jax.tree.map(lambda y: jnp.broadcast_to(y, (n * jobs, *y.shape[1:])), ys)
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


def _backward_rule(backward, by_xla, n, batched, x, mask, sites, us, dys, kept):
    x_batched, mask_batched, sites_batched, us_batched, dys_batched, kept_batched = batched
    if _base_batched(sites_batched):
        return _vmap_reference(by_xla, n, batched, (x, mask, sites, us, dys, kept))
    # Every element of the new axis owes its own dA and dB, so all of them become jobs here.
    jobs = _job_count((x, mask, us, dys), (x_batched, mask_batched, us_batched, dys_batched))
    out = backward(
        _shared(n, x, x_batched, jobs),
        _shared(n, mask, mask_batched, jobs),
        _adapters_as_jobs(n, sites, sites_batched, jobs),
        *jax.tree.map(
            lambda value, flag: _jobs(n, value, flag, jobs),
            (us, dys, kept),
            (us_batched, dys_batched, kept_batched),
        ),
    )
    out = _split_jobs(n, jobs, out)
    return out, jax.tree.map(lambda _: True, out)
