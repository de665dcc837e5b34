"""Tokenizers from .gguf metadata: splitting, merges, spaces, special tokens."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from plora_jax.errors import UserError
from plora_jax.models.gguf_tokenizer import tokenizer_from_gguf

BYTES = sorted(ByteLevel.alphabet())


def byte_level(pre, merges, special=("<|end|>",)):
    tokens = [*BYTES, *("".join(merge.split(" ")) for merge in merges), *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(special)) + [3] * len(special),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|end|>",
    }


DIGITS = ["1 2", "12 3", "3 4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
    ],
)
def test_digits_split_as_each_family_does(pre, pieces):
    tokenizer = tokenizer_from_gguf(byte_level(pre, DIGITS), "m.gguf")
    assert tokenizer.tokenize("1234") == pieces
    text = "Grüße,  12 §\n\tx<|end|>"
    ids = tokenizer(text).input_ids
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token == "<|end|>"
    assert tokenizer.decode(ids) == text


def test_llama3_starts_with_bos_unless_told_otherwise():
    fields = byte_level("llama-bpe", DIGITS, special=("<|begin|>", "<|end|>"))
    begin = len(fields["tokenizer.ggml.tokens"]) - 2
    fields["tokenizer.ggml.bos_token_id"] = begin
    assert tokenizer_from_gguf(fields, "m.gguf")("12").input_ids[0] == begin
    assert tokenizer_from_gguf(fields, "m.gguf")("12", add_special_tokens=False).input_ids[0] != begin
    fields["tokenizer.ggml.add_bos_token"] = False
    assert tokenizer_from_gguf(fields, "m.gguf")("12").input_ids[0] != begin


def test_chat_template_comes_along():
    tokenizer = tokenizer_from_gguf(byte_level("qwen2", DIGITS), "m.gguf")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi<|end|>"


def sentencepiece(prefix, **more):
    pieces = {
        "▁": -1.0,
        "l": -2.0,
        "o": -2.1,
        "w": -2.2,
        "lo": -3.0,
        "ow": -2.5,
        "▁lo": -4.0,
        "low": -3.5,
        "▁low": -5.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
        **more,
    }


def test_sentencepiece_merges_by_score_with_byte_fallback():
    tokenizer = tokenizer_from_gguf(sentencepiece(True), "m.gguf")
    assert tokenizer.tokenize("low") == ["▁low"]
    assert tokenizer("low").input_ids[0] == 1  # BOS
    assert tokenizer.tokenize("lü") == ["▁", "l", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(tokenizer("low lü").input_ids, skip_special_tokens=True) == "low lü"
    # "ow" outranks "lo", so l + ow is what is left when they do not join
    short = sentencepiece(True)
    for piece in ("low", "▁lo", "▁low"):
        index = short["tokenizer.ggml.tokens"].index(piece)
        for key in ("tokens", "scores", "token_type"):
            del short[f"tokenizer.ggml.{key}"][index]
    assert tokenizer_from_gguf(short, "m.gguf").tokenize("low") == ["▁", "l", "ow"]


def test_gemma_adds_no_space():
    fields = sentencepiece(False, **{"tokenizer.ggml.add_bos_token": False})
    tokenizer = tokenizer_from_gguf(fields, "m.gguf")
    assert tokenizer.tokenize("low low") == ["low", "▁low"]
    assert tokenizer("low").input_ids == [fields["tokenizer.ggml.tokens"].index("low")]


def test_unknown_kinds_are_refused():
    with pytest.raises(
        UserError, match=r"m\.gguf: pre-tokenizer 'jais' is not supported; supported are smollm"
    ):
        tokenizer_from_gguf(byte_level("jais", DIGITS), "m.gguf")
    with pytest.raises(UserError, match="tokenizer model 'bert' is not supported; supported are gpt2, llama"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "bert"}, "m.gguf")
