"""What a model is, read from its config.json: one description for decoder, loader, planner and docs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from plora_jax.errors import UserError
from plora_jax.models.families import ACTIVATIONS, FAMILIES, Family
from plora_jax.models.rope import Rope, rope_from_hf

SOURCES = ("attn_in", "attn_out", "mlp_in", "mlp_act")


@dataclass(frozen=True)
class Site:
    """Name one Linear that may carry an adapter, as PEFT names it; `source` is the input that it reads."""

    name: str
    module: str
    source: str
    d_in: int
    d_out: int


@dataclass(frozen=True)
class ModelConfig:
    """Describe a decoder-only transformer; every family is a choice of these values.

    `layer_rope[l]` indexes `ropes`; `layer_window[l]` is the sliding window of layer l in tokens, 0 for full
    attention. A softcap of 0 is none.
    """

    family: str
    vocab_size: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    ropes: tuple[Rope, ...]
    layer_rope: tuple[int, ...]
    layer_window: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # one qkv_proj and one gate_up_proj in the checkpoint (Phi-3)
    pre_norm: bool = True
    post_norm: bool = False
    # over each head (Qwen3, Gemma 3), or over all of them at once (OLMo 2)
    qk_norm: Literal["none", "head", "all"] = "none"
    norm_offset: float = 0.0  # Gemma stores weight − 1
    activation: str = "silu"
    embed_scale: float = 1.0
    attn_scale: float = 1.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """List the Linears of a layer in the order of the forward pass; the output head is not among them."""
        d, f = self.d_model, self.d_ff
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if self.fused:
            attn_in: tuple[tuple[str, int], ...] = (("qkv_proj", q + 2 * kv),)
            mlp_in: tuple[tuple[str, int], ...] = (("gate_up_proj", 2 * f),)
        else:
            attn_in = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
            mlp_in = (("gate_proj", f), ("up_proj", f))
        return (
            *(Site(name, f"self_attn.{name}", "attn_in", d, out) for name, out in attn_in),
            Site("o_proj", "self_attn.o_proj", "attn_out", q, d),
            *(Site(name, f"mlp.{name}", "mlp_in", d, out) for name, out in mlp_in),
            Site("down_proj", "mlp.down_proj", "mlp_act", f, d),
        )

    def sites_of(self, source: str) -> tuple[Site, ...]:
        """List the sites that read one source; they share its dropout mask and one packed product."""
        return tuple(s for s in self.sites if s.source == source)

    def has_bias(self, site: Site) -> bool:
        """Tell whether the checkpoint has a bias for this site."""
        by_source = {"attn_in": self.qkv_bias, "attn_out": self.o_bias}
        return by_source.get(site.source, self.mlp_bias)

    def module_path(self, site: Site | str, layer: int) -> str:
        """Name the module as transformers and PEFT do: "model.layers.3.self_attn.q_proj"."""
        site = next(s for s in self.sites if s.name == site) if isinstance(site, str) else site
        return f"model.layers.{layer}.{site.module}"

    @cached_property
    def n_params(self) -> int:
        """Count the parameters, a tied head once, as transformers' num_parameters() does."""
        from plora_jax.models.table import checkpoint_table  # the table imports this module

        return sum(tensor.size for tensor in checkpoint_table(self).values())

    @property
    def cudnn_obstacle(self) -> str:
        """Say what keeps cuDNN's attention from serving the model; empty when nothing does."""
        if self.attn_softcap:
            return "its attention scores have a softcap"
        if self.head_dim > 256 or self.head_dim % 8:
            return f"its head size {self.head_dim} is not a multiple of 8 up to 256"
        return ""

    def lora_params(self, rank: int) -> int:
        """Count the parameters of one adapter of this rank on every site."""
        return self.n_layers * rank * sum(s.d_in + s.d_out for s in self.sites)


