"""The decoder-only transformer, written for one job; `jax.vmap` over adapters and tokens makes the pack.

Every family is this code under other flags of `ModelConfig`. Weights are frozen and stacked over layers,
[L, …]; `lax.scan` runs the layers, so compile time does not grow with depth. Axes: B sequences, S positions,
D model, N heads, K key/value heads, H head size, V vocabulary, R rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import (
    GATED,
    SHRUNK,
    Fp8Weight,
    by_default,
    lora_dense_group,
    lora_mlp,
)
from plora_jax.models.attention import FULL, attend, attend_past, check_attention, heads_first, visible
from plora_jax.models.config import SOURCES, ModelConfig
from plora_jax.models.rope import Rope, frequencies
from plora_jax.models.table import norm_keys
from plora_jax.training.dropout import Dropout, dropout_mask

INPUT = "layer_input"  # what checkpoint_name calls a layer's input


class LoRA(NamedTuple):
    """Hold one site's adapter of one job, all layers: y += scale · B A x."""

    a: Float32[Array, "L R d_in"]
    b: Float32[Array, "L d_out R"]
    scale: Float32[Array, " L"]


Adapters = dict[str, LoRA]  # by Site.name; a site without an adapter is absent


@dataclass(frozen=True)
class Runtime:
    """Choose how the model runs; nothing here changes what it computes beyond rounding.

    attention: xla anywhere, cudnn on NVIDIA in bf16 or fp16.
    recompute: what backward computes again: none, all but the matrix products (dots), or the whole layer, whose input
    waits on the device (layer) or in the host's pinned memory (offload).
    recomputed: this many of the first layers are recomputed whole, whatever `recompute` says of the others.
    dtype: of activations, and of weights as they are used.
    precision: of the matrix products; "highest" keeps float32 on GPUs that would use TF32, None leaves jax's own
    setting. The backward pass is traced outside the model: put `matmul_precision` around it.
    kernels: of products with adapters: xla, or the fused kernel where it serves (auto); `pallas_kernels.using` wins.
    segments: False promises one example per sequence, its padding at the end, and spares the mask.
    unroll: layers written out in each turn of the scan: n_layers leaves no loop, which spares copies of what backward
    reads and costs compile time.
    fp8_backward: the format that output gradients are rounded to for products with an fp8 base.
    """

    attention: Literal["xla", "cudnn"] = "xla"
    recompute: Literal["none", "dots", "layer", "offload"] = "none"
    dtype: Any = jnp.float32
    precision: Literal["highest"] | None = None
    kernels: Literal["xla", "auto"] = "xla"
    segments: bool = True
    unroll: int = 1
    recomputed: int = 0
    fp8_backward: Literal["e4m3", "e5m2"] = "e4m3"


class Cache(NamedTuple):
    """Hold the keys and values of earlier tokens, all layers; a place whose position is FULL holds none."""

    k: Float[Array, "L B K T H"]
    v: Float[Array, "L B K T H"]
    positions: Int32[Array, "B T"]


class Flow(NamedTuple):
    """Carry what every layer reads besides its input: rotations, visibility, the dropout of its adapters."""

    cos: Float[Array, "P B S h"]  # one table a distinct rope, h = rotary features / 2
    sin: Float[Array, "P B S h"]
    seen: Bool[Array, "#B S S"] | None
    mask: Callable[[Array, str], Array] | None  # (layer, source) -> [B, S, d_in]
    apart: Int32[Array, "B T"] | None = None  # with a cache: positions from each of its tokens to the new one


class Which(NamedTuple):
    """Tell a layer which one it is."""

    layer: Int32[Array, ""]
    rope: Int32[Array, ""]
    window: Int32[Array, ""] | None


