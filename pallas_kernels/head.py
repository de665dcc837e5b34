"""Cross-entropy at a vocabulary head on Hopper GPUs, with the gradient of what the head reads: no logits in memory.

    z    = h·Wᵀ, of a softcap c: c·tanh(h·Wᵀ / c)       in the launch of the product, which writes
    e    = exp(z − (z[t] + BELOW))                      in 16 bits, times dz/d(h·Wᵀ), and sums of e in float32
    loss = log Σe + BELOW
    dh   = e·W / Σe − W[t], this too times dz/d(h·Wᵀ)

A shift that is known before the product spares the two readings of float32 logits that finding their largest and
making a softmax of them take. Exact are all logits up to `BELOW` + `CAP` = 108 above that of the target; what is
above that counts as 108, in a loss of more than 108.
"""

import jax.numpy as jnp

from .hopper_gemm import DEFAULT, Softmax, lora_gemm

BELOW = 32.0  # more leaves less digits to what is near the target


def loss_and_gradient(h, targets, w, softcap=0.0, *, config=DEFAULT, interpret=None):
    """Return the cross-entropy [n] in float32 and its gradient [n, D], both 0 where a target is −1.

    h [n, D] and the head w [V, D] in bfloat16, D and V multiples of 64, targets [n]; a softcap of 0 is none.
    """
    n, trained = len(h), targets >= 0
    h = jnp.pad(h, ((0, -n % 8), (0, 0)))
    targets = jnp.pad(jnp.maximum(targets, 0), (0, -n % 8))
    at_target = w.at[targets].get(mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    z, slope = jnp.sum(h.astype(jnp.float32) * at_target, axis=1), 1.0
    if softcap:
        tanh = jnp.tanh(z / softcap)
        z, slope = softcap * tanh, 1 - tanh * tanh
    shift = z + BELOW
    below = shift - z  # as rounded
    (e, sums), _ = lora_gemm(
        ((h[None], w),),
        softmax=Softmax(shift[None], softcap),
        transposed=True,
        config=config,
        interpret=interpret,
    )
    e, total = e[0], jnp.sum(sums[0], axis=0)[: len(h)]
    far = total > 1  # else the sum is scaled back before its logarithm, which is small
    loss = jnp.log(jnp.where(far, total, total * jnp.exp(below))) + jnp.where(far, below, 0)
    loss = jnp.maximum(loss, 0)  # z[t] is summed apart, and may be more than the product says
    # the target's own e, rounded, is taken out of the product and p − 1 put in its place, which may be small
    own = jnp.take_along_axis(e, targets[:, None], axis=1)[:, 0].astype(jnp.float32) / total
    spread = jnp.einsum("nv,vd->nd", e, w, preferred_element_type=jnp.float32) / total[:, None]
    dh = spread + (jnp.expm1(-loss) * slope - own)[:, None] * at_target
    return jnp.where(trained, loss[:n], 0), jnp.where(trained[:, None], dh[:n], 0).astype(h.dtype)
