"""The packed training step: one program trains every slot of a pack, each by its own clock and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from planner import rank_bucket
from planner.memory import HEAD_CHUNK
from plora_jax import adapters as lora
from plora_jax.adapters import Adapter, Factors, Stack
from plora_jax.jobs import Job
from plora_jax.models.config import ModelConfig
from plora_jax.models.decoder import LoRA, Runtime, matmul_precision
from plora_jax.models.load import Base
from plora_jax.training.batch import Batch
from plora_jax.training.compiled import Options, quick_options
from plora_jax.training.dropout import Dropout
from plora_jax.training.losses import token_losses
from plora_jax.training.optim import Hyper, apply_update, hyper, init_optimizer, learning_rate


class PackState(NamedTuple):
    """Hold everything that training changes, for J slots; weights and moments carry the job axis second."""

    weights: Stack
    grads: Stack  # sums of token-loss gradients over the open optimizer batch; {} where none stays open
    optimizer: dict[str, Any]
    scales: dict[str, Float[Array, "L J"]]
    hyper: Hyper  # each field [J]
    step: Int32[Array, " J"]  # optimizer batches closed so far
    skipped: Int32[Array, " J"]  # of these, how many changed nothing because the gradient was not finite
    loss_sum: Float[Array, " J"]  # over the open optimizer batch
    tokens: Int32[Array, " J"]


class Metrics(NamedTuple):
    """Report, for the slots that closed an optimizer batch, what was optimised and how; other slots repeat old sums."""

    closed: Bool[Array, " J"]
    step: Int32[Array, " J"]
    loss: Float[Array, " J"]  # sum of token losses / trained tokens, over the whole optimizer batch
    tokens: Int32[Array, " J"]
    grad_norm: Float[Array, " J"]
    learning_rate: Float[Array, " J"]
    skipped: Int32[Array, " J"]


@dataclass(frozen=True)
class PackSpec:
    """Fix what one compiled program can hold; a job whose needs lie within it can take any of its slots."""

    slots: int
    rank: int  # rank bucket: every slot's adapter is padded to it
    sites: tuple[str, ...]
    optimizers: frozenset[str] = frozenset({"adamw"})
    has_dropout: bool = False
    accumulate: bool = True  # False promises that every micro-step ends the batch of every active slot


def pack_spec(
    config: ModelConfig, jobs: Sequence[Job], slots: int | None = None, m: int | None = None
) -> PackSpec:
    """Return the smallest specification that every one of `jobs` fits.

    With `m`, the examples that each slot gets in a micro-step, gradients are summed only if a batch is larger.
    """
    used = {site for job in jobs for site in lora.ranks(config, job)}
    return PackSpec(
        slots=slots or len(jobs),
        rank=rank_bucket(max(lora.max_rank(config, job) for job in jobs)),
        sites=tuple(site.name for site in config.sites if site.name in used),
        optimizers=frozenset(job.optimizer for job in jobs),
        has_dropout=any(job.dropout > 0 for job in jobs),
        accumulate=m is None or any(job.batch_size != m for job in jobs),
    )


def job_axes(spec: PackSpec) -> PackState:
    """Return the job axis of every part of a state.

    Weights, gradients and moments keep the layer axis first, so that the scan over layers needs no transpose;
    everything else leads with the job axis.
    """
    adam = optax.ScaleByAdamState(count=0, mu=1, nu=1)  # type: ignore[arg-type]
    moments = {"adamw": adam, "adamw_bf16": adam, "sgd": 1}
    return PackState(1, 1, {kind: moments[kind] for kind in spec.optimizers}, 1, 0, 0, 0, 0, 0)  # type: ignore[arg-type]


def _slot_state(spec: PackSpec, weights: Adapter, scales: dict[str, Array], h: Hyper) -> PackState:
    """Return one slot's state at the start of a job: the given weights, zero everything else, no job axis."""
    zero = jnp.zeros((), jnp.int32)
    return PackState(
        weights=weights,
        grads=jax.tree.map(jnp.zeros_like, weights) if spec.accumulate else {},
        optimizer=init_optimizer(weights, spec.optimizers),
        scales=scales,
        hyper=h,
        step=zero,
        skipped=zero,
        loss_sum=jnp.zeros((), jax.tree.leaves(weights)[0].dtype),
        tokens=zero,
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_pack(config: ModelConfig, spec: PackSpec, dtype: Any = jnp.float32) -> PackState:
    """Return a pack whose J slots are all empty: zero adapters that no batch marks active."""
    sites = {site.name: site for site in config.sites}

    def slot(_: Array) -> PackState:
        weights = {
            name: Factors(
                jnp.zeros((config.n_layers, spec.rank, sites[name].d_in), dtype),
                jnp.zeros((config.n_layers, sites[name].d_out, spec.rank), dtype),
            )
            for name in spec.sites
        }
        scales = {name: jnp.zeros((config.n_layers,), jnp.float32) for name in spec.sites}
        return _slot_state(spec, weights, scales, hyper(Job(), 1, dtype))

    return jax.vmap(slot, out_axes=job_axes(spec))(jnp.arange(spec.slots))


class Progress(NamedTuple):
    """Hold what a job that goes on brings into a slot beside its weights; its gradients are those of a new batch."""

    optimizer: dict[str, Any]  # of its own kind of optimizer, padded as the weights are
    step: int
    skipped: int


@lru_cache(maxsize=32)
def make_load_slot(spec: PackSpec) -> Callable[..., PackState]:
    """Return `load(state, slot, weights, scales, hyper, progress)`: put a job into a slot.

    Without `progress` (None) it begins, with zero optimizer state. The slot's number is traced, so that filling and
    refilling any slot is one compiled program. `state` is donated.
    """
    axes = job_axes(spec)

    @partial(jax.jit, donate_argnums=0)
    def load(
        state: PackState,
        slot: Array,
        weights: Adapter,
        scales: dict[str, Array],
        h: Hyper,
        progress: Progress | None = None,
    ) -> PackState:
        def put(axis: int, stack: Array, value: Any) -> Array:
            value = jnp.asarray(value, stack.dtype)
            return jax.lax.dynamic_update_index_in_dim(stack, value, slot, axis)

        fresh = _slot_state(spec, weights, scales, h)
        if progress is not None:
            known = progress._asdict() | {"optimizer": fresh.optimizer | progress.optimizer}
            fresh = fresh._replace(**known)
        return jax.tree.map(lambda axis, s, v: jax.tree.map(partial(put, axis), s, v), axes, state, fresh)

    return load


def fresh_slot(
    config: ModelConfig, spec: PackSpec, job: Job, total_steps: int, adapter: Adapter | None = None
) -> tuple[Adapter, dict[str, Any], Hyper]:
    """Make what a job brings into a slot: weights padded to the bucket, scales [L] a site, settings.

    `adapter` (true rank) starts the job from given weights instead of a fresh A and B = 0.
    """
    weights = lora.pad_adapter(config, adapter or lora.init_adapter(config, job), spec.rank, spec.sites)
    scales = lora.scales(config, job)
    zeros = np.zeros((config.n_layers,), np.float32)
    return (
        weights,
        {name: scales.get(name, zeros) for name in spec.sites},
        hyper(job, total_steps, np.float64),
    )


def init_pack(
    base: Base,
    jobs: Sequence[Job],
    *,
    total_steps: Sequence[int] | None = None,
    spec: PackSpec | None = None,
) -> PackState:
    """Return the state of a pack with one slot per job, each drawn from its own seed.

    Args:
      base: the frozen model.
      jobs: the jobs, slot by slot; further slots of `spec` stay empty.
      total_steps: optimizer steps per job, which end its schedule; by default each job's `max_steps`.
      spec: what the program can hold; by default the smallest that fits the jobs.
    """
    spec = spec or pack_spec(base.config, jobs)
    if total_steps is None:
        if any(job.max_steps is None for job in jobs):
            raise ValueError("give total_steps, or max_steps in every job: a schedule needs its last step")
        total_steps = [job.max_steps or 0 for job in jobs]
    load = make_load_slot(spec)
    state = empty_pack(base.config, spec, weight_dtype(base))
    for slot, (job, total) in enumerate(zip(jobs, total_steps, strict=True)):
        state = load(state, slot, *fresh_slot(base.config, spec, job, total))
    return state


def weight_dtype(base: Base) -> Any:
    """Return the dtype of adapter masters: float32, or float64 on a float64 base."""
    return jnp.promote_types(jnp.float32, jax.tree.leaves(base.params)[0].dtype)


def make_train_step(
    base: Base, spec: PackSpec, runtime: Runtime | None = None, micro_steps: int = 1
) -> Callable[[PackState, nnx.State, Batch], tuple[PackState, Metrics]]:
    """Return the jitted `state, metrics = step(state, base.params, batch)` of one micro-step, or of several.

    Each slot sums the gradients of its token losses until its batch closes, then divides by its own count of
    trained tokens and steps its own optimizer, so that a job's numbers do not depend on its neighbours. `state` is
    donated. Equal arguments give the same function, so a program compiles once however many packs it serves.

    With `micro_steps` K above 1 batch and metrics have a leading axis K, and one call does what K calls do: for small
    models, whose steps take less time than their launch.
    """
    runtime = runtime or Runtime()
    options = quick_options() if runtime.unroll > 1 or base.precision == "fp8" else ()
    # else XLA transposes weights for dx already in forward: 2.6 GiB of 7B's (docs/benchmarks.md)
    joined = runtime.unroll > 1 and base.precision == "fp8" and runtime.recompute == "dots"
    return _train_step(base.graphdef, spec, runtime, micro_steps, options, joined)


@lru_cache(maxsize=32)
def _train_step(
    graphdef: nnx.GraphDef, spec: PackSpec, runtime: Runtime, micro_steps: int, options: Options, joined: bool
) -> Callable[..., Any]:
    axes = job_axes(spec)
    chunk = max(1, HEAD_CHUNK // spec.slots)  # logits of HEAD_CHUNK positions exist at once, over all slots

    def job_loss(
        weights: Adapter, scales: Any, h: Hyper, params: nnx.State, batch: Batch
    ) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, params)
        sites = {name: LoRA(w.a, w.b, scales[name]) for name, w in weights.items()}
        dropout = Dropout(h.seed, h.dropout, batch.epoch) if spec.has_dropout else None
        hidden = model.hidden(batch.tokens, batch.positions, batch.rows, sites, dropout, runtime=runtime)
        losses = token_losses(model, hidden, batch.trained, batch.targets, chunk, runtime)
        return losses.sum(), (batch.targets >= 0).sum(dtype=jnp.int32)

    packed_grad = jax.vmap(
        jax.value_and_grad(job_loss, has_aux=True), in_axes=(1, 1, 0, None, 0), out_axes=((0, 0), 1)
    )
    moments = axes.optimizer
    # sums of gradients lie in one array a leaf
    update = partial(apply_update, by_layer=runtime.unroll > 1 and not spec.accumulate)
    packed_update = jax.vmap(update, in_axes=(1, 1, moments, 0, 0, 0, 0), out_axes=(1, moments, 0, 0))

    def select(flags: Bool[Array, " J"], new: Stack, old: Stack) -> Stack:
        return jax.tree.map(lambda n, o: jnp.where(flags[:, None, None], n, o), new, old)

    def optimize(
        state: PackState, grads: Stack, tokens: Int32[Array, " J"], close: Bool[Array, " J"]
    ) -> tuple[PackState, Float[Array, " J"]]:
        count = jnp.maximum(tokens, 1).astype(state.loss_sum.dtype)
        weights, optimizer, norm, finite = packed_update(
            state.weights, grads, state.optimizer, state.hyper, state.step, count, close
        )
        return state._replace(
            weights=weights,
            optimizer=optimizer,
            step=state.step + close,
            skipped=state.skipped + (close & ~finite),
        ), norm

    def end_batches(state: PackState, close: Bool[Array, " J"]) -> tuple[PackState, Float[Array, " J"]]:
        ended, norm = optimize(state, state.grads, state.tokens, close)
        return ended._replace(
            grads=select(close, jax.tree.map(jnp.zeros_like, state.grads), state.grads),
            loss_sum=jnp.where(close, 0, state.loss_sum),
            tokens=jnp.where(close, 0, state.tokens),
        ), norm

    def leave_open(state: PackState, close: Bool[Array, " J"]) -> tuple[PackState, Float[Array, " J"]]:
        return state, jnp.zeros_like(state.loss_sum)

    def micro_step(state: PackState, params: nnx.State, batch: Batch) -> tuple[PackState, Metrics]:
        with matmul_precision(runtime):  # of the backward pass too
            # cast once a step, not in every layer forward and backward; their gradients are rounded as autocast's are
            cast = jax.tree.map(lambda w: w.astype(runtime.dtype), state.weights)
            (loss, count), grads = packed_grad(cast, state.scales, state.hyper, params, batch)
        if joined:
            grads = jax.lax.optimization_barrier(grads)
        loss, tokens = jnp.where(batch.active, loss, 0), jnp.where(batch.active, count, 0)
        before = state
        if spec.accumulate:
            close = batch.close & batch.active
            loss, tokens = state.loss_sum + loss, state.tokens + tokens
            grads = select(batch.active, jax.tree.map(jnp.add, state.grads, grads), state.grads)
            state = state._replace(grads=grads, loss_sum=loss, tokens=tokens)
            with jax.named_scope("optimizer"):
                state, norm = jax.lax.cond(close.any(), end_batches, leave_open, state, close)
        else:
            close = batch.active
            with jax.named_scope("optimizer"):
                state, norm = optimize(state, grads, tokens, close)
        return state, Metrics(
            closed=close,
            step=state.step,
            loss=loss / jnp.maximum(tokens, 1),
            tokens=tokens,
            grad_norm=jnp.where(close, norm, 0),  # computed for all slots as soon as one closes
            learning_rate=jax.vmap(learning_rate)(before.hyper, before.step),
            skipped=state.skipped,
        )

    @partial(jax.jit, donate_argnums=0, compiler_options=dict(options))
    def step(state: PackState, params: nnx.State, batch: Batch) -> tuple[PackState, Metrics]:
        if micro_steps == 1:
            return micro_step(state, params, batch)
        return jax.lax.scan(lambda s, b: micro_step(s, params, b), state, batch)

    return step
