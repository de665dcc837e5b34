"""One job's optimizer step, with every setting traced: the packed step vmaps it over the slots."""

import math
import zlib
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Bool, Float, Int32, UInt32

from plora_jax.jobs import Job

SCHEDULERS = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "sgd", "adamw_bf16")


class Hyper(NamedTuple):
    """Hold one job's settings as scalars (with a leading J axis in a pack); all are traced, none recompiles."""

    learning_rate: Float[Array, ""]
    beta1: Float[Array, ""]
    beta2: Float[Array, ""]
    eps: Float[Array, ""]
    momentum: Float[Array, ""]
    weight_decay: Float[Array, ""]
    max_grad_norm: Float[Array, ""]
    optimizer: Int32[Array, ""]
    scheduler: Int32[Array, ""]
    warmup: Int32[Array, ""]
    total: Int32[Array, ""]
    dropout: Float[Array, ""]
    seed: Int32[Array, ""]


def warmup_steps(job: Job, total_steps: int) -> int:
    """Return the optimizer steps of warmup: `warmup_steps`, else ceil(ratio x total), as transformers counts them."""
    if job.warmup_steps is not None:
        return job.warmup_steps
    return math.ceil(job.warmup_ratio * total_steps)


def hyper(job: Job, total_steps: int, dtype: Any = np.float32) -> Hyper:
    """Turn a job's settings into the scalars the step reads; `total_steps` ends its schedule."""
    longest = 2**31 - 1  # of int32; no run gets there, but an absurd number of epochs may ask for it
    reals: dict[str, Any] = {
        name: np.asarray(getattr(job, name), dtype)
        for name in (
            "learning_rate",
            "beta1",
            "beta2",
            "eps",
            "momentum",
            "weight_decay",
            "max_grad_norm",
            "dropout",
        )
    }
    integers: dict[str, Any] = {
        "optimizer": OPTIMIZERS.index(job.optimizer),
        "scheduler": SCHEDULERS.index(job.scheduler),
        "warmup": min(warmup_steps(job, total_steps), longest),
        "total": min(total_steps, longest),
        "seed": job.seed,
    }
    return Hyper(
        **reals, **{name: cast(Any, np.asarray(value, np.int32)) for name, value in integers.items()}
    )


def learning_rate(h: Hyper, step: Int32[Array, ""]) -> Float[Array, ""]:
    """Return the rate of optimizer step `step` (the first is 0), as transformers' get_*_schedule_with_warmup.

    With warmup the first step runs at rate 0, and the last runs one step short of the schedule's end.
    """
    dtype = h.learning_rate.dtype
    at, warmup, total = step.astype(dtype), h.warmup.astype(dtype), h.total.astype(dtype)
    after = (at - warmup) / jnp.maximum(1.0, total - warmup)
    decay = jnp.stack([jnp.ones_like(after), 1.0 - after, 0.5 * (1.0 + jnp.cos(jnp.pi * after))])[h.scheduler]
    factor = jnp.where(at < warmup, at / jnp.maximum(1.0, warmup), jnp.maximum(0.0, decay))
    return h.learning_rate * factor


def init_optimizer(params: Any, kinds: frozenset[str]) -> dict[str, Any]:
    """Return zero optimizer state for one job, with room for each optimizer kind that occurs in its pack."""
    state: dict[str, Any] = {}
    if "adamw" in kinds:
        state["adamw"] = optax.scale_by_adam().init(params)
    if "adamw_bf16" in kinds:
        state["adamw_bf16"] = _cast(optax.scale_by_adam().init(params), jnp.bfloat16)
    if "sgd" in kinds:
        state["sgd"] = optax.trace(0.9).init(params)
    return state


def _cast(adam: optax.ScaleByAdamState, dtype: Any) -> optax.ScaleByAdamState:
    mu, nu = jax.tree.map(lambda moment: moment.astype(dtype), (adam.mu, adam.nu))
    return adam._replace(mu=mu, nu=nu)


