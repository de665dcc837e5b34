"""Compile a program with its Mosaic kernels beside it.

XLA compiles a kernel when it comes to its call, after all passes over the program, and one after another. A process
keeps kernels by their content, so those that threads compile meanwhile, each as a program of its own, are found there.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CALL, TARGET = "stablehlo.custom_call", "mosaic_gpu_v2"
DTYPES = {
    "f32": jnp.float32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "i32": jnp.int32,
}

log = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """Hold a kernel as a lowered program calls it: its attributes, and the shapes of operands and results."""

    attributes: dict[str, Any]
    operands: list[jax.ShapeDtypeStruct]
    results: list[jax.ShapeDtypeStruct]

    def lower(self, **options: Any) -> Any:
        """Lower a program of this kernel alone."""

        def call(*operands: jax.Array) -> Any:
            return jax.ffi.ffi_call(TARGET, self.results)(*operands, **self.attributes)

        return jax.jit(call).trace(*self.operands).lower(**options)


def kernels_of(lowered: Any) -> list[Kernel]:
    """Return the different kernels of a `jax.stages.Lowered`, in the order of their calls."""
    found: dict[bytes, Kernel] = {}
    for call in _calls(lowered.compiler_ir("stablehlo").operation):
        pairs = ((item.name, item.attr) for item in call.attributes["mhlo.backend_config"])
        attributes = {
            name: attr.value_bytes if hasattr(attr, "value_bytes") else attr.value for name, attr in pairs
        }
        kernel = Kernel(
            attributes, *([_shape(v.type) for v in side] for side in (call.operands, call.results))
        )
        found.setdefault(attributes["kernel_hash"], kernel)
    return list(found.values())


def compile_lowered(lowered: Any, options: dict[str, Any] | None = None) -> Any:
    """Compile a `jax.stages.Lowered`, with `options` of the compiler, and its Mosaic kernels beside it."""
    threads = ThreadPoolExecutor(4, "kernels")
    try:
        for kernel in _found_in(lowered):
            threads.submit(_compile, kernel)
        return lowered.compile(compiler_options=options)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _found_in(lowered: Any) -> list[Kernel]:
    try:
        return kernels_of(lowered)
    except Exception:  # another JAX may say what a kernel is in other words; XLA compiles it all the same
        log.debug("kernels were not recognised", exc_info=True)
        return []


def _compile(kernel: Kernel) -> None:
    try:
        kernel.lower().compile()
    except Exception:  # the program compiles it too, and says what is wrong
        log.debug("a kernel did not compile by itself", exc_info=True)


def _calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == CALL and inner.attributes["call_target_name"].value == TARGET:
                    yield inner.operation
                yield from _calls(inner.operation)


def _shape(kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(kind.shape), DTYPES[str(kind.element_type)])
