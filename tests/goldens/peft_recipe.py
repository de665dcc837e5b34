"""What the PEFT oracle trains: models, rows and settings, by numpy alone: torch and JAX draw the same.

`scripts/goldens/peft.py` runs the settings in PEFT + torch; `tests/test_peft_oracle.py` runs them in packs.
"""

import zlib
from typing import Any

import numpy as np

STEPS = 20
LENGTH = 16
VOCAB = 97
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen2": _COMMON
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}

# Job fields by name, plus the model and `micro`: the rows of one torch micro-batch (the pack has its own).
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"model": "llama", "rank": 8, "alpha": 16, "learning_rate": 2e-3, "batch_size": 2},
    "low_alpha_linear": {
        "model": "llama", "rank": 4, "alpha": 1, "learning_rate": 1e-2, "batch_size": 4,
        "scheduler": "linear", "warmup_ratio": 0.12,
    },
    "high_alpha_cosine": {
        "model": "llama", "rank": 16, "alpha": 64, "learning_rate": 5e-4, "batch_size": 1,
        "scheduler": "cosine", "warmup_steps": 3,
    },
    "rslora_decay": {
        "model": "llama", "rank": 8, "alpha": 16, "use_rslora": True, "learning_rate": 1e-3, "batch_size": 2,
        "weight_decay": 0.3, "scheduler": "cosine",
    },
    "tight_clip": {
        "model": "llama", "rank": 5, "alpha": 10, "learning_rate": 3e-3, "batch_size": 3,
        "max_grad_norm": 0.05, "scheduler": "linear",
    },
    "attention_betas": {
        "model": "llama", "rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "learning_rate": 5e-3,
        "batch_size": 2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "prompt": 5,
    },
    "accumulated": {
        "model": "llama", "rank": 8, "alpha": 8, "learning_rate": 2e-3, "batch_size": 8, "micro": 2,
        "prompt": 9, "scheduler": "cosine", "warmup_ratio": 0.1,
    },
    "sgd_momentum": {
        "model": "llama", "rank": 8, "alpha": 32, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 2e-2,
        "batch_size": 2, "weight_decay": 0.01,
    },
    "qwen_plain": {
        "model": "qwen2", "rank": 8, "alpha": 16, "learning_rate": 2e-3, "batch_size": 2, "micro": 1,
    },
    "patterns": {
        "model": "qwen2", "rank": 8, "alpha": 16, "learning_rate": 2e-3, "batch_size": 2,
        "rank_pattern": {"q_proj": 4, "layers.1.mlp.down_proj": 12}, "alpha_pattern": {"v_proj": 40.0},
    },
    "mlp_odd_rank": {
        "model": "qwen2", "rank": 20, "alpha": 20, "targets": ["gate_proj", "up_proj", "down_proj"],
        "learning_rate": 1e-3, "batch_size": 4, "scheduler": "cosine", "warmup_ratio": 0.25,
    },
    "two_modules": {
        "model": "qwen2", "rank": 8, "alpha": 16, "learning_rate": 5e-3, "batch_size": 1,
        "targets": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"],
    },
    "unclipped_warmup": {
        "model": "qwen2", "rank": 4, "alpha": 8, "learning_rate": 2e-3, "batch_size": 6, "micro": 3,
        "max_grad_norm": 0.0, "warmup_steps": 5, "prompt": 12,
    },
    "sgd_linear": {
        "model": "qwen2", "rank": 8, "alpha": 16, "optimizer": "sgd", "learning_rate": 5e-2, "batch_size": 2,
        "scheduler": "linear", "warmup_steps": 2,
    },
    "rslora_patterns": {
        "model": "qwen2", "rank": 6, "alpha": 12, "use_rslora": True, "learning_rate": 1e-3, "batch_size": 2,
        "rank_pattern": {"o_proj": 3}, "weight_decay": 0.05, "scheduler": "cosine", "warmup_ratio": 0.05,
    },
}  # fmt: skip
SCHEDULES = [(0, 10), (1, 10), (3, 10), (10, 10), (0, 1), (1, 1), (10, 103), (0, 50)]  # (warmup, total) steps
DEFAULTS = {"scheduler": "constant", "max_grad_norm": 1.0, "prompt": 4}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, by its name in transformers."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    linear = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        out |= {f"{prefix}{name}.weight": shape for name, shape in linear.items()}
        out |= {f"{prefix}{n}.weight": (d,) for n in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen2":
            out |= {f"{prefix}self_attn.{n}_proj.bias": linear[f"self_attn.{n}_proj"][:1] for n in "qkv"}
    return out


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Draw a checkpoint whose activations stay near 1, so that a wrong term would show in the logits."""
    out = {}
    for name, shape in shapes(config).items():
        noise = _rng("weights", config["model_type"], name).standard_normal(shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif name == "model.embed_tokens.weight":
            value = noise * (0.5 if config["tie_word_embeddings"] else 1.0)
        else:
            value = noise / np.sqrt(shape[1])
        out[name] = value.astype(np.float32)
    return out


def adapter(shapes_by_key: dict[str, tuple[int, ...]], random_b: bool = False) -> dict[str, np.ndarray]:
    """Draw adapter tensors for PEFT keys: A uniform within ±1/√d_in; B zero, or random to move the logits."""
    out = {}
    for key, shape in shapes_by_key.items():
        rng = _rng("adapter", key, *map(str, shape))
        if ".lora_A." in key:
            value = rng.uniform(-1, 1, shape) / np.sqrt(shape[1])
        else:
            value = 0.3 * rng.standard_normal(shape) if random_b else np.zeros(shape)
        out[key] = value.astype(np.float32)
    return out


def rows(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a setting's rows in training order: (tokens, whether each token is a label).

    Lengths vary, the first `prompt` tokens are masked; where prompts are long some rows have no label at all.
    """
    setting = DEFAULTS | SETTINGS[name]
    rng = _rng("rows", name)
    out = []
    for _ in range(STEPS * setting["batch_size"]):
        length = int(rng.integers(6, LENGTH + 1))
        # a skewed token distribution, so that there is something to learn
        tokens = np.minimum(rng.geometric(0.08, length) + 2, VOCAB - 1).astype(np.int32)
        out.append((tokens, np.arange(length) >= setting["prompt"]))
    return out


def probe() -> np.ndarray:
    """Return tokens [3, 12] at which logits are compared."""
    return _rng("probe").integers(3, VOCAB, (3, 12)).astype(np.int32)


def checksum(arrays: dict[str, np.ndarray]) -> int:
    """Return a number that changes when numpy draws other values than it did for the goldens."""
    return zlib.crc32(b"".join(arrays[key].tobytes() for key in sorted(arrays)))


def _rng(*parts: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32("/".join(parts).encode()))
