"""Loading: sharded and not, every dtype, placement, random weights, and what is refused before reading."""

import json
import os
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from plora_jax.errors import UserError
from plora_jax.models.checkpoint import Stored
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.models.load import READERS, _read_ahead, load_base
from tests.models import tiny


def shard(directory, parts=2):
    """Split model.safetensors into shards with an index, as transformers writes them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    where = {}
    for n in range(parts):
        name = f"model-{n + 1:05d}-of-{parts:05d}.safetensors"
        held = {key: tensors[key] for key in sorted(tensors)[n::parts]}
        save_file(held, directory / name)
        where.update(dict.fromkeys(held, name))
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def test_every_tensor_lands_in_its_place(tmp_path):
    config = tiny.write(tmp_path, {**tiny.LLAMA, "attention_bias": True})
    base = load_base(str(tmp_path))
    weights = tiny.weights(config)
    model = base.model()
    np.testing.assert_array_equal(model.embed[...], weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.head[...], weights["lm_head.weight"])
    for layer in range(2):
        path = f"model.layers.{layer}"
        np.testing.assert_array_equal(
            model.layers.k_proj.w[layer], weights[f"{path}.self_attn.k_proj.weight"].T
        )
        np.testing.assert_array_equal(
            model.layers.q_proj.bias[layer], weights[f"{path}.self_attn.q_proj.bias"]
        )
        np.testing.assert_array_equal(
            model.layers.mlp_pre.weight[layer], weights[f"{path}.post_attention_layernorm.weight"]
        )
    assert base.tokenizer is None and base.name == str(tmp_path)
    assert not any(leaf.committed for leaf in jax.tree.leaves(base.params))  # see load._put
    assert sum(leaf.size for leaf in jax.tree.leaves(base.params)) == config.n_params


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_source_dtypes(dtype, tmp_path):
    config = tiny.write(tmp_path, tiny.LLAMA, dtype)
    weights = tiny.weights(config)["model.layers.1.mlp.up_proj.weight"]
    loaded = load_base(str(tmp_path), precision="fp32").model().layers.up_proj.w[1]
    np.testing.assert_array_equal(loaded, weights.astype(dtype).astype(np.float32).T)
    assert {leaf.dtype for leaf in jax.tree.leaves(load_base(str(tmp_path), precision="bf16").params)} == {
        jnp.dtype("bfloat16")
    }


def test_shards_by_the_index_and_strangers_ignored(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    whole = load_base(str(tmp_path)).params
    where = shard(tmp_path)
    save_file({"stranger": np.zeros(2, np.float32)}, tmp_path / "model-00099-of-00099.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_base(str(tmp_path)).params, whole)
    lost = sorted(set(where.values()))[1]
    (tmp_path / lost).unlink()
    with pytest.raises(
        UserError, match=f"index.json: 1 missing shard: {lost}; download the checkpoint again"
    ):
        load_base(str(tmp_path))


def test_all_tensor_errors_in_one_message(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 32), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # old files have it
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_base(str(tmp_path))
    assert str(error.value).endswith(
        ": the weights do not fit config.json: "
        "2 missing tensors: model.norm.weight, model.layers.1.mlp.up_proj.weight; "
        "1 unexpected tensor: model.layers.2.mlp.up_proj.weight; "
        "1 misshapen tensor: model.layers.0.self_attn.k_proj.weight [8, 32] instead of [16, 32]"
    )


def test_tied_head_may_be_in_the_file_or_not(tmp_path):
    config = {**tiny.LLAMA, "tie_word_embeddings": True}
    tiny.write(tmp_path, config)
    without = load_base(str(tmp_path)).params
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors"
    )
    jax.tree.map(np.testing.assert_array_equal, load_base(str(tmp_path)).params, without)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"1 missing tensor: lm_head\.weight"):
        load_base(str(tmp_path))


def damaged(directory, what):
    path = directory / "model.safetensors"
    data = path.read_bytes()
    if what == "truncated":
        path.write_bytes(data[:-100])
    elif what == "no safetensors":
        path.write_bytes(b"\xff" * 200)
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "fp8":
        path.write_bytes(data.replace(b'"F32"', b'"F8X"', 1))
    else:
        path.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"")


def headed(directory, header):
    """Write weights again under what `header` makes of their header."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(header(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("value", [None, [], ["a"], [0.0, 128.0], [-128, 0], {}, 3])
