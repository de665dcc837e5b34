"""Say in words what a model is and what of it is supported: for `plora doctor --model` and docs/models.md."""

from plora_jax.models.config import ModelConfig
from plora_jax.models.families import FAMILIES, Family
from plora_jax.models.find import load_config
from plora_jax.models.presets import PRESETS, preset

RANK = 16
ADAMW_COPIES = 4  # a float32 adapter, its gradient, and AdamW's two moments


def describe(model: str) -> str:
    """Describe a hub id, directory or .gguf file: family, parameters, memory, what is supported; one fact a line.

    Raises:
        UserError: the model is not found or not supported; the message says why.
    """
    c = load_config(model)
    family = FAMILIES[c.family]
    lora = c.lora_params(RANK)
    facts = {
        "model": model,
        "family": f"{c.family} ({family.title}): {family.notes}",
        "parameters": f"{c.n_params:,}, {'tied' if c.tied else 'separate'} output head",
        "shape": f"{c.n_layers} layers, width {c.d_model}, MLP {c.d_ff}, {c.n_heads} heads of {c.head_dim} "
        f"with {c.n_kv_heads} key/value heads, vocabulary {c.vocab_size:,}",
        "context": f"{c.max_positions:,} tokens; rope {_ropes(c)}; {_windows(c)}",
        "base": f"{_size(4 * c.n_params)} in fp32, {_size(2 * c.n_params)} in bf16, {_size(_fp8_bytes(c))} in fp8",
        "adapter": f"rank {RANK} on every site: {lora:,} parameters, {_size(4 * lora)}; "
        f"{_size(4 * ADAMW_COPIES * lora)} while AdamW trains it",
        "LoRA sites": ", ".join(site.name for site in c.sites),
        "attention": f"xla; no cudnn: {c.cudnn_obstacle}"
        if c.cudnn_obstacle
        else "xla; cudnn on NVIDIA, 16 bit",
        "weights": "safetensors" + (f", .gguf ({family.gguf})" if family.gguf else ""),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in facts.items())


def families_table() -> str:
    """Write the Markdown table of the supported families."""
    head = "| `model_type` | models | of its own | attention | `.gguf` | presets |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_family_row, FAMILIES.values())])


def presets_table() -> str:
    """Write the Markdown table of the presets, one row a size; the variants of a model share it."""
    rows: dict[tuple[str, int], list[str]] = {}
    for name in PRESETS:
        config = preset(name)
        rows.setdefault((config.family, config.n_params), []).append(name)
    lines = [
        f"| {' '.join(f'`{name}`' for name in names)} | {family} | {count:,} |"
        for (family, count), names in rows.items()
    ]
    return "\n".join(["| hub id | family | parameters |", "|---|---|---|", *lines])


def _fp8_bytes(c: ModelConfig) -> int:
    """Count a byte a weight of the sites, four a scale, and two of everything else."""
    weights, scales = sum(site.d_in * site.d_out for site in c.sites), sum(site.d_out for site in c.sites)
    return 2 * c.n_params + c.n_layers * (4 * scales - weights)


def _family_row(family: Family) -> str:
    configs = [preset(name) for name in PRESETS if PRESETS[name]["model_type"] == family.name]
    sizes = sorted({c.n_params for c in configs})
    cudnn = "xla" if any(c.cudnn_obstacle for c in configs) else "xla, cudnn"
    gguf = f"`{family.gguf}`" if family.gguf else "no"
    presets = ", ".join(_count(n) for n in sizes)
    return f"| `{family.name}` | {family.title} | {family.notes} | {cudnn} | {gguf} | {presets} |"


def _ropes(config: ModelConfig) -> str:
    named = dict.fromkeys(
        "none" if rope.kind == "none" else f"{rope.kind} (theta {rope.theta:,.0f})" for rope in config.ropes
    )
    return ", ".join(named)


def _windows(config: ModelConfig) -> str:
    sliding = [window for window in config.layer_window if window]
    if not sliding:
        return "full attention"
    return f"{len(sliding)} of {config.n_layers} layers see the last {sliding[0]:,} tokens only"


def _count(n: int) -> str:
    return f"{n / 1e9:.3g}B" if n >= 0.9995e9 else f"{n / 1e6:.0f}M"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
