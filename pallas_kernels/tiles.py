"""Tile sizes of the Hopper kernel, apart from it: the choice needs them where Pallas for GPUs is not imported."""

import dataclasses

TILE_M = 128


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
