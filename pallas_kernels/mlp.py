"""The gated MLP of J jobs, forward and backward, each product by the implementation that serves it.

`sites` are gate, up and down; `masks` those of the MLP's input and of what down reads.
"""

from .choice import implementation


def forward(activation, x, masks, sites, asked):
    """Return ((y, gate, up, h), us): down(h) of h = activation(gate)·up, which is `Rounded` on fp8 weights."""
    ins, outs = sites[:2], sites[2:]
    (gate, up, h), us = implementation(x, ins, asked).forward_glu(activation, x, masks[0], ins)
    (y,), u = implementation(h, outs, asked).forward(h, masks[1], outs)
    return (y, gate, up, h), us + u


def backward(activation, x, masks, sites, us, dys, kept, asked):
    """Return (dx, das, dbs) for kept = (gate, up, h or None)."""
    gate, up, h = kept
    ins, outs = sites[:2], sites[2:]
    ws = tuple(site.w for site in ins)
    last = implementation(gate, outs, asked)
    dys, rounded, *of_down = last.backward_glu(activation, h, masks[1], outs, us[2:], dys, (gate, up), ws)
    dx, *of_ins = implementation(x, ins, asked).backward(x, masks[0], ins, us[:2], dys, rounded)
    das, dbs = (one + other for one, other in zip(of_ins, of_down, strict=True))
    return dx, das, dbs
