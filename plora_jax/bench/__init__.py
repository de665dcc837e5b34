"""`plora bench step` measures the real step: its numbers belong together, and memory is counted, not guessed."""

import contextlib
from collections.abc import Iterator

import jax

from pallas_kernels import default_device
from plora_jax.errors import UserError


@contextlib.contextmanager
def on_this_device(kernels: str | None) -> Iterator[None]:
    """Run a benchmark, and say in words what it asks of this device that it does not have.

    Raises:
      UserError: `kernels` is "hopper" and the device is not one, or its memory is too small.
    """
    device = default_device()
    if kernels == "hopper" and device.capability != "9.0":
        raise UserError(f"--kernels hopper: the kernel is for H100 and H200, not for {device.kind}; use auto")
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise
        raise UserError(
            f"{device.kind} has not the memory for it: take fewer --jobs, a smaller --batch or --length, "
            "or for a step --recompute auto"
        ) from error
