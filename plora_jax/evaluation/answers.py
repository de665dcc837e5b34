"""Answers in generated text: the prompts to answer, and how an answer is read out of a text. Imports no JAX."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from plora_jax.data.encode import Coder
from plora_jax.data.examples import Examples, Source
from plora_jax.data.shapes import split_lengths
from plora_jax.data.template import Template
from plora_jax.errors import UserError
from plora_jax.evaluation.metrics import UserMetric

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign counts where nothing stands before it: "3-4" holds 3 and 4
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))"
    r"(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
ALLOWED = "whole, last_number, {after: TEXT} or {regex: PATTERN}"
TRIED = 4  # references that a user's metric is tried on before anything is trained
AnswerValue = str | tuple[tuple[str, str], ...]  # as the configuration holds it


class Answer(NamedTuple):
    """Say where the answer stands in a text.

    kind: whole | last_number | after (the first line after the first `mark`) | regex (the first match of `mark`: its
    first group that took part, or all of it).
    """

    kind: str
    mark: str = ""

    def extract(self, text: str) -> str | None:
        """Return the answer, such that equal answers are equal texts; None if the text has none.

        Spaces around it do not count, and neither does how a number is written ("1,234.50" is "1234.5"), except of a
        whole text.
        """
        text = text.strip()
        if self.kind == "whole":
            return text or None
        if self.kind == "last_number":
            found = NUMBER.findall(text)
            return _value(found[-1]) if found else None
        if self.kind == "after":
            lines = text.partition(self.mark)[2].strip().splitlines()
            return _value(lines[0].strip()) if lines else None
        match = re.search(self.mark, text)
        if match is None:
            return None
        taken = next((group for group in match.groups() if group is not None), None)
        return _value((match[0] if taken is None else taken).strip()) or None


def make_answer(value: AnswerValue) -> Answer:
    """Read `data.answer`; a ValueError says what is wrong with it."""
    if isinstance(value, str):
        if value not in ("whole", "last_number"):
            raise ValueError(f"{value!r} is not known; expected {ALLOWED}")
        return Answer(value)
    if len(value) != 1 or value[0][0] not in ("after", "regex"):
        raise ValueError(f"{dict(value)} is not one of {ALLOWED}")
    ((kind, mark),) = value
    if not mark.strip():
        raise ValueError(f"{kind} is empty; expected {ALLOWED}")
    if kind == "regex":
        try:
            re.compile(mark)
        except re.error as error:
            raise ValueError(f"{mark!r} is not a regular expression: {error}") from None
    return Answer(kind, mark)


def parse_answer(text: str) -> AnswerValue:
    """Read `--answer`: whole, last_number, after:TEXT or regex:PATTERN; a ValueError says what is wrong with it."""
    kind, colon, mark = text.partition(":")
    value: AnswerValue = ((kind, mark),) if colon else text
    make_answer(value)
    return value


def _value(text: str) -> str:
    """Return a number in one form of the many it can be written in, and any other text as it is."""
    if not NUMBER.fullmatch(text):
        return text
    try:
        value = Decimal(text.replace(",", "").replace("\u2212", "-")).normalize(Context(prec=len(text)))
    except ArithmeticError:  # an exponent beyond all bounds
        return text
    return f"{value:f}" if value and abs(value.adjusted()) < 100 else str(value or 0)


@dataclass(frozen=True)
class Questions:
    """Hold the rows of a held-out part as prompts to answer, and what the answers are graded by."""

    prompts: list[Int32[np.ndarray, " P"]]
    repeated: list[str]  # ends of the prompts that the first token of an answer spells out once more
    references: list[str]  # what each row's answer should be, without surrounding spaces
    stops: frozenset[int]
    new_tokens: int
    tokenizer: Callable[[], Any]  # made when it is needed
    metric: Answer | UserMetric

    @property
    def proportion(self) -> bool:
        """Tell whether the values of `grade` are 0 and 1."""
        return isinstance(self.metric, Answer)

    def grade(self, texts: Sequence[str]) -> Float[np.ndarray, " rows"]:
        """Return the value of every row from the generated texts."""
        if isinstance(self.metric, Answer):
            extract = self.metric.extract
            pairs = zip(texts, self.references, strict=True)
            return np.array([float(extract(text) == extract(reference)) for text, reference in pairs])
        return self.metric(texts, self.references)

    def texts(self, answers: Sequence[Int32[np.ndarray, " n"]]) -> list[str]:
        """Return generated tokens as text, without special tokens, stops and surrounding spaces."""
        kept = [[int(t) for t in tokens if int(t) not in self.stops] for tokens in answers]
        texts = self.tokenizer().batch_decode(
            kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [t.removeprefix(end).strip() for t, end in zip(texts, self.repeated, strict=True)]

    @property
    def longest(self) -> int:
        """Count the tokens of the longest prompt, padding included, with its longest answer."""
        return split_lengths(np.array([len(prompt) for prompt in self.prompts]), 1)[0] + self.new_tokens

    @property
    def tokens(self) -> int:
        """Count the tokens that are run at most, for one adapter."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.new_tokens


