"""Tiny .gguf files of every architecture, written as llama.cpp's converter does, load as their HF directory does."""

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from plora_jax.errors import UserError
from plora_jax.models.config import config_from_hf
from plora_jax.models.gguf import open_gguf
from plora_jax.models.load import load_base
from tests.models import tiny

WINDOWS = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "rope_theta": 10000.0}
CONFIGS = {
    "llama": tiny.LLAMA,
    "qwen2": {**tiny.LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**tiny.LLAMA, "model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "gemma2": {**tiny.LLAMA, "model_type": "gemma2", **WINDOWS},
    "gemma3": {**tiny.LLAMA, "model_type": "gemma3_text", **WINDOWS, "rope_theta": 1e6},
}
LAYER = {  # transformers' name in a layer → llama.cpp's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama_cpp_name(key, gemma):
    stem, kind = key.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    norms = {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    norms |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    return f"blk.{layer}.{(LAYER | norms)[module]}.{kind}"


def permute(weights, heads):
    """Order the rows of q or k as convert_hf_to_gguf.py does for Llama."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path, arch, hf, quantised=None, extra=None):
    config = config_from_hf(hf)
    out = GGUFWriter(str(path), arch)
    out.add_block_count(config.n_layers)
    out.add_context_length(config.max_positions)
    out.add_embedding_length(config.d_model)
    out.add_feed_forward_length(config.d_ff)
    out.add_head_count(config.n_heads)
    out.add_head_count_kv(config.n_kv_heads)
    out.add_key_length(config.head_dim)
    out.add_rope_freq_base(hf["rope_theta"])
    out.add_layer_norm_rms_eps(config.norm_eps)
    if "sliding_window" in hf:
        out.add_sliding_window(hf["sliding_window"])
    if config.attn_softcap:
        out.add_attn_logit_softcapping(config.attn_softcap)
        out.add_final_logit_softcapping(config.final_softcap)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(config.vocab_size - 3)]
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_types([2, 3, 3] + [6] * (len(tokens) - 3))
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for key, values in tiny.weights(config).items():
        if arch == "llama" and "_proj" in key and key.split(".")[-2] in ("q_proj", "k_proj"):
            values = permute(values, config.n_heads if "q_proj" in key else config.n_kv_heads)
        if config.norm_offset and values.ndim == 1:
            values = values + np.float32(1)
        name = llama_cpp_name(key, bool(config.norm_offset))
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            out.add_tensor(name, quantize(values, quantised), raw_dtype=quantised)
        else:
            out.add_tensor(name, values)
    for name, values in (extra or {}).items():
        out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return config


@pytest.mark.parametrize("arch", CONFIGS)
def test_same_model_as_the_hf_directory(arch, tmp_path):
    write_gguf(tmp_path / "m.gguf", arch, CONFIGS[arch])
    tiny.write(tmp_path / "hf", CONFIGS[arch])
    file, directory = load_base(str(tmp_path / "m.gguf")), load_base(str(tmp_path / "hf"))
    ids = {"bos_id": 1, "eos_ids": (2,), "pad_id": None}
    assert {**vars(file.config), **ids, "norm_eps": 0} == {**vars(directory.config), **ids, "norm_eps": 0}
    assert file.config.norm_eps == pytest.approx(directory.config.norm_eps)
    compare = np.testing.assert_array_equal
    if arch.startswith("gemma"):  # their norms went through + 1 and - 1
        compare = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6)  # noqa: E731
    jax.tree.map(compare, file.params, directory.params)


def test_quantised_tensors_are_read_back(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", tiny.LLAMA, GGMLQuantizationType.Q8_0)
    config = config_from_hf(tiny.LLAMA)
    exact = tiny.weights(config)["model.layers.1.self_attn.q_proj.weight"]
    read = load_base(str(tmp_path / "m.gguf")).model().layers.q_proj.w[1].T
    assert 0 < np.abs(read - exact).max() < np.abs(exact).max() / 127


def test_llama3_scaling_comes_as_divisors_of_the_frequencies(tmp_path):
    divisors = np.asarray([1.0, 1.0, 2.5, 8.0], np.float32)
    write_gguf(tmp_path / "m.gguf", "llama", tiny.LLAMA, extra={"rope_freqs.weight": divisors})
    (rope,) = open_gguf(tmp_path / "m.gguf").config.ropes
    assert rope.short == rope.long == (1.0, 1.0, 2.5, 8.0)
    assert load_base(str(tmp_path / "m.gguf")).config.ropes == (rope,)


def test_unknown_architecture_and_broken_file(tmp_path):
    out = GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    with pytest.raises(
        UserError, match="gguf architecture 'mamba' is not supported; supported are llama, qwen2"
    ):
        load_base(str(tmp_path / "m.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(2))
    with pytest.raises(UserError, match=r"broken\.gguf: not a readable \.gguf file"):
        load_base(str(tmp_path / "broken.gguf"))


def test_split_files_are_refused(tmp_path):
    out = GGUFWriter(str(tmp_path / "m-00001-of-00002.gguf"), "llama")
    out.add_uint16("split.count", 2)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    with pytest.raises(UserError, match="one of several split files"):
        load_base(str(tmp_path / "m-00001-of-00002.gguf"))


def test_missing_tensor_is_named_as_transformers_does(tmp_path):
    hf = {**tiny.LLAMA, "num_hidden_layers": 1}
    write_gguf(
        tmp_path / "m.gguf", "llama", hf, extra={"blk.1.attn_q.weight": np.zeros((32, 32), np.float32)}
    )
    with pytest.raises(UserError, match=r"1 unexpected tensor: model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_base(str(tmp_path / "m.gguf"))
