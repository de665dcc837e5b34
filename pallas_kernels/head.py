"""Cross-entropy at a vocabulary head on Hopper GPUs, with the gradient of what the head reads: no logits in memory.

    e      = exp(h·Wᵀ − (h·W[t] + BELOW))     16 bits, made in the launch of the product with its sums in float32
    loss   = log Σe + BELOW
    dh     = e·W / Σe − W[t]

A shift that is known before the product spares the two readings of float32 logits that finding their largest and
making a softmax of them take. Exact are all logits less than `BELOW` + `CAP` above that of the target, 136: no
probability is less than exp(−136) for the loss, and beyond it the gradient still points away from what is likelier.
"""

import jax
import jax.numpy as jnp

from .hopper_gemm import DEFAULT, Softmax, lora_gemm

BELOW = 60.0  # exp(−BELOW) leaves room for probabilities 1e-12 times the target's


def loss_and_gradient(h, targets, w, *, config=DEFAULT, interpret=None):
    """Return the cross-entropy [n] in float32 and its gradient [n, D], both 0 where a target is −1.

    h [n, D] and the head w [V, D] in bfloat16, D and V multiples of 64, targets [n].
    """
    n, trained = len(h), targets >= 0
    h = jnp.pad(h, ((0, -n % 8), (0, 0)))
    targets = jnp.pad(jnp.maximum(targets, 0), (0, -n % 8))
    at_target = w[targets].astype(jnp.float32)
    shift = jnp.sum(h.astype(jnp.float32) * at_target, axis=1) + BELOW
    (e, sums), _ = lora_gemm(
        ((h[None], w),), softmax=Softmax(shift[None]), transposed=True, config=config, interpret=interpret
    )
    e, total = e[0], jnp.sum(sums[0], axis=0)[: len(h)]
    loss = jnp.log(total) + BELOW
    # the target's own e, rounded, is taken out of the product and p − 1 put in its place, which may be small
    own = jnp.take_along_axis(e, targets[:, None], axis=1)[:, 0].astype(jnp.float32) / total
    spread = jnp.einsum("nv,vd->nd", e, w, preferred_element_type=jnp.float32) / total[:, None]
    dh = spread + (jnp.expm1(-loss) - own)[:, None] * at_target
    return jnp.where(trained, loss[:n], 0), jnp.where(trained[:, None], dh[:n], 0).astype(h.dtype)
