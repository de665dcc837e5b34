"""Configurations of public models by hub id: planning and benchmarks need no download.

Values are those of each model's config.json; loading real weights reads that file itself. The LongRoPE factors of
Phi-3 and Phi-4-mini are 1 here: they change neither size nor speed.
"""

import re
from typing import Any

from plora_jax.errors import UserError
from plora_jax.models.config import ModelConfig, config_from_hf

TIED = {"tie_word_embeddings": True}


def _values(
    model_type: str, vocab: int, positions: int, theta: float, eps: float, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        **more,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **scaling}}


def _longrope(pairs: int) -> dict[str, Any]:
    scaling = {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs}
    return {"rope_scaling": scaling, "original_max_position_embeddings": 4096}


SERIES: dict[str, dict[str, Any]] = {
    "llama2": _values("llama", 32000, 4096, 1e4, 1e-5),
    "llama3": _values("llama", 128256, 8192, 5e5, 1e-5),
    "llama3.1": _values("llama", 128256, 131072, 5e5, 1e-5, **_llama3_rope(8.0)),
    "llama3.2": _values("llama", 128256, 131072, 5e5, 1e-5, **_llama3_rope(32.0), **TIED),
    "smollm2": _values("llama", 49152, 8192, 1e5, 1e-5, **TIED),
    "smollm2-1.7b": _values("llama", 49152, 8192, 1.3e5, 1e-5, **TIED),
    "smollm3": _values("smollm3", 128256, 65536, 5e6, 1e-6, **TIED),
    "mistral-v0.1": _values("mistral", 32000, 32768, 1e4, 1e-5, sliding_window=4096),
    "mistral-v0.2": _values("mistral", 32000, 32768, 1e6, 1e-5),
    "mistral-v0.3": _values("mistral", 32768, 32768, 1e6, 1e-5),
    "mistral-nemo": _values("mistral", 131072, 131072, 1e6, 1e-5),
    "ministral": _values("mistral", 131072, 32768, 1e8, 1e-5, sliding_window=32768),
    "mistral-small": _values("mistral", 131072, 32768, 1e8, 1e-5),
    "qwen2": _values("qwen2", 152064, 32768, 1e6, 1e-6),
    "qwen2-tied": _values("qwen2", 151936, 32768, 1e6, 1e-6, **TIED),
    "qwen2.5-math": _values("qwen2", 152064, 4096, 1e4, 1e-6),
    "qwen2.5-math-tied": _values("qwen2", 151936, 4096, 1e4, 1e-6, **TIED),
    "qwen3": _values("qwen3", 151936, 40960, 1e6, 1e-6),
    "qwen3-tied": _values("qwen3", 151936, 40960, 1e6, 1e-6, **TIED),
    "qwen3-2507": _values("qwen3", 151936, 262144, 5e6, 1e-6, **TIED),
    "gemma2": _values("gemma2", 256000, 8192, 1e4, 1e-6),
    "gemma2-27b": _values("gemma2", 256000, 8192, 1e4, 1e-6, query_pre_attn_scalar=144),
    "gemma3": _values("gemma3_text", 262144, 32768, 1e6, 1e-6, sliding_window=512),
    "phi3-4k": _values("phi3", 32064, 4096, 1e4, 1e-5, sliding_window=2047),
    "phi3-128k": _values("phi3", 32064, 131072, 1e4, 1e-5, **_longrope(48)),
    "phi3-medium-128k": _values("phi3", 32064, 131072, 1e4, 1e-5, **_longrope(64)),
    "phi4": _values("phi3", 100352, 16384, 2.5e5, 1e-5),
    "phi4-mini": _values(
        "phi3", 200064, 131072, 1e4, 1e-5, partial_rotary_factor=0.75, **_longrope(48), **TIED
    ),
    "olmo2": _values("olmo2", 100352, 4096, 5e5, 1e-6),
}