def make_questions(
    examples: Examples,
    tokenizer: Any,
    metric: Answer | UserMetric,
    *,
    new_tokens: int,
    stops: Sequence[int] = (),
) -> Questions:
    """Lay out the rows of a held-out part: each is asked for its completion, or its last assistant turn.

    A prompt's tokens are those that a training row begins with: what is before its first token to learn. So a model
    that learnt " yes" as one token after "A:" goes on from "A:" also where the space belongs to the prompt.

    Args:
      examples: the rows.
      tokenizer: the model's.
      metric: how an answer is read out of prediction and reference, which must agree; or a user's metric.
      new_tokens: the most tokens of an answer.
      stops: ids that end an answer, besides the tokenizer's EOS and what its chat template ends a turn with.

    Raises:
      UserError: a row has no prompt, one that is too long, or no answer can be read out of its completion; or the
        user's metric fails on the references themselves.
    """
    coder = Coder(tokenizer)
    sources = examples.sources
    encoded = coder.encode(
        [s.prompt + s.completion for s in sources], [s.bos for s in sources], [s.where for s in sources]
    )
    prompts, repeated = [], []
    for source, piece in zip(sources, encoded, strict=True):
        first = int((piece.end > len(source.prompt)).argmax())
        limit = examples.report.max_length
        if not 0 < first <= limit:
            wrong = "nothing to go on from" if first == 0 else f"{first} tokens, more than max_length {limit}"
            raise UserError(f"{source.where}: the prompt has {wrong}, and the metric asks for its answer.")
        prompts.append(piece.ids[:first])
        repeated.append(source.prompt[int(piece.start[first]) :])
    references = [s.completion.strip() for s in sources]
    if isinstance(metric, Answer):
        for source in sources:
            _check_answer(metric, source)
    else:
        metric(references[:TRIED], references[:TRIED])
    ends = frozenset(stops) | chat_ends(tokenizer)
    return Questions(prompts, repeated, references, ends, new_tokens, lambda: tokenizer, metric)


def _check_answer(answer: Answer, source: Source) -> None:
    if answer.extract(source.completion) is None:
        where = answer.kind if answer.kind == "last_number" else f"{answer.kind} {answer.mark!r}"
        raise UserError(f"{source.where}: data.answer {where} finds no answer in {source.completion[:80]!r}.")


def chat_ends(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer by the tokenizer alone: its EOS, and the end mark of an assistant's turn."""
    coder, tail = Coder(tokenizer), Template(tokenizer).tail
    marks = [i for i in coder.encode([tail], [False], ["chat template"])[0].ids if i in coder.special]
    return frozenset(int(i) for i in [coder.eos, *marks[:1]] if i is not None)
