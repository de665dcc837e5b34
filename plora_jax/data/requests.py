"""The log-probabilities that are wanted of a model, and the few sequences that have to be run for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32


@dataclass
class Requests:
    """Collect (sequence, position, target) triples whose log-probabilities are wanted.

    A sequence that begins another one is not run by itself: the model is causal, so its positions are read off the
    longer one. Prompt, options and the completion of a row therefore usually cost one row of compute.
    """

    sequences: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(
        self, sequence: np.ndarray, positions: np.ndarray, targets: np.ndarray
    ) -> Int32[np.ndarray, " n"]:
        """Ask for the log-probability of `targets` after `positions`; return where the results will stand."""
        self.sequences.append(np.asarray(sequence[: int(positions.max()) + 1], np.int32))
        self.positions.append(np.asarray(positions, np.int32))
        self.targets.append(np.asarray(targets, np.int32))
        start, self.size = self.size, self.size + len(targets)
        return np.arange(start, self.size, dtype=np.int32)

    @property
    def tokens(self) -> int:
        """Count the tokens that are run to answer everything."""
        return sum(len(self.sequences[group[0]]) for group in self.carriers())

    def carriers(self) -> list[list[int]]:
        """Group requests by the sequence that carries them: the first of each group begins with all the others."""
        order = sorted(range(len(self.sequences)), key=lambda i: self.sequences[i].tolist(), reverse=True)
        groups: list[list[int]] = []
        for i in order:
            carrier = self.sequences[groups[-1][0]] if groups else None
            mine = self.sequences[i]
            if carrier is not None and np.array_equal(carrier[: len(mine)], mine):
                groups[-1].append(i)
            else:
                groups.append([i])
        return sorted(groups, key=lambda group: len(self.sequences[group[0]]))


def lay_out(
    requests: Requests,
    groups: Sequence[Sequence[int]],
    starts: np.ndarray,
    size: int,
    length: int,
    width: int,
) -> tuple[tuple[Int32[np.ndarray, "B _"], ...], Int32[np.ndarray, "B P"]]:
    """Return the arrays of one batch, as the evaluation step takes them, and where its results will stand.

    The arrays are tokens, positions and rows [B, S], trained positions and targets [B, P].

    Args:
      requests: all of them.
      groups: of the batch, as `carriers` gives them; at most `size`, the rest is padding.
      starts: where each request's results begin.
      size, length, width: B, S and P.
    """
    tokens, rows = np.zeros((size, length), np.int32), np.full((size, length), -1, np.int32)
    trained, targets = np.zeros((size, width), np.int32), np.full((size, width), -1, np.int32)
    ids = np.full((size, width), -1, np.int64)
    for row, group in enumerate(groups):
        sequence = requests.sequences[group[0]]
        tokens[row, : len(sequence)], rows[row, : len(sequence)] = sequence, row
        at = 0
        for i in group:
            n = len(requests.targets[i])
            trained[row, at : at + n], targets[row, at : at + n] = requests.positions[i], requests.targets[i]
            ids[row, at : at + n] = np.arange(starts[i], starts[i] + n)
            at += n
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (size, length))
    return (tokens, positions, rows, trained, targets), ids
