"""What backward computes again is planned: the cheapest choice whose compiled program fits the device's memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from planner.signature import LAST_RESORT
from plora_jax.errors import UserError
from plora_jax.models.decoder import Runtime


def needed_bytes(compiled: Any) -> int:
    """Return the bytes a compiled program needs on its device, its arguments included."""
    memory = compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def device_bytes() -> int | None:
    """Return what this process may use of its device; None where the device does not tell."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return int(limit) if limit else None


def with_policy(runtime: Runtime, policy: str, layers: int) -> Runtime:
    """Return the runtime of a recompute policy.

    On a GPU "none" and "dots" also write the layers out: a loop copies what it keeps for backward, and each layer's
    weights for the fused kernel, which serves only without it.
    """
    chosen = replace(runtime, recompute=policy, recomputed=0)  # type: ignore[arg-type]
    if policy in ("none", "dots") and jax.default_backend() == "gpu":
        return replace(chosen, unroll=layers, kernels="auto")
    return chosen


def choices(runtime: Runtime, layers: int) -> Iterator[Runtime]:
    """Yield how a step may be run, cheapest first: all kept, products kept, more and more layers recomputed, all.

    Last, where the host's memory is not the device's, as a CPU's is: all, from inputs that wait on the host.
    """
    yield with_policy(runtime, "none", layers)
    for recomputed in sorted({0, layers // 4, layers // 2, layers - layers // 4}):
        yield replace(with_policy(runtime, "dots", layers), recomputed=recomputed)
    yield with_policy(runtime, "layer", layers)
    if jax.default_backend() != "cpu":
        yield with_policy(runtime, LAST_RESORT, layers)


def cheapest[Program](
    runtime: Runtime,
    layers: int,
    limit: int,
    make: Callable[[Runtime], Program],
    size: Callable[[Program], int] = needed_bytes,
    predict: Callable[[Runtime], float] = lambda runtime: 0.0,
) -> tuple[Runtime, Program]:
    """Return the first of `choices` whose program fits into `limit` bytes, and the program.

    Args:
      runtime: what else is fixed. layers: of the model. limit: bytes. make: compiles the program of a runtime.
      size: its bytes. predict: its bytes by the planner; what is far above the limit is not compiled, but for the last.

    Raises:
      UserError: even the last program, which recomputes every layer, is larger.
    """
    every = list(choices(runtime, layers))
    for choice in every:
        if predict(choice) > 1.25 * limit + 2**30 and choice is not every[-1]:
            continue
        program = make(choice)
        if size(program) <= limit:
            return choice, program
    where = ", inputs on the host" if choice.recompute == LAST_RESORT else ""
    raise UserError(
        f"the step needs {size(program) / 2**30:.1f} GiB with every layer recomputed{where}, and the device has "
        f"{limit / 2**30:.1f} GiB; use fewer jobs, a smaller batch, shorter rows, or a smaller rank"
    )
