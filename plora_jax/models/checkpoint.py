"""Checkpoint tensors as they lie in safetensors files: described at once, read one by one."""

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from plora_jax.errors import UserError
from plora_jax.models.config import ModelConfig
from plora_jax.models.table import checkpoint_table, ignorable

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
MOST_LISTED = 12  # names of tensors in one error


class Stored(NamedTuple):
    """Describe one tensor of a checkpoint; `read` gives its values, and nothing is read before."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` when the file is absent or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def open_directory(directory: Path) -> dict[str, Stored]:
    """Describe the tensors of a Hugging Face directory: by its index when sharded, else of model.safetensors.

    With an index, only the shards and keys that it lists count; other files are ignored.

    Raises:
        UserError: no safetensors weights, a missing or truncated shard, a dtype that is not a float.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        where: dict[str, str] = read_json(index).get("weight_map", {})
        if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
            raise UserError(
                f"{index}: weight_map must name each tensor's file; download the checkpoint again"
            )
        shards = sorted(set(where.values()))
        absent = [shard for shard in shards if not (directory / shard).is_file()]
        if absent:
            raise UserError(f"{index}: {_listing(absent, 'missing shard')}; download the checkpoint again")
        stored: dict[str, Stored] = {}
        for shard in shards:
            held = open_safetensors(directory / shard)
            stored.update({key: tensor for key, tensor in held.items() if where.get(key) == shard})
        return stored
    if single.is_file():
        return open_safetensors(single)
    others = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pth"))
    found = f"; found {others[0]}: convert it to safetensors first" if others else ""
    raise UserError(f"{directory}: no model.safetensors and no model.safetensors.index.json{found}")


def open_safetensors(path: Path) -> dict[str, Stored]:
    """Describe the tensors of one file from its header.

    References:
        The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path}: not a safetensors file, or truncated; download it again")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise UserError(f"{path}: its safetensors header is not JSON; download it again") from None
    stored, spans = {}, []
    for key, name, shape, offsets in _entries(path, header):
        begin, end = (8 + length + offset for offset in offsets)
        dtype = DTYPES.get(name)
        if dtype is None:
            raise UserError(f"{path}: {key} is {name}; supported are {', '.join(DTYPES)}")
        if end > size or end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise UserError(f"{path}: {key} does not fit the file: it is truncated; download it again")
        stored[key] = Stored(shape, _reader(path, begin, end - begin, np.dtype(dtype), shape))
        spans.append((begin, end, key))
    for (_, end, one), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            raise UserError(f"{path}: {one} and {other} share bytes; download it again")
    return stored


def _entries(path: Path, header: Any) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the name, dtype, shape and offsets of every tensor in a header, which may hold anything."""
    if not isinstance(header, dict):
        raise UserError(f"{path}: its safetensors header is no JSON object; download it again")
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        match entry:
            case {"dtype": str(name), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                if 0 <= begin <= end and all(isinstance(size, int) for size in shape):
                    yield key, name, tuple(shape), (begin, end)
                    continue
        raise UserError(f"{path}: {key} is not described as safetensors does; download it again")


def _reader(
    path: Path, begin: int, length: int, dtype: np.dtype, shape: tuple[int, ...]
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        values = np.fromfile(path, dtype=np.uint8, count=length, offset=begin)
        if len(values) < length:
            raise UserError(f"{path}: became shorter while it was read")
        return values.view(dtype).reshape(shape)

    return read


def check_tensors(stored: dict[str, Stored], config: ModelConfig, name: str) -> None:
    """Compare a checkpoint with the table, every tensor, before any of it is read.

    Raises:
        UserError: one message that lists missing, unexpected and misshapen tensors.
    """
    table = checkpoint_table(config)
    missing = [key for key in table if key not in stored]
    extra = [key for key in stored if key not in table and not ignorable(key, config)]
    misshapen = [
        f"{key} {list(stored[key].shape)} instead of {list(tensor.shape)}"
        for key, tensor in table.items()
        if key in stored and stored[key].shape != tensor.shape
    ]
    kinds = ((missing, "missing tensor"), (extra, "unexpected tensor"), (misshapen, "misshapen tensor"))
    problems = [_listing(keys, kind) for keys, kind in kinds if keys]
    if problems:
        raise UserError(f"{name}: the weights do not fit config.json: {'; '.join(problems)}")


def _listing(names: list[str], kind: str) -> str:
    shown = ", ".join(names[:MOST_LISTED])
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{len(names)} {kind}{'s' if len(names) > 1 else ''}: {shown}{more}"
