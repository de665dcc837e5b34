"""How many rows and tokens a data file has, for planning: no model, no JAX, and no transformers."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plora_jax.config.sweep import DataConfig, Sweep
from plora_jax.data.formats import Record, to_record, too_long
from plora_jax.data.read import Faults, read_rows
from plora_jax.errors import UserError

SAMPLE = 2_000  # rows tokenised for the mean; the longest ones are looked at besides
TURN_TOKENS = 5  # what a chat template typically puts around a turn


class Size(NamedTuple):
    """Hold how many rows train, the tokens of a mean and of the longest one, and how that is known."""

    rows: int
    row_tokens: float
    max_row_tokens: int
    how: str

    def __str__(self) -> str:
        tokens = f"{self.row_tokens:.0f} tokens on average, {self.max_row_tokens} at most"
        return f"{self.rows:,} rows, {tokens}; {self.how}"


Count = Callable[[Sequence[str]], list[int]]


def data_size(sweep: Sweep, name: str, count: Count | None, rows: int | None = None) -> Size:
    """Measure a data set of the sweep; without `count` (texts → tokens) a row has data.max_length tokens.

    `rows` stands in where the data is not at hand.

    Raises:
      UserError: the data cannot be read, a row is too long and `on_long` is "error", or the data is not at hand and
        `rows` is not given.
    """
    data, path = sweep.data, sweep.path(name)
    longest = data.max_length
    if not path.exists() and rows is not None:
        return Size(rows, longest, longest, "assumed, since the data is not at hand")
    local = path.exists() or name.count("/") != 1
    try:
        kept = list(records(path if local else Path(name), data))
    except UserError as error:
        if path.exists():
            raise
        raise UserError(f"{error} To plan without the data, set data.rows or give --rows N.") from None
    if not kept:
        raise UserError(f"{path}: no row is left to train on: every row is empty, or skipped as unreadable.")
    if count is None:
        return Size(len(kept), longest, longest, "no tokenizer at hand, so a row counts as max_length tokens")
    return _measure(kept, data, count)


def records(path: Path, data: DataConfig) -> Iterator[Record]:
    """Yield the rows that have something to train on; faults are raised or skipped as the sweep says."""
    faults = Faults(data.on_bad_row)
    for row in read_rows(path, faults):
        try:
            record = to_record(row, data.format)
        except UserError as error:
            faults.add(str(error))
            continue
        if not record.blank:
            yield record


def _measure(kept: list[Record], data: DataConfig, count: Count) -> Size:
    texts = [_text(record) for record in kept]
    if data.on_long == "error":
        _check_long(kept, texts, data.max_length, count)
    step = max(1, len(texts) // SAMPLE)
    sample = range(0, len(texts), step)
    longest = heapq.nlargest(SAMPLE // 10, range(len(texts)), key=lambda i: len(texts[i]))
    chosen = sorted({*sample, *longest})
    marks = {i: 1 + TURN_TOKENS * len(kept[i].turns) for i in chosen}  # EOS, and the template's
    lengths = {i: n + marks[i] for i, n in zip(chosen, count([texts[i] for i in chosen]), strict=True)}
    if data.on_long == "drop":
        lengths = {i: n for i, n in lengths.items() if n <= data.max_length} or {chosen[0]: data.max_length}
    lengths = {i: min(n, data.max_length) for i, n in lengths.items()}
    means = [lengths[i] for i in sample if i in lengths] or list(lengths.values())
    rows = math.ceil(len(kept) * len(means) / len(sample))
    how = "tokenised" if step == 1 else f"{len(chosen)} rows tokenised"
    return Size(rows, sum(means) / len(means), max(lengths.values()), how)


def _check_long(kept: Sequence[Record], texts: Sequence[str], longest: int, count: Count) -> None:
    """Raise what a sweep would for the first row whose text alone, without BOS and EOS, is longer than it may be.

    A text has no more tokens than bytes. Conversations are left out: what a template makes of them is not known here.
    """
    long = [i for i, text in enumerate(texts) if not kept[i].turns and len(text.encode()) > longest]
    for i, n in zip(long, count([texts[i] for i in long]), strict=True):
        if n > longest:
            raise too_long(kept[i].where, n, longest)


def _text(record: Record) -> str:
    if record.turns:
        return "\n".join(turn.content for turn in record.turns)
    return record.prompt + record.completion


def token_counter(model: str) -> Count | None:
    """Return a function that counts tokens as the model does, or None where its tokenizer is not at hand."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        from plora_jax.models.find import load_tokenizer

        return _counter(load_tokenizer(model).backend_tokenizer)
    file = path / "tokenizer.json"
    if not path.exists():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "tokenizer.json")  # looks on this machine alone
        file = Path(found) if isinstance(found, str) else file
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return _counter(Tokenizer.from_file(str(file)))
    except Exception as error:  # what tokenizers raises is a plain Exception
        raise UserError(f"{file}: is not a tokenizer that can be read: {error}") from None


def _counter(tokenizer: Any) -> Count:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda texts: [len(e) for e in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
