"""Presets: sizes against the parameter counts that the models' own pages and papers give."""

import pytest

from plora_jax.errors import UserError
from plora_jax.models.presets import PRESETS, preset

PUBLISHED = {  # exact totals, as the checkpoints' safetensors metadata on the hub count them
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Mistral-Small-Instruct-2409": 22_247_282_688,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts(name, count):
    assert preset(name).n_params == count


def test_every_preset_is_a_supported_model():
    families = {preset(name).family for name in PRESETS}
    assert len(PRESETS) > 100
    assert families == {
        *("llama", "smollm3", "mistral", "qwen2", "qwen3"),
        *("gemma2", "gemma3_text", "phi3", "olmo2"),
    }


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(UserError, match=r"'no/such' is not a known preset.*Qwen/Qwen2\.5-7B-Instruct"):
        preset("no/such")


def test_sites_and_adapter_size_of_a_7b():
    config = preset("Qwen/Qwen2.5-7B-Instruct")
    assert [s.name for s in config.sites] == [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    # r · (in + out) summed over a layer's seven Linears, 28 layers
    d, kv, f = 3584, 512, 18944
    assert config.lora_params(16) == 28 * 16 * (2 * (d + d) + 2 * (d + kv) + 3 * (d + f))
    assert config.module_path("down_proj", 27) == "model.layers.27.mlp.down_proj"
