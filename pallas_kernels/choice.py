"""Which implementation serves a call, and why: decided from the device, dtype and shapes alone, never by trying.

The decision is made while tracing, so that a compiled program has one implementation for good. `choose` answers for
any call without running it; `lora_dense` follows it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.resources
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import reference
from .fp8 import Fp8Weight
from .reference import Site, adapted
from .tiles import TILE_M, GemmConfig

MAX_RANK = 256
MAX_ROW_WASTE = 1.07  # rows of whole tiles over tokens: beyond, the folded product of XLA is faster
# Tiles of the widest output over blocks: below, waiting for the shrink costs more than it saves.
MIN_WAVES = 2
MIN_DEPTH = 896  # of either frozen product: the narrowest that was measured (Qwen2.5-0.5B)
MIN_ROWS = 2 * TILE_M  # of a head: below, rows that are none cost more than float32 logits
IMPLEMENTATIONS = ("auto", "xla", "hopper")
# The fused kernel beats these products on Hopper, but in a loop over layers XLA copies each layer's W for it and the
# step is slower (docs/benchmarks.md). So it serves whoever asks for it, as the step does whose layers are written out.
_mode: contextvars.ContextVar[str | None] = contextvars.ContextVar("pallas_kernels", default=None)
_by_default: contextvars.ContextVar[str] = contextvars.ContextVar("pallas_kernels_default", default="xla")


class Choice(NamedTuple):
    """The implementation that serves a call ("hopper" or "xla") and the reason, in words for a person."""

    name: str
    reason: str


class Device(NamedTuple):
    """What the choice needs to know of a device."""

    kind: str
    capability: str  # "9.0" on Hopper, "" without CUDA
    cores: int


def default_device() -> Device:
    """Return the device jax computes on by default."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "")) if device.platform == "gpu" else ""
    return Device(device.device_kind, capability, getattr(device, "core_count", 0) or 0)


@contextlib.contextmanager
def by_default(name: str):
    """Trace with an implementation unless `using` asks for one; gradients follow what the forward pass was traced with.

    What JAX remembers of a function that was traced before is not forgotten: a jitted function must depend on the name.

    Raises:
      ValueError: when the name is none of `using`'s.
    """
    token = _by_default.set(_known(name))
    try:
        yield
    finally:
        _by_default.reset(token)


@contextlib.contextmanager
def using(name: str):
    """Trace with one implementation: "xla" (what serves if nobody asks), "auto" (the fused kernel where it serves the
    call and is expected to be faster), or "hopper" (wherever it serves, also to compile for a device that is not here).

    Raises:
      ValueError: when the name is none of these.
    """
    token = _mode.set(_known(name))
    jax.clear_caches()  # what was traced before remembers the choice made then
    try:
        yield
    finally:
        _mode.reset(token)
        jax.clear_caches()