def config_from_hf(config: dict[str, Any], name: str = "config.json") -> ModelConfig:
    """Read a config.json, of transformers 4 or 5, into a ModelConfig.

    Args:
        config: the parsed file.
        name: what error messages call it.

    Raises:
        UserError: the model is of a kind that this code does not run (mixture of experts, multimodal, unknown
            rope or activation, quantised weights …), or a needed field is missing or malformed.
    """
    try:
        return _config(config, name)
    except (
        AttributeError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:  # text for a number, a list for text …
        raise UserError(f"{name}: a field is malformed: {error}") from None


def _config(config: dict[str, Any], name: str) -> ModelConfig:
    family = _family(config, name)
    get = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}.get

    def integer(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}: {key} must be a positive integer, found {value!r}")
        return value

    d_model, n_heads, n_layers = (
        integer(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    n_kv_heads = integer("num_key_value_heads", n_heads)
    head_dim = integer("head_dim", d_model // n_heads)
    if n_heads % n_kv_heads:
        raise UserError(f"{name}: {n_heads} attention heads cannot share {n_kv_heads} key/value heads evenly")
    kinds = _layer_kinds(get, family, n_layers, name)
    ropes, layer_rope = _ropes(config, get, family, kinds, head_dim, name)
    attention_bias, gemma = bool(get("attention_bias", False)), family.name.startswith("gemma")
    return ModelConfig(
        family=family.name,
        vocab_size=integer("vocab_size"),
        d_model=d_model,
        d_ff=integer("intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        max_positions=integer("max_position_embeddings"),
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        tied=bool(get("tie_word_embeddings")),
        ropes=ropes,
        layer_rope=layer_rope,
        layer_window=tuple(integer("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds),
        qkv_bias=attention_bias or family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=bool(get("mlp_bias", False)),
        fused=family.fused,
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        qk_norm=family.qk_norm,
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(get, name),
        embed_scale=d_model**0.5 if gemma else 1.0,
        attn_scale=float(get("query_pre_attn_scalar", head_dim)) ** -0.5,
        attn_softcap=float(get("attn_logit_softcapping", 0.0)),
        final_softcap=float(get("final_logit_softcapping", 0.0)),
        bos_id=get("bos_token_id"),
        eos_ids=_ids(get("eos_token_id")),
        pad_id=get("pad_token_id"),
    )


def _family(config: dict[str, Any], name: str) -> Family:
    kind = config.get("model_type")
    known = ", ".join(FAMILIES)
    for key in ("vision_config", "audio_config", "speech_config"):
        if config.get(key):
            raise UserError(
                f"{name}: {kind} is multimodal ({key}), which is not supported; "
                f"use a text-only model of {known}"
            )
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        if config.get(key):
            raise UserError(
                f"{name}: {kind} is a mixture of experts ({key} = {config[key]}), which is not supported; "
                f"use a dense model of {known}"
            )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise UserError(
            f"{name}: the weights are quantised ({method}), which is not supported; "
            "use the unquantised model and choose `precision` instead"
        )
    if kind not in FAMILIES:
        raise UserError(f"{name}: model_type {kind!r} is not supported; supported are {known}")
    if config.get("use_bidirectional_attention"):
        raise UserError(
            f"{name}: use_bidirectional_attention is not supported; the decoder attends causally only"
        )
    return FAMILIES[kind]


def _layer_kinds(get: Any, family: Family, n_layers: int, name: str) -> tuple[str, ...]:
    """Say for every layer whether its attention is full or sliding, by the rules of transformers."""
    window = get("sliding_window")
    given: Sequence[str] | None = get("layer_types")
    if given is None:
        given = family.layer_types(get, n_layers)
    if not family.layered_windows:  # Mistral, Phi-3: one window for all layers
        given = ["sliding_attention" if window else "full_attention"] * n_layers
    elif family.window_switch and not get("use_sliding_window"):
        given = ["full_attention"] * n_layers
    given = given if window else ["full_attention" if kind == "sliding_attention" else kind for kind in given]
    unknown = sorted(set(given) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"{name}: layer type {unknown[0]!r} is not supported; full_attention and sliding_attention are"
        )
    if len(given) != n_layers:
        raise UserError(f"{name}: layer_types has {len(given)} entries for {n_layers} layers")
    return tuple(given)


def _ropes(
    config: dict[str, Any], get: Any, family: Family, kinds: tuple[str, ...], head_dim: int, name: str
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Give the distinct rotary embeddings and, for each layer, which of them it uses."""
    partial = float(get("partial_rotary_factor", 1.0))
    shared: dict[str, Any] = {
        "rope_theta": get("rope_theta", 10_000.0),
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": get("original_max_position_embeddings"),
    }
    given = get("rope_parameters") or get("rope_scaling") or {}
    if given.get("full_attention") is not None:  # transformers 5, by layer type
        by_kind = {
            kind: {**shared, **(given.get(kind) or {})} for kind in ("full_attention", "sliding_attention")
        }
    else:
        by_kind = {kind: {**shared, **given} for kind in ("full_attention", "sliding_attention")}
        if family.local_theta:  # Gemma 3: the scaling is for the global layers alone
            by_kind["sliding_attention"] = {
                **shared,
                "rope_theta": get("rope_local_base_freq", family.local_theta),
            }
    max_positions = get("max_position_embeddings")
    of_kind = {kind: rope_from_hf(by_kind[kind], head_dim, max_positions, name) for kind in set(kinds)}
    of_layer = [of_kind[kind] for kind in kinds]
    if family.nope:
        interval = get("no_rope_layer_interval", 4)
        uses = get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(len(kinds))]
        if len(uses) != len(kinds):
            raise UserError(f"{name}: no_rope_layers has {len(uses)} entries for {len(kinds)} layers")
        of_layer = [r if use else Rope("none", dim=r.dim) for r, use in zip(of_layer, uses, strict=True)]
    ropes = tuple(dict.fromkeys(of_layer))
    return ropes, tuple(ropes.index(r) for r in of_layer)


def _activation(get: Any, name: str) -> str:
    given = get("hidden_activation") or get("hidden_act")
    if given not in ACTIVATIONS:
        raise UserError(
            f"{name}: activation {given!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[given]


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
