"""The configuration LP and the searches: what they may change and what they must keep."""

import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from highspy import HighsModelStatus

from planner.config_lp import ConfigurationLP, make_types
from planner.errors import PlanError
from planner.fill import Filler, dive, make_tables
from planner.greedy import greedy
from planner.groups import make_group, makespan, remember
from planner.master import PRECISE, Master
from planner.ours import LEAST_RENT, Bound, Effort, bounds, ours
from planner.pack import choose_pack, group_seconds, merge_counts
from planner.recut import recut
from planner.search import improve
from planner.trials import Ranking
from tests.planner.problems import instance, job

JOBS = [job(i, 8 * 2 ** (i % 5), 2 ** (i % 4), i % 3, 1 + i % 3, 20_000 * (i % 2)) for i in range(36)]


@pytest.fixture(scope="module")
def problem():
    return instance(JOBS, "5xA100-40GB")


def jobs_of(solution):
    return merge_counts(*(pack.counts for group in solution for pack in group.packs))


def test_the_lp_covers_every_class_and_falls_with_time(problem):
    types = make_types(problem)
    lp = ConfigurationLP(problem, types)
    low = lp.bound(1.0)
    values = [lp.solve(C) for C in (low, 1.2 * low, 2 * low)]
    assert [v.machine_s for v in values] == sorted((v.machine_s for v in values), reverse=True)
    fresh = ConfigurationLP(problem, types).solve(2 * low)
    assert values[-1].machine_s == pytest.approx(fresh.machine_s, rel=1e-9), "from the last basis or none"
    per_class = np.zeros(len(problem.classes))
    np.add.at(per_class, types.k[values[0].pairs], values[0].jobs)
    assert per_class == pytest.approx([n for _, n in problem.counts], rel=1e-6)
    assert (values[0].prices > 0).all(), "every job costs machine time"


def test_a_solver_that_fails_tries_again_from_nothing_and_then_says_so(problem, monkeypatch):
    """A failure is never taken for a time that is impossible, which would make the bound too high."""
    lp = ConfigurationLP(problem, make_types(problem))
    want = lp.solve(300.0).machine_s
    status, failures = lp.highs.getModelStatus, [HighsModelStatus.kUnknown]
    monkeypatch.setattr(lp.highs, "getModelStatus", lambda: failures.pop() if failures else status())
    assert np.isfinite(want) and lp.solve(300.0).machine_s == pytest.approx(want, rel=1e-9) and not failures
    failures += 2 * [HighsModelStatus.kUnknown]
    with pytest.raises(PlanError, match="kUnknown on the configuration LP"):
        lp.solve(300.0)


@pytest.fixture(scope="module")
def priced(problem):
    """Types, prices and tables of the problem at a little more than its LP bound."""
    types = make_types(problem)
    lp = ConfigurationLP(problem, types)
    C = 1.1 * lp.bound(1.0)
    return (
        C,
        dict.fromkeys(problem.degrees, lp.solve(C).prices),
        make_tables(problem, types, 2 * C),
    )


def test_a_group_is_filled_within_its_time_and_what_it_loses_is_accounted(problem, priced):
    C, prices, tables = priced
    jobs = np.array([n for _, n in problem.counts])
    for d, table in tables.items():
        lost, state = Filler(problem, table, prices[d], jobs, C).fill()
        seconds = group_seconds(problem, list(state.packs))
        taken = merge_counts(*(pack.counts for pack in state.packs))
        assert seconds <= C * (1 + 1e-9)
        assert [n - dict(taken).get(k, 0) for k, n in enumerate(jobs)] == list(state.left)
        worth = sum(n * prices[d][k] for k, n in taken)
        assert lost == pytest.approx(d * (C - problem.load_seconds(d)) - worth, rel=1e-6)
        assert lost >= -1e-3 * C, "no pack is worth more than its time"


