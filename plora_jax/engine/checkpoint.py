"""Checkpoints of a pack: written by Orbax in the background, whole or not at all, and given back bit for bit."""

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from plora_jax.engine.faults import fault
from plora_jax.engine.rundir import flush
from plora_jax.errors import UserError

PyTree = Any

_NAME = re.compile(r"(\d{6,})-(\d+)")  # order of writing, micro-step
_PARTIAL, _DELETED = ".partial", ".deleted"
_FILLER = "."  # no array has this name
_log = logging.getLogger(__name__)


class _Damaged(Exception):
    """Say what is wrong with the files of a checkpoint that was once whole."""


class Checkpoints:
    """Keep the last `keep` checkpoints of one pack in a directory of its own, which nobody else writes.

    A checkpoint is a subdirectory `NNNNNN-MICROSTEP` in Orbax's format. It is written under another name, flushed to
    disk and renamed, so that after kill -9 or a power cut it is there as a whole or not at all; only then are older
    ones deleted. The arrays' checksums are kept beside them and checked when they are read.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep} is below 1")
        self.directory, self.keep = Path(directory).absolute(), keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plora-checkpoint")
        self._saving: Future[None] | None = None

    def save(self, micro_step: int, arrays: PyTree, meta: dict[str, Any]) -> None:
        """Copy `arrays` and `meta` to the host, and write them in the background once the last save has ended.

        Args:
          micro_step: names the checkpoint, and is given back by `restore`.
          arrays: a tree of arrays of any dtype JAX or NumPy has; they may be donated as soon as this returns.
          meta: what JSON holds (tuples come back as lists).

        Raises:
          OSError: the last save failed (disk full, read-only); the checkpoints before it are intact.
        """
        self.wait()
        meta = json.loads(json.dumps(meta))
        self._saving = self._thread.submit(self._write, micro_step, _to_host(arrays), meta)

    def restore(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Return micro-step, arrays and meta of the newest whole checkpoint, or None where there is none.

        Half-written checkpoints are removed. So are those whose files were damaged later, with a warning: the one
        before is taken. Leaves come back as `like` has them: on the same devices, or as NumPy arrays.

        Args:
          like: a tree of arrays or `jax.ShapeDtypeStruct` with the structure, shapes and dtypes that were saved.

        Raises:
          UserError: the checkpoint holds other arrays than `like`; every difference is named.
          OSError: a checkpoint is there and cannot be read.
        """
        self.wait()
        for path in self.directory.glob("*") if self.directory.is_dir() else ():
            if path.name.endswith((_PARTIAL, _DELETED)) or _PARTIAL + "." in path.name:
                _remove_tree(path)
        for path in reversed(self._whole()):
            try:
                record = _read_record(path)
                _check_fit(path, record["arrays"], like)
                return (
                    record["micro_step"],
                    _place(_read_arrays(path, record["arrays"]), like),
                    record["meta"],
                )
            except _Damaged as err:
                _log.warning("checkpoint %s is damaged (%s): the one before it is used", path, err)
                _remove(path)
        return None

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what the last save raised."""
        if self._saving is not None:
            wait_for([self._saving])  # a signal may end this line, and the save is still known
            saving, self._saving = self._saving, None
            saving.result()

    def close(self) -> None:
        """Wait as `wait` does and stop the thread; the checkpoints stay."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def delete(self) -> None:
        """Wait, and remove all checkpoints and the directory: the pack is done."""
        self.wait()
        for path in self._whole():
            _remove(path)
        if self.directory.is_dir():
            _remove_tree(self.directory)

    def _whole(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        found = self.directory.glob("*-*") if self.directory.is_dir() else ()
        return sorted(path for path in found if _NAME.fullmatch(path.name) and path.is_dir())

    def _write(self, micro_step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        before = self._whole()
        order = 1 + (int(before[-1].name.split("-")[0]) if before else 0)
        final = self.directory / f"{order:06d}-{micro_step}"
        partial = final.with_name(final.name + _PARTIAL)
        record = {
            "micro_step": micro_step,
            "arrays": {name: [*_kind(value), _checksum(value)] for name, value in arrays.items()},
            "meta": meta,
        }
        try:
            fault("checkpoint")
            self.directory.mkdir(parents=True, exist_ok=True)
            context = ocp.Context()
            context.array.saving.use_compression = False  # weights and moments are noise to a compressor
            context.memory.deepcopy_host_arrays = False  # they are copies already
            # else threads wait five minutes for a directory that could not be made, and the process with them
            context.asynchronous.create_directories_asynchronously = False
            with context:
                # The record says enough of zeros (gradients between batches); Orbax refuses empty arrays and trees.
                filled = {_FILLER: np.ones(1, bool)}
                filled |= {name: value for name, value in arrays.items() if _bytes(value).any()}
                ocp.save(partial, filled, overwrite=True, custom_metadata=record)
            fault("checkpoint-sync")
            _flush_all(partial)
            fault("checkpoint-commit")
            partial.rename(final)
            flush(self.directory)
            fault("checkpoint-prune")
            for path in [*before, final][: -self.keep]:
                _remove(path)
        except Exception as err:
            for path in self.directory.glob(partial.name + "*"):  # Orbax's own temporary name too
                shutil.rmtree(path, ignore_errors=True)
            raise _as_os_error(err, final) from err


def _names(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "value", leaf) for path, leaf in leaves
    ]


def _to_host(arrays: PyTree) -> dict[str, np.ndarray]:
    named = _names(arrays)
    for _, leaf in named:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    out = {name: _copy(leaf) for name, leaf in named}
    if len(out) < len(named):
        raise ValueError("two arrays of the tree have one name; use other keys")
    return out


def _copy(leaf: Any) -> np.ndarray:
    """Return a host copy that outlives the array; what NumPy sees of an array on the CPU is the array itself."""
    on_device = isinstance(leaf, jax.Array) and all(d.platform != "cpu" for d in leaf.devices())
    return np.array(leaf, order="C", copy=None if on_device else True)


def _kind(leaf: Any) -> tuple[str, list[int]]:
    return np.dtype(leaf.dtype).name, list(leaf.shape)


def _checksum(value: np.ndarray) -> int:
    return zlib.crc32(_bytes(value))


def _bytes(value: np.ndarray) -> np.ndarray:
    return value.reshape(-1).view(np.uint8)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = ocp.checkpointables_metadata(path).custom_metadata
        assert isinstance(record, dict) and {"micro_step", "arrays", "meta"} <= record.keys()
        return record
    except (MemoryError, PermissionError):
        raise
    except Exception as err:
        raise _Damaged(f"{type(err).__name__} in its metadata") from err


def _check_fit(path: Path, stored: dict[str, list[Any]], like: PyTree) -> None:
    there = {name: f"{dtype}{shape}" for name, (dtype, shape, _) in stored.items()}
    here = {name: "{}{}".format(*_kind(leaf)) for name, leaf in _names(like)}
    wrong = [
        f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise UserError(f"{path}: this checkpoint is of another pack: {'; '.join(wrong[:5])}{more}")


def _read_arrays(path: Path, stored: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    try:
        read = {name: np.zeros(shape, np.dtype(dtype)) for name, (dtype, shape, _) in stored.items()}
        read |= ocp.load(path)
        wrong = [name for name, kept in stored.items() if [*_kind(read[name]), _checksum(read[name])] != kept]
    except (MemoryError, PermissionError):
        raise
    except Exception as err:
        raise _Damaged(f"{type(err).__name__} in its arrays") from err
    if wrong:
        raise _Damaged(f"the checksum of {', '.join(wrong[:5])} is wrong")
    return read


def _place(arrays: dict[str, np.ndarray], like: PyTree) -> PyTree:
    def put(value: np.ndarray, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return value
        # an uncommitted array stays one: a committed one would be another program to jit
        return jax.device_put(value, leaf.sharding if getattr(leaf, "committed", True) else None)

    values = [put(arrays[name], leaf) for name, leaf in _names(like)]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _remove(path: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never taken for a whole one."""
    deleted = path.with_name(path.name + _DELETED)
    _remove_tree(deleted)
    path.rename(deleted)
    _remove_tree(deleted)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush_all(directory: Path) -> None:
    """Flush every file and directory below `directory`: Orbax flushes arrays, but neither its metadata nor names."""
    for parent, _, files in os.walk(directory):
        for name in files:
            flush(Path(parent, name))
        flush(Path(parent))


def _as_os_error(err: BaseException, path: Path) -> BaseException:
    """Return the operating system's error behind what Orbax or TensorStore raised, naming the checkpoint."""
    for one in _chain(err):
        if isinstance(one, OSError) and one.errno:
            return OSError(one.errno, os.strerror(one.errno), str(path))
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
            if os.strerror(number) in str(one):
                return OSError(number, os.strerror(number), str(path))
    return err


def _chain(err: BaseException | None) -> Iterable[BaseException]:
    while err is not None:
        yield err
        err = err.__cause__ or err.__context__
