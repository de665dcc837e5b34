"""Tile sizes of the Hopper kernel, and what shared memory holds, apart from it: `choose` needs no Pallas for GPUs."""

import dataclasses

TILE_M = 128
STEP_BYTES = 128  # of the summed axis in a step of the ring: 64 numbers of 16 bits, 128 of 8
PIECE = 64  # results leave in [64, 64] pieces
SHARED_BYTES = 232_448 - 2_048  # of a Hopper block, less barriers and alignment


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and schedule of one launch; a block computes [128, tile_n]."""

    tile_n: int = 256
    stages: int = 4
    cluster: int = 2  # blocks along M that receive one copy of W by multicast
    minor_n: bool = False  # walk the tiles of a band along N (True) or M
    band: int = 8  # width of a band, for reuse in L2
    out_slots: int = 2
    sms: int = 132


def fit_shared(config: GemmConfig, width: int, piece: int) -> tuple[GemmConfig, int]:
    """Return the configuration with as many slots as fit beside those of `width` rows of A, and their number.

    `piece` is the width in which shrinks leave, from slots of their own if it is less than a result's.
    """

    def size(stages, a_stages, out_slots):
        ring = stages * (TILE_M + config.tile_n) + a_stages * width
        narrow = TILE_M * piece if piece < PIECE else 0
        return STEP_BYTES * ring + 2 * (out_slots * TILE_M * PIECE + narrow)

    for stages in range(config.stages, 1, -1):
        for a_stages in (4, 3, 2) if width else (0,):
            for out_slots in range(config.out_slots, 0, -1):
                if size(stages, a_stages, out_slots) <= SHARED_BYTES:
                    return dataclasses.replace(config, stages=stages, out_slots=out_slots), a_stages
    raise ValueError(f"{config} with {width} rows of A does not fit in shared memory")
