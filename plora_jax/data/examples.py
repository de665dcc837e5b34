"""Tokenised training rows with their labels, and the one line that says what became of the file's rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64


class Source(NamedTuple):
    """Hold one row's text for metrics: what the model is given, what it should answer, the options if any."""

    where: str
    prompt: str
    completion: str
    choices: tuple[str, ...] | None
    bos: bool  # the prompt's tokens begin with BOS


@dataclass(frozen=True)
class DataReport:
    """Count what became of a file's rows; str() is the one line shown to the user."""

    path: str
    formats: dict[str, int]
    kept: int
    unreadable: int
    untrained: int  # well-formed, but nothing in them to train on
    truncated: int
    too_long: int  # dropped for their length
    max_length: int
    longest: int
    tokens: int
    trained: int
    notes: tuple[str, ...] = ()
    first_fault: str = ""

    @property
    def rows(self) -> int:
        """Count the rows read, whatever became of them."""
        return self.kept + self.unreadable + self.untrained + self.too_long

    def __str__(self) -> str:
        formats = " + ".join(
            name if len(self.formats) == 1 else f"{n} {name}" for name, n in self.formats.items()
        )
        parts = [
            f"{self.path}: {formats}, {self.kept:,} of {self.rows:,} rows, {self.tokens:,} tokens "
            f"({self.trained:,} trained), longest {self.longest} of at most {self.max_length}"
        ]
        for count, what in (
            (self.truncated, f"truncated to {self.max_length}"),
            (self.too_long, f"dropped, longer than {self.max_length}"),
            (self.untrained, "dropped, nothing to train on"),
            (self.unreadable, f"skipped, unreadable (first: {self.first_fault})"),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class Examples:
    """Hold n token sequences; `trained[i]` marks the tokens of `tokens[i]` that are labels.

    The first token is never a label. `digest` names the content, so that equal data can be told by it.
    """

    tokens: Sequence[Int32[np.ndarray, " S"]]
    trained: Sequence[Bool[np.ndarray, " S"]]
    report: DataReport
    sources: Sequence[Source] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Count the tokens of each row."""
        return np.array([len(t) for t in self.tokens], dtype=np.int64)

    @cached_property
    def counts(self) -> Int64[np.ndarray, " n"]:
        """Count the labels of each row."""
        return np.array([int(t.sum()) for t in self.trained], dtype=np.int64)

    @cached_property
    def heads(self) -> list[Int32[np.ndarray, " P"]]:
        """Give, for each row, the positions that predict a label: the one before each label."""
        return [np.flatnonzero(t[1:]).astype(np.int32) for t in self.trained]

    @cached_property
    def targets(self) -> list[Int32[np.ndarray, " P"]]:
        """Give, for each row, the label at each of `heads`."""
        return [t[h + 1] for t, h in zip(self.tokens, self.heads, strict=True)]

    @cached_property
    def digest(self) -> str:
        """Name the tokens and labels: 16 hexadecimal digits of their SHA-256."""
        sha = hashlib.sha256()
        for tokens, trained in zip(self.tokens, self.trained, strict=True):
            sha.update(len(tokens).to_bytes(4, "little") + tokens.astype("<i4").tobytes() + trained.tobytes())
        return sha.hexdigest()[:16]


def overlap(train: Examples, evaluation: Examples) -> str:
    """Return a warning with the count of evaluation rows that are training rows too; "" when none is."""
    seen = {t.tobytes() for t in train.tokens}
    twice = sum(t.tobytes() in seen for t in evaluation.tokens)
    if not twice:
        return ""
    return (
        f"{twice:,} of {len(evaluation):,} rows of {evaluation.report.path} are also in {train.report.path}: "
        "the score on them says nothing about new data"
    )
