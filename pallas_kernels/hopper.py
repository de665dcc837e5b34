"""The packed LoRA products on Hopper GPUs: the frozen products with their adapters in one kernel each.

Same contract as `reference`. The fused kernel does x·W and dy·Wᵀ with everything that must touch their operands; the
sums over tokens for dA and dB, and shrinks too wide for a leader tile, stay with XLA, whose products run at the
memory bandwidth there (docs/benchmarks.md).

On an fp8 base the kernel multiplies 8-bit numbers and adds what the adapters expand to in 16 bits, from shrinks of
XLA's: they read tokens before these are rounded, which the kernel does not see. The scales, which multiply everything
at the end, are divided out of what is added.
"""

import functools

import jax.numpy as jnp

from . import hopper_rows, reference
from .fp8 import Rounded, gradient_format
from .hopper_gemm import DEFAULT, MAX_SHRINK, Extra, Scales, Shrink, Unit, lora_gemm, shrink_width
from .hopper_rows import round_rows
from .reference import (
    Site,
    accumulator,
    adapted,
    holds_fp8,
    job_product,
    masked,
    split_ranks,
    stacked_a,
    stacked_scale,
)


def padded(sites):
    """Pad the ranks with zeros to multiples of 8, and of 64 above 64, as the copy engine wants."""

    def whole(array, axis):
        rank, widths = array.shape[axis], [(0, 0)] * array.ndim
        widths[axis] = (0, -rank % (8 if rank <= 64 else 64))
        return jnp.pad(array, widths)

    return tuple(s if s.a is None else s._replace(a=whole(s.a, 1), b=whole(s.b, 2)) for s in sites)


def forward(x, mask, sites: tuple[Site, ...], *, config=lambda site: DEFAULT, interpret=None):
    """Compute the outputs and scaled shrinks of all sites; as `reference.forward`. config: the tiles for a site."""
    return _forward(None, x, mask, sites, config, interpret)


def forward_glu(activation, x, mask, sites, *, config=lambda site: DEFAULT, interpret=None):
    """Compute gate, up and activation(gate)·up, as `reference.forward_glu`: in the launch that makes up."""
    if holds_fp8(sites) or sites[1].a is None:
        own = functools.partial(forward, config=config, interpret=interpret)
        round_glu = functools.partial(hopper_rows.round_glu, interpret=interpret)
        return reference.forward_glu(activation, x, mask, sites, own, round_glu)
    return _forward(activation, x, mask, sites, config, interpret)


def _forward(activation, x, mask, sites, config, interpret):
    dtype, fp8, given, sites = x.dtype, holds_fp8(sites), sites, padded(sites)
    own = adapted(sites)
    ranks = tuple(sites[i].a.shape[1] for i in own)
    a, scale = stacked_a(sites, dtype), stacked_scale(sites, jnp.float32)
    leader, us = None, None
    if mask is None and not fp8 and shrink_width(ranks) <= MAX_SHRINK:
        leader = max(own, key=lambda i: sites[i].d_out)
    else:
        wide = job_product(masked(x, mask), a, "tk,nk", jnp.float32) * scale[:, None, :]
        us = split_ranks(wide.astype(dtype), sites, axis=2)
    if fp8:
        if isinstance(x, Rounded):
            values, token_scale = x.values, x.scale[..., 0]
        else:
            (values,), token_scale = round_rows((x,), (None,), jnp.float8_e4m3fn, interpret=interpret)
        added = split_ranks((wide / token_scale[:, :, None]).astype(dtype), sites, axis=2)
    ys: dict[int, jnp.ndarray] = {}
    # the leader's launch comes first and gives u to the others; of gate and up that is gate, or nobody waits for it
    order = range(len(sites)) if activation else sorted(range(len(sites)), key=lambda i: i != leader)
    for i in order:
        site = sites[i]
        if site.a is None:
            ys[i] = reference.forward(x, None, (site,))[0][0]
            continue
        bias = None if site.bias is None else site.bias.astype(dtype)
        launch = functools.partial(lora_gemm, bias=bias, config=config(site), interpret=interpret)
        if fp8:
            extra = Extra(added[i], (site.b / site.w.scale[:, None]).astype(dtype).swapaxes(1, 2))
            scales = Scales(token_scale, site.w.scale, dtype)
            ys[i], _ = launch(((values, site.w.values),), (), (extra,), scales=scales, transposed=True)
            continue
        shrinks = (Shrink(0, a, scale, ranks),) if i == leader else ()
        extra = Extra(own.index(i) if i == leader else us[i], site.b.astype(dtype).swapaxes(1, 2))
        unit = Unit(activation, ys[0]) if activation and i else None
        made, shrunk = launch(((x, site.w.astype(dtype)),), shrinks, (extra,), unit=unit)
        ys.update(enumerate(made, i) if unit else [(i, made)])
        if shrunk:
            us = tuple(shrunk[own.index(i)] if i in own else None for i in range(len(sites)))
    us = tuple(None if u is None else u[:, :, : site.a.shape[1]] for u, site in zip(us, given, strict=True))
    return tuple(ys[i] for i in range(len(ys))), us