class Linear(nnx.Module):
    """Hold the frozen weights of one site: w [d_in, d_out], or in fp8 w [d_out, d_in] with a scale [d_out]."""

    def __init__(self, stack: tuple[int, ...], d_in: int, d_out: int, bias: bool, dtype: Any, fp8: bool):
        shape, kind = ((d_out, d_in), jnp.float8_e4m3fn) if fp8 else ((d_in, d_out), dtype)
        self.w = nnx.Param(jnp.zeros((*stack, *shape), kind))
        self.scale = nnx.Param(jnp.zeros((*stack, d_out), jnp.bfloat16)) if fp8 else None
        self.bias = nnx.Param(jnp.zeros((*stack, d_out), dtype)) if bias else None

    def weight(self, dtype: Any, runtime: Runtime) -> Float[Array, "d_in d_out"] | Fp8Weight:
        """Return one layer's weight as `lora_dense_group` takes it beside an input of `dtype`."""
        if self.scale is None:
            return self.w[...].astype(dtype)
        return Fp8Weight(self.w[...], self.scale[...], runtime.fp8_backward)


class Norm(nnx.Module):
    """Scale to unit root mean square over the last axis, in float32 at least (RMSNorm)."""

    def __init__(self, stack: tuple[int, ...], size: int, eps: float, offset: float, dtype: Any):
        self.eps, self.offset = eps, offset
        self.weight = nnx.Param(jnp.full((*stack, size), 1.0 - offset, dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        h = x.astype(wide)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        return (h * (self.offset + self.weight[...].astype(wide))).astype(x.dtype)


class Layer(nnx.Module):
    """Hold one layer, or with `stack` = (L,) all of them; `__call__` is for one."""

    attn_pre: Norm
    attn_post: Norm
    mlp_pre: Norm
    mlp_post: Norm
    q_norm: Norm
    k_norm: Norm

    def __init__(self, config: ModelConfig, stack: tuple[int, ...], dtype: Any, fp8: bool):
        self.config = config
        for site in config.sites:
            linear = Linear(stack, site.d_in, site.d_out, config.has_bias(site), dtype, fp8)
            setattr(self, site.name, linear)
        for name, size in norm_keys(config).values():
            setattr(self, name, Norm(stack, size, config.norm_eps, config.norm_offset, dtype))

    def __call__(
        self,
        x: Float[Array, "B S D"],
        adapters: Adapters,
        past: tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]] | None,
        flow: Flow,
        which: Which,
        runtime: Runtime,
    ) -> tuple[Float[Array, "B S D"], tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]]:
        """Return the layer's output, and the keys and values that a cache would hold."""
        c = self.config
        sites_of = partial(self.sites_of, adapters=adapters, flow=flow, which=which, runtime=runtime)

        def project(source: str, x: Array) -> tuple[Array, ...]:
            weights, lora, biases, mask = sites_of(source, x.dtype)
            ys = lora_dense_group(x, weights, lora, biases=biases, mask=mask)
            return tuple(checkpoint_name(y, source) for y in ys)

        h = self.attn_pre(x) if c.pre_norm else x
        q, k, v = _parts(project("attn_in", h), (c.n_heads, c.n_kv_heads, c.n_kv_heads), c.head_dim)
        q, k = self.norm_qk(q, k)
        rope = which.rope if len(c.ropes) > 1 else 0
        q, k = (rotate(t, flow.cos[rope], flow.sin[rope]) for t in (q, k))
        if past is None or flow.apart is None:
            h = attend(q, k, v, flow.seen, which.window, c, runtime.attention)  # [B, S, N, H]
        else:
            h = attend_past(q, k, v, past, flow.apart, which.window, c)
        (h,) = project("attn_out", checkpoint_name(h.reshape(*x.shape[:2], -1), "attention"))
        x = x + (self.attn_post(h) if c.post_norm else h)

        h = self.mlp_pre(x) if c.pre_norm else x
        parts = (sites_of(source, h.dtype) for source in ("mlp_in", "mlp_act"))
        weights, lora, biases, masks = zip(*parts, strict=True)
        h = lora_mlp(
            h,
            sum(weights, ()),
            sum(lora, ()),
            activation=c.activation,
            biases=sum(biases, ()),
            masks=masks,
            keep=runtime.recompute != "dots",
        )
        return x + (self.mlp_post(h) if c.post_norm else h), (heads_first(k), heads_first(v))

    def sites_of(
        self, source: str, dtype: Any, *, adapters: Adapters, flow: Flow, which: Which, runtime: Runtime
    ) -> tuple[tuple[Any, ...], tuple[LoRA | None, ...], tuple[Array | None, ...], Array | None]:
        """Return weights, adapters if any and biases of the sites that read one source, and its dropout mask."""
        sites = self.config.sites_of(source)
        linears = [getattr(self, site.name) for site in sites]
        lora = tuple(adapters.get(site.name) for site in sites)
        mask = flow.mask(which.layer, source) if flow.mask and any(a is not None for a in lora) else None
        weights = tuple(linear.weight(dtype, runtime) for linear in linears)
        biases = tuple(None if l.bias is None else l.bias[...].astype(dtype) for l in linears)
        return weights, lora, biases, mask

    def norm_qk(self, q: Float[Array, "B S N H"], k: Float[Array, "B S K H"]) -> tuple[Array, Array]:
        """Normalise queries and keys over each head, or over all heads at once, where the family does."""
        if self.config.qk_norm == "none":
            return q, k
        if self.config.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        flat = [t.reshape(*t.shape[:2], -1) for t in (q, k)]
        return self.q_norm(flat[0]).reshape(q.shape), self.k_norm(flat[1]).reshape(k.shape)


