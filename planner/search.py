"""Local search: move, swap, split and merge packs of jobs between device groups, accepting by annealing.

What falls is E = (Σ_g t_g^P / g)^(1/P): near the makespan for large P, yet work saved on any group counts,
since it makes room. The random numbers are seeded and the number of proposals is fixed by the size of the
problem, so the same input gives the same plan.
"""

import math
import random

from planner.groups import Group, Solution, makespan, remember, unused
from planner.instance import Counts, Instance
from planner.pack import Choice, choose_pack, group_seconds, merge_counts

POWER = 20
Parts = dict[int, tuple[Choice, ...]]  # group number -> the packs it would have


class State:
    """Hold a solution under change: the packs and seconds of every group, unused devices as empty groups."""

    def __init__(self, instance: Instance, solution: Solution) -> None:
        self.instance = instance
        solution = [
            *solution,
            *(Group(place.degree, (), 0.0, place.on) for place in unused(instance, solution)),
        ]
        self.degrees = [group.degree for group in solution]
        self.on = [group.on for group in solution]
        self.start = [instance.free_at(on) for on in self.on]
        self.packs: list[tuple[Choice, ...]] = [group.packs for group in solution]
        self.seconds = [group.seconds for group in solution]
        self.scale = max(self.seconds)
        self.energy_sum = sum(self.term(s) for s in self.seconds)

    def term(self, seconds: float) -> float:
        """Return one group's part of the energy."""
        return (seconds / self.scale) ** POWER

    def energy(self, total: float) -> float:
        """Return E from a sum of terms, in units of the first makespan."""
        return (total / len(self.seconds)) ** (1 / POWER)

    def try_parts(self, parts: Parts) -> tuple[float, dict[int, float]]:
        """Return the sum of terms if some groups had other packs, and those groups' seconds."""
        seconds = {g: self.end(g, packs) for g, packs in parts.items()}
        change = sum(self.term(s) - self.term(self.seconds[g]) for g, s in seconds.items())
        return self.energy_sum + change, seconds

    def end(self, g: int, packs: tuple[Choice, ...]) -> float:
        """Return when a group would end with other packs."""
        return self.start[g] + group_seconds(self.instance, list(packs)) if packs else 0.0

    def accept(self, parts: Parts, total: float, seconds: dict[int, float]) -> None:
        """Make a change."""
        for g, packs in parts.items():
            self.packs[g] = packs
            self.seconds[g] = seconds[g]
            if self.instance.met is not None:
                remember(self.instance, Group(self.degrees[g], packs, seconds[g]))
        self.energy_sum = total

    def solution(self) -> Solution:
        """Return the groups in use."""
        return [
            Group(d, packs, seconds, on)
            for d, packs, seconds, on in zip(self.degrees, self.packs, self.seconds, self.on, strict=True)
            if packs
        ]


def take(counts: Counts, k: int, n: int) -> Counts:
    """Take n jobs of a class away."""
    return tuple((c, have - n if c == k else have) for c, have in counts if c != k or have > n)