# hub id, {a,b} for each of a and b; series; D, d_ff, layers, heads, key/value heads, head size
TABLE = """
meta-llama/Llama-2-7b{,-chat}-hf                      llama2             4096 11008  32  32 32 128
meta-llama/Llama-2-13b{,-chat}-hf                     llama2             5120 13824  40  40 40 128
meta-llama/Llama-2-70b{,-chat}-hf                     llama2             8192 28672  80  64  8 128
meta-llama/Meta-Llama-3-8B{,-Instruct}                llama3             4096 14336  32  32  8 128
meta-llama/Meta-Llama-3-70B{,-Instruct}               llama3             8192 28672  80  64  8 128
meta-llama/{Meta-,}Llama-3.1-8B{,-Instruct}           llama3.1           4096 14336  32  32  8 128
meta-llama/{Meta-,}Llama-3.1-70B{,-Instruct}          llama3.1           8192 28672  80  64  8 128
meta-llama/{Meta-,}Llama-3.1-405B{,-Instruct}         llama3.1          16384 53248 126 128  8 128
meta-llama/Llama-3.2-1B{,-Instruct}                   llama3.2           2048  8192  16  32  8  64
meta-llama/Llama-3.2-3B{,-Instruct}                   llama3.2           3072  8192  28  24  8 128
meta-llama/Llama-3.3-70B-Instruct                     llama3.1           8192 28672  80  64  8 128
HuggingFaceTB/SmolLM2-135M{,-Instruct}                smollm2             576  1536  30   9  3  64
HuggingFaceTB/SmolLM2-360M{,-Instruct}                smollm2             960  2560  32  15  5  64
HuggingFaceTB/SmolLM2-1.7B{,-Instruct}                smollm2-1.7b       2048  8192  24  32 32  64
HuggingFaceTB/SmolLM3-3B{,-Base}                      smollm3            2048 11008  36  16  4 128
mistralai/Mistral-7B{,-Instruct}-v0.1                 mistral-v0.1       4096 14336  32  32  8 128
mistralai/Mistral-7B-Instruct-v0.2                    mistral-v0.2       4096 14336  32  32  8 128
mistralai/Mistral-7B{,-Instruct}-v0.3                 mistral-v0.3       4096 14336  32  32  8 128
mistralai/Mistral-Nemo-{Base,Instruct}-2407           mistral-nemo       5120 14336  40  32  8 128
mistralai/Ministral-8B-Instruct-2410                  ministral          4096 12288  36  32  8 128
mistralai/Mistral-Small-Instruct-2409                 mistral-v0.3       6144 16384  56  48  8 128
mistralai/Mistral-Small-24B-{Base,Instruct}-2501      mistral-small      5120 32768  40  32  8 128
mistralai/Mistral-Large-Instruct-2407                 mistral-v0.3      12288 28672  88  96  8 128
Qwen/Qwen2-0.5B{,-Instruct}                           qwen2-tied          896  4864  24  14  2  64
Qwen/Qwen2-1.5B{,-Instruct}                           qwen2-tied         1536  8960  28  12  2 128
Qwen/Qwen2-7B{,-Instruct}                             qwen2              3584 18944  28  28  4 128
Qwen/Qwen2-72B{,-Instruct}                            qwen2              8192 29568  80  64  8 128
Qwen/Qwen2.5{,-Coder}-0.5B{,-Instruct}                qwen2-tied          896  4864  24  14  2  64
Qwen/Qwen2.5{,-Coder}-1.5B{,-Instruct}                qwen2-tied         1536  8960  28  12  2 128
Qwen/Qwen2.5{,-Coder}-3B{,-Instruct}                  qwen2-tied         2048 11008  36  16  2 128
Qwen/Qwen2.5{,-Coder}-7B{,-Instruct}                  qwen2              3584 18944  28  28  4 128
Qwen/Qwen2.5{,-Coder}-14B{,-Instruct}                 qwen2              5120 13824  48  40  8 128
Qwen/Qwen2.5{,-Coder}-32B{,-Instruct}                 qwen2              5120 27648  64  40  8 128
Qwen/Qwen2.5-72B{,-Instruct}                          qwen2              8192 29568  80  64  8 128
Qwen/Qwen2.5-Math-1.5B{,-Instruct}                    qwen2.5-math-tied  1536  8960  28  12  2 128
Qwen/Qwen2.5-Math-7B{,-Instruct}                      qwen2.5-math       3584 18944  28  28  4 128
Qwen/Qwen2.5-Math-72B{,-Instruct}                     qwen2.5-math       8192 29568  80  64  8 128
Qwen/Qwen3-0.6B{,-Base}                               qwen3-tied         1024  3072  28  16  8 128
Qwen/Qwen3-1.7B{,-Base}                               qwen3-tied         2048  6144  28  16  8 128
Qwen/Qwen3-4B{,-Base}                                 qwen3-tied         2560  9728  36  32  8 128
Qwen/Qwen3-4B-{Instruct,Thinking}-2507                qwen3-2507         2560  9728  36  32  8 128
Qwen/Qwen3-8B{,-Base}                                 qwen3              4096 12288  36  32  8 128
Qwen/Qwen3-14B{,-Base}                                qwen3              5120 17408  40  40  8 128
Qwen/Qwen3-32B                                        qwen3              5120 25600  64  64  8 128
google/gemma-2-2b{,-it}                               gemma2             2304  9216  26   8  4 256
google/gemma-2-9b{,-it}                               gemma2             3584 14336  42  16  8 256
google/gemma-2-27b{,-it}                              gemma2-27b         4608 36864  46  32 16 128
google/gemma-3-270m{,-it}                             gemma3              640  2048  18   4  1 256
google/gemma-3-1b-{it,pt}                             gemma3             1152  6912  26   4  1 256
microsoft/Phi-3-mini-4k-instruct                      phi3-4k            3072  8192  32  32 32  96
microsoft/{Phi-3-mini-128k,Phi-3.5-mini}-instruct     phi3-128k          3072  8192  32  32 32  96
microsoft/Phi-3-medium-4k-instruct                    phi3-4k            5120 17920  40  40 10 128
microsoft/Phi-3-medium-128k-instruct                  phi3-medium-128k   5120 17920  40  40 10 128
microsoft/{phi-4,Phi-4-reasoning}                     phi4               5120 17920  40  40 10 128
microsoft/Phi-4-mini-{instruct,reasoning}             phi4-mini          3072  8192  32  24  8 128
allenai/OLMo-2-0425-1B{,-Instruct}                    olmo2              2048  8192  16  16 16 128
allenai/OLMo-2-1124-7B{,-Instruct}                    olmo2              4096 11008  32  32 32 128
allenai/OLMo-2-1124-13B{,-Instruct}                   olmo2              5120 13824  40  40 40 128
allenai/OLMo-2-0325-32B{,-Instruct}                   olmo2              5120 27648  64  40  8 128
"""
COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def _expand(pattern: str) -> list[str]:
    """List the names that a pattern stands for: "a{,-b}" is a and a-b."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for choice in found[1].split(",") for name in _expand(f"{before}{choice}{after}")]


def _read(table: str) -> dict[str, dict[str, Any]]:
    presets = {}
    for line in table.strip().splitlines():
        pattern, series, *sizes = line.split()
        values = {**SERIES[series], **dict(zip(COLUMNS, map(int, sizes), strict=True))}
        presets.update(dict.fromkeys(_expand(pattern), values))
    return presets


PRESETS: dict[str, dict[str, Any]] = _read(TABLE)


def preset(name: str) -> ModelConfig:
    """Give the configuration of a public model. Raises `UserError` for a name that is not known."""
    if name not in PRESETS:
        raise UserError(f"model {name!r} is not a known preset; known are {', '.join(PRESETS)}")
    return config_from_hf(PRESETS[name], name)
