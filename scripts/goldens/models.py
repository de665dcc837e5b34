"""Make tests/goldens/models/*.npz: logits and LoRA gradients of tiny models by transformers, peft and torch.

    python scripts/goldens/models.py [CASE ...]

needs torch, transformers and peft, which the project itself never imports. Weights come from
tests/models/seeded.py.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its peft.py would hide the package

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from tests.models.seeded import seeded  # noqa: E402

OUT = ROOT / "tests" / "goldens" / "models"
RANK, ALPHA = 3, 6.0

TINY = {
    "vocab_size": 56,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 7.0],
    "partial_rotary_factor": 0.75,
}


def theta(value):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


# name: (model_type, config, positions per sequence)
CASES = {
    "llama": ("llama", {**theta(10000.0)}, 20),
    "llama-mha-tied": ("llama", {**theta(1e5), "num_key_value_heads": 4, "tie_word_embeddings": True}, 20),
    "llama-biases-wide-heads": (
        "llama",
        {**theta(10000.0), "head_dim": 12, "attention_bias": True, "mlp_bias": True},
        20,
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}, 28),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        20,
    ),
    "smollm3": (
        "smollm3",
        {**theta(100.0), "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "tie_word_embeddings": True},
        20,
    ),
    "mistral": ("mistral", {**theta(10000.0), "sliding_window": None, "head_dim": 16}, 20),
    "mistral-window": ("mistral", {**theta(10000.0), "sliding_window": 6}, 24),
    "qwen2-tied": ("qwen2", {**theta(1e6), "tie_word_embeddings": True}, 20),
    "qwen2-yarn-window": (
        "qwen2",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        28,
    ),
    "qwen3": ("qwen3", {**theta(1e6), "head_dim": 16}, 20),
    "gemma2": (
        "gemma2",
        {
            **theta(10000.0),
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
        24,
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        24,
    ),
    "phi3": ("phi3", {**theta(10000.0), "num_key_value_heads": 4}, 20),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16, "tie_word_embeddings": True},
        14,
    ),
    "phi3-longrope-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16, "sliding_window": 11},
        24,
    ),
    "olmo2": ("olmo2", {**theta(10000.0)}, 20),
}


def make(name, model_type, more, length):
    config = AutoConfig.for_model(model_type, **{**TINY, **json.loads(json.dumps(more))})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    norm_mean = 0.0 if model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(seeded(key, tuple(parameter.shape), norm_mean)))
    tokens = torch.from_numpy(np.random.default_rng(length).integers(0, TINY["vocab_size"], (2, length)))
    with torch.no_grad():
        base = model(tokens, use_cache=False).logits
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(model, lora)
    factors = {k: p for k, p in model.named_parameters() if "lora_" in k}
    plain = {k: k.removeprefix("base_model.model.").replace(".default", "") for k in factors}
    with torch.no_grad():
        for key, parameter in factors.items():
            parameter.copy_(torch.from_numpy(seeded(plain[key], tuple(parameter.shape))))
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    OUT.mkdir(parents=True, exist_ok=True)
    written = config.to_dict()
    noise = ("id2label", "label2id", "transformers_version", "return_dict", "problem_type", "architectures")
    np.savez_compressed(
        OUT / f"{name}.npz",
        config=json.dumps({k: v for k, v in written.items() if k not in noise}),
        n_params=sum(p.numel() for k, p in model.named_parameters() if "lora_" not in k),
        rank=RANK,
        alpha=ALPHA,
        tokens=tokens.numpy().astype(np.int32),
        base_logits=base.numpy(),
        logits=logits.detach().numpy(),
        loss=loss.item(),
        **{f"grad/{plain[key]}": p.grad.numpy() for key, p in factors.items()},
    )
    print(name, "loss", round(loss.item(), 4), "sites", len(factors) // 2)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        make(name, *CASES[name])
