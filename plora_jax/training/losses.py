"""Cross-entropy at the trained positions: the gradient of the hidden states is made with the loss, so that no logits
are kept and the head is not multiplied again.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int32

from pallas_kernels import by_default
from pallas_kernels.choice import asked, head_kernel
from plora_jax.models.decoder import Decoder, Runtime, matmul_precision, vocabulary_logits


def token_losses(
    model: Decoder,
    hidden: Float[Array, "B S D"],
    trained: Int32[Array, "B P"],
    targets: Int32[Array, "B P"],
    chunk: int,
    runtime: Runtime | None = None,
) -> Float[Array, "B P"]:
    """Return the cross-entropy at the trained positions, 0 where the target is -1, computing the head only there.

    Log-sum-exp runs in float32 or wider. Logits of at most `chunk` positions exist at a time. Gradients flow to
    `hidden` alone, never to the head. With a gradient, where the fused kernel serves (`pallas_kernels.choose_head`),
    logits more than 108 above the target's count as 108 above.
    """
    picked = jnp.take_along_axis(hidden, trained[..., None], axis=1)
    flat, wanted = picked.reshape(-1, picked.shape[-1]), targets.reshape(-1)
    count = flat.shape[0]
    pieces = -(-count // chunk)
    rows = -(-count // pieces)
    flat = jnp.pad(flat, ((0, pieces * rows - count), (0, 0))).reshape(pieces, rows, -1)
    wanted = jnp.pad(wanted, (0, pieces * rows - count), constant_values=-1).reshape(pieces, rows)
    runtime = runtime or Runtime()
    with matmul_precision(runtime), by_default(runtime.kernels), jax.named_scope("loss"):
        out = _losses(model.config.final_softcap, asked(), flat, wanted, model.head_weights)
    return out.reshape(-1)[:count].reshape(targets.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(
    softcap: float,
    kernels: str,
    hidden: Float[Array, "c n D"],
    targets: Int32[Array, "c n"],
    head: Float[Array, "V D"],
) -> Float[Array, "c n"]:
    return jax.lax.map(lambda chunk: _chunk(softcap, chunk[0], chunk[1], head)[0], (hidden, targets))


def _losses_fwd(
    softcap: float, kernels: str, hidden: Array, targets: Array, head: Array
) -> tuple[Array, Array]:
    both = with_gradient(softcap, kernels)
    return jax.lax.map(lambda chunk: both(chunk[0], chunk[1], head), (hidden, targets))


@cache
def with_gradient(softcap: float, kernels: str) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Return the function that makes losses [n] with their gradients [n, D], of all jobs at once unless by "xla"."""

    def by_xla(h: Array, t: Array, head: Array) -> tuple[Array, Array]:
        loss, (logits, lse) = _chunk(softcap, h, t, head)
        here = jnp.arange(head.shape[0]) == t[:, None]
        d = jnp.exp(logits - lse[:, None]) - here  # softmax - one-hot
        d = d * (1 - jnp.square(logits / softcap)) if softcap else d
        d = jnp.where(t[:, None] >= 0, d, 0).astype(h.dtype)
        return loss, jnp.einsum("nv,vd->nd", d, head.astype(h.dtype))

    if kernels == "xla":
        return by_xla

    @custom_vmap
    def both(h: Array, t: Array, head: Array) -> tuple[Array, Array]:
        by_kernel = head_kernel(h, head, softcap, kernels)
        return by_kernel(h, t, head.astype(h.dtype)) if by_kernel else by_xla(h, t, head)

    @both.def_vmap
    def over_jobs(jobs: int, batched: list[bool], h: Array, t: Array, head: Array) -> Any:
        if batched[2]:  # a head for each
            axes = tuple(0 if flag else None for flag in batched)
            return jax.vmap(by_xla, axes, axis_size=jobs)(h, t, head), (True, True)
        h, t = (
            value if flag else jnp.broadcast_to(value, (jobs, *value.shape))
            for value, flag in zip((h, t), batched[:2], strict=True)
        )
        loss, d = both(h.reshape(-1, h.shape[-1]), t.reshape(-1), head)
        return (loss.reshape(t.shape), d.reshape(h.shape)), (True, True)

    return both


def _losses_bwd(softcap: float, kernels: str, slope: Array, g: Array) -> tuple[Array, None, None]:
    """Scale the gradient of each position's own loss: a loss depends on its own position alone."""
    return (slope * g[..., None].astype(slope.dtype)), None, None


_losses.defvjp(_losses_fwd, _losses_bwd)


def log_sum_exp(x: Float[Array, "n V"]) -> Float[Array, " n"]:
    """Return the log of the sum of exp(x) of finite numbers, read once: for GPUs, since logits are gigabytes.

    The sum so far is carried together with the largest number so far (Milakov and Gimelshein 2018, "Online normalizer
    calculation for softmax"). `jax.nn.logsumexp` reads them twice, which a CPU does faster than this.
    """

    def join(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        (top, total), (other_top, other) = one, two
        fall = jnp.exp(-jnp.abs(top - other_top))
        less = top < other_top
        return jnp.maximum(top, other_top), jnp.where(less, fall * total + other, total + fall * other)

    nothing = (jnp.asarray(jnp.finfo(x.dtype).min, x.dtype), jnp.zeros((), x.dtype))
    top, total = jax.lax.reduce((x, jnp.ones_like(x)), nothing, join, (1,))
    return top + jnp.log(total)


def _chunk(softcap: float, h: Array, t: Array, head: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the losses [n] of one chunk, and its logits [n, V] with their log-sum-exp [n]."""
    logits = vocabulary_logits(h, head, softcap)
    lse = jax.lax.platform_dependent(logits, default=log_sum_exp, cpu=partial(jax.nn.logsumexp, axis=-1))
    at_target = jnp.take_along_axis(logits, jnp.maximum(t, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(t >= 0, lse - at_target, 0.0), (logits, lse)
