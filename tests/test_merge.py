"""Merged models: the weights, the logits, and everything else that a Hugging Face directory holds."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plora_jax import adapters as lora
from plora_jax import merge, peft
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.checkpoint import open_directory
from plora_jax.models.config import config_from_hf
from plora_jax.models.decoder import LoRA
from plora_jax.models.load import load_base
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import GOLDENS, probe_logits, write_model


def made(family: str) -> Path:
    """Return the adapter that PEFT saved for this family."""
    return GOLDENS / f"peft_made_{family}"


@pytest.mark.parametrize("family", recipe.MODELS)
def test_logits_are_those_of_base_and_adapter_in_peft(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", family)
    merge.merge_adapter(str(tmp_path / "base"), made(family), tmp_path / "merged")
    golden = load_file(GOLDENS / "peft_logits.safetensors")
    assert np.abs(golden[family] - golden[f"{family}_base"]).max() > 0.1
    np.testing.assert_allclose(probe_logits(load_base(str(tmp_path / "merged"))), golden[family], atol=1e-4)


@pytest.mark.parametrize("family", recipe.MODELS)
def test_only_adapted_weights_change_and_a_tied_head_stays_tied(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", family)
    merge.merge_adapter(str(tmp_path / "base"), made(family), tmp_path / "merged")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "merged"))
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) is not recipe.MODELS[family]["tie_word_embeddings"]
    tensors = load_file(made(family) / "adapter_model.safetensors")
    settings = json.loads((made(family) / "adapter_config.json").read_text())
    for key, old in before.items():
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in tensors:
            assert np.array_equal(after[key], old), key
            continue
        a, b = (tensors[f"{prefix}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        alpha = settings["alpha_pattern"].get(key.split(".")[-2], settings["lora_alpha"])
        np.testing.assert_allclose(after[key], old + alpha / len(a) * b @ a, atol=2e-6)


def test_a_bf16_base_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    full = load_file(base / "model.safetensors")
    half = {key: value.astype(ml_dtypes.bfloat16) for key, value in full.items()}
    save_file(half, base / "model.safetensors", {"format": "pt"})
    merge.merge_adapter(str(base), made("llama"), tmp_path / "same")
    merge.merge_adapter(str(base), made("llama"), tmp_path / "wide", dtype="fp32")
    same, wide = (open_directory(tmp_path / d) for d in ("same", "wide"))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert same[key].read().dtype == ml_dtypes.bfloat16
    assert np.array_equal(same[key].read(), wide[key].read().astype(ml_dtypes.bfloat16))
    assert not np.array_equal(wide[key].read(), wide[key].read().astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "same" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_shards_tokenizer_and_settings(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    (base / "generation_config.json").write_text('{"temperature": 0.6}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "pytorch_model.bin").write_text("not copied")
    merge.merge_adapter(str(base), made("llama"), tmp_path / "whole")
    merge.merge_adapter(str(base), made("llama"), tmp_path / "cut", shard_bytes=20_000)
    assert sorted(os.listdir(tmp_path)) == ["base", "cut", "whole"]
    names = {"chat_template.jinja", "config.json", "generation_config.json"}
    assert set(os.listdir(tmp_path / "whole")) == names | {"model.safetensors"}
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    assert set(os.listdir(tmp_path / "cut")) == names | shards | {"model.safetensors.index.json"}
    sizes = {shard: sum(v.nbytes for v in load_file(tmp_path / "cut" / shard).values()) for shard in shards}
    assert max(sizes.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    whole, cut = (open_directory(tmp_path / d) for d in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[key].read(), cut[key].read()) for key in whole)


def write_gguf(path: Path) -> None:
    """Write the recipe's Llama as a .gguf file, q and k in llama.cpp's order, with a byte-level tokenizer."""
    from gguf import GGUFWriter, TokenType

    config = recipe.MODELS["llama"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(recipe.VOCAB - 4)), "!!"]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for key, value in recipe.weights(config).items():
        module = key.removesuffix(".weight")
        layer = module.split(".")[2] if module.startswith("model.layers.") else None
        name = names[module if layer is None else module.split(".", 3)[3]]
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name)
        if heads:  # llama.cpp interleaves the rotary halves: (i, i + H/2) stand side by side
            half = len(value) // heads // 2
            value = value.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"{name}.weight" if layer is None else f"blk.{layer}.{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_base_becomes_a_hugging_face_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf")
    merge.merge_adapter(str(tmp_path / "base.gguf"), made("llama"), tmp_path / "merged")
    golden = load_file(GOLDENS / "peft_logits.safetensors")["llama"]
    merged = load_base(str(tmp_path / "merged"))
    np.testing.assert_allclose(probe_logits(merged), golden, atol=1e-4)
    assert merged.tokenizer.eos_token == "</s>"
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")


def test_merging_our_own_export_gives_the_logits_of_the_adapter(tmp_path: Path) -> None:
    base = load_base(str(write_model(tmp_path / "base", "qwen2")))
    job = Job(rank=6, alpha=9.0, use_rslora=True, rank_pattern=(("o_proj", 3),), seed=4)
    rng = np.random.default_rng(0)
    adapter = lora.init_adapter(base.config, job)
    rank = lora.ranks(base.config, job)
    for name, (a, b) in adapter.items():
        drawn = rng.standard_normal(b.shape) * (np.arange(b.shape[2]) < rank[name][:, None])[:, None]
        adapter[name] = lora.Factors(a, drawn.astype(np.float32))
    peft.export_adapter(tmp_path / "a", str(tmp_path / "base"), base.config, job, adapter)
    assert merge.merge_command(tmp_path / "a", tmp_path / "merged", None) == 0
    scales = lora.scales(base.config, job)
    expected = probe_logits(base, {name: LoRA(f.a, f.b, scales[name]) for name, f in adapter.items()})
    assert np.abs(expected - probe_logits(base)).max() > 0.1
    np.testing.assert_allclose(probe_logits(load_base(str(tmp_path / "merged"))), expected, atol=1e-4)


def test_wrong_input_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(write_model(tmp_path / "base", "llama"))
    with pytest.raises(UserError, match="for this model"):
        merge.merge_adapter(base, made("qwen2"), tmp_path / "merged")
    with pytest.raises(UserError, match="exists already"):
        merge.merge_adapter(base, made("llama"), tmp_path / "base")
    with pytest.raises(UserError, match="cannot be made"):
        merge.merge_adapter(base, made("llama"), tmp_path / "base" / "config.json" / "merged")
    with pytest.raises(UserError, match="int4"):
        merge.merge_adapter(base, made("llama"), tmp_path / "merged", dtype="int4")
    with pytest.raises(UserError, match="names no base model"):
        merge.merge_command(made("llama"), tmp_path / "merged", None)
    config = config_from_hf(recipe.MODELS["llama"])
    monkeypatch.setattr(
        merge.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * config.n_params - 1)
    )
    with pytest.raises(UserError, match="are free"):
        merge.merge_adapter(base, made("llama"), tmp_path / "merged")
    assert os.listdir(tmp_path) == ["base"]