class Decoder(nnx.Module):
    """Run a frozen base model with one job's adapters.

    `hidden` gives the states after the final norm and `logits` applies the head, so that a caller may compute
    logits at trained positions alone. `extend` is `hidden` for generation, token by token. With `fp8` the sites'
    weights are fp8 and everything else has `dtype`.
    """

    def __init__(self, config: ModelConfig, dtype: Any = jnp.float32, fp8: bool = False):
        self.config = config
        self.embed = nnx.Param(jnp.zeros((config.vocab_size, config.d_model), dtype))
        self.layers = Layer(config, (config.n_layers,), dtype, fp8)
        self.norm = Norm((), config.d_model, config.norm_eps, config.norm_offset, dtype)
        self.head = None if config.tied else nnx.Param(jnp.zeros((config.vocab_size, config.d_model), dtype))

    def hidden(
        self,
        tokens: Int32[Array, "B S"],
        positions: Int32[Array, "B S"],
        rows: Int32[Array, "B S"],
        adapters: Adapters | None = None,
        dropout: Dropout | None = None,
        *,
        runtime: Runtime = Runtime(),
    ) -> Float[Array, "B S D"]:
        """Compute the states after the final norm, in `runtime.dtype`.

        Args:
            tokens: ids below the vocabulary size.
            positions: position within the example; restarts at 0 for each example of a sequence.
            rows: the example that each token belongs to, -1 for padding. Tokens of one row stand together.
            adapters: this job's; None runs the base model.
            dropout: of the adapters' input; None compiles none of it.

        Raises:
            UserError: `runtime.attention` cannot serve this model.
        """
        return self._run(tokens, positions, rows, adapters, dropout, None, False, runtime)[0]

    def extend(
        self,
        tokens: Int32[Array, "B S"],
        positions: Int32[Array, "B S"],
        rows: Int32[Array, "B S"],
        adapters: Adapters | None = None,
        cache: Cache | None = None,
        *,
        runtime: Runtime = Runtime(),
    ) -> tuple[Float[Array, "B S D"], tuple[Float[Array, "L B K S H"], Float[Array, "L B K S H"]]]:
        """Return `hidden` of whole prompts, or with a `cache` of the one token (S = 1) that follows what it holds.

        The second result is what these tokens add to the cache; to put it there is the caller's part.
        """
        return self._run(tokens, positions, rows, adapters, None, cache, True, runtime)

    def _run(
        self,
        tokens: Array,
        positions: Array,
        rows: Array,
        adapters: Adapters | None,
        dropout: Dropout | None,
        cache: Cache | None,
        keep: bool,  # keys and values: without it the second result is None
        runtime: Runtime,
    ) -> tuple[Array, Any]:
        c = self.config
        check_attention(c, runtime.attention)
        S = tokens.shape[-1]
        T = S if cache is None else cache.k.shape[3] + S  # how long an example may be
        cos, sin = zip(*(rotations(rope, positions, rows, runtime.dtype, T) for rope in c.ropes), strict=True)
        draw = None
        if dropout is not None:
            width = {site.source: site.d_in for site in c.sites}

            def draw(layer: Array, source: str) -> Array:
                return dropout_mask(dropout, layer, SOURCES.index(source), rows, positions, width[source])

        seen = visible(rows, runtime.segments, runtime.attention) if cache is None else None
        apart = None if cache is None else positions - cache.positions
        flow = Flow(jnp.stack(cos), jnp.stack(sin), seen, draw, apart)
        windows = None
        if any(0 < w < T for w in c.layer_window):
            windows = jnp.asarray([w or FULL for w in c.layer_window], jnp.int32)
        which = Which(jnp.arange(c.n_layers), jnp.asarray(c.layer_rope, jnp.int32), windows)
        graphdef, stacked = nnx.split(self.layers)

        def layer(
            own: Runtime, x: Array, xs: tuple[nnx.State | None, Adapters, Which, Any]
        ) -> tuple[Array, Any]:
            state, lora, this, past = xs
            if state is None:
                state = jax.tree.map(
                    lambda w: jax.lax.dynamic_index_in_dim(w, this.layer, keepdims=False), stacked
                )
            x, made = nnx.merge(graphdef, state)(x, lora, past, flow, this, own)
            return x, made if keep else None

        def run(x: Array, xs: Any, policy: str, layers: int) -> tuple[Array, Any]:
            own = replace(runtime, recompute=policy)  # type: ignore[arg-type]
            unroll = max(1, min(runtime.unroll, layers))
            return jax.lax.scan(recomputing(partial(layer, own), own), x, xs, unroll=unroll)

        with matmul_precision(runtime), by_default(runtime.kernels):
            x = self.embed[...][tokens].astype(runtime.dtype)  # [B, S, D]
            x = x * jnp.asarray(c.embed_scale, x.dtype) if c.embed_scale != 1.0 else x
            past = None if cache is None else (cache.k, cache.v)
            if runtime.recomputed == 0:
                x, made = run(x, (stacked, adapters or {}, which, past), runtime.recompute, c.n_layers)
                return self.norm(x), made
            # Each layer picks its own weights: two scans over parts of them would copy them all.
            for start, end, policy in (
                (0, runtime.recomputed, "layer"),
                (runtime.recomputed, c.n_layers, runtime.recompute),
            ):
                part = jax.tree.map(lambda t, i=start, j=end: t[i:j], (adapters or {}, which))
                x, made = run(x, (None, *part, None), policy, end - start)
            return self.norm(x), made

    @property
    def head_weights(self) -> Float[Array, "V D"]:
        """Give the weights of the head, which a tied model shares with its embedding."""
        return (self.embed if self.head is None else self.head)[...]

    def logits(self, hidden: Float[Array, "... D"], *, runtime: Runtime = Runtime()) -> Float[Array, "... V"]:
        """Apply the head, in float32 at least; of `runtime` only the precision counts."""
        with matmul_precision(runtime):
            return vocabulary_logits(hidden, self.head_weights, self.config.final_softcap)


