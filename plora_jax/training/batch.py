"""What flows into the packed step: one rectangular micro-batch for every slot of a pack."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int32


class Batch(NamedTuple):
    """Hold one micro-step of tokens for J slots, m sequences each, S positions, P trained positions.

    `rows` is the example's index in its data set, and -1 marks padding; two positions of one sequence attend to
    each other only when their `rows` agree, so several examples may share a sequence. `positions` restart at 0 for
    each example. The head is computed at `trained` alone: `trained[p] = s` means that the hidden state at
    position s predicts `targets[p]`; a target of -1 is padding and adds nothing.
    """

    tokens: Int32[Array, "J m S"]
    positions: Int32[Array, "J m S"]
    rows: Int32[Array, "J m S"]
    trained: Int32[Array, "J m P"]
    targets: Int32[Array, "J m P"]
    epoch: Int32[Array, " J"]
    close: Bool[Array, " J"]  # this micro-step ends slot j's optimizer batch
    active: Bool[Array, " J"]  # slot j trains at all in this micro-step