def test_a_header_that_describes_no_tensor(field, value, tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    headed(tmp_path, lambda header: header | {NORMS[0]: header[NORMS[0]] | {field: value}})
    with pytest.raises(UserError, match=r"model\.layers\.0\.input_layernorm\.weight"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("header", [None, [], [1], 7, "text"])
def test_a_header_that_is_no_object(header, tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    headed(tmp_path, lambda _: header)
    with pytest.raises(UserError, match=r"model\.safetensors: its safetensors header is no JSON object"):
        load_base(str(tmp_path))


def test_tensors_that_share_bytes(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    headed(tmp_path, lambda header: header | {NORMS[1]: header[NORMS[0]]})
    with pytest.raises(UserError, match="share bytes; download it again"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("where", [None, ["a"], {"a": 3}, {"a": None, "b": "c"}])
def test_an_index_that_names_no_files(where, tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UserError, match=r"index\.json: weight_map must name each tensor's file"):
        load_base(str(tmp_path))


def test_a_directory_where_weights_should_be(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_base(str(tmp_path))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", "does not fit the file: it is truncated; download it again"),
        ("no safetensors", "not a safetensors file, or truncated"),
        ("empty", "not a safetensors file, or truncated"),
        ("fp8", "is F8X; supported are F64, F32, F16, BF16"),
        ("torch", r"no model.safetensors .*found pytorch_model.bin: convert it to safetensors first"),
    ],
)
def test_damaged_weights(what, message, tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    damaged(tmp_path, what)
    with pytest.raises(UserError, match=message):
        load_base(str(tmp_path))


def test_unsupported_model_is_refused_before_its_weights(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    (tmp_path / "config.json").write_text(json.dumps({**tiny.LLAMA, "num_local_experts": 8}))
    with pytest.raises(UserError, match="mixture of experts"):
        load_base(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/thing", "no such directory or .gguf file, and not a hub id"),
        ("nowhere", "no such directory or .gguf file, and not a hub id"),
        ("no-such-owner-x/no-such-model", "not a local directory, and the hub cannot give it"),
        ("absent.gguf", "absent.gguf does not exist"),
    ],
)
def test_absent_models(name, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_base, load_config, load_tokenizer):
        with pytest.raises(UserError, match=message):
            load(name)


def test_a_directory_without_config_json(tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON"):
        load_base(str(tmp_path))


def test_precision_that_the_loader_does_not_have(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    with pytest.raises(UserError, match="precision: 'fp4' is not supported by the loader; allowed are auto"):
        load_base(str(tmp_path), precision="fp4")


def test_random_weights_need_no_files_and_follow_the_seed(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (load_base(str(tmp_path), random_weights=True, seed=s).params for s in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    q, k = first["layers"]["q_proj"]["w"][...], other["layers"]["q_proj"]["w"][...]
    assert np.std(q) == pytest.approx(0.02, rel=0.1) and np.abs(q - k).max() > 0.01
    assert np.mean(first["norm"]["weight"][...]) == pytest.approx(1.0, abs=0.02)


def test_placement_shards_parameters_as_they_are_filled(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    asked = {}

    def placement(path, shape):
        asked[path] = shape
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "model"))

    sharded = load_base(str(tmp_path), placement=placement).params
    jax.tree.map(np.testing.assert_array_equal, sharded, load_base(str(tmp_path)).params)
    assert asked["layers.q_proj.w"] == (2, 32, 32)
    assert {leaf.sharding.spec[-1] for leaf in jax.tree.leaves(sharded)} == {"model"}


def run(code):
    """Run code in a process of its own, with four CPU devices."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, env=env
    ).stdout


def test_parameters_spread_over_devices(tmp_path):
    tiny.write(tmp_path, tiny.LLAMA)
    code = f"""
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        from plora_jax.models.load import load_base
        mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
        def placement(path, shape):
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "model"))
        plain = load_base({str(tmp_path)!r}).params
        for random in (False, True):
            spread = load_base({str(tmp_path)!r}, placement=placement, random_weights=random).params
            for leaf in jax.tree.leaves(spread):
                assert {{s.data.shape[-1] for s in leaf.addressable_shards}} == {{leaf.shape[-1] // 4}}
            if not random:
                jax.tree.map(np.testing.assert_array_equal, spread, plain)
        print("spread")
    """
    assert run(code) == "spread\n"


def test_host_memory_stays_under_the_largest_shard(tmp_path):
    """The process may hold the parameters (the CPU is the device), and beyond them no second copy."""
    config = {**tiny.LLAMA, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
    bf16 = tiny.write(tmp_path, config, ml_dtypes.bfloat16)
    shard(tmp_path, 4)
    code = f"""
        import resource
        from plora_jax.models.load import load_base
        from tests.models import tiny
        load_base({str(tmp_path / "small")!r})  # what running jax at all takes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        load_base({str(tmp_path)!r}, precision="bf16")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    tiny.write(tmp_path / "small", tiny.LLAMA)
    grown = 1024 * int(run(code))
    size = 2 * bf16.n_params
    assert size > 100e6
    assert grown < size + 60e6, (grown / 1e6, size / 1e6)


def test_tensors_are_read_ahead_in_order_and_a_fault_ends_all():
    begun, found = [], []

    def stored(n):
        def read():
            begun.append(n)
            time.sleep(0.02 * (n % 3 == 0))  # those after it are there sooner
            if n == 7:
                raise UserError("became shorter")
            return np.array([n])

        return Stored((1,), read)

    with pytest.raises(UserError, match="became shorter"):
        for values in _read_ahead(map(stored, range(40))):
            found.append(int(values[0]))
    assert found == list(range(7)) and max(begun) <= 7 + READERS
