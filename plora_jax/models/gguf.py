"""Read llama.cpp's .gguf files: metadata to ModelConfig, tensors to the checkpoint keys of transformers."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from plora_jax.errors import UserError
from plora_jax.models.checkpoint import Stored
from plora_jax.models.config import ModelConfig, config_from_hf
from plora_jax.models.families import FAMILIES

ARCHITECTURES = {family.gguf: family.name for family in FAMILIES.values() if family.gguf}
NAMES = {  # gguf tensor, within a layer or outside → transformers'
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GGUF:
    """Hold an open .gguf file: its metadata, what model it is (as config.json and as read), its reader."""

    fields: dict[str, Any]
    config_json: dict[str, Any]
    config: ModelConfig
    reader: Any

    def tensors(self) -> dict[str, Stored]:
        """Describe its tensors under transformers' names; read, they are dequantised and in its layout."""
        return {
            key: Stored(tuple(int(n) for n in reversed(tensor.shape)), self._read(key, tensor))
            for tensor in self.reader.tensors
            if (key := _key(tensor.name, self.config)) is not None
        }

    def _read(self, key: str, tensor: Any) -> Any:
        from gguf.quants import dequantize

        def read() -> np.ndarray:
            values = dequantize(tensor.data, tensor.tensor_type)
            values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
            heads = {"q_proj": self.config.n_heads, "k_proj": self.config.n_kv_heads}
            module = key.split(".")[-2]
            if self.config.family == "llama" and module in heads:
                return unpermute(values, heads[module])
            if self.config.norm_offset and values.ndim == 1:
                return values - self.config.norm_offset  # llama.cpp stores Gemma's norms as they multiply
            return values

        return read


def open_gguf(path: Path) -> GGUF:
    """Open a .gguf file and read what model it holds.

    Raises:
        UserError: not a readable .gguf file, or an architecture that is not supported.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    return _open(path, path.stat().st_mtime_ns)


@cache  # configuration, tokenizer and weights are each asked for; parsing the vocabulary takes seconds
def _open(path: Path, modified_ns: int) -> GGUF:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{path}: not a readable .gguf file: {error}") from None
    config = _config_json(fields, reader, str(path))
    return GGUF(fields, config, config_from_hf(config, str(path)), reader)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of Llama's q and k: pairs (2i, 2i+1) of a head become (i, i + H/2)."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _key(name: str, config: ModelConfig) -> str | None:
    """Translate a tensor's name; None for stored rope factors, the name itself where unknown."""
    if name.startswith("rope_freqs") or name.startswith("rope_factors"):
        return None
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if not match:
        return name
    layer, stem, kind = match.groups()
    if stem == "ffn_norm":
        stem = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
    stem = NAMES.get(stem, stem)
    return f"{stem}.{kind}" if layer is None else f"model.layers.{layer}.{stem}.{kind}"


def _config_json(fields: dict[str, Any], reader: Any, name: str) -> dict[str, Any]:
    """Build a config.json from the metadata."""
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{name}: gguf architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{key}", default)

    if fields.get("split.count", 0) > 1:
        raise UserError(
            f"{name}: one of several split files, which is not supported; merge them with gguf-split"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if get("expert_count"):
        raise UserError(f"{name}: a mixture of experts is not supported")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length") or get("rope.dimension_count"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": get("attention.sliding_window"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _scaling(get, name),
    }
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in config.items():
        config[key] = int(value) if isinstance(value, np.integer) else value
    if arch.startswith("gemma"):
        config["query_pre_attn_scalar"] = _gemma_query_scalar(config)
    if "rope_freqs.weight" in tensors:  # llama3 scaling, as the divisor of each frequency
        divisors = [float(f) for f in np.asarray(tensors["rope_freqs.weight"].data).ravel()]
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    return config


def _scaling(get: Any, name: str) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{name}: rope scaling {kind!r} in a .gguf file is not supported; linear and yarn are"
        )
    return {
        "rope_type": kind,
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
    }


def _gemma_query_scalar(config: dict[str, Any]) -> int:
    """Give query_pre_attn_scalar, which .gguf leaves out: the head size, but D/N in the 27B models."""
    is_27b = (config["model_type"], config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3_text", 62))
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
