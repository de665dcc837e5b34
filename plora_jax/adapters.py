"""Adapters as arrays: which modules get one, their ranks and scales, their start, and the stack over jobs.

One job's adapter is `{site: Factors(a [L, r, d_in], b [L, d_out, r])}` in float32, at the job's true rank. A
layer without an adapter, or with a smaller rank than its site's largest (`rank_pattern`), has zero rows in A
and zero columns in B: their gradients are exactly zero, so AdamW, decay and clipping leave them at zero.
"""

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from plora_jax.errors import UserError
from plora_jax.jobs import LINEAR, Job
from plora_jax.models.config import ModelConfig, Site


class Factors(NamedTuple):
    """Hold one site's two matrices for all layers of one job."""

    a: Float32[Array, "L R d_in"]
    b: Float32[Array, "L d_out R"]


Adapter = dict[str, Factors]
Stack = dict[str, Factors]  # with a job axis: a [L, J, R, d_in], b [L, J, d_out, R]


def resolve_targets(config: ModelConfig, targets: Sequence[str] | str) -> dict[str, np.ndarray]:
    """Return `{site: bool [L]}`, true where the layer gets an adapter; sites without any are absent.

    `all-linear` is every Linear of the layers, never the head or the embedding. An entry of a list names a
    module as PEFT's `target_modules` does: by its name (`q_proj`), or by any longer end of its path
    (`layers.0.self_attn.q_proj`). Raises `UserError` for an entry that names no module.
    """
    if targets == LINEAR:
        return {site.name: np.ones(config.n_layers, bool) for site in config.sites}
    entries = (targets,) if isinstance(targets, str) else tuple(targets)
    if not entries:
        raise UserError(f"targets: the list is empty; use {LINEAR} or some of {_names(config)}")
    found: dict[str, np.ndarray] = {}
    for entry in entries:
        hit = False
        for site, layer, path in modules(config):
            if path == entry or path.endswith(f".{entry}"):
                found.setdefault(site.name, np.zeros(config.n_layers, bool))[layer] = hit = True
        if not hit:
            raise UserError(
                f"targets: {entry!r} names no module that can carry an adapter in this model; "
                f"use {LINEAR} or some of {_names(config)}"
            )
    return {site.name: found[site.name] for site in config.sites if site.name in found}


def ranks(config: ModelConfig, job: Job) -> dict[str, np.ndarray]:
    """Return `{site: int [L]}`, the rank of every adapted module; 0 where a layer has none.

    Raises `UserError` for an unknown target, a pattern that matches nothing, or a rank below 1.
    """
    return _per_module(config, job, "rank_pattern", job.rank, np.int64)


def alphas(config: ModelConfig, job: Job) -> dict[str, np.ndarray]:
    """Return `{site: float64 [L]}`, the alpha of every adapted module; raises as `ranks` does."""
    return _per_module(config, job, "alpha_pattern", job.alpha, np.float64)


def max_rank(config: ModelConfig, job: Job) -> int:
    """Return the largest rank the job uses anywhere: what its slot's rank bucket must hold."""
    return max(int(r.max()) for r in ranks(config, job).values())


def scales(config: ModelConfig, job: Job) -> dict[str, np.ndarray]:
    """Return `{site: float32 [L]}`: alpha/r, or alpha/√r with rsLoRA; 0 where a layer has no adapter.

    Computed in float64 and rounded once; patterns apply to rank and alpha separately, as in PEFT.
    """
    rank, alpha = ranks(config, job), alphas(config, job)
    out = {}
    for site, r in rank.items():
        denominator = np.sqrt(np.maximum(r, 1)) if job.use_rslora else np.maximum(r, 1)
        out[site] = np.where(r > 0, alpha[site] / denominator, 0.0).astype(np.float32)
    return out


def init_adapter(config: ModelConfig, job: Job) -> Adapter:
    """Draw a fresh adapter: A Kaiming uniform (a = √5, so within ±1/√d_in), B zero, as PEFT starts one.

    Each module's A depends on the job's seed, the site's name, the layer and the true rank alone: not on the
    bucket, the pack, or which other modules are targeted.
    """
    sites = {site.name: site for site in config.sites}
    modules = tuple(
        (name, sites[name].d_in, sites[name].d_out, tuple(rank.tolist()))
        for name, rank in ranks(config, job).items()
    )
    return _draw(job.seed, modules)


@partial(jax.jit, static_argnums=1)
def _draw(seed: int, modules: tuple[tuple[str, int, int, tuple[int, ...]], ...]) -> Adapter:
    """Draw all modules, (site, d_in, d_out, rank of every layer), in one program."""
    out = {}
    for name, d_in, d_out, by_layer in modules:
        rank = np.array(by_layer)
        a = jnp.zeros((len(rank), int(rank.max()), d_in), jnp.float32)
        for r in np.unique(rank[rank > 0]):
            layers = np.flatnonzero(rank == r)
            a = a.at[layers, :r].set(_kaiming(seed, np.uint32(zlib.crc32(name.encode())), layers, (r, d_in)))
        out[name] = Factors(a, jnp.zeros((len(rank), d_out, a.shape[1]), jnp.float32))
    return out


