"""config.json in its old and new forms, and every kind of model that is refused from it."""

import json
from pathlib import Path

import numpy as np
import pytest

from plora_jax.errors import UserError
from plora_jax.models.config import config_from_hf
from plora_jax.models.rope import Rope
from tests.models.tiny import LLAMA

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 6, "sliding_window": 16}
PAIRS = {  # name: (as transformers 4 wrote it, as transformers 5 writes it)
    "default": ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "linear": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
    "longrope": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.75,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "su", **LONG},
        },
        {
            "model_type": "phi3",
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.75,
                "rope_theta": 1e4,
                **LONG,
            },
        },
    ),
    "gemma3": (
        {
            **GEMMA3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        },
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
}


def old_form(new):
    """Write a config.json of transformers 5 as transformers 4 did."""
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    rope = new["rope_parameters"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        old["layer_types"] = new["layer_types"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "partial_rotary_factor")}
    old["rope_theta"] = rope["rope_theta"]
    old["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    old["rope_scaling"] = {"type": rope["rope_type"], **scaling} if rope["rope_type"] != "default" else None
    return old


@pytest.mark.parametrize("golden", sorted(GOLDENS.glob("*.npz")), ids=lambda path: path.stem)
def test_every_family_in_both_forms(golden):
    new = json.loads(str(np.load(golden)["config"]))
    assert "rope_scaling" not in new and "rope_scaling" in old_form(new)
    assert config_from_hf(old_form(new)) == config_from_hf(new)


@pytest.mark.parametrize("case", PAIRS)
def test_old_and_new_form_are_one_model(case):
    old, new = ({k: v for k, v in LLAMA.items() if k != "rope_theta"} | form for form in PAIRS[case])
    assert config_from_hf(old) == config_from_hf(new)


def test_longrope_magnitude_and_rotary_features():
    (rope,) = config_from_hf({**LLAMA, **PAIRS["longrope"][0]}).ropes
    assert (rope.kind, rope.dim, rope.original, rope.factor) == ("longrope", 6, 16, 4.0)
    assert rope.magnitude == pytest.approx((1 + 2 / 4) ** 0.5)  # sqrt(1 + ln 4 / ln 16)


def test_gemma3_layers():
    config = config_from_hf({**LLAMA, **PAIRS["gemma3"][0]})
    assert config.layer_window == (16, 16, 16, 16, 16, 0)
    assert [config.ropes[i].theta for i in config.layer_rope] == [1e4] * 5 + [1e6]
    assert (config.norm_offset, config.embed_scale, config.attn_scale) == (1.0, 32**0.5, 1 / 16)


def test_smollm3_every_fourth_layer_has_no_rope():
    config = config_from_hf({**LLAMA, "model_type": "smollm3", "num_hidden_layers": 8})
    assert [config.ropes[i].kind for i in config.layer_rope] == (["default"] * 3 + ["none"]) * 2


def test_windows_count_only_where_the_family_uses_them():
    windows = {"sliding_window": 8, "max_window_layers": 1}
    qwen = {**LLAMA, "model_type": "qwen2", **windows}
    assert config_from_hf(qwen).layer_window == (0, 0)
    assert config_from_hf({**qwen, "use_sliding_window": True}).layer_window == (0, 8)
    assert config_from_hf({**LLAMA, "model_type": "mistral", **windows}).layer_window == (8, 8)
    assert config_from_hf({**LLAMA, "model_type": "mistral", "sliding_window": None}).layer_window == (0, 0)


def test_fields_left_out_take_the_family_s_defaults():
    config = config_from_hf(
        {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta", "rms_norm_eps")}
    )
    assert config.n_kv_heads == 4  # as many as heads: multi-head attention
    assert config.head_dim == 8
    assert config.ropes == (Rope("default", dim=8, theta=10_000.0),)
    assert config_from_hf({**LLAMA, "model_type": "gemma2"}).attn_softcap == 50.0
    assert config_from_hf({**LLAMA, "eos_token_id": [1, 7]}).eos_ids == (1, 7)


REFUSED = {
    "no model_type": ({"model_type": None}, "model_type None is not supported; supported are llama, smollm3"),
    "unknown": ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    "mixture": (
        {"model_type": "qwen3_moe", "num_experts": 128},
        r"mixture of experts \(num_experts = 128\)",
    ),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
    "multimodal": (
        {"model_type": "gemma3", "vision_config": {"hidden_size": 4}},
        r"multimodal \(vision_config\)",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    "rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported",
    ),
    "rope field": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 needs low_freq_factor"),
    "longrope": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "longrope needs 4 short and long factors, found 1 and 1",
    ),
    "activation": ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
    "layers": ({"layer_types": ["linear_attention", "full_attention"]}, "layer type 'linear_attention'"),
    "layer count": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
    "missing": ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
    "text": ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, found '2'"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_from_config_alone(case):
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=f"^M/config.json: .*{message}"):
        config_from_hf({**LLAMA, **change}, "M/config.json")
