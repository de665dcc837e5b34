"""The choice of an implementation: each reason, its override, and that lora_dense follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import Device, choose, lora_dense, using
from pallas_kernels.choice import config_for, tuned
from pallas_kernels.hopper_gemm import GemmConfig

H200, A100 = Device("NVIDIA H200", "9.0", 132), Device("NVIDIA A100", "8.0", 108)
CALL = {"dtype": jnp.bfloat16, "jobs": 8, "tokens": 1024, "d_in": 3584, "d_outs": [3584], "ranks": [8]}


@pytest.mark.parametrize(
    "change, name, reason",
    [
        ({}, "hopper", "fused"),
        ({"device": A100}, "xla", "A100"),
        ({"dtype": jnp.float32}, "xla", "float32"),
        ({"ranks": []}, "xla", "no site has an adapter"),
        ({"ranks": [8, 512]}, "xla", "rank 512"),
        ({"frozen": False}, "xla", "without a frozen product"),
        ({"shared": True}, "xla", "the same tokens"),
        ({"shared": True, "jobs": 1}, "hopper", ""),
        ({"d_in": 100}, "xla", "input features 100"),
        ({"d_outs": [3584, 72]}, "xla", "output features 72"),
        ({"tokens": 1023}, "xla", "1023 tokens"),
        ({"tokens": 192}, "xla", "75%"),
        ({"tokens": 1000}, "hopper", ""),
    ],
)
def test_reasons(change, name, reason):
    choice = choose(**{**CALL, "device": H200, **change})
    assert choice.name == name
    assert reason in choice.reason


def test_this_machine_and_overrides():
    if jax.default_backend() == "cpu":
        assert choose(**CALL).name == "xla"
        assert "cpu" in choose(**CALL).reason
    with using("hopper"):
        assert choose(**CALL).name == "hopper"
    with using("xla"):
        assert choose(**CALL, device=H200).name == "xla"
    with pytest.raises(ValueError, match="auto, xla, hopper"), using("cuda"):
        pass


def test_a_mesh_that_xla_partitions_keeps_to_xla():
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert "mesh" in choose(**CALL, device=H200).reason


def test_lora_dense_follows_the_choice():
    """Lowered for CUDA, one packed layer holds one kernel forward and one backward."""

    def sd(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def loss(x, w, a, b, scale):
        return jnp.sum(lora_dense(x, w, a, b, scale).astype(jnp.float32) ** 2)

    grad = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 2, 3)), in_axes=(0, None, 0, 0, 0)))
    f32 = jnp.float32
    args = (sd(2, 256, 128), sd(128, 64), sd(2, 8, 128, dtype=f32), sd(2, 64, 8, dtype=f32), sd(2, dtype=f32))

    def kernels(name):
        jax.clear_caches()  # the choice is made while tracing
        with using(name):
            text = grad.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("stablehlo.custom_call @mosaic_gpu")

    assert kernels("hopper") == 2
    assert kernels("xla") == 0


def test_tables_load():
    assert tuned("no such device") == {}
    assert config_for("forward", 1, 1, A100) == GemmConfig(sms=108)
    for config in tuned(H200.kind).values():
        assert config.tile_n in (128, 256)


def test_shard_map():
    """Jobs sharded over a mesh axis by shard_map give the unsharded result."""
    mesh = jax.make_mesh((1,), ("jobs",), axis_types=(jax.sharding.AxisType.Auto,))
    key = jax.random.key(0)
    x, w = jax.random.normal(key, (2, 4, 6)), jax.random.normal(key, (6, 5))
    a, b, s = jax.random.normal(key, (2, 3, 6)), jax.random.normal(key, (2, 5, 3)), jnp.ones(2)
    packed = jax.vmap(pallas_kernels.lora_dense, in_axes=(0, None, 0, 0, 0))
    specs = (P("jobs"), P(), P("jobs"), P("jobs"), P("jobs"))
    sharded = jax.shard_map(packed, mesh=mesh, in_specs=specs, out_specs=P("jobs"))

    def total(f):
        return jax.jit(jax.value_and_grad(lambda *v: jnp.sum(f(*v) ** 2), argnums=(0, 2, 3)))(x, w, a, b, s)

    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), total(sharded), total(packed))
