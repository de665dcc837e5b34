"""Configurations of public models by hub id: planning and benchmarks need no download."""

from typing import Any

from plora_jax.errors import UserError
from plora_jax.models.config import ModelConfig, config_from_hf

_QWEN25 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6}
_SMOL = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def _sizes(d: int, ff: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": d,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **_SMOL,
        **_sizes(576, 1536, 30, 9, 3),
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {**_QWEN25, **_sizes(896, 4864, 24, 14, 2), "tie_word_embeddings": True},
    "Qwen/Qwen2.5-3B-Instruct": {**_QWEN25, **_sizes(2048, 11008, 36, 16, 2), "tie_word_embeddings": True},
    "Qwen/Qwen2.5-7B-Instruct": {**_QWEN25, **_sizes(3584, 18944, 28, 28, 4, vocab_size=152064)},
}


def preset(name: str) -> ModelConfig:
    """Give the configuration of a public model. Raises `UserError` for a name that is not known."""
    if name not in PRESETS:
        raise UserError(f"model {name!r} is not a known preset; known are {', '.join(PRESETS)}")
    return config_from_hf(PRESETS[name], name)