def test_packs_of_several_states_are_those_of_each_alone(problem, priced):
    """A beam's states are filled together, each from its own jobs: those dearest a micro-step that fit the slots."""
    _, prices, tables = priced
    table, rng = tables[1], np.random.default_rng(0)
    jobs = np.array([n for _, n in problem.counts])
    ranking, left = Ranking(table.steps, prices[1]), np.array([jobs, rng.integers(0, jobs + 1), jobs // 2])
    n = len(table.row)
    states, trials = np.repeat([2, 0, 1], n), np.tile(np.arange(n), 3)
    found = ranking.best(left, states, table.row[trials], table.capacity[trials])
    for t in rng.choice(3 * n, 60, replace=False):
        row, room, taken = table.row[trials[t]], table.capacity[trials[t]], np.zeros(len(jobs), dtype=int)
        steps = table.steps[row]
        for k in sorted(np.flatnonzero(steps), key=lambda k: -prices[1][k] / steps[k]):
            taken[k] = min(left[states[t]][k], room // steps[k])
            room -= taken[k] * steps[k]
            if taken[k] < left[states[t]][k]:
                break
        assert (found.taken(t) == taken).all()
        assert found.worth[t] == pytest.approx(taken @ prices[1])


def test_a_dive_tries_the_degrees_that_may_lose_least(problem, priced, monkeypatch):
    """The same groups as when every degree is tried for every group, with fewer tries."""
    C, prices, tables = priced
    tried = []

    class Watched(Filler):
        def fill(self):
            tried.append(self.degree)
            return super().fill()

    monkeypatch.setattr("planner.fill.Filler", Watched)
    groups = dive(problem, tables, prices, 1.05 * C, {})
    left, free = np.array([n for _, n in problem.counts]), 5
    for group in groups:
        lost = {d: Filler(problem, tables[d], prices[d], left, 1.05 * C).fill() for d in tables if d <= free}
        if not all(lost.values()):
            break  # the last jobs are put into groups filled before
        least = min(lost, key=lambda d: lost[d][0] / d)
        assert group.degree == least
        left, free = lost[least][1].left, free - least
    assert set(tried) == {1, 2, 4} and len(tried) < 2 * len(groups)


def test_groups_are_filled_at_what_they_cost():
    """Jobs are worth more to groups whose devices cost less, and where devices cost the same, as much to all."""
    bound = Bound(1.0, "lp", np.array([2.0, 6.0]), {1: 0.5, 2: 2.0, 4: 5.0, 8: 0.0})
    worth = {d: list(prices) for d, prices in bound.worth(np.array([1.0, 0.5])).items()}
    assert worth == {1: [4.0, 6.0], 2: [2.0, 3.0], 4: [1.6, 2.4], 8: [2.0 / LEAST_RENT, 3.0 / LEAST_RENT]}


def test_a_group_of_few_jobs_is_filled_best():
    """All ways to put some of five jobs into packs of one group, by hand."""
    small = instance([job(i, (8, 64)[i % 2], (2, 4)[i // 3], 1, 1 + i // 4) for i in range(5)], "1xA100-40GB")
    types = make_types(small)
    C = 1.02 * bounds(small).seconds
    prices = ConfigurationLP(small, types).solve(C).prices
    room = C - small.load_seconds(1)
    per_job = [k for k, n in small.counts for _ in range(n)]

    def least(jobs: list[int], used: float, lost: float) -> float:
        best = lost + room - used
        if not jobs:
            return best
        first, rest = jobs[0], jobs[1:]
        best = min(best, least(rest, used, lost))  # without the first, or in a pack with some of the others
        for size in range(len(rest) + 1):
            for others in combinations(range(len(rest)), size):
                counts = merge_counts(*(((k, 1),) for k in (first, *(rest[i] for i in others))))
                seconds = choose_pack(small, counts, 1).run_s + small.cost.compile_s
                if used + seconds <= room:
                    worth = sum(n * prices[k] for k, n in counts)
                    left = [k for i, k in enumerate(rest) if i not in others]
                    best = min(best, least(left, used + seconds, lost + seconds - worth))
        return best

    jobs = np.array([n for _, n in small.counts])
    lost, _ = Filler(small, make_tables(small, types, C)[1], prices, jobs, C).fill()
    assert lost == pytest.approx(least(per_job, 0.0, 0.0), rel=1e-6, abs=1e-6 * C)


def test_searches_keep_every_job_and_never_lose_time(problem, priced):
    C, prices, tables = priced
    start = min(greedy(problem).values(), key=makespan)
    assert jobs_of(start) == problem.counts
    for found in (
        recut(problem, tables, prices, start, 20),
        improve(problem, start, 600),
        improve(problem, start, 600, seed=1),
    ):
        assert jobs_of(found) == problem.counts
        assert makespan(found) <= makespan(start)
        assert sum(group.degree for group in found) <= 5
    dived = dive(problem, tables, prices, 1.05 * C, {})
    assert jobs_of(dived) == problem.counts and sum(group.degree for group in dived) <= 5
    assert improve(problem, start, 300) == improve(problem, start, 300)
    assert recut(problem, tables, prices, start, 9) == recut(problem, tables, prices, start, 9)
    assert dive(problem, tables, prices, 0.5 * C, {}) is None, "half the time does not do"


def test_more_effort_comes_closer(problem):
    bound = bounds(problem)
    little = makespan(ours(problem, bound, Effort(0, 0, 0))[0])
    more = makespan(ours(problem, bound, Effort(20, 900, 4))[0])
    assert bound.seconds <= more < little


def test_a_pack_takes_the_best_of_all_its_programs(problem):
    """Every m, policy and J by hand, for equal jobs."""
    counts = ((problem.counts[0][0], problem.counts[0][1]),)
    need, (k, n) = problem.need(counts), counts[0]
    best = float("inf")
    for m in range(1, problem.classes[k].batch_size + 1):
        if problem.classes[k].batch_size % m:
            continue
        for policy in problem.policies:
            cost = problem.step_cost(1, policy, need)
            for J in range(1, min(n, problem.slot_limit(1, m, policy, need)) + 1):
                steps = -(-n // J) * -(-problem.classes[k].rows // m)
                best = min(best, steps * cost.seconds(J, m, need.S, need.bucket))
    chosen = choose_pack(problem, counts, 1)
    assert chosen.run_s == pytest.approx(best + n * problem.eval_seconds(1, k))


@pytest.mark.parametrize("seed", range(4))
def test_the_integer_program_finds_the_best_choice_of_the_groups_met(seed):
    """Against every choice of at most three of them; jobs held twice may be left out of either."""
    rng = random.Random(seed)
    jobs = [job(i, (8, 64)[i % 2], (2, 4)[i % 3 == 0], i % 2, 1 + i % 2) for i in range(9)]
    problem = instance(jobs, "3xA100-40GB")
    everything = [k for k, n in problem.counts for _ in range(n)]
    problem.met = {}
    for _ in range(60):
        taken = Counter(rng.sample(everything, rng.randint(2, 5)))
        group = make_group(problem, 1, [tuple(sorted(taken.items()))])
        remember(problem, group)
    groups = list(problem.met.values())
    best = min(
        max(group.seconds for group in three)
        for three in combinations(groups, 3)
        if all(
            sum(n for g in three for p in g.packs for c, n in p.counts if c == k) >= m
            for k, m in problem.counts
        )
    )
    slow = [make_group(problem, 1, [problem.counts])]
    found = Master(problem).choose(slow, 1.0)
    assert jobs_of(found) == problem.counts and len(found) <= 3
    assert makespan(found) <= best * (1 + PRECISE)


def test_a_search_of_few_jobs_a_device_chooses_among_the_groups_it_met():
    jobs = [job(i, 8 * 2 ** (i % 5), 2 ** (i % 4), i % 3, 1 + i % 3) for i in range(24)]
    problem = instance(jobs, "8xA100-40GB")
    bound = bounds(problem)
    found, _, _ = ours(problem, bound, Effort(recuts=30, proposals=600, dives=3))
    assert problem.met and jobs_of(found) == problem.counts
    assert makespan(found) <= makespan(Master(problem).choose(found, bound.seconds)) * (1 + PRECISE)
