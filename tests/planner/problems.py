"""Small problems that the planner's tests share, and a hypothesis strategy for random ones."""

from random import Random

from hypothesis import strategies as st

from planner import Devices, JobSpec, decoder_shape, devices
from planner.instance import Instance
from planner.time import cost_model

TINY = decoder_shape("tiny-1B", 16, 2048, 8192, 32, 8, 64, 128_256, tied=True)
QWEN = decoder_shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064)
SETS = (("short", 90.0, 128, 900), ("middle", 152.0, 256, 2500), ("long", 700.0, 1024, 400))


def job(
    n: int, rank: int = 16, batch: int = 4, data: int = 0, epochs: int = 1, eval_tokens: int = 0
) -> JobSpec:
    """Make one job on one of three data sets."""
    name, mean, longest, rows = SETS[data]
    return JobSpec(f"job-{n}", rank, batch, rows * epochs, mean, longest, name, eval_tokens=eval_tokens)


def instance(jobs: list[JobSpec], on: str = "4xA100-40GB", shape=TINY) -> Instance:
    """Make an instance with the shipped cost model."""
    where = devices(on)
    return Instance(jobs, shape, where, "bf16", cost_model(where.spec))


@st.composite
def sweeps(draw, most: int = 12) -> list[JobSpec]:
    """Draw 1 to `most` jobs of mixed ranks, batches, data sets and epochs."""
    n = draw(st.integers(1, most))
    return [
        job(
            i,
            draw(st.sampled_from((8, 16, 64, 128))),
            draw(st.sampled_from((1, 2, 4, 6, 8))),
            draw(st.integers(0, 2)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from((0, 50_000))),
        )
        for i in range(n)
    ]


def crowd(seed: int) -> tuple[list[JobSpec], int]:
    """Draw 40 to 100 jobs of a few kinds, on two data sets of different lengths, and 1 to 16 devices."""
    rng = Random(seed)
    sets = rng.choice(((0, 1), (0, 2), (1, 2)))
    kinds = [
        (
            rng.choice((8, 16, 32, 64, 128)),
            rng.choice((1, 2, 4, 6, 8, 16)),
            rng.choice(sets),
            rng.randint(1, 3),
            rng.choice((0, 50_000)),
        )
        for _ in range(rng.randint(6, 16))
    ]
    return [job(i, *rng.choice(kinds)) for i in range(rng.randint(40, 100))], rng.randint(1, 16)


def mixture(jobs: list[JobSpec], on: str, shape=TINY) -> list[Instance]:
    """Make an instance of each device type, with all the jobs."""
    out: list[Instance] = []
    for part in devices(on).parts:
        first = sum(one.devices.count for one in out)
        cost = cost_model(part.spec)
        out.append(Instance(jobs, shape, part, "bf16", cost, shared=True, first=first))
    return out


def cluster(count: int, kind: str = "A100-40GB") -> Devices:
    """Make devices."""
    return devices(f"{count}x{kind}")
