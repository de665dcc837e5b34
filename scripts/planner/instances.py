"""Problems for the planner's experiments: the paper's models and search space, and random instances."""

import random

from planner import Devices, JobSpec, ModelShape, decoder_shape, devices

# layers, d_model, d_ff, heads, kv heads, head size, vocabulary, tied: from each model's published config.json
MODELS: dict[str, ModelShape] = {
    name: decoder_shape(name, *sizes, tied=tied)
    for name, sizes, tied in (
        ("Qwen2.5-3B", (36, 2048, 11008, 16, 2, 128, 151_936), True),
        ("Qwen2.5-7B", (28, 3584, 18944, 28, 4, 128, 152_064), False),
        ("Qwen2.5-14B", (48, 5120, 13824, 40, 8, 128, 152_064), False),
        ("Qwen2.5-32B", (64, 5120, 27648, 40, 8, 128, 152_064), False),
        ("Llama-3.2-3B", (28, 3072, 8192, 24, 8, 128, 128_256), True),
        ("Llama-3.1-8B", (32, 4096, 14336, 32, 8, 128, 128_256), False),
    )
}
RANKS = (8, 16, 32, 64, 128)
ROWS = 7473  # training rows of GSM8K


def paper_jobs(
    count: int = 120, length: int = 1024, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32), seed: int = 0
) -> list[JobSpec]:
    """Draw jobs from the paper's search space: one epoch of equal rows of one length."""
    rng = random.Random(seed)
    return [
        JobSpec(f"job-{i:04d}", rng.choice(RANKS), rng.choice(batches), ROWS, float(length), length, "train")
        for i in range(count)
    ]


def random_instance(seed: int) -> tuple[list[JobSpec], ModelShape, Devices]:
    """Draw an instance: 1 to 64 devices, 5 to 2,000 jobs, one to three data sets, epochs, ranks, batches."""
    rng = random.Random(seed)
    shape = MODELS[rng.choice(sorted(MODELS)[:6])]
    kind = rng.choice(("A100-40GB", "A100-80GB", "H100", "H200"))
    count = round(2 ** rng.uniform(0, 6))
    if shape.name == "Qwen2.5-32B" and kind == "A100-40GB":
        count = max(count, 4)
    n = round(5 * 400 ** rng.random())
    sets = []
    for s in range(rng.randint(1, 3)):
        mean = round(2 ** rng.uniform(6, 10))
        sets.append(
            (f"set{s}", float(mean), min(1024, round(mean * rng.uniform(1.0, 2.0))), rng.randint(500, 10_000))
        )
    epochs = rng.choice(((1,), (1, 2), (1, 2, 3)))
    batches = rng.choice(((1, 2, 4, 8, 16, 32), (1, 2, 4), (8, 16), (4, 8, 12)))
    ranks = rng.choice((RANKS, (8, 16), (32,), (8, 64)))
    jobs = []
    for i in range(n):
        name, mean, longest, rows = rng.choice(sets)
        jobs.append(
            JobSpec(
                f"job-{i:04d}", rng.choice(ranks), rng.choice(batches), rows * rng.choice(epochs),
                min(mean, longest), max(longest, int(mean)), name, eval_tokens=200 * int(mean),
            )
        )  # fmt: skip
    return jobs, shape, devices(f"{count}x{kind}")
