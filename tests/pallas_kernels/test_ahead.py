"""Kernels found in a lowered program, and compiled beside it."""

import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead, compile_lowered
from pallas_kernels.ahead import _compile, kernels_of
from pallas_kernels.hopper_gemm import Scales, lora_gemm
from pallas_kernels.hopper_rows import round_rows


@pytest.fixture(scope="module")
def lowered():
    """Lower three calls of two kernels for CUDA."""
    x, w, wide = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 128, 64), (64, 64), (64, 128)))

    @jax.jit
    def product(x, w):
        return lora_gemm([(x, w)])[0]

    def run(x, w, wide):
        return product(product(product(x, w), w), wide)

    return jax.jit(run).trace(x, w, wide).lower(lowering_platforms=("cuda",))


def test_each_kernel_of_a_program_is_found_once_with_its_shapes(lowered):
    first, second = kernels_of(lowered)
    assert [(s.shape, s.dtype) for s in first.operands] == [
        ((2, 128, 64), "bfloat16"),
        ((64, 64), "bfloat16"),
    ]
    assert [s.shape for s in first.results] == [(2, 128, 64)]
    assert [s.shape for s in second.operands + second.results] == [(2, 128, 64), (64, 128), (2, 128, 128)]


def test_kernels_of_8_bit_numbers_are_found_too():
    """One that rounds, and one that multiplies: a type that is not known would hide all kernels of a program."""
    x, w, scale = (
        jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((128,), jnp.float32),
    )

    def run(x, w, scale, kind):
        (values,), rows = round_rows((x,), (scale,), kind)
        return lora_gemm(((values, w),), scales=Scales(rows, scale, jnp.bfloat16), transposed=True)[0]

    for kind in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        lowered = jax.jit(run, static_argnums=3).trace(x, w, scale, kind).lower(lowering_platforms=("cuda",))
        rounding, product = kernels_of(lowered)
        assert rounding.results[0].dtype == product.operands[0].dtype == kind


def test_a_kernel_alone_is_the_same_to_the_compiler(lowered):
    kernels = kernels_of(lowered)
    alone = [kernels_of(kernel.lower(lowering_platforms=("cuda",))) for kernel in kernels]
    assert alone == [[kernel] for kernel in kernels]


def test_what_does_not_compile_alone_is_left_to_the_program(lowered, caplog):
    kernel = kernels_of(lowered)[0]
    broken = kernel._replace(attributes=kernel.attributes | {"module": b"no module"})
    with caplog.at_level(logging.DEBUG):
        _compile(broken)
    assert "did not compile" in caplog.text


def test_kernels_are_compiled_beside_the_program(lowered, monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "_compile", begun.append)

    class Program:
        """Stand in for the lowered program, whose kernels no CPU compiles."""

        compiler_ir = lowered.compiler_ir

        def compile(self, compiler_options):
            while len(begun) < 2:
                time.sleep(0.01)
            return compiler_options

    assert compile_lowered(Program(), {"an_option": 1}) == {"an_option": 1}
    assert begun == kernels_of(lowered)


def test_kernels_in_words_that_are_not_known_are_left_to_the_program(lowered, monkeypatch, caplog):
    monkeypatch.setattr(ahead, "DTYPES", {})
    with caplog.at_level(logging.DEBUG), pytest.raises(Exception, match=r"mosaic_gpu_v2|cuda|CUDA"):
        compile_lowered(lowered)
    assert "not recognised" in caplog.text


def test_a_program_without_kernels_compiles_as_ever():
    program = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    assert kernels_of(program) == []
    x = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(compile_lowered(program)(x), jax.jit(lambda x: jnp.tanh(x) @ x)(x))
    with pytest.raises(Exception, match="no_such_option"):
        compile_lowered(program, {"no_such_option": 1})
