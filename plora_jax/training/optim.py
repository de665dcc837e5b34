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
OPTIMIZERS = ("adamw", "sgd", "adamw_bf16")  # `Hyper.optimizer` is a place in this


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


def _random_bits(key: UInt32[Array, ""], name: str, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Hash a key, the name of a leaf and each element's place in it: 32 bits an element.

    An element's bits depend on its own place alone, not on how far the leaf is padded. This is the finalizer of
    MurmurHash3, which costs nothing beside the memory that an optimizer reads; threefry would take as long again.
    """

    def mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    h = mix(key + jnp.uint32(zlib.crc32(name.encode())))
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


def _rounded(
    name: str, adam: optax.ScaleByAdamState, h: Hyper, step: Int32[Array, ""]
) -> optax.ScaleByAdamState:
    """Round a leaf's moments as its name and its job's seed and step say, whatever else is in the pack."""
    key = jax.random.fold_in(jax.random.key(h.seed, impl="threefry2x32"), step)
    bits = _random_bits(jax.random.key_data(key)[0], name, adam.mu.shape)
    return adam._replace(mu=_stochastic_bfloat16(adam.mu, bits), nu=_stochastic_bfloat16(adam.nu, bits >> 16))


def _norm(grads: Any, factor: Array, by_layer: bool) -> Float[Array, ""]:
    """Return the norm of factor · grads, whose squares are summed one leaf after another, or one layer of one.

    A sum waits for the one before it by the factor, or XLA puts several into one kernel. Where layers are written
    out each leaf lies in pieces, one a layer: a kernel that reads several chooses among them for every number, at a
    third of the memory's speed, and took XLA seconds to compile (docs/benchmarks.md).
    """
    leaves = [piece for leaf in jax.tree.leaves(grads) for piece in (leaf if by_layer else [leaf])]
    # partial sums, or XLA splits each long reduction into two kernels
    rows = math.gcd(64, *(leaf.size for leaf in leaves))
    parts = []
    for leaf in leaves:
        part = jnp.sum(jnp.square(factor * leaf.reshape(rows, -1).astype(factor.dtype)), axis=1)
        part, factor = jax.lax.optimization_barrier((part, factor))
        parts.append(part)
    return jnp.sqrt(jnp.sum(sum(parts)))


def apply_update(
    params: Any,
    grads: Any,
    state: dict[str, Any],
    h: Hyper,
    step: Int32[Array, ""],
    count: Float[Array, ""] | float = 1.0,
    close: Bool[Array, ""] | bool = True,
    by_layer: bool = False,
) -> tuple[Any, dict[str, Any], Float[Array, ""], Bool[Array, ""]]:
    """Take one job's optimizer step and return (params, state, gradient norm, whether the gradient was finite).

    `grads` / `count` is the gradient of the mean loss. AdamW decays weights decoupled from the gradient and SGD adds
    the decay to it, as torch.optim does; the norm is over this job alone and clips as torch's clip_grad_norm_. A
    non-finite gradient changes nothing, nor does a step that is not to `close`. With `by_layer` the norm is summed
    layer by layer, the first axis of every leaf: for layers that are written out.
    """
    norm = _norm(grads, jnp.asarray(1 / count, jax.tree.leaves(params)[0].dtype), by_layer)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype) / count, grads, params)
    finite = jnp.isfinite(norm)
    clip = jnp.where(h.max_grad_norm > 0, jnp.minimum(1.0, h.max_grad_norm / (norm + 1e-6)), 1.0)
    settings = (h, clip, learning_rate(h, step), finite & close, step)

    paths, tree = jax.tree_util.tree_flatten_with_path(params)

    def like_params(one: Any) -> bool:
        return jax.tree.structure(one) == tree  # type: ignore[operator]

    def of_leaf(at: int) -> Any:
        return jax.tree.map(
            lambda one: jax.tree.leaves(one)[at] if like_params(one) else one, state, is_leaf=like_params
        )

    done = []
    for at, ((path, param), grad) in enumerate(zip(paths, jax.tree.leaves(grads), strict=True)):
        new = _update_leaf(jax.tree_util.keystr(path), param, grad, of_leaf(at), *settings)
        # one after another, or a GPU works on several leaves in one kernel and on parts of a leaf in several, which
        # then need copies of it; a CPU would hold more for this
        new, settings = jax.lax.platform_dependent(
            (new, settings), cpu=lambda both: both, default=jax.lax.optimization_barrier
        )
        done.append(new)
    new_params, states = zip(*done, strict=True)
    new_state = jax.tree.map(
        lambda one, *parts: jax.tree.unflatten(tree, parts) if like_params(one) else parts[0],
        state,
        *states,
        is_leaf=like_params,
    )
    return jax.tree.unflatten(tree, new_params), new_state, norm, finite


def _update_leaf(
    name: str,
    param: Array,
    grad: Array,
    state: dict[str, Any],
    h: Hyper,
    clip: Float[Array, ""],
    rate: Float[Array, ""],
    change: Bool[Array, ""],
    step: Int32[Array, ""],
) -> tuple[Array, dict[str, Any]]:
    """Take one leaf's optimizer step, if anything is to `change`, and return (param, state)."""
    grad = grad * clip
    new_state: dict[str, Any] = {}
    deltas = []
    for kind, old in state.items():
        if kind == "sgd":
            delta, new_state[kind] = optax.trace(h.momentum).update(grad + h.weight_decay * param, old)
        else:
            tx = optax.chain(
                optax.scale_by_adam(h.beta1, h.beta2, h.eps), optax.add_decayed_weights(h.weight_decay)
            )
            wide = _cast(old, clip.dtype)  # or optax would round a short second moment to the nearest
            delta, (new, _) = tx.update(grad, (wide, optax.EmptyState()), param)
            new_state[kind] = _rounded(name, new, h, step) if kind == "adamw_bf16" else new
        deltas.append((OPTIMIZERS.index(kind), delta))
    chosen = deltas[0][1]
    for index, delta in deltas[1:]:
        chosen = jnp.where(h.optimizer == index, delta, chosen)
    return jax.tree.map(
        lambda new, old: jnp.where(change, new, old), (param - rate * chosen, new_state), (param, state)
    )
