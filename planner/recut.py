"""Large-neighbourhood search: pool the jobs of two or three groups and cut them anew, in a random order."""

import random

from planner.greedy import Line, bisect, cut
from planner.groups import Solution, makespan
from planner.instance import Counts, Instance
from planner.pack import merge_counts

FIELDS = ("batch_size", "bucket", "rows")


def pooled_line(instance: Instance, pooled: Counts, rng: random.Random) -> Counts:
    """Order pooled jobs: by length first or last, batch, rank and rows in any order and direction."""
    keys = [(field, rng.choice((1, -1))) for field in rng.sample(FIELDS, len(FIELDS))]
    length_first = rng.random() < 0.8

    def key(item: tuple[int, int]) -> tuple:
        job = instance.classes[item[0]]
        length = (job.row_tokens, job.max_row_tokens, job.data)
        rest = tuple(sign * getattr(job, field) for field, sign in keys)
        return (length, rest, item[0]) if length_first else (rest, length, item[0])

    return tuple(sorted(pooled, key=key))


def recut(instance: Instance, solution: Solution, rounds: int, seed: int = 0, goal: float = 0.0) -> Solution:
    """Return a solution no slower: each round re-cuts the slowest group with one or two others, if that helps
    both.
    """
    rng = random.Random(seed)
    groups = sorted(solution, key=lambda g: -g.seconds)
    free = instance.devices.count - sum(group.degree for group in groups)
    for _ in range(rounds):
        if makespan(groups) <= goal or len(groups) < 2:
            break
        slow = 0 if rng.random() < 0.7 else rng.randrange(len(groups))
        others = [g for g in range(len(groups)) if g != slow]
        chosen = [slow, *rng.sample(others, min(len(others), rng.choice((1, 1, 2))))]
        pool = [groups[g] for g in chosen]
        pooled = merge_counts(*(pack.counts for group in pool for pack in group.packs))
        pattern = [group.degree for group in pool]
        if free >= instance.degrees[0] and rng.random() < 0.5:
            pattern.append(instance.degrees[0])
        rng.shuffle(pattern)
        line = Line(instance, pooled_line(instance, pooled, rng))
        order = tuple(pattern)
        worst = makespan(pool)
        found = cut(line, order, worst * (1 - 1e-4))
        if found is None:
            continue
        found = bisect(lambda C, line=line, order=order: cut(line, order, C), worst * 0.9, found)  # type: ignore[misc]
        groups = [group for g, group in enumerate(groups) if g not in chosen] + found
        groups.sort(key=lambda g: -g.seconds)
        free = instance.devices.count - sum(group.degree for group in groups)
    return groups
