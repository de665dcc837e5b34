"""Load a frozen base model: from a Hugging Face directory, a hub id, a .gguf file, or with random weights."""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from pallas_kernels import default_device, quantise_weight
from pallas_kernels.fp8 import why_not
from plora_jax.errors import UserError
from plora_jax.models import gguf
from plora_jax.models.checkpoint import Stored, check_tensors, open_directory, read_json
from plora_jax.models.config import ModelConfig, config_from_hf
from plora_jax.models.decoder import Decoder
from plora_jax.models.find import HUB_FILES, hub_snapshot, load_config, load_tokenizer
from plora_jax.models.gguf_tokenizer import tokenizer_from_gguf
from plora_jax.models.table import Tensor, checkpoint_table

READERS = 4  # tensors that are read at a time, while the device takes the one before them
PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.bfloat16}
Placement = Callable[[str, tuple[int, ...]], Sharding]


@dataclass(frozen=True)
class Base:
    """Hold a frozen base model: what it is, how it is built, its arrays, and how to make its tokenizer."""

    name: str
    config: ModelConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    make_tokenizer: Callable[[], Any] = lambda: None

    @cached_property
    def tokenizer(self) -> Any:
        """Load the tokenizer on first use: transformers imports torch for it where that is installed, 10 s.

        Raises:
            UserError: it cannot be loaded.
        """
        return self.make_tokenizer()

    def model(self, params: nnx.State | None = None) -> Decoder:
        """Merge the parameters (these, or `params` as traced by a transformation) into a Decoder."""
        return nnx.merge(self.graphdef, self.params if params is None else params)

    @property
    def precision(self) -> str:
        """Name what the weights of the layers are held in, as `load_base` is told: fp8, or by their dtype."""
        name = str(self.params["layers"][self.config.sites[0].name]["w"].dtype)  # type: ignore[index]
        return {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float32": "fp32"}.get(name, name)


def check_weights(name: str) -> None:
    """Check that a model's weights are there and fit, from the files' headers alone.

    Raises:
        UserError: as `load_base`.
    """
    config, stored, _ = _sources(name, False)
    check_tensors(stored, config, name)


def load_base(
    name: str,
    *,
    dtype: Any = None,
    random_weights: bool = False,
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto",
    seed: int = 0,
    placement: Placement | None = None,
) -> Base:
    """Load a base model, tensor by tensor, onto the device.

    The model is checked from config.json before weights are fetched, and every tensor's name and shape before
    any is read; host memory then holds a few tensors at a time, which follow each other in the files.

    Args:
        name: hub id, directory with config.json and safetensors, or .gguf file.
        dtype: of the stored parameters; overrides `precision`, but for the weights that fp8 rounds.
        random_weights: draw normal(0, 0.02) weights from `seed`; a known hub id then needs no files.
        precision: auto is fp32 on CPU and bf16 elsewhere. fp8 rounds the weights of the sites that take adapters, one
            scale an output feature, and leaves embeddings, norms, biases and the head in bf16.
        placement: the sharding of a parameter from its path ("layers.q_proj.w") and shape; None: the default.

    Raises:
        UserError: the model is not supported, not found or unreachable, or its tensors do not fit; fp8 on a GPU
            without it.
    """
    dtype, fp8 = _held_in(dtype, precision)
    if fp8 and (reason := why_not(default_device().capability)):
        raise UserError(f"precision: fp8 cannot run on {default_device().kind}: {reason}; use bf16")
    config, stored, make_tokenizer = _sources(name, random_weights)
    graphdef, params = _load(name, config, stored, dtype, fp8, seed if random_weights else None, placement)
    return Base(name, config, graphdef, params, make_tokenizer)


def abstract_base(name: str, *, dtype: Any = None, precision: str = "auto") -> Base:
    """Return `load_base`'s model with shapes alone for parameters: enough to compile a step, in no memory.

    Raises:
        UserError: the model is not supported, not found or unreachable.
    """
    config = load_config(name)
    parts = nnx.split(_decoder(config, *_held_in(dtype, precision)))
    return Base(name, config, *parts, partial(load_tokenizer, name))


@cache
def _decoder(config: ModelConfig, dtype: Any, fp8: bool) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, dtype, fp8))


