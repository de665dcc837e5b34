"""The published method: DTM chooses packs of greatest throughput for the free devices, the job planner
repeats it.

As published, a job keeps its native batch, every job of a pack takes the same number of steps, and a pack
ends at a barrier; value is the rank. On our step, a slot holds one row and jobs of equal rows end together;
memory and time come from our models either way. Source: PLoRA (arXiv 2508.02932), algorithm DTM and its job
planner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.instance import Counts, Instance
from planner.knapsack import Items, Knapsack, best_ratio, bounded_knapsack
from planner.memory import HEAD_CHUNK, StepShape, logits_bytes, memory_terms
from planner.pack import choose_pack
from planner.placed import Placed


class Part(NamedTuple):
    """Hold one pack of a policy: degree, numbers of jobs by kind, and its throughput Σ value / T."""

    degree: int
    jobs: tuple[int, ...]
    ratio: float


@dataclass
class Published:
    """Hold one run of the published method: variant, knapsack solver, and what has been solved already.

    Jobs that the method cannot tell apart (equal rank bucket, rows a slot, lengths, rows) are one kind.
    """

    instance: Instance
    native: bool = False  # native batches (as published), else one row a slot (on our step)
    knapsack: Knapsack = bounded_knapsack
    memo: dict = field(default_factory=dict)
    kinds: list[list[int]] = field(default_factory=list)  # the classes of each kind

    def __post_init__(self) -> None:
        found: dict[tuple, list[int]] = {}
        for k, job in enumerate(self.instance.classes):
            need = self.instance.need(((k, 1),))._replace(divisor=0)
            found.setdefault((need, self.rows(k), job.rows, job.data), []).append(k)
        self.kinds = list(found.values())

    def rows(self, k: int) -> int:
        """Return the rows a slot holds for a class."""
        return self.instance.classes[k].batch_size if self.native else 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Count the jobs of each kind."""
        return tuple(sum(self.instance.counts[k][1] for k in kind) for kind in self.kinds)

    def slot_terms(self, kind: int, degree: int) -> tuple[float, float, float, float]:
        """Return (bytes of a slot, bytes of the rest, fixed seconds, seconds of a slot) for one job of a
        kind.
        """
        key = ("terms", kind, degree)
        if key not in self.memo:
            instance, k = self.instance, self.kinds[kind][0]
            job, need = instance.classes[k], instance.need(((k, 1),))
            policy = "layer" if "layer" in instance.policies else instance.policies[0]
            step = StepShape(
                degree, 1, self.rows(k), need.S_max, need.bucket, policy, need.optimizers, job.targets
            )
            model = instance.cost.memory
            terms = memory_terms(instance.shape, step, instance.precision, instance.devices.spec)
            sized = {name: getattr(model, name) * value for name, value in terms.items()}
            rest = sized.pop("weights") + model.fixed_bytes
            rest += model.logits * logits_bytes(instance.shape, HEAD_CHUNK, instance.precision)
            sized.pop("logits")
            cost = instance.step_cost(degree, policy, need)
            tokens = self.rows(k) * need.S
            slot_s = cost.c * tokens + (cost.a0 + cost.a1 * tokens) * need.bucket
            self.memo[key] = (sum(sized.values()), rest, cost.t0, slot_s)
        return self.memo[key]

    def F(self, degree: int, counts: tuple[int, ...]) -> Part:
        """Return the pack of greatest Σ rank / T on `degree` devices."""
        key = ("F", degree, counts)
        if key not in self.memo:
            K = range(len(counts))
            terms = [self.slot_terms(k, degree) for k in K]
            values = tuple(float(self.instance.classes[self.kinds[k][0]].bucket) for k in K)
            items = Items(values, tuple(t[3] for t in terms), tuple(t[0] for t in terms), counts)
            margin = 1 + self.instance.cost.memory.margin
            room = self.instance.limit / margin - max(t[1] for t in terms)
            jobs, ratio = (0,) * len(counts), 0.0
            if room > 0:
                jobs, ratio = best_ratio(items, terms[0][2], room, self.knapsack)
            self.memo[key] = Part(degree, jobs, ratio)
        return self.memo[key]

    def dtm(self, free: int, counts: tuple[int, ...]) -> tuple[float, tuple[Part, ...]]:
        """Return the policy for the free devices of greatest Σ Σ rank / T: dynamic programming on (free,
        counts).

        Partial policies cover different jobs, so their predicted times do not compare; throughput does.
        """
        if free <= 0 or not any(counts):
            return 0.0, ()
        key = ("dtm", free, counts)
        if key not in self.memo:
            best: tuple[float, tuple[Part, ...]] = (0.0, ())
            for d in [d for d in reversed(self.instance.devices.degrees) if d <= free]:
                part = self.F(d, counts)
                if not any(part.jobs):
                    continue
                left = tuple(c - n for c, n in zip(counts, part.jobs, strict=True))
                ratio, rest = self.dtm(free - d, left)
                if ratio + part.ratio > best[0]:
                    best = (ratio + part.ratio, (part, *rest))
            self.memo[key] = best
        return self.memo[key]

    def literal_dtm(self, free: int, counts: tuple[int, ...]) -> float:
        """Return the best policy's throughput by the recursion as printed: every branch, nothing shared."""
        if free <= 0 or not any(counts):
            return 0.0
        best, d = 0.0, 2 ** (free.bit_length() - 1)
        while d >= 1:
            part = self.F(d, counts)
            left = tuple(c - n for c, n in zip(counts, part.jobs, strict=True))
            if any(part.jobs):
                best = max(best, part.ratio + self.literal_dtm(free - d, left))
            d //= 2
        return best

    def pack_seconds(self, part: Part) -> float:
        """Return how long a pack runs: the steps of its longest job at the pack's step time (barrier)."""
        used = [(k, n) for k, n in enumerate(part.jobs) if n]
        first = [self.kinds[k][0] for k, _ in used]
        steps = max(-(-self.instance.classes[k].rows // self.rows(k)) for k in first)
        terms = [(self.slot_terms(k, part.degree), n) for k, n in used]
        return steps * (terms[0][0][2] + sum(t[3] * n for t, n in terms))

    def schedule(self) -> float:
        """Return the makespan of the job planner with the variant's own times."""
        return _job_planner(self, lambda part, jobs: self.pack_seconds(part))[0]

    def placed(self) -> tuple[float, list[Placed]] | None:
        """Return the job planner's schedule with every pack run by our step; None where a pack has no
        program.
        """
        instance = self.instance

        def seconds(part: Part, jobs: Counts) -> float:
            pack = choose_pack(instance, jobs, part.degree)
            return float("inf") if pack is None else pack.run_s

        makespan, spans = _job_planner(self, seconds)
        if makespan == float("inf"):
            return None
        out = []
        for part, jobs, on, start, setup in spans:
            pack = choose_pack(instance, jobs, part.degree)
            assert pack is not None
            out.append(Placed(pack, on, start, setup))
        return makespan, out


Span = tuple[Part, Counts, tuple[int, ...], float, float]  # pack, its jobs, devices, start, set-up seconds


def _job_planner(method: Published, seconds: Callable[[Part, Counts], float]) -> tuple[float, list[Span]]:
    """Run DTM whenever devices are free, until no job is left; a pack pays for compiling, a new group for
    loading.
    """
    instance = method.instance
    left = method.counts
    stock = [[[k, instance.counts[k][1]] for k in kind] for kind in method.kinds]
    free = list(range(instance.devices.count))
    running: list[tuple[float, tuple[int, ...]]] = []
    last: dict[int, tuple[int, ...]] = {}
    clock, end = 0.0, 0.0
    spans: list[Span] = []
    while any(left):
        _, policy = method.dtm(len(free), left)
        for part in sorted(policy, key=lambda part: -part.degree):
            jobs = _take(stock, part.jobs)
            on = tuple(free[: part.degree])
            del free[: part.degree]
            same = all(last.get(device) == on for device in on)
            setup = instance.cost.compile_s + (0.0 if same else instance.load_seconds(part.degree))
            finish = clock + setup + seconds(part, jobs)
            if finish == float("inf"):
                return finish, []
            running.append((finish, on))
            spans.append((part, jobs, on, clock, setup))
            last.update(dict.fromkeys(on, on))
            left = tuple(c - n for c, n in zip(left, part.jobs, strict=True))
            end = max(end, finish)
        if not running:
            return float("inf"), []  # no job that is left fits any group
        running.sort()
        clock, devices = running.pop(0)
        free = sorted([*free, *devices])
        while running and running[0][0] <= clock:
            free = sorted([*free, *running.pop(0)[1]])
    return end, spans


def _take(stock: list[list[list[int]]], wanted: tuple[int, ...]) -> Counts:
    """Take jobs of each kind from the stock of its classes, in order."""
    out = []
    for kind, n in zip(stock, wanted, strict=True):
        for item in kind:
            taken = min(n, item[1])
            if taken:
                out.append((item[0], taken))
                item[1] -= taken
                n -= taken
    return tuple(sorted(out))