def _kaiming(seed: int, site: np.uint32, layers: np.ndarray, shape: tuple[int, int]) -> Array:
    # the bit generator is named so that a changed JAX default cannot change a job's start
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), site)
    bound = 1.0 / math.sqrt(shape[1])
    draw = partial(jax.random.uniform, shape=shape, dtype=jnp.float32, minval=-bound, maxval=bound)
    return jax.vmap(lambda layer: draw(jax.random.fold_in(key, layer)))(jnp.asarray(layers))


def pad_adapter(
    config: ModelConfig, adapter: Mapping[str, Factors], bucket: int, sites: Iterable[str]
) -> Adapter:
    """Return the adapter at rank `bucket` over exactly `sites`; new rows, columns and sites are zero."""
    names = set(sites)
    wanted = {site.name: (site.d_in, site.d_out) for site in config.sites if site.name in names}
    if missing := set(adapter) - set(wanted):
        raise ValueError(
            f"sites {sorted(missing)} of the adapter are not among the pack's sites {sorted(wanted)}"
        )
    dtype = np.result_type(np.float32, *[factors.a.dtype for factors in adapter.values()])
    return _pad(dict(adapter), tuple(wanted.items()), config.n_layers, bucket, dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _pad(
    adapter: Adapter, sites: tuple[tuple[str, tuple[int, int]], ...], layers: int, bucket: int, dtype: Any
) -> Adapter:
    out = {}
    for name, (d_in, d_out) in sites:
        a, b = jnp.zeros((layers, bucket, d_in), dtype), jnp.zeros((layers, d_out, bucket), dtype)
        if name in adapter:
            r = adapter[name].a.shape[1]
            a, b = a.at[:, :r].set(adapter[name].a), b.at[:, :, :r].set(adapter[name].b)
        out[name] = Factors(a, b)
    return out


def stack_adapters(adapters: Sequence[Mapping[str, Factors]]) -> Stack:
    """Stack padded adapters of J jobs: `{site: Factors(a [L, J, R, d_in], b [L, J, d_out, R])}`.

    The layer axis comes first, so that the scan over layers slices without a transpose; jobs are axis 1.
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *adapters)


def stack_scales(config: ModelConfig, jobs: Sequence[Job], sites: Iterable[str]) -> dict[str, Array]:
    """Return `{site: float32 [L, J]}`; 0 where a job does not target the module."""
    columns = [scales(config, job) for job in jobs]
    zero = np.zeros(config.n_layers, np.float32)
    return {name: jnp.asarray(np.stack([c.get(name, zero) for c in columns], axis=1)) for name in sites}


def unstack_adapter(config: ModelConfig, job: Job, stack: Stack, slot: int) -> Adapter:
    """Return slot `slot` of a stack at the job's true ranks and over its own sites alone."""
    out = {}
    for name, rank in ranks(config, job).items():
        r = int(rank.max())
        out[name] = Factors(stack[name].a[:, slot, :r], stack[name].b[:, slot, :, :r])
    return out


def match_pattern(pattern: str, path: str) -> bool:
    """Tell whether a PEFT rank or alpha pattern (a regular expression for the end of a module path) matches.

    Source: `get_pattern_key` in peft/utils/other.py (0.21): `(.*\\.)?(pattern)$` from the start of the path.
    """
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _per_module(
    config: ModelConfig, job: Job, field: str, default: float, dtype: type
) -> dict[str, np.ndarray]:
    targets = resolve_targets(config, job.targets)
    values: dict[str, np.ndarray] = {
        site: np.where(mask, default, 0).astype(dtype) for site, mask in targets.items()
    }
    targeted = {
        (site.name, layer): path
        for site, layer, path in modules(config)
        if site.name in targets and targets[site.name][layer]
    }
    matches: list[tuple[int, int, list[tuple[str, int]], float]] = []
    for pattern, value in getattr(job, field):
        try:
            hits = [key for key, path in targeted.items() if match_pattern(pattern, path)]
        except re.error as err:
            raise UserError(f"{field}: {pattern!r} is not a regular expression: {err}") from None
        if not hits:
            raise UserError(
                f"{field}: {pattern!r} matches none of the targeted modules; a pattern is a module's name or "
                f"the end of its path, such as {_example(targeted.values())}"
            )
        if value <= 0:
            raise UserError(f"{field}: {pattern!r} is {value}; it must be above 0")
        matches.append((len(hits), len(matches), hits, value))
    # The pattern that matches fewest modules is the most specific and is written last; of equals the first
    # given wins. PEFT takes the first that matches, in an order that its own saving loses (keys are sorted).
    for _, _, hits, value in sorted(matches, key=lambda match: match[:2], reverse=True):
        for site, layer in hits:
            values[site][layer] = value
    return values


def _example(paths: Iterable[str]) -> str:
    """Name a module in its two usual forms, for error messages."""
    path = next(iter(paths))
    return f"{path.rsplit('.', 1)[-1]} or {path}"


def modules(config: ModelConfig) -> Iterable[tuple[Site, int, str]]:
    """Yield every module that can carry an adapter: its site, its layer and its path in transformers."""
    for site in config.sites:
        for layer in range(config.n_layers):
            yield site, layer, config.module_path(site, layer)


def _names(config: ModelConfig) -> str:
    return ", ".join(site.name for site in config.sites)
