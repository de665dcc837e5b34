"""The model families: what each one's name alone decides; everything else stands in its config.json."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """Describe a family by the flags of the decoder that its model_type implies.

    `defaults` are the values of transformers' configuration class where a config.json leaves a field out.
    `layer_types(get, n_layers)` gives the attention kinds when the file does not list them.
    """

    name: str
    title: str
    notes: str
    defaults: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    fused: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    nope: bool = False
    local_theta: float = 0.0  # rope theta of the sliding layers where it differs from the others'
    layered_windows: bool = True  # False: a sliding_window holds for every layer
    window_switch: bool = False  # sliding_window counts only where use_sliding_window is set
    layer_types: Callable[[Any, int], list[str]] = lambda get, n: ["full_attention"] * n
    gguf: str = ""  # general.architecture in a .gguf file that this family's loader reads


def _after_max_window_layers(get: Any, n: int) -> list[str]:
    first = get("max_window_layers", 28)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(n)]


def _nope_layers_slide(get: Any, n: int) -> list[str]:
    interval = get("no_rope_layer_interval", 4)
    uses = get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(n)]
    return ["full_attention" if use else "sliding_attention" for use in uses]


def _every(period: int) -> Callable[[Any, int], list[str]]:
    def kinds(get: Any, n: int) -> list[str]:
        p = get("sliding_window_pattern", period)
        return ["sliding_attention" if (i + 1) % p else "full_attention" for i in range(n)]

    return kinds


_GEMMA: dict[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6}

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            "llama",
            "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2",
            "llama3 rope scaling",
            defaults={**_LLAMA, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
            gguf="llama",
        ),
        Family(
            "smollm3",
            "SmolLM3",
            "layers without position embedding (NoPE)",
            defaults={
                **_LLAMA,
                "tie_word_embeddings": True,
                "rope_theta": 2_000_000.0,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
            },
            nope=True,
            window_switch=True,
            layer_types=_nope_layers_slide,
        ),
        Family(
            "mistral",
            "Mistral 7B, Nemo, Small",
            "sliding window in all layers (v0.1)",
            defaults={**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            layered_windows=False,
        ),
        Family(
            "qwen2",
            "Qwen2, Qwen2.5",
            "biases on q, k, v",
            defaults={**_LLAMA, "max_position_embeddings": 32768},
            qkv_bias=True,
            window_switch=True,
            layer_types=_after_max_window_layers,
            gguf="qwen2",
        ),
        Family(
            "qwen3",
            "Qwen3 (dense)",
            "norm on each head of q and k",
            defaults={**_LLAMA, "head_dim": 128, "max_position_embeddings": 32768},
            qk_norm="head",
            window_switch=True,
            layer_types=_after_max_window_layers,
            gguf="qwen3",
        ),
        Family(
            "gemma2",
            "Gemma 2",
            "softcaps, alternating sliding and global layers, four norms, scaled embedding",
            defaults={
                **_GEMMA,
                "num_key_value_heads": 4,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            post_norm=True,
            layer_types=_every(2),
            gguf="gemma2",
        ),
        Family(
            "gemma3_text",
            "Gemma 3 text (270M, 1B)",
            "sliding layers with their own rope, norm on each head of q and k, four norms, scaled embedding",
            defaults={
                **_GEMMA,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rope_theta": 1_000_000.0,
            },
            post_norm=True,
            qk_norm="head",
            local_theta=10_000.0,
            layer_types=_every(6),
            gguf="gemma3",
        ),
        Family(
            "phi3",
            "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
            "fused qkv and gate/up, LongRoPE, partly rotary heads",
            defaults={**_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1},
            fused=True,
            layered_windows=False,
        ),
        Family(
            "olmo2",
            "OLMo 2",
            "norms after attention and MLP, norm over all of q and of k",
            defaults={**_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279},
            pre_norm=False,
            post_norm=True,
            qk_norm="all",
        ),
    )
}
