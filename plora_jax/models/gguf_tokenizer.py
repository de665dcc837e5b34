"""Build a model's tokenizer from the metadata of a .gguf file, without torch."""

from collections.abc import Callable
from typing import Any

from plora_jax.errors import UserError

CONTROL, USER_DEFINED = 3, 4  # llama.cpp's token types that never come from merges
# The regular expressions that split text before merges, as the models' own tokenizer.json have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_PRE = ("llama-bpe", "llama3")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _splits() -> dict[str, Callable[[], Any]]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def regex(pattern: str) -> Any:
        return Sequence(
            [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return {
        "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        "gpt-2": lambda: ByteLevel(add_prefix_space=False),
        "llama-bpe": lambda: regex(LLAMA3),
        "llama3": lambda: regex(LLAMA3),
        "qwen2": lambda: regex(QWEN2),
        "deepseek-r1-qwen": lambda: regex(QWEN2),
    }


def tokenizer_from_gguf(fields: dict[str, Any], name: str) -> Any:
    """Build the transformers tokenizer, with special tokens and chat template.

    Raises:
        UserError: a tokenizer kind or pre-tokenizer that is not supported.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    builders: dict[str, Callable[[dict[str, Any], str], Tokenizer]] = {
        "gpt2": _byte_bpe,
        "llama": _sentencepiece,
    }
    kind = fields.get("tokenizer.ggml.model")
    if kind not in builders:
        raise UserError(
            f"{name}: tokenizer model {kind!r} is not supported; supported are {', '.join(builders)}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    backend = builders[kind](fields, name)
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    for kinds, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [t for t, k in zip(tokens, types, strict=True) if k == kinds]
        added = [AddedToken(t, normalized=False, special=special) for t in found]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)

    def named(role: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[int(index)]

    bos = named("bos")
    starts = kind == "llama" or fields.get("tokenizer.ggml.pre") in LLAMA3_PRE  # where the file does not say
    if bos and fields.get("tokenizer.ggml.add_bos_token", starts):
        index = int(fields["tokenizer.ggml.bos_token_id"])
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, index)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=named("eos"),
        pad_token=named("padding"),
        unk_token=named("unknown"),
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_bpe(fields: dict[str, Any], name: str) -> Any:
    """Build a byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), with the pre-tokenizer that the file names."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    splits, pre = _splits(), fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in splits:
        raise UserError(f"{name}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(splits)}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in LLAMA3_PRE))
    backend.pre_tokenizer = splits[pre]()
    backend.decoder = decoders.ByteLevel()
    if "qwen" in pre:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(fields: dict[str, Any], name: str) -> Any:
    """Build a SentencePiece BPE (Llama 2, Mistral, Gemma); its merges follow from the pieces' scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for piece, score in zip(tokens, scores, strict=True):
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(vocab[l], vocab[r], l, r) for l, r in halves if l in vocab and r in vocab]
        merges += [(-score, order, l, r) for order, (_, _, l, r) in enumerate(sorted(known))]
    merges.sort(key=lambda merge: merge[0])  # stable: pieces of one score stay in the order of their ids
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    pairs = [(l, r) for _, _, l, r in merges]
    backend = Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space: list[Any] = [normalizers.Replace(" ", "▁")]
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        space.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(space), decoders.Sequence(parts)
    return backend
