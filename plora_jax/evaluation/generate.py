"""Greedy generation for J adapters of one base model at once, with a cache of keys and values.

One compiled program takes a batch from prompts to answers: it runs the prompts, then one token a step until every
sequence has ended. Prompts are padded on the right to a bucket of P tokens, and new tokens are cached from place P on
whatever a prompt's own length is. Attention goes by the positions that the cache holds beside the keys, so no token
sees the gap, and all sequences write to the same place in one update.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int32

from plora_jax.adapters import Stack
from plora_jax.data.shapes import split_lengths
from plora_jax.models.attention import FULL
from plora_jax.models.decoder import Adapters, Cache, Decoder, LoRA, Runtime
from plora_jax.models.load import Base
from plora_jax.training.compiled import quick_options

Tokens = Int32[np.ndarray, " n"]
Scales = dict[str, Float[Array, "L J"]]
BUCKETS = 4  # prompt lengths to compile for, at most


def generate(
    base: Base,
    weights: Stack,
    scales: Scales,
    prompts: Sequence[Tokens],
    *,
    stops: Collection[int],
    new_tokens: int,
    runtime: Runtime,
    at_once: int = 8192,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[Tokens]]:
    """Return, for each of J adapters, the likeliest continuation of each prompt, up to and with a stop token.

    The tokens are those of transformers' `generate(do_sample=False)` for each adapter and prompt alone.

    Args:
        base: the frozen model.
        weights: J adapters as `stack_adapters` makes them.
        scales: theirs, as `stack_scales` makes them.
        prompts: token ids, at least one each.
        stops: ids that end an answer.
        new_tokens: the most tokens of an answer.
        runtime: how the model runs.
        at_once: tokens that the cache may hold at a time, padding included, over all adapters; one sequence of each
            adapter runs in any case.
        advance: is told, batch by batch, how many tokens were run over all adapters.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt has no token: there is nothing to go on from")
    jobs = jax.tree.leaves(weights)[0].shape[1]
    run = _program(base.graphdef, runtime, new_tokens)
    ends = np.array(sorted(stops) or [-1], np.int32)
    # LongRoPE computes an example anew, with other frequencies, once it is longer than the original context: answers
    # that cross it are cut there, and go on as prompts.
    short = min((rope.original for rope in base.config.ropes if rope.kind == "longrope"), default=FULL - 1)
    texts = [[np.asarray(prompt, np.int32) for prompt in prompts] for _ in range(jobs)]
    left = np.full((jobs, len(prompts)), new_tokens)
    while (rows := np.flatnonzero(left.any(axis=0))).size:
        lengths = np.array([[len(text) for text in own] for own in texts])
        limits = np.where(lengths > short, left, np.minimum(left, short + 1 - lengths))
        for part, count, P in _batches(rows, lengths.max(axis=0), new_tokens, at_once // jobs):
            tokens = [[np.pad(own[row], (0, P - len(own[row]))) for row in part] for own in texts]
            caps = np.where(np.arange(len(part)) < count, limits[:, part], 0)
            batch = [np.asarray(array, np.int32) for array in (tokens, lengths[:, part], caps, ends)]
            made = np.asarray(run(weights, scales, base.params, *batch))
            for j, i in np.ndindex(jobs, count):
                row, new = part[i], made[j, i][made[j, i] >= 0]
                texts[j][row] = np.concatenate([texts[j][row], new])
                left[j, row] = 0 if np.isin(new[-1:], ends).any() else left[j, row] - len(new)
            advance(int(lengths[:, part[:count]].sum() + (made >= 0).sum()))
    return [[text[len(p) :] for text, p in zip(own, prompts, strict=True)] for own in texts]


def _batches(
    rows: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " N"], new_tokens: int, at_once: int
) -> Iterator[tuple[Int[np.ndarray, " B"], int, int]]:
    """Yield the rows of each batch, how many of them are real (the rest repeat one), and the prompt bucket P.

    All batches of a bucket have one size, so that a bucket is one program.
    """
    tops = split_lengths(lengths[rows], min(BUCKETS, 1 + len(rows) // 128))
    for low, P in zip([0, *tops], tops, strict=False):
        fits = rows[(lengths[rows] > low) & (lengths[rows] <= P)]
        fits = fits[np.argsort(lengths[fits], kind="stable")]
        batches = -(-len(fits) // max(1, at_once // (P + new_tokens)))
        size = -(-len(fits) // batches)
        for start in range(0, len(fits), size):
            part = fits[start : start + size]
            yield np.pad(part, (0, size - len(part)), mode="edge"), len(part), P


class _Loop(NamedTuple):
    """Carry what a new token changes: n tokens `made` so far (-1: none), who has ended, and the keys and values."""

    n: Int32[Array, ""]
    made: Int32[Array, "J B new"]
    done: Bool[Array, "J B"]
    k: Float[Array, "L J B K T H"]
    v: Float[Array, "L J B K T H"]


@lru_cache(maxsize=32)
def _program(graphdef: nnx.GraphDef, runtime: Runtime, new: int) -> Callable[..., Int32[Array, "J B new"]]:
    """Return the jitted program of at most `new` tokens; it compiles once for each J, B and P."""

    def model_with(weights: Stack, scales: Scales, params: nnx.State) -> tuple[Decoder, Adapters]:
        sites = {name: LoRA(w.a, w.b, scales[name]) for name, w in weights.items()}
        return nnx.merge(graphdef, params), sites

    def likeliest(model: Decoder, hidden: Array) -> Array:
        return jnp.argmax(model.logits(hidden, runtime=runtime), axis=-1).astype(jnp.int32)

    def read(weights: Stack, scales: Scales, params: nnx.State, tokens: Array, lengths: Array) -> Any:
        """Run one adapter's prompts [B, P]; return their next tokens [B] and what they add to the cache."""
        model, sites = model_with(weights, scales, params)
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        rows = jnp.where(index < lengths[:, None], jnp.arange(len(tokens))[:, None], -1)
        hidden, kept = model.extend(tokens, index, rows, sites, runtime=runtime)
        return likeliest(model, jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]), kept

    def write(
        weights: Stack, scales: Scales, params: nnx.State, token: Array, position: Array, cache: Cache
    ) -> Any:
        """Run one adapter's last tokens [B]; return the next ones and what they add to the cache."""
        model, sites = model_with(weights, scales, params)
        token, position = token[:, None], position[:, None]
        hidden, kept = model.extend(token, position, jnp.zeros_like(token), sites, cache, runtime=runtime)
        return likeliest(model, hidden[:, 0]), kept

    @partial(jax.jit, compiler_options=dict(quick_options()))
    def run(
        weights: Stack,
        scales: Scales,
        params: nnx.State,
        tokens: Int32[Array, "J B P"],
        lengths: Int32[Array, "J B"],
        limits: Int32[Array, "J B"],  # the most tokens of each sequence, up to `new`
        stops: Int32[Array, " E"],
    ) -> Int32[Array, "J B new"]:
        P = tokens.shape[-1]
        # rounded once, as each product would round them, and not at every token
        weights = jax.tree.map(lambda factor: factor.astype(runtime.dtype), weights)
        place = jnp.arange(P + new - 1)  # the last token is never read
        positions = jnp.where(place < P, place, lengths[..., None] + place - P)  # [J, B, T]
        gap = (place < P) & (place >= lengths[..., None])

        def add(loop: _Loop, token: Array, k: Array, v: Array) -> _Loop:
            made = loop.made.at[:, :, loop.n].set(jnp.where(loop.done, -1, token))
            done = loop.done | jnp.isin(token, stops) | (loop.n + 1 >= limits)
            return _Loop(loop.n + 1, made, done, k, v)

        def step(loop: _Loop) -> _Loop:
            at = loop.n - 1  # the token to read
            token = jnp.maximum(
                loop.made[:, :, at], 0
            )  # -1, of a sequence that has ended, is nobody's business
            there = jnp.where(gap | (place >= P + at), FULL, positions)
            each = jax.vmap(write, in_axes=(1, 1, None, 0, 0, Cache(1, 1, 0)), out_axes=(0, 1))  # type: ignore[arg-type]
            token, kept = each(weights, scales, params, token, lengths + at, Cache(loop.k, loop.v, there))
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=P + at, axis=4)
            return add(loop, token, put(loop.k, kept[0]), put(loop.v, kept[1]))

        each = jax.vmap(read, in_axes=(1, 1, None, 0, 0), out_axes=(0, 1))
        first, (k, v) = each(weights, scales, params, tokens, lengths)
        k, v = (jnp.pad(t, (*((0, 0),) * 4, (0, new - 1), (0, 0))) for t in (k, v))
        made = jnp.full((*lengths.shape, new), -1, jnp.int32)
        loop = add(_Loop(jnp.int32(0), made, limits <= 0, k, v), first, k, v)
        return jax.lax.while_loop(lambda loop: (loop.n < new) & ~loop.done.all(), step, loop).made

    return run
