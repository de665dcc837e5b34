"""Large-neighbourhood search: pool the jobs of two to four groups and make the groups anew: cut a line of the
jobs in a random order, or fill group after group at disturbed prices. Where jobs are few, two of the groups may become
one of twice the degree, or one two of half of it.
"""

import random

import numpy as np

from planner.fill import Prices, Tables, fill
from planner.greedy import Line, Pattern, bisect, cut
from planner.groups import Place, Solution, makespan, remember, unused
from planner.instance import Counts, Instance
from planner.pack import merge_counts

FIELDS = ("batch_size", "bucket", "rows")
NOISE = (0.01, 0.03, 0.06)  # deviations of the logarithms of prices
REGROUP = 0.4  # chance that groups made anew are joined or halved, where there are few jobs a device
HASTE = (0.001, 0.003, 0.01, 0.02)  # how much faster than the slowest the groups are filled for


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


def regrouped(pattern: list[Place], degrees: tuple[int, ...], rng: random.Random) -> list[Place]:
    """Return a pattern with two groups of one degree joined, or one halved, at random; itself where neither can be."""
    out = [place.degree for place in pattern]
    joined = [d for d in degrees if 2 * d in degrees and out.count(d) > 1]
    halved = [d for d in degrees if 2 * d in degrees and 2 * d in out]
    changes = [([d, d], [2 * d]) for d in joined] + [([2 * d], [d, d]) for d in halved]
    if not changes:
        return pattern
    gone, new = rng.choice(changes)
    for d in gone:
        out.remove(d)
    return [Place(d) for d in out + new]


def recut(
    instance: Instance,
    tables: Tables,
    prices: Prices,
    solution: Solution,
    rounds: int,
    seed: int = 0,
    goal: float = 0.0,
) -> Solution:
    """Return a solution no slower: each round makes two to four groups anew, mostly the slowest among them, and
    keeps them if the slowest of them got faster.
    """
    rng = random.Random(seed)
    groups = sorted(solution, key=lambda g: -g.seconds)
    free = unused(instance, groups)
    for _ in range(rounds):
        if makespan(groups) <= goal or len(groups) < 2:
            break
        slow = 0 if rng.random() < 0.7 else rng.randrange(len(groups))
        others = [g for g in range(len(groups)) if g != slow]
        chosen = [slow, *rng.sample(others, min(len(others), rng.choice((1, 1, 2, 2, 3))))]
        pool = [groups[g] for g in chosen]
        pooled = merge_counts(*(pack.counts for group in pool for pack in group.packs))
        pattern = [Place(group.degree, group.on, instance.free_at(group.on)) for group in pool]
        if len(free) and rng.random() < 0.5:
            pattern.append(free[0])
        if instance.met is not None and rng.random() < REGROUP:
            pattern = regrouped(pattern, instance.degrees, rng)
        rng.shuffle(pattern)
        worst = makespan(pool)
        if rng.random() < 0.5:
            found = _cut(instance, pooled_line(instance, pooled, rng), tuple(pattern), worst)
        else:
            jobs = np.zeros(len(instance.classes), dtype=int)
            jobs[[k for k, _ in pooled]] = [n for _, n in pooled]
            deviation = rng.choice(NOISE)
            noise = np.exp([rng.gauss(0.0, deviation) for _ in jobs])
            disturbed = {d: worth * noise for d, worth in prices.items()}
            found = fill(instance, tables, disturbed, jobs, pattern, worst * (1 - rng.choice(HASTE)))
        for group in found or ():
            remember(instance, group)
        if found is None or makespan(found) > worst * (1 - 1e-4):
            continue
        groups = [group for g, group in enumerate(groups) if g not in chosen] + found
        groups.sort(key=lambda g: -g.seconds)
        free = unused(instance, groups)
    return groups


def _cut(instance: Instance, items: Counts, pattern: Pattern, worst: float) -> Solution | None:
    """Cut a line into groups of the pattern's degrees, all faster than `worst`, as fast as bisection finds."""
    line = Line(instance, items)
    found = cut(line, pattern, worst * (1 - 1e-4))
    return found and bisect(lambda C: cut(line, pattern, C), worst * 0.9, found)
