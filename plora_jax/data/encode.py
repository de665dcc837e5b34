"""Rows as tokens with labels: the template rendered, tokenised once, labels placed by character offsets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from plora_jax.data.examples import DataReport, Examples, Source
from plora_jax.data.formats import FIELDS, Record, to_record, too_long
from plora_jax.data.read import Faults, OnBadRow, read_rows
from plora_jax.data.template import Span, Template
from plora_jax.errors import UserError

OnLong = Literal["truncate", "drop", "error"]


class Draft(NamedTuple):
    """Hold one row's text before it is tokenised: labels go to `spans`, EOS to the end when `eos`."""

    text: str
    spans: Sequence[Span]
    eos: bool
    source: Source


class Encoded(NamedTuple):
    """Hold one tokenised text: its ids and the characters [start, end) of each token."""

    ids: Int32[np.ndarray, " S"]
    start: Int64[np.ndarray, " S"]
    end: Int64[np.ndarray, " S"]


class Coder:
    """Tokenise texts for one tokenizer, with what must be known about its special tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int | None = None):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "the model's tokenizer gives no character offsets; a fast one (tokenizer.json) is needed."
            )
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        plain = tokenizer("a").input_ids
        self.adds_bos = self.bos is not None and plain[:1] == [self.bos]
        marked = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        marked |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.special = np.array(sorted(marked), dtype=np.int64)
        self.special_texts = tuple(marked.values())

    def encode(self, texts: Sequence[str], bos: Sequence[bool], wheres: Sequence[str]) -> list[Encoded]:
        """Tokenise without special tokens; BOS goes in front where asked, unless the text has it already.

        UserError when a token id is not below `vocab_size`, the size of the embedding table.
        """
        out = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        result = []
        for ids, offsets, first, where in zip(
            out["input_ids"], out["offset_mapping"], bos, wheres, strict=True
        ):
            if first and ids[:1] != [self.bos]:
                ids, offsets = [self.bos, *ids], [(0, 0), *offsets]
            array = np.array(ids, dtype=np.int32)
            highest = int(array.max(initial=-1))
            if self.vocab_size is not None and highest >= self.vocab_size:
                raise UserError(
                    f"{where}: token id {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}) is "
                    f"outside the model's {self.vocab_size} embeddings: not this model's tokenizer."
                )
            start, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
            # byte-level tokenizers may leave spaces out of the offsets: each reaches back to the one before
            start[1:] = np.minimum(start[1:], end[:-1])
            result.append(Encoded(array, start, end))
        return result

    def ends_turn(self, text: str) -> bool:
        """Tell whether the text after an assistant's words has a special token, which ends the turn."""
        return any(token in text for token in self.special_texts)

    def labels(self, encoded: Encoded, spans: Iterable[Span]) -> Bool[np.ndarray, " S"]:
        """Mark the tokens that overlap a span's content, and its end mark up to a special token.

        A token that straddles a span's border is a label: without it the span's first characters would never
        be learnt.
        """
        mask = np.zeros(len(encoded.ids), dtype=bool)
        for span in spans:
            mask |= (encoded.end > span.start) & (encoded.start < span.stop)
            ending = np.flatnonzero((encoded.start >= span.stop) & (encoded.end <= span.end))
            stops = np.isin(encoded.ids[ending], self.special)
            if stops.any():
                mask[ending[: int(stops.argmax()) + 1]] = True
        return mask


def draft(record: Record, template: Template, coder: Coder) -> Draft:
    """Lay out one record as text: conversations through the template, all else as it stands plus EOS."""
    if not record.turns:
        text = record.prompt + record.completion
        span = Span(len(record.prompt), len(text), len(text))
        source = Source(record.where, record.prompt, record.completion, record.choices, coder.adds_bos)
        return Draft(text, [span], True, source)
    text, spans = template.render(record.turns, record.where)
    last = spans[-1]
    bos = template.plain and coder.adds_bos
    source = Source(record.where, text[: last.start], text[last.start : last.stop], record.choices, bos)
    # a template that never ends an assistant's turn would teach the model not to stop: EOS follows its words
    unended = not coder.ends_turn(text[last.stop : last.end]) and not text[last.end :].strip()
    return Draft(text[: last.stop] if unended else text, spans, unended, source)


Labelled = tuple[Int32[np.ndarray, " S"], Bool[np.ndarray, " S"]]