def vocabulary_logits(
    hidden: Float[Array, "... D"], head: Float[Array, "V D"], softcap: float
) -> Float[Array, "... V"]:
    """Multiply by the head in the states' dtype and sum in float32 at least; a softcap of 0 is none."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=wide)
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def matmul_precision(runtime: Runtime) -> AbstractContextManager[Any]:
    """Trace products with the runtime's precision; jax's own setting holds where it asks for none."""
    return jax.default_matmul_precision(runtime.precision) if runtime.precision else nullcontext()


def recomputing(layer: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Wrap a layer so that backward computes again what `Runtime.recompute` says.

    "dots" keeps the outputs of attention and of every site but the last, whose sum is the next layer's input.
    """
    policy = runtime.recompute
    if policy == "none":
        return layer
    # cuDNN's own output is kept below
    attention = () if runtime.attention == "cudnn" else ("attention",)
    names = (*attention, *SOURCES[:2], GATED) if policy == "dots" else ()
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SHRUNK, *names],
        names_which_can_be_offloaded=[INPUT] if policy == "offload" else [],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def keep(primitive: Any, *args: Any, **params: Any) -> Any:
        # with the softmax statistics, which cuDNN's backward pass needs: its forward pass would run again for them
        flash = policy == "dots" and primitive.name.startswith("dot_product_attention_fwd")
        return flash or named(primitive, *args, **params)

    def with_input_named(x: Array, xs: Any) -> Any:
        return layer(checkpoint_name(x, INPUT), xs)

    # A loop keeps XLA from undoing it. Where layers are written out, barriers around what flows through them do; around
    # weights they would make copies.
    apart = (True, (False, False, False, False)) if runtime.unroll > 1 else False
    body = with_input_named if policy == "offload" else layer
    return jax.checkpoint(body, policy=keep, prevent_cse=apart)  # type: ignore[arg-type]  # a tree, as for in_axes


