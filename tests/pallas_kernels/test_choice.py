"""The choice of an implementation: each reason, its override, and that lora_dense follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import SHRUNK, Device, Fp8Weight, choose, lora_dense, using
from pallas_kernels.choice import config_for, tuned
from pallas_kernels.hopper_gemm import GemmConfig

from .problems import count_launches

H200, A100 = Device("NVIDIA H200", "9.0", 132), Device("NVIDIA A100", "8.0", 108)
J, S = P("jobs"), P("jobs", "share")
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
        ({"shared": True, "jobs": 1, "tokens": 8192}, "hopper", ""),
        ({"d_in": 100}, "xla", "input features 100"),
        ({"d_outs": [3584, 72]}, "xla", "output features 72"),
        ({"tokens": 1023}, "xla", "1023 tokens"),
        ({"tokens": 192}, "xla", "75%"),
        ({"tokens": 1000}, "hopper", ""),
        ({"d_outs": [512]}, "xla", "128 tiles"),
        ({"d_outs": [3584, 512, 512]}, "hopper", ""),
        ({"d_in": 256}, "xla", "depth 256"),
    ],
)
def test_reasons(change, name, reason):
    with using("auto"):
        choice = choose(**{**CALL, "device": H200, **change})
    assert choice.name == name
    assert reason in choice.reason


def test_this_machine_and_overrides():
    assert choose(**CALL, device=H200).name == "xla" and "default" in choose(**CALL, device=H200).reason
    if jax.default_backend() == "cpu":
        with using("auto"):
            assert choose(**CALL).name == "xla" and "cpu" in choose(**CALL).reason
    with using("hopper"):
        assert choose(**CALL).name == "hopper"
    with using("xla"):
        assert choose(**CALL, device=H200).name == "xla"
    with pytest.raises(ValueError, match="auto, xla, hopper"), using("cuda"):
        pass
    with pytest.raises(ValueError, match="auto, xla, hopper"):
        choose(**CALL, mode="cuda")


def test_a_mesh_that_xla_partitions_keeps_to_xla():
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    with jax.sharding.use_abstract_mesh(mesh), using("auto"):
        assert "mesh" in choose(**CALL, device=H200).reason


def launches(dense, over=lambda f: f, d_out=64, fp8=False):
    """Lower a packed layer's gradients for CUDA and count the launches of the kernels."""

    def sd(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def loss(x, w, a, b, scale):
        return jnp.sum(dense(x, w, a, b, scale).astype(jnp.float32) ** 2)

    grad = jax.jit(over(jax.vmap(jax.grad(loss, argnums=(0, 2, 3)), in_axes=(0, None, 0, 0, 0))))
    x, w = sd(2, 256, 128, dtype=jnp.bfloat16), sd(128, d_out, dtype=jnp.bfloat16)
    if fp8:
        w = Fp8Weight(sd(d_out, 128, dtype=jnp.float8_e4m3fn), sd(d_out))
    lowered = grad.trace(x, w, sd(2, 8, 128), sd(2, d_out, 8), sd(2)).lower(lowering_platforms=("cuda",))
    return count_launches(lowered.as_text())


def test_lora_dense_follows_the_choice():
    """One packed layer holds one launch forward and one backward, or none."""
    with using("hopper"):
        assert launches(lora_dense) == 2
    with using("xla"):
        assert launches(lora_dense) == 0


def test_the_kernel_serves_inside_a_shard_map():
    mesh = jax.make_mesh((1,), ("jobs",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (J, P(), J, J, J)

    def over(f):
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(J, J, J))

    with using("hopper"):
        assert launches(lora_dense, over) == 2
        assert launches(lora_dense, over, 128, fp8=True) == 4  # with one each way that rounds


@pytest.mark.parametrize("keep, count", [((), 3), ((SHRUNK,), 2)])
def test_a_kept_shrink_saves_a_frozen_product(keep, count):
    """Of the last site only dB needs its forward again, and of that only the shrink: kept, x·W runs once."""
    policy = jax.checkpoint_policies.save_only_these_names(*keep)
    with using("hopper"):
        assert launches(jax.checkpoint(lora_dense, policy=policy)) == count


def test_tables_load():
    assert tuned("no such device") == {}
    assert config_for("forward", 1, 1, A100) == GemmConfig(sms=108)
    for config in tuned(H200.kind).values():
        assert config.tile_n in (128, 256)


@pytest.mark.parametrize(
    "specs, out",
    [
        ((J, P(), J, J, J), J),
        ((S, P(), J, J, J), S),  # tokens: each share owes a part of dA and dB
        ((J, P(None, "share"), J, S, J), P("jobs", None, "share")),  # output features: a part of dx and dA
        ((P("jobs", None, "share"), P("share"), P("jobs", None, "share"), J, J), J),  # input features, summed
    ],
    ids=["jobs", "tokens", "outputs", "inputs"],
)
def test_shard_map(specs, out):
    """Sharded by shard_map, values and gradients are the unsharded ones."""
    mesh = jax.make_mesh((1, 1), ("jobs", "share"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    key = jax.random.key(0)
    x, w = jax.random.normal(key, (2, 4, 6)), jax.random.normal(key, (6, 5))
    a, b, s = jax.random.normal(key, (2, 3, 6)), jax.random.normal(key, (2, 5, 3)), jnp.ones(2)
    packed = jax.vmap(pallas_kernels.lora_dense, in_axes=(0, None, 0, 0, 0))

    def whole(*values):
        y = packed(*values)
        return y if "share" in out or "share" not in specs[1] else jax.lax.psum(y, "share")

    sharded = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=out)

    def total(f):
        return jax.jit(jax.value_and_grad(lambda *v: jnp.sum(f(*v) ** 2), argnums=(0, 2, 3)))(x, w, a, b, s)

    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), total(sharded), total(packed))