class Proposer:
    """Propose changes to a state at random, from a seed."""

    def __init__(self, state: State, seed: int) -> None:
        self.state = state
        self.rng = random.Random(seed)

    def propose(self) -> Parts | None:
        """Return the changed groups of one random change; None where the draw makes no sense."""
        kind = self.rng.random()
        if kind < 0.40:
            return self.relocate()
        if kind < 0.75:
            return self.swap()
        if kind < 0.85:
            return self.move_packs()
        return self.split() if kind < 0.93 else self.merge()

    def source(self) -> tuple[int, int] | None:
        """Draw a pack, of the slower of two random groups."""
        state, rng = self.state, self.rng
        a, b = rng.randrange(len(state.packs)), rng.randrange(len(state.packs))
        g = a if state.seconds[a] >= state.seconds[b] else b
        return (g, rng.randrange(len(state.packs[g]))) if state.packs[g] else None

    def draw(self, counts: Counts) -> tuple[int, int]:
        """Draw some jobs of one class of a pack: mostly one, at times half or all."""
        k, have = counts[self.rng.randrange(len(counts))]
        amount = min(have, self.rng.choice((1, 1, 1, 2, 3, max(1, have // 2), have)))
        return k, amount

    def change(self, g: int, p: int, out: Counts, h: int, q: int | None, into: Counts) -> Parts | None:
        """Give pack p of group g the jobs `out`, and pack q of group h (None: a new one) the jobs `into`."""
        state = self.state
        parts = {g: list(state.packs[g]), h: list(state.packs[h])}
        if h == g:
            parts[h] = parts[g]
        fresh = choose_pack(state.instance, into, state.degrees[h])
        if fresh is None:
            return None
        if q is None:
            parts[h].append(fresh)
        else:
            parts[h][q] = fresh
        if out:
            left = choose_pack(state.instance, out, state.degrees[g])
            if left is None:
                return None
            parts[g][p] = left
        else:
            del parts[g][p]
        return {group: tuple(packs) for group, packs in parts.items()}

    def suits(self, k: int, pack: Choice) -> bool:
        """Say whether a class of jobs leaves a pack's program as it is: same length, rows and bucket large enough."""
        job, need = self.state.instance.classes[k], pack.need
        return (
            job.batch_size % pack.m == 0
            and job.bucket <= need.bucket
            and job.max_row_tokens <= need.S_max
            and job.row_tokens <= need.S <= 1.2 * job.row_tokens
        )

    def partner(self, g: int, p: int, k: int) -> tuple[int, int] | None:
        """Draw another pack, preferring those whose program a class of jobs leaves as it is."""
        packs, found = self.state.packs, None
        for _ in range(6):
            h = self.rng.randrange(len(packs))
            if packs[h]:
                q = self.rng.randrange(len(packs[h]))
                if (h, q) != (g, p):
                    found = (h, q)
                    if self.suits(k, packs[h][q]):
                        break
        return found

    def relocate(self) -> Parts | None:
        """Move jobs of one class to another pack, at times to a new pack of a group."""
        source = self.source()
        if source is None:
            return None
        g, p = source
        packs = self.state.packs
        counts = packs[g][p].counts
        k, n = self.draw(counts)
        if self.rng.random() < 0.1:
            return self.change(g, p, take(counts, k, n), self.rng.randrange(len(packs)), None, ((k, n),))
        target = self.partner(g, p, k)
        if target is None:
            return None
        h, q = target
        return self.change(g, p, take(counts, k, n), h, q, merge_counts(packs[h][q].counts, ((k, n),)))

    def swap(self) -> Parts | None:
        """Exchange jobs of two classes between two packs."""
        source = self.source()
        if source is None:
            return None
        g, p = source
        mine = self.state.packs[g][p]
        k, n = self.draw(mine.counts)
        target = self.partner(g, p, k)
        if target is None:
            return None
        h, q = target
        theirs = self.state.packs[h][q].counts
        suited = tuple(item for item in theirs if item[0] != k and self.suits(item[0], mine))
        c, o = self.draw(suited or theirs)
        if k == c:
            return None
        out = merge_counts(take(mine.counts, k, n), ((c, o),))
        into = merge_counts(take(theirs, c, o), ((k, n),))
        return self.change(g, p, out, h, q, into)

    def move_packs(self) -> Parts | None:
        """Move a whole pack to another group, at times against one of its packs."""
        source = self.source()
        h = self.rng.randrange(len(self.state.packs))
        if source is None or source[0] == h:
            return None
        g, p = source
        degrees, packs = self.state.degrees, self.state.packs
        mine, theirs = list(packs[g]), list(packs[h])
        moved = choose_pack(self.state.instance, mine.pop(p).counts, degrees[h])
        if theirs and self.rng.random() < 0.5:
            back = choose_pack(
                self.state.instance, theirs.pop(self.rng.randrange(len(theirs))).counts, degrees[g]
            )
            if back is None:
                return None
            mine.append(back)
        if moved is None:
            return None
        return {g: tuple(mine), h: (*theirs, moved)}

    def split(self) -> Parts | None:
        """Split a pack in two by batch size, rank bucket, rows or data, the second part on any group."""
        source = self.source()
        if source is None:
            return None
        g, p = source
        counts = self.state.packs[g][p].counts
        if len(counts) < 2:
            return None
        jobs = self.state.instance.classes
        pivot = jobs[self.rng.choice(counts)[0]]
        field = self.rng.choice(("batch_size", "bucket", "rows", "row_tokens"))
        limit = getattr(pivot, field)
        out = tuple(item for item in counts if getattr(jobs[item[0]], field) >= limit)
        into = tuple(item for item in counts if getattr(jobs[item[0]], field) < limit)
        if not into:
            return None
        h = self.rng.choice((g, self.rng.randrange(len(self.state.packs))))
        return self.change(g, p, out, h, None, into)

    def merge(self) -> Parts | None:
        """Put all of a pack's jobs into another pack."""
        source = self.source()
        if source is None:
            return None
        g, p = source
        h = self.rng.choice((g, self.rng.randrange(len(self.state.packs))))
        others = [q for q in range(len(self.state.packs[h])) if (h, q) != (g, p)]
        if not others:
            return None
        q = self.rng.choice(others)
        into = merge_counts(self.state.packs[h][q].counts, self.state.packs[g][p].counts)
        return self.change(g, p, (), h, q, into)


def improve(
    instance: Instance,
    solution: Solution,
    proposals: int,
    seed: int = 0,
    heat: float = 0.004,
    goal: float = 0.0,
) -> Solution:
    """Return the best solution met in a number of proposals; stop early at a makespan of `goal`.

    `heat` is the first temperature as a share of the makespan; it falls geometrically to a hundredth.
    """
    state = State(instance, solution)
    proposer = Proposer(state, seed)
    best, best_s = solution, makespan(solution)
    energy = state.energy(state.energy_sum)
    for n in range(proposals):
        parts = proposer.propose()
        if parts is None:
            continue
        total, seconds = state.try_parts(parts)
        after = state.energy(total)
        temperature = heat * 0.01 ** (n / proposals)
        if after <= energy or proposer.rng.random() < math.exp((energy - after) / temperature):
            state.accept(parts, total, seconds)
            energy = after
            if after < 1.2 * best_s / state.scale and max(state.seconds) < best_s * (1 - 1e-9):
                best, best_s = state.solution(), max(state.seconds)
                if best_s <= goal:
                    break
    return best
