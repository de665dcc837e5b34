"""A tiny model on disk, with a tokenizer and a chat template but no weights, and a task to go with it."""

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "yes",
    "no",
    "what",
    "is",
    "the",
    "color",
    "user",
    "assistant",
    "system",
    ":",
    ".",
    "?",
]
ROWS = [{"prompt": "what is one ?", "completion": " red"}, {"prompt": "what is two ?", "completion": " blue"}]


def write_model(directory: Path, **changes: Any) -> Path:
    """Write config.json and tokenizer files of a two-layer Llama of 64 words; `None` removes a key."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    vocab = {word: i for i, word in enumerate(["<bos>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": TEMPLATE}))
    return directory


def write_weights(directory: Path, seed: int = 0) -> None:
    """Write random weights that fit the directory's config.json."""
    import numpy as np
    from safetensors.numpy import save_file

    from plora_jax.models.find import load_config
    from plora_jax.models.table import checkpoint_table

    draw = np.random.default_rng(seed).standard_normal
    shapes = {key: tensor.shape for key, tensor in checkpoint_table(load_config(str(directory))).items()}
    tensors = {k: (0.2 * draw(shape) + (len(shape) == 1)).astype(np.float32) for k, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")


def write_rows(path: Path, rows: list[Any] | None = None) -> Path:
    """Write rows (by default two) as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)))
    return path


def write_sweep(directory: Path, **changes: Any) -> Path:
    """Write a model, its data and a sweep of four jobs; `changes` replace sections, None removes them."""
    from plora_jax.config.yamlfile import dump_yaml

    if not (directory / "model").exists():
        write_model(directory / "model")
    for name in ("train.jsonl", "eval.jsonl"):
        if not (directory / name).exists():
            write_rows(directory / name, [*ROWS, {"prompt": name, "completion": " yes"}])
    sweep = {
        "model": "model",
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16},
        "search": {"rank": [4, 8], "learning_rate": [1e-4, 1e-3]},
        "train": {"batch_size": 2},
    } | changes
    path = directory / "sweep.yaml"
    path.write_text(dump_yaml({key: value for key, value in sweep.items() if value is not None}))
    return path