def encode_drafts(drafts: Sequence[Draft], coder: Coder) -> Iterator[Labelled]:
    """Yield the tokens of each draft and which of them are labels."""
    sources = [d.source for d in drafts]
    encoded = coder.encode([d.text for d in drafts], [s.bos for s in sources], [s.where for s in sources])
    for one, piece in zip(drafts, encoded, strict=True):
        mask = coder.labels(piece, one.spans)
        tokens = piece.ids
        if one.eos and coder.eos is not None and tokens[-1:].tolist() != [coder.eos]:
            tokens, mask = np.append(tokens, np.int32(coder.eos)), np.append(mask, True)
        mask[:1] = False  # nothing comes before the first token to predict it
        yield tokens, mask


def read_examples(
    path: str | Path,
    tokenizer: Any,
    *,
    max_length: int,
    on_long: OnLong = "truncate",
    on_bad_row: OnBadRow = "error",
    format: str = "auto",
    vocab_size: int | None = None,
) -> Examples:
    """Read a data file (or hub data set) and tokenise it, labels on what the model should say.

    Rows with nothing to train on are dropped and counted; `on_long` says what becomes of rows of more than
    `max_length` tokens. UserError: the file or a row cannot be read (unless `on_bad_row` is "skip"), a row is
    too long and `on_long` is "error", a token is outside `vocab_size`, or no row is left.
    """
    if format != "auto" and format not in FIELDS:
        raise UserError(f"data.format is {format!r}; allowed: auto, {', '.join(FIELDS)}.")
    faults, formats = Faults(on_bad_row), Counter[str]()
    coder, template = Coder(tokenizer, vocab_size), Template(tokenizer)
    kept: list[tuple[Labelled, Source]] = []
    lost = Counter[str]()
    notes: set[str] = set()

    def drafts() -> Iterator[Draft]:
        for row in read_rows(path, faults):
            try:
                record = to_record(row, format)
                drawn = None if record.blank else draft(record, template, coder)
            except UserError as error:
                faults.add(str(error))
                continue
            formats[record.format] += 1
            notes.update(_notes(record, template))
            if drawn is None:
                lost["untrained"] += 1
            else:
                yield drawn

    for chunk in batched(drafts(), 512):
        for one, labelled in zip(chunk, encode_drafts(chunk, coder), strict=True):
            fitted = _fit(labelled, max_length, on_long, one.source.where, lost)
            if fitted is not None:
                kept.append((fitted, one.source))

    if coder.eos is None:
        notes.add("the tokenizer has no EOS token, so none is trained")
    tokens, trained = [ids for (ids, _), _ in kept], [mask for (_, mask), _ in kept]
    report = DataReport(
        path=str(path),
        formats=dict(formats),
        kept=len(tokens),
        unreadable=len(faults.messages),
        untrained=lost["untrained"],
        truncated=lost["truncated"],
        too_long=lost["too_long"],
        max_length=max_length,
        longest=max(map(len, tokens), default=0),
        tokens=sum(map(len, tokens)),
        trained=sum(int(m.sum()) for m in trained),
        notes=tuple(sorted(notes)),
        first_fault=faults.messages[0] if faults.messages else "",
    )
    if not tokens:
        raise UserError(f"{path}: no row is left to train on ({report.rows} read). {report}.")
    return Examples(tokens, trained, report, [source for _, source in kept])


def _fit(
    labelled: Labelled, max_length: int, on_long: OnLong, where: str, lost: Counter[str]
) -> Labelled | None:
    """Cut a row to `max_length`, or None where it is dropped; what happens is counted in `lost`."""
    ids, mask = labelled
    if len(ids) > max_length and on_long == "error":
        raise too_long(where, len(ids), max_length)
    if len(ids) > max_length and on_long == "drop":
        lost["too_long"] += 1
        return None
    if not mask[:max_length].any():
        lost["untrained"] += 1
        return None
    lost["truncated"] += len(ids) > max_length
    return ids[:max_length], mask[:max_length]


def _notes(record: Record, template: Template) -> Iterator[str]:
    if record.turns and template.plain:
        yield "the model has no chat template: turns are written as 'User: …' and 'Assistant: …'"
    elif record.turns and not template.has_system and any(t.role == "system" for t in record.turns):
        yield "the model's template has no system role: system text goes in front of the first user turn"
