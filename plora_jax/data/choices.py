"""Multiple choice: which sequences to run, and which log-probabilities make up each option's score.

The score of an option is the mean log-probability of its tokens given the prompt. EOS is no part of an
option: its probability says how likely the text ends there, and would be half of a one-token option's score.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from plora_jax.data.encode import Coder
from plora_jax.data.examples import Examples, Source
from plora_jax.errors import UserError

MAX_DISTINCT = 100


class Choices(NamedTuple):
    """Hold the sequences to run and, for each token to score, where its log-probability is found.

    Arrays `row`, `option`, `sequence`, `position`, `target` have one entry a scored token: the
    hidden state at `position` of `sequences[sequence]` predicts `target`, a token of that row's `option`.
    """

    sequences: list[Int32[np.ndarray, " S"]]
    row: Int32[np.ndarray, " K"]
    option: Int32[np.ndarray, " K"]
    sequence: Int32[np.ndarray, " K"]
    position: Int32[np.ndarray, " K"]
    target: Int32[np.ndarray, " K"]
    correct: Int32[np.ndarray, " rows"]
    options: list[tuple[str, ...]]


def distinct_completions(train: Examples) -> tuple[str, ...]:
    """Return the distinct completions of the training rows, sorted, the options of last resort.

    UserError when there are more than MAX_DISTINCT of them, or only one.
    """
    found = sorted({s.completion for s in train.sources})
    if not 2 <= len(found) <= MAX_DISTINCT:
        raise UserError(
            f"{train.report.path}: metric choice_accuracy needs options, and the rows have {len(found):,} "
            f"distinct completions (2 to {MAX_DISTINCT} could serve). Give each row 'choices', set "
            "data.choices, or use metric loss."
        )
    return tuple(found)


def row_options(
    source: Source, default: Sequence[str] | None, origin: str = "data.choices"
) -> tuple[tuple[str, ...], int]:
    """Return a row's options and the index of the right one.

    Options written without the completion's surrounding spaces ("yes" against " yes") take them over.
    UserError when the row has no options, lists one twice, or its completion is none of them; `origin` says in it
    where `default` is from.
    """
    options = tuple(source.choices or default or ())
    if not options:
        raise UserError(
            f"{source.where}: metric choice_accuracy needs 'choices' in the row, or data.choices."
        )
    right, core = source.completion, source.completion.strip()
    if right not in options:
        lead, _, trail = right.partition(core)
        options = tuple(f"{lead}{o.strip()}{trail}" for o in options)
    if right not in options:
        shown = ", ".join(repr(o.strip()) for o in options[:8]) + (", …" if len(options) > 8 else "")
        origin = "the row's options" if source.choices else origin
        raise UserError(f"{source.where}: the completion {core!r} is none of {origin} ({shown}).")
    if len(set(options)) < len(options):
        raise UserError(f"{source.where}: the same option is listed twice.")
    return options, options.index(right)


def make_choices(
    examples: Examples, tokenizer: Any, *, choices: Sequence[str] | None = None, train: Examples | None = None
) -> Choices:
    """Lay out every option of every row: the row's own, else `choices`, else `train`'s distinct completions.

    Options whose tokens agree up to the last one share a sequence, as do options that begin another option.
    """
    coder = Coder(tokenizer)
    default = tuple(choices) if choices else None
    origin = "data.choices"
    if default is None and train is not None and not all(s.choices for s in examples.sources):
        default, origin = (
            distinct_completions(train),
            "the training rows' completions, which serve where there are no data.choices",
        )
    laid = [row_options(s, default, origin) for s in examples.sources]
    sequences: list[np.ndarray] = []
    scored: list[tuple[int, int, int, int, int]] = []
    for r, (source, (options, _)) in enumerate(zip(examples.sources, laid, strict=True)):
        texts = [source.prompt + option for option in options]
        encoded = coder.encode(texts, [source.bos] * len(texts), [source.where] * len(texts))
        alike: dict[bytes, str] = {}
        for text, piece in zip(options, encoded, strict=True):
            if (other := alike.setdefault(piece.ids.tobytes(), text)) != text:
                raise UserError(f"{source.where}: options {other!r} and {text!r} have the same tokens.")
        homes = _share([e.ids[:-1] for e in encoded], sequences)
        for o, (piece, home) in enumerate(zip(encoded, homes, strict=True)):
            mask = piece.end > len(source.prompt)
            mask[:1] = False
            labels = np.flatnonzero(mask)
            if labels.size == 0:
                raise UserError(f"{source.where}: option {options[o]!r} has no token that follows another.")
            scored += [(r, o, home, int(at) - 1, int(piece.ids[at])) for at in labels]
    row, option, sequence, position, target = np.array(scored, dtype=np.int32).reshape(-1, 5).T
    correct = np.array([index for _, index in laid], dtype=np.int32)
    listed = [options for options, _ in laid]
    return Choices(sequences, row, option, sequence, position, target, correct, listed)


def _share(inputs: list[np.ndarray], sequences: list[np.ndarray]) -> list[int]:
    """Append to `sequences` the inputs that begin no other one; return each input's sequence."""
    keys = [one.tobytes() for one in inputs]
    ordered = sorted(range(len(inputs)), key=keys.__getitem__)
    homes = [-1] * len(inputs)
    # in this order an input that begins others stands right before one of them, so one look ahead is enough
    for i, after in zip(reversed(ordered), [None, *reversed(ordered)], strict=False):
        if after is None or not keys[after].startswith(keys[i]):
            sequences.append(inputs[i])
            homes[i] = len(sequences) - 1
        else:
            homes[i] = homes[after]
    return homes


def option_scores(choices: Choices, logprobs: Float[np.ndarray, " K"]) -> Float[np.ndarray, "rows options"]:
    """Return the mean log-probability of each option from those of its tokens; -inf where no option is."""
    shape = (len(choices.correct), max(map(len, choices.options)))
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, (choices.row, choices.option), logprobs)
    np.add.at(count, (choices.row, choices.option), 1)
    return np.where(count > 0, total / np.maximum(count, 1), -np.inf)


def accuracy(choices: Choices, logprobs: Float[np.ndarray, " K"]) -> float:
    """Return the share of rows whose right option has the highest score; NaN scores never win."""
    scores = np.nan_to_num(option_scores(choices, logprobs), nan=-np.inf)
    best = scores.argmax(axis=1)
    return float(np.mean((best == choices.correct) & np.isfinite(scores.max(axis=1))))