def _load(
    name: str,
    config: ModelConfig,
    stored: dict[str, Stored],
    dtype: Any,
    fp8: bool,
    seed: int | None,
    placement: Placement | None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Read the weights, or draw them from `seed` where there is one."""
    graphdef, state = nnx.split(_decoder(config, dtype, fp8))
    flat = nnx.to_flat_state(state)
    where = {
        path: placement(".".join(map(str, path)), leaf.shape) if placement else None for path, leaf in flat
    }
    if seed is not None:
        arrays: dict[tuple[Any, ...], jax.Array] = {}
        for path, leaf in flat:
            if path[-1] != "scale":  # it comes with its weight
                arrays |= _random(leaf, path, config, seed, dtype, where)
    else:
        check_tensors(stored, config, name)
        zeros = {path: partial(jnp.zeros, leaf.shape, leaf.dtype) for path, leaf in flat}
        arrays = jax.jit(lambda: {path: make() for path, make in zeros.items()}, out_shardings=where)()
        table = checkpoint_table(config)
        wanted = [(table[key], found) for key, found in stored.items() if key in table]
        for (tensor, _), values in zip(wanted, _read_ahead(found for _, found in wanted), strict=True):
            for path, part in _stored_as(tensor, values, arrays[tensor.path].dtype).items():
                # waited for, so that host memory is free again
                arrays[path] = jax.block_until_ready(_put(arrays[path], part, tensor.layer))
    return graphdef, nnx.from_flat_state([(path, leaf.replace(arrays[path])) for path, leaf in flat])


def _sources(name: str, random_weights: bool) -> tuple[ModelConfig, dict[str, Stored], Callable[[], Any]]:
    config = load_config(name)
    path = Path(name).expanduser()
    if random_weights:
        return (
            config,
            {},
            partial(load_tokenizer, name) if path.suffix == ".gguf" else partial(_tokenizer_in, path),
        )
    if path.suffix == ".gguf":
        file = gguf.open_gguf(path)
        return config, file.tensors(), partial(tokenizer_from_gguf, file.fields, str(path))
    directory = path if path.is_dir() else hub_snapshot(name, HUB_FILES)
    if not path.is_dir():  # the hub's own config.json counts, not the preset's
        config = config_from_hf(read_json(directory / "config.json"), f"{name}/config.json")
    return config, open_directory(directory), partial(_tokenizer_in, directory)


def _tokenizer_in(directory: Path) -> Any:
    known = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return load_tokenizer(str(directory)) if any((directory / n).exists() for n in known) else None


def _held_in(dtype: Any, precision: str) -> tuple[Any, bool]:
    """Return what parameters are stored in, and whether the layers' weights are fp8 all the same."""
    return jnp.dtype(dtype or _dtype(precision)), precision == "fp8"


def _dtype(precision: str) -> Any:
    if precision == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if precision not in PRECISIONS:
        allowed = ", ".join(["auto", *PRECISIONS])
        raise UserError(f"precision: {precision!r} is not supported by the loader; allowed are {allowed}")
    return PRECISIONS[precision]


def _read_ahead(stored: Iterable[Stored]) -> Iterator[np.ndarray]:
    """Read tensors in order, READERS at a time: one stream alone seldom keeps a disk busy."""
    waiting: deque[Future[np.ndarray]] = deque()
    with ThreadPoolExecutor(READERS, "reader") as pool:
        for found in stored:
            waiting.append(pool.submit(found.read))
            if len(waiting) > READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _stored_as(tensor: Tensor, values: np.ndarray, dtype: Any) -> dict[tuple[str, ...], Any]:
    """Return by path what the decoder holds of a checkpoint tensor: turned to [in, out], or as it lies in fp8."""
    if dtype == jnp.float8_e4m3fn:
        return dict(zip((tensor.path, _scale(tensor.path)), _quantise(values), strict=True))
    return {tensor.path: _turn(values, dtype) if tensor.transpose else values}


def _scale(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*path[:-1], "scale")


_quantise = jax.jit(quantise_weight)


@partial(jax.jit, static_argnums=1)
def _turn(values: jax.Array, dtype: Any) -> jax.Array:
    # a program of its own: inside the write, XLA on CPU takes four times as long
    return values.T.astype(dtype)


def _put(stack: jax.Array, values: jax.Array, layer: int | None) -> jax.Array:
    """Write a tensor into its place; the stack is donated, so it is updated where it lies."""
    # an array without a placement stays uncommitted: committed weights would commit the first training step's
    # result, and the second step would compile again
    sharding = stack.sharding if stack.committed else None
    return _writer(layer is not None, sharding)(stack, values, layer or 0)


@cache
def _writer(stacked: bool, sharding: Sharding | None) -> Callable[..., jax.Array]:
    def write(stack: jax.Array, values: jax.Array, layer: jax.Array) -> jax.Array:
        values = values.astype(stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, values, layer, 0) if stacked else values

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _random(
    leaf: Any,
    path: tuple[Any, ...],
    config: ModelConfig,
    seed: int,
    dtype: Any,
    where: dict[tuple[Any, ...], Sharding | None],
) -> dict[tuple[Any, ...], jax.Array]:
    """Draw one parameter on the device; a norm near what leaves its input as it is, as trained ones are.

    An fp8 weight is the one of `dtype`, rounded.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(".".join(map(str, path)).encode()))
    mean = 1.0 - config.norm_offset if path[-1] == "weight" else 0.0
    if leaf.dtype != jnp.float8_e4m3fn:
        return {path: _normal(where[path])(key, leaf.shape, leaf.dtype, mean)}
    *stack, d_out, d_in = leaf.shape
    pair = path, _scale(path)
    draw = _normal_fp8(*(where[name] for name in pair))
    return dict(zip(pair, draw(key, (*stack, d_in, d_out), dtype), strict=True))


@cache
def _normal(sharding: Sharding | None) -> Callable[..., jax.Array]:
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, mean: float) -> jax.Array:
        return (mean + 0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)

    return jax.jit(draw, static_argnums=(1, 2), out_shardings=sharding)


@cache
def _normal_fp8(*shardings: Sharding | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
        return quantise_weight(_normal(None)(key, shape, dtype, 0.0).swapaxes(-1, -2))

    return jax.jit(draw, static_argnums=(1, 2), out_shardings=shardings)
