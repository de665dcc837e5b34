"""What `plora doctor --model` says, and that docs/models.md says what the code does."""

import json

import pytest

from plora_jax.errors import UserError
from plora_jax.models.describe import describe
from plora_jax.models.families import FAMILIES
from scripts.docs_models import PAGE, page
from tests.models import tiny


def test_a_preset():
    lines = dict(line.split("  ", 1) for line in describe("Qwen/Qwen2.5-7B-Instruct").splitlines())
    facts = {name: text.strip() for name, text in lines.items()}
    assert facts["family"] == "qwen2 (Qwen2, Qwen2.5): biases on q, k, v"
    assert facts["parameters"] == "7,615,616,512, separate output head"
    assert facts["base"] == "28.4 GiB in fp32, 14.2 GiB in bf16, 8.1 GiB in fp8"
    # 40,370,176 float32 numbers, and as many again for the gradient and each of AdamW's moments
    assert facts["adapter"].startswith("rank 16 on every site: 40,370,176 parameters, 154 MiB; 616 MiB")
    assert facts["attention"] == "xla; cudnn on NVIDIA, 16 bit"
    assert facts["weights"] == "safetensors, .gguf (qwen2)"


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**tiny.LLAMA, "model_type": "gemma2"}))
    said = describe(str(tmp_path))
    assert "no cudnn: its attention scores have a softcap" in said
    assert "1 of 2 layers see the last 4,096 tokens only" in said


def test_an_unsupported_model_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**tiny.LLAMA, "num_experts": 4}))
    with pytest.raises(UserError, match="mixture of experts"):
        describe(str(tmp_path))


def test_docs_are_in_sync_and_name_every_family():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m scripts.docs_models"
    assert all(f"| `{family}` |" in text for family in FAMILIES)