def _random_bits(key: Int32[Array, ""], path: Any, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Hash a key, the name of a leaf and each element's place in it: 32 bits an element.

    An element's bits depend on its own place alone, not on how far the leaf is padded. This is the finalizer of
    MurmurHash3, which costs nothing beside the memory that an optimizer reads; threefry would take as long again.
    """

    def mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    h = mix(key.astype(jnp.uint32) + jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode())))
    strides = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
    places = [
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(strides[axis % 3])
        for axis in range(len(shape))
    ]
    return mix(sum(places, h))


def _stochastic_bfloat16(value: Array, bits: UInt32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Round finite numbers to one of the two bfloat16 around them, so that the mean is right; 16 bits are used.

    Rounded to the nearest, a moment never decays by less than half of a bfloat16's last place, 0.2 to 0.4 %; AdamW's
    second moment changes by 0.1 % a step.
    """
    wide = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32) + (bits & jnp.uint32(0xFFFF))
    return jax.lax.bitcast_convert_type((wide >> 16).astype(jnp.uint16), jnp.bfloat16)


def _rounded(adam: optax.ScaleByAdamState, h: Hyper, step: Int32[Array, ""]) -> optax.ScaleByAdamState:
    """Round both moments as a job's seed and step say, whatever else is in its pack."""
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(h.seed, impl="threefry2x32"), step))[0]

    def both(path: Any, mu: Array, nu: Array) -> tuple[Array, Array]:
        bits = _random_bits(key, path, mu.shape)
        return _stochastic_bfloat16(mu, bits), _stochastic_bfloat16(nu, bits >> 16)

    pairs = jax.tree_util.tree_map_with_path(both, adam.mu, adam.nu)
    mu, nu = jax.tree.transpose(jax.tree.structure(adam.mu), None, pairs)
    return adam._replace(mu=mu, nu=nu)


def _norm(grads: Any) -> Float[Array, ""]:
    """Return the norm over all leaves, whose squares are summed one leaf after another.

    A leaf's sum waits for the one before it by a factor of 1, or XLA puts several into one kernel. Where layers are
    written out each leaf is read from pieces, one a layer, and such a kernel took it 7 to 11 s (docs/benchmarks.md).
    """
    leaves = jax.tree.leaves(grads)
    total, one = jnp.zeros((), leaves[0].dtype), jnp.ones((), leaves[0].dtype)
    for leaf in leaves:
        total, one = jax.lax.optimization_barrier((total + jnp.sum(jnp.square(one * leaf)), one))
    return jnp.sqrt(total)


def apply_update(
    params: Any, grads: Any, state: dict[str, Any], h: Hyper, step: Int32[Array, ""]
) -> tuple[Any, dict[str, Any], Float[Array, ""], Bool[Array, ""]]:
    """Take one job's optimizer step and return (params, state, gradient norm, whether the gradient was finite).

    `grads` is the gradient of the mean loss. AdamW decays weights decoupled from the gradient and SGD adds the decay
    to it, as torch.optim does; the norm is over this job alone and clips as torch's clip_grad_norm_. A non-finite
    gradient changes nothing.
    """
    norm = _norm(grads)
    finite = jnp.isfinite(norm)
    clip = jnp.where(h.max_grad_norm > 0, jnp.minimum(1.0, h.max_grad_norm / (norm + 1e-6)), 1.0)
    grads = jax.tree.map(lambda g: g * clip, grads)
    rate = learning_rate(h, step)

    new_state: dict[str, Any] = {}
    deltas = []
    for kind, old in state.items():
        if kind != "sgd":
            tx = optax.chain(
                optax.scale_by_adam(h.beta1, h.beta2, h.eps), optax.add_decayed_weights(h.weight_decay)
            )
            wide = _cast(old, norm.dtype)  # or optax would round the new second moment to the nearest
            delta, (new, _) = tx.update(grads, (wide, optax.EmptyState()), params)
            new_state[kind] = _rounded(new, h, step) if kind == "adamw_bf16" else new
        else:
            decayed = jax.tree.map(lambda g, p: g + h.weight_decay * p, grads, params)
            delta, new_state[kind] = optax.trace(h.momentum).update(decayed, old)
        deltas.append((OPTIMIZERS.index(kind), delta))
    chosen = deltas[0][1]
    for index, delta in deltas[1:]:
        chosen = jax.tree.map(lambda c, d, i=index: jnp.where(h.optimizer == i, d, c), chosen, delta)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new_params = jax.tree.map(lambda p, d: p - rate * d, params, chosen)
    return keep(new_params, params), keep(new_state, state), norm, finite