def _known(name: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {name!r}: allowed are {', '.join(IMPLEMENTATIONS)}")
    return name


def asked() -> str:
    """Return the implementation that is asked for here, by `using` or else `by_default`."""
    return _mode.get() or _by_default.get()


def choose(
    dtype, jobs, tokens, d_in, d_outs, ranks, *, shared=False, frozen=True, fp8=False, device=None, mode=None
) -> Choice:
    """Say which implementation serves sites that share an input, and why.

    Args:
      dtype: of x. jobs, tokens: J adapters with T tokens each. d_in: D. d_outs: F per site. ranks: the R of the
        adapted sites. shared: whether all jobs read the same tokens. frozen: whether every site has its W.
      fp8: whether the Ws are `Fp8Weight`s; where only some are, XLA serves without asking here.
      device: a `Device`; the default one if None. mode: the implementation asked for; the one in force here if None.

    Raises:
      ValueError: when the implementation is none of `using`'s.
    """
    mode = _known(mode) if mode else asked()
    device = device or default_device()
    if reason := _why_no_kernel(dtype, mode, device):
        return Choice("xla", reason)
    if fp8 and jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return Choice("xla", f"beside fp8 weights the kernel takes bfloat16, not {jnp.dtype(dtype).name}")
    if not ranks:
        return Choice("xla", "no site has an adapter")
    if not frozen:
        return Choice("xla", "adapters without a frozen product run at memory bandwidth as XLA products")
    if shared and jobs > 1:
        return Choice("xla", "all jobs read the same tokens: one frozen product serves them")
    if max(ranks) > MAX_RANK:
        return Choice("xla", f"rank {max(ranks)} is above {MAX_RANK}")
    for size, what in ((d_in, "input"), *((d_out, "output") for d_out in d_outs)):
        if size % (unit := 128 if fp8 else 64):
            return Choice("xla", f"{what} features {size} are no multiple of {unit}")
    if tokens % 8:
        return Choice("xla", f"{tokens} tokens a job are no multiple of 8")
    rows = -(-tokens // TILE_M) * TILE_M
    if rows > MAX_ROW_WASTE * tokens:
        return Choice("xla", f"{tokens} tokens a job would fill row tiles of {TILE_M} to {tokens / rows:.0%}")
    tiles = jobs * rows // TILE_M * -(-max(d_outs) // 256)
    if mode != "hopper" and tiles < MIN_WAVES * device.cores:
        return Choice(
            "xla", f"{tiles} tiles are fewer than {MIN_WAVES} for each of {device.cores} multiprocessors"
        )
    if mode != "hopper" and min(d_in, sum(d_outs)) < MIN_DEPTH:
        return Choice("xla", f"a frozen product of depth {min(d_in, sum(d_outs))}, below {MIN_DEPTH}")
    return Choice("hopper", f"fused kernel, {'untuned tiles' if fp8 else _source(device.kind)}")


def choose_head(dtype, rows, shape, *, device=None, mode=None) -> Choice:
    """Say which implementation gives the cross-entropy of a head of a shape [V, D] at some rows, and its gradient.

    Args and raised errors as `choose`.
    """
    mode = _known(mode) if mode else asked()
    device = device or default_device()
    if reason := _why_no_kernel(dtype, mode, device):
        return Choice("xla", reason)
    if jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return Choice("xla", f"exponentials leave the range of {jnp.dtype(dtype).name}")
    for size, what in zip(shape, ("a vocabulary of", "features"), strict=True):
        if size % 64:
            return Choice("xla", f"{what} {size} is no multiple of 64")
    if mode != "hopper" and rows < MIN_ROWS:
        return Choice("xla", f"{rows} rows are fewer than {MIN_ROWS}")
    return Choice("hopper", "fused kernel")


def _why_no_kernel(dtype, mode: str, device: Device) -> str | None:
    """Say why no kernel serves numbers of this dtype here, None if one may."""
    if mode == "xla":
        return "the default; using('auto') chooses the fused kernel where it serves"
    if mode != "hopper" and device.capability != "9.0":
        return f"no kernel for {device.kind}: there is one for compute capability 9.0 (H100, H200)"
    if mode != "hopper" and _partitioned_by_xla():
        return "XLA partitions this program over a mesh, which it cannot do to a kernel"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel multiplies 16-bit numbers, not {jnp.dtype(dtype).name}"
    return None


def _partitioned_by_xla() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return any(size > 1 and name not in manual for name, size in mesh.shape.items())


@functools.cache
def tuned(kind: str) -> dict:
    """Return the tuned table of a device kind: {(pass, K, N): GemmConfig}; empty where none is shipped."""
    name = f"tuned_{kind.lower().replace(' ', '_')}.json"
    file = importlib.resources.files(__package__) / name
    if not file.is_file():
        return {}
    entries = json.loads(file.read_text())["entries"]
    return {(e["pass"], e["k"], e["n"]): GemmConfig(**e["config"]) for e in entries}


def _source(kind: str) -> str:
    return f"table tuned_{kind.lower().replace(' ', '_')}.json" if tuned(kind) else "untuned tiles"


def config_for(which: str, k: int, n: int, device: Device, fp8: bool = False) -> GemmConfig:
    """Return the tiles of a "forward", "backward" or "head" product [T, K]·[K, N]: tuned if known, else the default.

    Products of 8-bit numbers take the default: of those tried none was faster by more than 0.5 % (docs/benchmarks.md).
    """
    config = GemmConfig() if fp8 else tuned(device.kind).get((which, k, n), GemmConfig())
    return dataclasses.replace(config, sms=device.cores) if device.cores else config


class _Hopper(NamedTuple):
    """Give the functions of `hopper` their tiles.

    Each call is of a function of its own: layers that are written out one by one call it, and it is lowered once.
    """

    device: Device

    def forward(self, x, mask, sites):
        from . import hopper  # imports Pallas for GPUs, a second that other processes need not wait

        return jax.jit(functools.partial(hopper.forward, config=self._forward_tiles(x)))(x, mask, sites)

    def forward_glu(self, activation, x, mask, sites):
        from . import hopper

        function = functools.partial(hopper.forward_glu, activation, config=self._forward_tiles(x))
        return jax.jit(function)(x, mask, sites)

    def backward(self, x, mask, sites, us, dys, rounded=None):
        from . import hopper

        function = functools.partial(hopper.backward, config=self._backward_tiles(sites))
        return jax.jit(function)(x, mask, sites, us, dys, rounded)

    def backward_glu(self, activation, h, mask, sites, us, dys, ys, ws):
        from . import hopper

        function = functools.partial(hopper.backward_glu, activation, config=self._backward_tiles(sites))
        return jax.jit(function)(h, mask, sites, us, dys, ys, ws)

    def _forward_tiles(self, x):
        def config(site):
            fp8 = isinstance(site.w, Fp8Weight)
            return config_for("forward", x.shape[-1], site.d_out, self.device, fp8)

        return config

    def _backward_tiles(self, sites):
        depth, fp8 = sum(site.d_out for site in sites), isinstance(sites[0].w, Fp8Weight)
        return config_for("backward", depth, sites[0].w.shape[0], self.device, fp8)


def head_kernel(h, w, softcap, mode: str | None = None):
    """Return `head.loss_and_gradient` for states [n, D] and a head [V, D]; None where XLA serves, as `choose_head`."""
    device = default_device()
    if choose_head(h.dtype, len(h), w.shape, device=device, mode=mode).name == "xla":
        return None
    from . import head

    config = config_for("head", w.shape[1], w.shape[0], device)
    return functools.partial(head.loss_and_gradient, softcap=softcap, config=config)


def implementation(x, sites: tuple[Site, ...], mode: str | None = None):
    """Return the object whose `forward` and `backward`, or those of a gated unit, serve a call, as `choose` says."""
    eight = [isinstance(site.w, Fp8Weight) for site in sites]
    if any(eight) != all(eight):
        return reference  # a launch reads weights of one kind
    some = adapted(sites)
    jobs = sites[some[0]].a.shape[0] if some else x.shape[0]
    device = default_device()
    choice = choose(
        x.dtype,
        jobs,
        x.shape[1],
        x.shape[2],
        [site.d_out for site in sites],
        [sites[i].a.shape[1] for i in some],
        shared=x.shape[0] != jobs,
        frozen=all(site.w is not None for site in sites),
        fp8=any(eight),
        device=device,
        mode=mode,
    )
    return _Hopper(device) if choice.name == "hopper" else reference