def rotations(
    rope: Rope, positions: Int32[Array, "B S"], rows: Int32[Array, "B S"], dtype: Any, longest: int = 0
) -> tuple[Float[Array, "B S h"], Float[Array, "B S h"]]:
    """Compute cos and sin of every position's angles, in float32 at least.

    LongRoPE takes its long factors for examples longer than the original context, each example by itself: the
    choice must not depend on what else is in the batch (transformers decides for a whole batch). Examples of
    `longest` tokens may be longer than S: a token that stands alone (S = 1) is the end of its example.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(frequencies(rope), wide)
    S = positions.shape[-1]
    if rope.kind == "longrope" and rope.original < max(S, longest):
        start = jnp.clip(jnp.arange(S) - positions, 0, S - 1)  # where each token's example begins
        ends = jax.vmap(lambda s, p: jnp.zeros(S, p.dtype).at[s].max(p)[s])(
            start, jnp.where(rows < 0, 0, positions)
        )
        beyond = positions[..., None].astype(wide) * jnp.asarray(frequencies(rope, long=True), wide)
        angles = jnp.where((ends + 1 > rope.original)[..., None], beyond, angles)
    return jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude


def rotate(x: Float[Array, "B S N H"], cos: Float[Array, "B S h"], sin: Float[Array, "B S h"]) -> Array:
    """Rotate feature pairs (i, i + h) of each head; features from 2h on stay."""
    h = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, h]
    a, b, rest = x[..., :h], x[..., h : 2 * h], x[..., 2 * h :]
    turned = (a * cos - b * sin, b * cos + a * sin)
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), rest], axis=-1)


def _parts(ys: tuple[Array, ...], heads: tuple[int, ...], size: int) -> list[Array]:
    """Give each part as [B, S, heads, size], whether the checkpoint fuses the parts into one site or not."""
    if len(ys) < len(heads):
        edges = [sum(heads[: i + 1]) * size for i in range(len(heads) - 1)]
        ys = tuple(jnp.split(ys[0], edges, axis=-1))
    return [y.reshape(*y.shape[:2], n, size) for y, n in zip(ys, heads, strict=True)]