def backward(x, mask, sites: tuple[Site, ...], us, dys, rounded=None, *, config=DEFAULT, interpret=None):
    """Compute dx, dA and dB of all sites; as `reference.backward`."""
    dx, dus = _dx(mask, sites, dys, rounded, None, config, interpret)
    return dx, *_adapter_gradients(masked(x, mask), sites, us, dys, dus)


def backward_glu(activation, h, mask, sites, us, dys, ys, ws, *, config=DEFAULT, interpret=None):
    """Compute the gradients of gate and up, and of the adapters of the site that reads the unit, as
    `reference.backward_glu`: in the launch of its dx.
    """
    if holds_fp8(sites) or mask is not None:
        own = functools.partial(backward, config=config, interpret=interpret)
        round_back = functools.partial(hopper_rows.round_glu_back, interpret=interpret)
        return reference.backward_glu(activation, h, mask, sites, us, dys, ys, ws, own, round_back)
    unit = Unit(activation, *ys, again=h is None)
    (dgate, dup, *again), dus = _dx(mask, sites, dys, None, unit, config, interpret)
    h = again[0] if again else h
    return (dgate, dup), None, *_adapter_gradients(h, sites, us, dys, dus)


def _adapter_gradients(x, sites, us, dys, dus):
    """Return dA and dB of all sites, None where there is no adapter."""
    out, das = reference.gradient_dtype(sites), [None] * len(sites)
    dbs = list(das)
    for i, du in dus.items():
        das[i] = job_product(du, x, "tk,tn", out)
        dbs[i] = job_product(dys[i], us[i], "tk,tn", out)
    return tuple(das), tuple(dbs)


def _dx(mask, sites, dys, rounded, unit, config, interpret):
    """Return dx, or what a `Unit` makes of it, and by site du = scale·(dy·B): one launch where the ranks fit in it."""
    dtype, fp8, given, sites = dys[0].dtype, holds_fp8(sites), sites, padded(sites)
    bts = {i: sites[i].b.astype(dtype).swapaxes(1, 2) for i in adapted(sites)}
    dus, added, shrinks, scales = {}, {}, (), None
    if fp8:
        ws = [site.w for site in sites]
        values, token_scale = rounded or round_rows(
            dys, [w.scale for w in ws], gradient_format(ws), interpret=interpret
        )
        products = [(own, site.w.values.T) for own, site in zip(values, sites, strict=True)]
        scales = Scales(token_scale, None, dtype)
    else:
        products = [(dy, site.w.astype(dtype)) for dy, site in zip(dys, sites, strict=True)]
    if not fp8 and max(shrink_width(bt.shape[1:2]) for bt in bts.values()) <= MAX_SHRINK:
        shrinks = [
            Shrink(i, bt, jnp.broadcast_to(sites[i].scale.astype(jnp.float32)[:, None], bt.shape[:2]))
            for i, bt in bts.items()
        ]
        added = {i: n for n, i in enumerate(bts)}
    else:
        for i, bt in bts.items():
            du = job_product(dys[i], bt, "tk,nk", jnp.float32) * sites[i].scale[:, None, None]
            dus[i] = du.astype(dtype)
            added[i] = (du / token_scale[:, :, None]).astype(dtype) if fp8 else dus[i]
    extras = []
    if mask is None:
        a, at = stacked_a(sites, dtype), 0  # forward's, so that XLA makes it once
        for i, bt in bts.items():
            extras.append(Extra(added[i], a, at))
            at += bt.shape[1]
    dx, made = lora_gemm(
        products,
        shrinks,
        extras,
        scales=scales,
        unit=unit,
        transposed=True,
        config=config,
        interpret=interpret,
    )
    dus |= dict(zip(bts, made, strict=False))
    dus = {i: du[:, :, : given[i].a.shape[1]] for i, du in dus.items()}
    if mask is not None:  # the mask falls on the adapters' part alone
        acc = accumulator(dtype)
        parts = [
            job_product(du, given[i].a.astype(dtype), "tk,kn", dtype).astype(acc) for i, du in dus.items()
        ]
        dx = (dx.astype(acc) + sum(parts) * mask.astype(acc)).astype(dtype)
    return dx, dus
