"""The one table from checkpoint key to parameter: shapes, layout and place of every tensor of a model."""

import math
from typing import NamedTuple

from plora_jax.models.config import ModelConfig


class Tensor(NamedTuple):
    """Place one checkpoint tensor: `path` in the decoder's state, `layer` of the stack (None: no stack).

    `shape` is the checkpoint's; Linear weights [out, in] are stored transposed, [in, out].
    """

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    transpose: bool = False

    @property
    def size(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)


def checkpoint_table(config: ModelConfig) -> dict[str, Tensor]:
    """Map every key that a checkpoint of this model must have, as transformers names it, to its place."""
    d, v = config.d_model, config.vocab_size
    table = {
        "model.embed_tokens.weight": Tensor(("embed",), None, (v, d)),
        "model.norm.weight": Tensor(("norm", "weight"), None, (d,)),
    }
    if not config.tied:
        table["lm_head.weight"] = Tensor(("head",), None, (v, d))
    for layer in range(config.n_layers):
        for site in config.sites:
            key, path = config.module_path(site, layer), ("layers", site.name)
            table[f"{key}.weight"] = Tensor((*path, "w"), layer, (site.d_out, site.d_in), transpose=True)
            if config.has_bias(site):
                table[f"{key}.bias"] = Tensor((*path, "bias"), layer, (site.d_out,))
        for key, (name, size) in norm_keys(config).items():
            table[f"model.layers.{layer}.{key}.weight"] = Tensor(("layers", name, "weight"), layer, (size,))
    return table


def norm_keys(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Map the norms of a layer from the checkpoint's name to (the decoder's name, size).

    "post_attention_layernorm" stands before the MLP in Llama and after attention in Gemma and OLMo 2.
    """
    d = config.d_model
    norms: dict[str, tuple[str, int]] = {}
    if config.pre_norm:
        norms["input_layernorm"] = ("attn_pre", d)
        norms["pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"] = (
            "mlp_pre",
            d,
        )
    if config.post_norm:
        norms["post_attention_layernorm"] = ("attn_post", d)
        norms["post_feedforward_layernorm"] = ("mlp_post", d)
    if config.qk_norm != "none":
        heads = (config.n_heads, config.n_kv_heads) if config.qk_norm == "all" else (1, 1)
        norms["self_attn.q_norm"] = ("q_norm", heads[0] * config.head_dim)
        norms["self_attn.k_norm"] = ("k_norm", heads[1] * config.head_dim)
    return norms


def ignorable(key: str, config: ModelConfig) -> bool:
    """Tell whether a checkpoint may carry this key unused: a copy of a tied head, rope frequencies."""
    return key.endswith("rotary_emb.inv_freq") or (config.tied and key == "lm_head.weight")
