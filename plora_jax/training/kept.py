"""Training steps kept whole on disk: one that was compiled before is neither traced nor lowered again.

JAX keeps compiled programs too, but names one by its lowered form, so that finding it takes tracing and lowering the
step: 9 s for the 28 written-out layers of a 7B model and their Mosaic kernels. Here a step is named by all that it is
traced from, which is known before any weight is read: the source of these packages, versions, the device, JAX's
settings, the model, the pack's specification and the shape of the batch. What JAX finds in its own cache all the same
is not kept here: XLA on CPU cannot write it again.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from pallas_kernels import choice, compile_lowered
from plora_jax.data.shapes import Shape
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import Base
from plora_jax.training.batch import Batch
from plora_jax.training.compiled import processor
from plora_jax.training.step import (
    Metrics,
    PackSpec,
    PackState,
    empty_pack,
    make_train_step,
    weight_dtype,
)

MOST = 128  # files; those that were not used for longest go first
HELD = 32  # programs in memory, beside those of a pack in training
SOURCES = ("plora_jax", "pallas_kernels", "planner")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
CUDA = ["nvidia-cublas", "nvidia-cudnn"]
CUDA += [f"{name}{major}" for major in (12, 13) for name in ("nvidia-cudnn-cu", "nvidia-cublas-cu")]
CUDA += [f"jax-cuda{major}-{name}" for major in (12, 13) for name in ("plugin", "pjrt")]
ASIDE = (
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_log",
    "jax_dump",
    "jax_platform",
    "jax_traceback",
)

log = logging.getLogger(__name__)
_found: dict[str, Future[Any]] = {}  # by name: the program, or None where there is none
_reader = ThreadPoolExecutor(1, "kept-steps")
_hits: Counter[int] = Counter()  # of JAX's own cache, by the thread that asked


def _count(event: str, **_: Any) -> None:
    _hits[get_ident()] += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_count)


def folder() -> Path | None:
    """Return where steps are kept, beside the programs that JAX keeps; None where it keeps none, or not in files."""
    place = jax.config.jax_compilation_cache_dir
    if not place or "://" in place or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(place) / "steps"


class KeptStep:
    """Run `make_train_step`'s micro-step of one pack: a program for each shape of batch, kept where JAX's are.

    Where JAX keeps none, or arrays lie on several devices, this is the jitted step itself.
    """

    def __init__(self, base: Base, spec: PackSpec, runtime: Runtime | None = None) -> None:
        self.base, self.spec, self.runtime = base, spec, runtime or Runtime()
        self.jitted = make_train_step(base, spec, self.runtime)
        self._programs: dict[tuple[int, ...], Any] = {}
        self._keeps = folder() is not None and jax.config.jax_default_device is None

    def __call__(self, state: PackState, params: nnx.State, batch: Batch) -> tuple[PackState, Metrics]:
        """Return `jitted(state, params, batch)`; `state` is donated."""
        at = (*batch.tokens.shape[1:], batch.trained.shape[-1])
        if at not in self._programs:
            self._programs[at] = self._program(at) if self._keeps and _alone(params) else self.jitted
        return self._programs[at](state, params, batch)

    def seek(self, m: int, shapes: Iterable[Shape]) -> None:
        """Begin to read the programs of m sequences of each shape, where they are kept, on a thread of their own."""
        if self._keeps:
            for shape in shapes:
                self._seek((m, *shape))

    def name(self, at: tuple[int, ...]) -> str:
        """Name the program for a batch of m sequences, S positions, P of them trained: `at` is (m, S, P)."""
        device, config = jax.devices()[0], jax.config
        settings = {  # as they are here and now, where a context manager changed one; a few have no attribute
            name: repr(getattr(config, name, value))
            for name, value in config.values.items()
            if not name.startswith(ASIDE)
        }
        said = (
            _source(),
            _versions(),
            processor() if device.platform == "cpu" else "",
            (device.platform, device.device_kind, device.client.platform_version, choice.default_device()),
            sorted(settings.items()),
            [os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")],
            choice.asked(),
            self.base.config,
            [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.base.params)],
            [(name, _plain(value)) for name, value in sorted(vars(self.spec).items())],
            [(name, _plain(value)) for name, value in sorted(vars(self.runtime).items())],
            at,
        )
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _arguments(self, at: tuple[int, ...]) -> tuple[PackState, nnx.State, Batch]:
        """Return the shapes of what a program is called with."""
        m, S, P = at

        def of(*shape: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct((self.spec.slots, *shape), dtype)

        tokens, trained, flags = of(m, S), of(m, P), of(dtype=jnp.bool_)
        batch = Batch(tokens, tokens, tokens, trained, trained, of(), flags, flags)
        state = jax.eval_shape(lambda: empty_pack(self.base.config, self.spec, weight_dtype(self.base)))
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.base.params)
        return state, params, batch

    def _seek(self, at: tuple[int, ...]) -> Future[Any]:
        name = self.name(at)
        if name not in _found:
            state, params, batch = self._arguments(at)
            trees = jax.tree.structure(((state, params, batch), {})), jax.tree.structure((state, _METRICS))
            while len(_found) >= HELD:
                _found.pop(next(iter(_found)))
            _found[name] = _reader.submit(_read, name, *trees)
        return _found[name]

    def _program(self, at: tuple[int, ...]) -> Any:
        began, name = time.perf_counter(), self.name(at)
        found = self._seek(at).result()
        if found is not None and jax.config.jax_log_compiles:
            log.warning("Finished loading jit(step) in %.3f sec", time.perf_counter() - began)
        if found is None:
            before, lowered = _hits[get_ident()], self.jitted.lower(*self._arguments(at))  # type: ignore[attr-defined]
            found = compile_lowered(lowered)
            # a program that was read once would be written without some of its functions
            if _hits[get_ident()] == before:
                _write(name, found)
            _found[name] = Future()
            _found[name].set_result(found)
        return found


_METRICS = Metrics(*range(len(Metrics._fields)))  # type: ignore[arg-type]


def _alone(params: nnx.State) -> bool:
    """Tell whether all parameters lie on the default device, as `_arguments` takes it."""
    return all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


def _plain(value: Any) -> str:
    return repr(sorted(value) if isinstance(value, frozenset) else value)


@cache
def _source() -> str:
    """Return a digest of the code that steps are traced from, and of the tables that it reads."""
    sha = hashlib.sha256()
    for package in SOURCES:
        root = Path(__import__(package).__file__ or "").parent
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
            sha.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha.hexdigest()


@cache
def _versions() -> list[tuple[str, str]]:
    found = []
    for name in (*PACKAGES, *CUDA):
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return found


def _evict(place: Path) -> None:
    """Delete what was not used for longest, and what processes that were killed left behind."""
    files = [path for path in place.iterdir() if path.is_file()]  # no links that lead nowhere
    files.sort(key=lambda path: path.stat().st_mtime)
    killed = [path for path in files if path.name[0] == "." and path.stat().st_mtime < time.time() - 86_400]
    for old in (*[path for path in files if path.name[0] != "."][:-MOST], *killed):
        old.unlink(missing_ok=True)


def _own(path: Path) -> bool:
    """Tell whether none but this user and root may write a file or folder: what is read from it is run."""
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _read(name: str, inputs: Any, outputs: Any) -> Any:
    """Return the program of a file, None where there is none that is whole."""
    place = folder()
    if place is None:
        return None
    try:
        content = (place / name).read_bytes()
        if not (_own(place) and _own(place / name)):
            log.warning("%s is not used: others than this user and root may write it", place / name)
            return None
        if content[:32] != hashlib.sha256(content[32:]).digest():
            return None
        found = deserialize_and_load(content[32:], inputs, outputs, execution_devices=[jax.devices()[0]])
        with suppress(OSError):  # another's cache
            os.utime(place / name)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a file of another world raises, the step can be compiled
        log.warning("a kept step cannot be used and is compiled anew: %s: %s", type(error).__name__, error)
        return None
    return found


def _write(name: str, program: Any) -> None:
    """Keep a program, whole or not at all; what cannot be kept is compiled again next time."""
    place = folder()
    if place is None:
        return
    part = None  # beside it until it is whole
    try:
        content, *_ = serialize(program)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, path = tempfile.mkstemp(prefix=".", dir=place)  # for this user alone
        os.close(number)
        part = Path(path)
        part.write_bytes(hashlib.sha256(content).digest() + content)
        part.replace(place / name)
        _evict(place)
    except Exception as error:  # a full disk, or whatever a device's own serialisation raises
        log.warning("the step is not kept: %s: %s", type(error).__name__, error)
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)
