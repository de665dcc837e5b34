"""Early stopping: each rule against hand-computed tables, its published definition, and what must always hold."""

import math
import random
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.search.early_stop import (
    EarlyStop,
    EvalConfig,
    Point,
    Rule,
    Verdict,
    bracket_of,
    expected_fraction,
    make_rule,
)

ASHA = EarlyStop("asha")
TENTHS = [k / 10 for k in range(1, 11)]


def curve(scores: Sequence[float], fractions: Sequence[float], train: Sequence[float] = ()) -> list[Point]:
    """Return a job's points; the loss is the score, and the training loss falls unless it is given."""
    train = train or [1 / (n + 1) for n in range(len(scores))]
    return [Point(round(1000 * f), f, s, s, t) for s, f, t in zip(scores, fractions, train, strict=True)]


def stopped(rule: Rule, job_id: str, history: dict[str, list[Point]]) -> bool:
    return rule.decide(job_id, history).stop


def one_by_one(rule: Rule, scores: Sequence[float], fraction: float) -> list[bool]:
    """Let jobs come to a rung one after another; return who passed."""
    history: dict[str, list[Point]] = {}
    passed = []
    for n, score in enumerate(scores):
        history[f"job{n}"] = curve([score], [fraction])
        passed.append(not stopped(rule, f"job{n}", history))
    return passed


def together(rule: Rule, scores: Sequence[float], fraction: float) -> list[bool]:
    """Let jobs come to a rung at once: all are scored, then each is judged."""
    history = {f"job{n}": curve([score], [fraction]) for n, score in enumerate(scores)}
    return [not stopped(rule, name, history) for name in history]


# --- rungs


def test_rungs() -> None:
    assert ASHA.rungs() == pytest.approx((1 / 9, 1 / 3))
    assert EarlyStop("halving", reduction_factor=4).rungs() == pytest.approx((1 / 16, 1 / 4))
    assert EarlyStop("asha", grace_period=0.1).rungs() == pytest.approx((0.1, 0.3, 0.9))
    assert EarlyStop("asha", grace_period=1 / 49, reduction_factor=7).rungs() == pytest.approx(
        (1 / 49, 1 / 7)
    )
    assert EarlyStop("asha", grace_period=0.05, brackets=2).rungs(1) == pytest.approx((0.15, 0.45))
    assert EarlyStop("median", every=0.3).rungs() == pytest.approx((0.3, 0.6, 0.9))
    assert EarlyStop("plateau").rungs() == pytest.approx([k / 10 for k in range(1, 10)])
    assert EarlyStop().rungs() == ()


# --- ASHA


def test_asha_by_hand_as_jobs_come_one_by_one() -> None:
    """η = 3, losses. Passing of n: 1 of 1 to 5, 2 of 6 to 8, 3 of 9. The first passes, then only a new best until 6."""
    losses = [5.0, 4.0, 6.0, 3.0, 3.5, 3.2, 3.1, 2.0, 2.9]
    ranks_ = [1, 1, 3, 1, 2, 2, 2, 1, 2]  # of each among those that came before and itself
    passing = [1, 1, 1, 1, 1, 2, 2, 2, 3]
    assert one_by_one(make_rule(ASHA, False), losses, 1 / 9) == [
        rank <= most for rank, most in zip(ranks_, passing, strict=True)
    ]
    assert one_by_one(make_rule(ASHA, True), [-loss for loss in losses], 1 / 9) == [
        True,
        True,
        False,
        True,
        False,
        True,
        True,
        True,
        True,
    ]


def test_asha_by_hand_together_and_at_the_second_rung() -> None:
    rule = make_rule(ASHA, False)
    losses = [9.0, 1, 8, 2, 7, 3, 6, 4, 5]
    assert together(rule, losses, 1 / 9) == [loss <= 3 for loss in losses]
    second = {
        f"job{n}": curve([loss, 10 - loss], [1 / 9, 1 / 3]) if loss <= 3 else curve([loss], [1 / 9])
        for n, loss in enumerate(losses)
    }
    alive = {"job1": False, "job3": False, "job5": True}  # their order has turned: 9, 8 and 7 now
    assert {name: not stopped(rule, name, second) for name in alive} == alive
    assert rule.decide("job1", second).reason == "asha: rank 3 of 3 at 0.333 of its training; 1 passed"


def test_a_job_is_judged_once_a_rung_and_never_at_its_end() -> None:
    rule = make_rule(ASHA, False)
    history = {f"job{n}": curve([n], [1 / 9]) for n in range(9)}
    history["job8"] = curve([8, 8.5], [1 / 9, 0.2])
    assert not stopped(rule, "job8", history)  # stopped at 1/9; 0.2 is no rung
    history["job8"] = curve([8, 9], [1 / 9, 1.0])
    assert not stopped(rule, "job8", history)
    for method in ("median", "plateau"):
        whole = {f"job{n}": curve([n] * 10, TENTHS) for n in range(9)}
        judge = make_rule(EarlyStop(method), False)  # type: ignore[arg-type]
        assert not stopped(judge, "job8", whole)
        assert stopped(judge, "job8", whole | {"job8": whole["job8"][:9]})


def test_an_evaluation_after_a_rung_counts_for_it() -> None:
    rule = make_rule(ASHA, False)
    history = {"a": curve([1.0], [1 / 9]), "b": curve([2.0], [0.115]), "c": curve([3.0], [1 / 9 - 1e-12])}
    assert [stopped(rule, name, history) for name in "abc"] == [False, True, True]


def test_ties_go_by_loss_then_by_the_order_of_the_jobs() -> None:
    """Accuracies of few rows tie all the time."""
    rule = make_rule(ASHA, True)
    points = {"a": (0.5, 2.0), "b": (0.5, 1.0), "c": (0.5, 1.5)}
    history = {name: [Point(1, 1 / 9, score, loss, 1.0)] for name, (score, loss) in points.items()}
    assert [not stopped(rule, name, history) for name in "abc"] == [False, True, False]
    assert together(rule, [0.5] * 9, 1 / 9) == [True] * 3 + [False] * 6


def promotable(scores: dict[str, float], eta: int) -> set[str]:
    """Return top_k(rung, |rung| / η) of Algorithm 2 of Li et al. (2020), best first arrivals besides."""
    best = sorted(scores, key=lambda name: scores[name])
    return set(best[: max(1, len(best) // eta)])


def ray_continues(score: float, before: Sequence[float], eta: int) -> bool:
    """Say what Ray Tune's ASHAScheduler does: not below the percentile of those recorded before (scores: losses)."""
    if not before:
        return True
    return bool(-score >= np.nanpercentile([-x for x in before], (1 - 1 / eta) * 100))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True))
def test_asha_against_its_published_definitions(eta: int, losses: list[int]) -> None:
    """Whoever comes is in the paper's top 1/η, or is stopped; and nobody passes whom Ray would have stopped."""
    rule = make_rule(EarlyStop("asha", reduction_factor=eta), False)
    passed = one_by_one(rule, losses, eta**-2)
    rung: dict[str, float] = {}
    for n, loss in enumerate(losses):
        before = list(rung.values())
        rung[f"job{n}"] = loss
        assert passed[n] == (f"job{n}" in promotable(rung, eta))
        assert not passed[n] or ray_continues(loss, before, eta)


def test_brackets_are_dealt_by_the_id_for_equal_tokens() -> None:
    """η = 3: from 1/9 a job costs 1/9 + 2/9·1/3 + 2/3·1/9 = 7/27; from 1/3 it costs 1/3 + 2/3·1/3 = 5/9."""
    config = EarlyStop("asha", brackets=2)
    names = [f"r8-lr0.0001-b8-{n:08x}" for n in range(4000)]
    first = fmean(bracket_of(name, config) == 0 for name in names)
    assert first == pytest.approx((27 / 7) / (27 / 7 + 9 / 5), abs=5 * 0.5 / math.sqrt(4000))
    rule = make_rule(config, False)
    late = [name for name in names if bracket_of(name, config) == 1][:6]
    history = {name: curve([n], [1 / 9]) for n, name in enumerate(late)}
    assert not any(stopped(rule, name, history) for name in late)  # its first rung is 1/3
    history = {name: curve([n, n], [1 / 9, 1 / 3]) for n, name in enumerate(late)}
    early = [name for name in names if bracket_of(name, config) == 0][:6]
    history |= {name: curve([-1, -1], [1 / 9, 1 / 3]) for name in early}  # compared among themselves
    assert [stopped(rule, name, history) for name in late] == [False] * 2 + [True] * 4


# --- synchronous halving


def test_halving_by_hand() -> None:
    """Two cohorts of four, η = 2, rungs 1/4 and 1/2: four, two, one."""
    rule = make_rule(EarlyStop("halving", reduction_factor=2, cohort=4), False)
    assert rule.rungs() == (0.25, 0.5)
    history = {name: curve([score], [0.25]) for name, score in zip("abc", (3.0, 1.0, 4.0), strict=True)}
    assert not any(stopped(rule, name, history) for name in history)  # d is not there yet
    history |= {"d": curve([2.0], [0.25]), "e": curve([0.1], [0.25])}  # e is of the next cohort
    assert [stopped(rule, name, history) for name in "abcde"] == [True, False, True, False, False]
    history |= {"b": curve([1, 5], [0.25, 0.5])}
    assert not stopped(rule, "b", history)
    history |= {"d": curve([2, 4], [0.25, 0.5])}
    assert [stopped(rule, name, history) for name in "bd"] == [True, False]
    late = history | {
        "a": curve([3, 0.1], [0.25, 0.3])
    }  # went on before d came: judged at its next evaluation
    assert rule.decide("a", late).reason == "halving: rank 3 of 4 at 0.25 of its training; 2 passed"


def test_a_failed_job_does_not_hold_up_its_cohort() -> None:
    rule = make_rule(EarlyStop("halving", reduction_factor=2, cohort=2), False)
    history = {"a": curve([2.0], [0.25]), "b": [*curve([1.0], [0.1]), *curve([math.nan], [1.0])]}
    assert not stopped(rule, "a", history)
    rule = make_rule(EarlyStop("halving", reduction_factor=2, cohort=8), False)
    history = {f"x{n}": curve([math.nan], [0.25]) for n in range(6)}  # stopped there
    history |= {"a": curve([2, 2], [0.25, 0.5]), "b": curve([2, 3], [0.25, 0.5])}
    assert [stopped(rule, name, history) for name in "ab"] == [False, True]


# --- median


def test_median_by_hand() -> None:
    """Mean losses of the others from 0.2 to 0.4: 3, 4, 5 and (one not so far, one before the grace period) none."""
    rule = make_rule(EarlyStop("median"), False)
    others = {
        "a": curve([9, 4, 2], [0.1, 0.2, 0.4]),
        "b": curve([9, 5, 3], [0.1, 0.2, 0.4]),
        "c": curve([9, 6, 4, 0], [0.1, 0.2, 0.4, 0.6]),
        "d": curve([0, 0], [0.1, 0.2]),
    }

    def verdict(*scores: float, names: str = "abcd") -> Verdict:
        history = {name: others[name] for name in names} | {
            "x": curve(scores, [0.1, 0.2, 0.4][: len(scores)])
        }
        return rule.decide("x", history)

    assert verdict(9, 8, 4.1).stop and verdict(9, 4.1, 8).stop
    assert not verdict(9, 8, 4.0).stop and not verdict(9, 4.0, 8).stop  # strictly worse; the best counts
    assert not verdict(4.0, 8, 8).stop  # the best of its own is from all of its points, as in Ray
    assert not verdict(9).stop  # grace
    assert not verdict(9, 8, 8, names="abd").stop  # two others have come so far; three are wanted
    assert verdict(9, 8, 4.1).reason == "median: best 4.1 against a median of 4 at 40% of its training"
    turned = make_rule(EarlyStop("median"), True)
    history = {name: [p._replace(score=-p.score) for p in points] for name, points in others.items()}
    history["x"] = curve([-9, -8, -4.1], [0.1, 0.2, 0.4])
    assert turned.decide("x", history).stop
    history["x"] = curve([-9, -8, -4.0], [0.1, 0.2, 0.4])
    assert not turned.decide("x", history).stop


# --- plateau


@pytest.mark.parametrize(
    ("losses", "train", "stops", "reason"),
    [
        ([2, 1.8, 1.7, 1.6, 1.5, 1.4], [2, 1.8, 1.6, 1.4, 1.2, 1.0], None, ""),
        ([2, 1.5, 1.6, 1.7, 1.8], [2, 1.5, 1.0, 0.8, 0.6], 5, "overfit: held-out loss rose from 1.5 to 1.8"),
        ([2, 1.5, 1.6, 1.7, 1.4, 1.5, 1.6, 1.7], [1] * 8, 8, "plateau: no gain in 3 evaluations"),
        ([2, 1.5, 1.6, 1.7, 1.8], [2, 1.5, 1.6, 1.7, 1.8], 5, "plateau"),  # its training fails too
        ([2, 2, 2, 2], [2, 1.9, 1.8, 1.7], 4, "plateau"),
        ([2, 4.1], [2, 4], 2, "diverged: held-out loss 4.1, 2 at the start"),
        ([2, 3.9], [2, 4], None, ""),
        ([2, 1.9, math.nan], [2, 2, 2], 3, "diverged: not finite at 30%"),
    ],
)
def test_plateau_by_hand(losses: list[float], train: list[float], stops: int | None, reason: str) -> None:
    rule = make_rule(EarlyStop("plateau"), False, base_loss=2.0)
    points = curve(losses, TENTHS[: len(losses)], train)
    found = [n for n in range(1, len(points) + 1) if stopped(rule, "x", {"x": points[:n]})]
    assert found[:1] == ([] if stops is None else [stops])
    if stops:
        assert rule.decide("x", {"x": points[:stops]}).reason.startswith(reason)


def test_plateau_takes_a_better_score_for_a_gain() -> None:
    """Accuracy may go on rising while the held-out loss rises, too: that is no plateau."""
    rule = make_rule(EarlyStop("plateau"), True, base_loss=2.0)
    points = [Point(n, n / 10, 0.5 + n / 100, 1 + n / 10, 1 / n) for n in range(1, 8)]
    assert not any(stopped(rule, "x", {"x": points[:n]}) for n in range(1, 8))
    flat = [p._replace(score=0.5) for p in points]
    assert [stopped(rule, "x", {"x": flat[:n]}) for n in range(1, 6)] == [False, False, False, True, True]


def test_plateau_settings() -> None:
    losses = curve([2, 1.99, 1.98, 1.97, 1.96], TENTHS[:5])
    assert stopped(make_rule(EarlyStop("plateau", min_delta=0.1), False), "x", {"x": losses})
    assert not stopped(make_rule(EarlyStop("plateau", min_delta=0.001), False), "x", {"x": losses})
    rising = curve([2, 2.1, 2.2, 2.3, 2.4], TENTHS[:5])
    assert not stopped(make_rule(EarlyStop("plateau", patience=5), False), "x", {"x": rising})
    assert not stopped(make_rule(EarlyStop("plateau", grace_period=0.6), False), "x", {"x": rising})
    late = make_rule(EarlyStop("plateau", grace_period=0.6, max_loss_ratio=1.1), False)
    assert stopped(late, "x", {"x": rising})  # divergence knows no grace; without a base, the job's own start


# --- what always holds


METHODS = ["median", "asha", "halving", "plateau"]
curves = st.lists(
    st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=9), min_size=1, max_size=12
).filter(lambda rows: len({x for row in rows for x in row}) == sum(map(len, rows)))  # no ties


def as_history(rows: Sequence[Sequence[float]]) -> dict[str, list[Point]]:
    return {f"job{n}": curve(row, TENTHS[: len(row)]) for n, row in enumerate(rows)}


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["median", "asha", "plateau"]), curves, st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_does_not_matter(
    method: str, rows: list[list[float]], shuffle: random.Random
) -> None:
    rule, history = make_rule(EarlyStop(method), False), as_history(rows)  # type: ignore[arg-type]
    names = list(history)
    shuffle.shuffle(names)
    turned = {name: history[name] for name in names}
    assert all(rule.decide(name, history) == rule.decide(name, turned) for name in names)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(METHODS), curves)
def test_higher_is_better_is_the_mirror_image(method: str, rows: list[list[float]]) -> None:
    history = as_history(rows)
    mirror = {name: [p._replace(score=-p.score) for p in points] for name, points in history.items()}
    config = EarlyStop(method)  # type: ignore[arg-type]
    for name in history:
        one, other = make_rule(config, False), make_rule(config, True)
        assert stopped(one, name, history) == stopped(other, name, mirror)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["asha", "halving"]), curves)
def test_ranks_alone_count(method: str, rows: list[list[float]]) -> None:
    """A loss and its perplexity give the same verdicts."""
    rule, history = make_rule(EarlyStop(method), False), as_history(rows)  # type: ignore[arg-type]
    other = {
        name: [p._replace(score=math.exp(p.score / 10**6)) for p in points]
        for name, points in history.items()
    }
    assert all(stopped(rule, name, history) == stopped(rule, name, other) for name in history)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(METHODS), curves, st.data())
def test_a_better_score_never_stops_a_job(method: str, rows: list[list[float]], data: st.DataObject) -> None:
    rule, history = make_rule(EarlyStop(method), False), as_history(rows)  # type: ignore[arg-type]
    name = data.draw(st.sampled_from(list(history)))
    if not stopped(rule, name, history):
        gain = data.draw(st.integers(0, 10**6))
        better = history[name][-1]._replace(score=history[name][-1].score - gain)
        assert not stopped(rule, name, history | {name: [*history[name][:-1], better]})


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["asha", "halving"]), st.integers(2, 5), curves)
def test_the_best_at_a_rung_passes(method: str, eta: int, rows: list[list[float]]) -> None:
    """All that have come to a rung, at their records there: all but the best may be stopped, and some are."""
    for rung in (0.1, 0.1 * eta):
        history = as_history([row for row in rows if len(row) >= 10 * rung])
        there = {name: [p for p in points if p.fraction <= rung + 1e-9] for name, points in history.items()}
        if len(there) > 1:
            config = EarlyStop(method, grace_period=rung, reduction_factor=eta, cohort=len(there))  # type: ignore[arg-type]
            passed = {name for name in there if not stopped(make_rule(config, False), name, there)}
            assert min(there, key=lambda name: there[name][-1].score) in passed
            assert len(passed) == max(1, len(there) // eta)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(METHODS), curves, st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_what_is_not_finite_is_stopped_and_worst(
    method: str, rows: list[list[float]], bad: float, higher: bool
) -> None:
    rule, history = make_rule(EarlyStop(method), higher), as_history(rows)  # type: ignore[arg-type]
    worst = -1.0 if higher else 1e9
    name = "job0"
    finite = history | {name: [*history[name][:-1], history[name][-1]._replace(score=worst)]}
    broken = history | {name: [*history[name][:-1], history[name][-1]._replace(score=bad)]}
    assert stopped(rule, name, broken) or history[name][-1].fraction == 1
    for other in set(history) - {name} if method == "asha" else ():
        assert stopped(rule, other, finite) == stopped(rule, other, broken)


def test_no_rule_is_no_stop_and_seeds_are_jobs_of_their_own() -> None:
    history = {"r8-seed0": curve([math.nan], [0.5]), "r8-seed1": curve([9.0], [0.5])}
    assert not any(stopped(make_rule(EarlyStop(), False), name, history) for name in history)
    twins = {f"r8-seed{n}": curve([n], [1 / 9]) for n in range(3)}
    assert [stopped(make_rule(ASHA, False), name, twins) for name in twins] == [False, True, True]


# --- what a rule costs


def spent(rule: Rule, n_jobs: int, wave: int, rng: random.Random) -> float:
    """Train n jobs of unrelated scores, `wave` side by side to their end, under a rule; return the share of tokens."""
    history: dict[str, list[Point]] = {}
    rungs, tokens = (*rule.rungs(), 1.0), 0.0
    for start in range(0, n_jobs, wave):
        alive, before = [f"job{n}" for n in range(start, min(start + wave, n_jobs))], 0.0
        for rung in rungs:
            tokens += len(alive) * (rung - before)
            before = rung
            for name in alive:
                history.setdefault(name, []).append(Point(0, rung, rng.random(), 1.0, 1.0))
            alive = [name for name in alive if not stopped(rule, name, history)]
    return tokens / n_jobs


@pytest.mark.parametrize(("eta", "wave"), [(3, 1), (4, 4), (2, 16)])
def test_the_expected_cost_is_that_of_simulated_runs(eta: int, wave: int) -> None:
    config, rng = EarlyStop("asha", reduction_factor=eta), random.Random(0)
    costs = [spent(make_rule(config, False), 48, wave, rng) for _ in range(60)]
    error = np.std(costs) / math.sqrt(len(costs))
    expected = expected_fraction(config, 48, wave)
    assert expected == pytest.approx(fmean(costs), abs=4 * error + 0.01)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(0, 99))
def test_the_budget_is_bounded_when_all_come_together(n_jobs: int, eta: int, seed: int) -> None:
    """By hand: n to r, max(1, ⌊n/η⌋) to ηr, and so on; for η = 4, n = 64: 64/16 + 16·3/16 + 4·3/4 = 10 of 64."""
    config = EarlyStop("asha", reduction_factor=eta)
    bound, alive, before = 0.0, n_jobs, 0.0
    for rung in (*config.rungs(), 1.0):
        bound, before, alive = bound + alive * (rung - before), rung, max(1, alive // eta)
    assert expected_fraction(config, n_jobs, n_jobs) == pytest.approx(bound / n_jobs)
    found = spent(make_rule(config, False), n_jobs, n_jobs, random.Random(seed))
    assert found == pytest.approx(bound / n_jobs)
    cohort = EarlyStop("halving", reduction_factor=eta, cohort=max(2, n_jobs))
    if n_jobs > 1:
        assert spent(make_rule(cohort, False), n_jobs, n_jobs, random.Random(seed)) == pytest.approx(found)
        assert expected_fraction(cohort, n_jobs) == pytest.approx(found)


def test_costs_by_hand() -> None:
    assert expected_fraction(EarlyStop("asha", reduction_factor=4), 64, 64) == pytest.approx(10 / 64)
    assert expected_fraction(EarlyStop(), 10) == 1.0
    assert expected_fraction(EarlyStop("median"), 10) is None
    # one by one 1, 1/2, 1/3 and 2/4 of a job pass
    two = EarlyStop("asha", reduction_factor=2, grace_period=0.5)
    assert expected_fraction(two, 4) == pytest.approx((4 * 0.5 + (1 + 1 / 2 + 1 / 3 + 2 / 4) * 0.5) / 4)
    # nine jobs in threes: one of each three passes 1/9, and those come to 1/3 one by one: 1 + 1/2 + 1/3
    threes = 9 / 9 + 3 * 2 / 9 + (1 + 1 / 2 + 1 / 3) * 2 / 3
    assert expected_fraction(ASHA, 9, 3) == pytest.approx(threes / 9)
    # cohorts of four, η = 2: 4·1/4 + 2·1/4 + 1·1/2 = 2 of 4; two of ten jobs are in no whole cohort
    assert expected_fraction(EarlyStop("halving", reduction_factor=2), 10) == pytest.approx((2 * 2 + 2) / 10)
    both = expected_fraction(EarlyStop("asha", brackets=2), 3000, 3000)
    first = (27 / 7) / (27 / 7 + 9 / 5)  # of the jobs, at 7/27 each; the others cost 5/9
    assert both == pytest.approx(first * 7 / 27 + (1 - first) * 5 / 9, rel=0.01)


# --- when jobs are scored


def test_the_steps_at_which_a_job_is_scored() -> None:
    assert EvalConfig().steps(100, 50) == [100]
    assert EvalConfig(every_steps=30).steps(100, 50) == [30, 60, 90, 100]
    assert EvalConfig(every_steps=25).steps(100, 50) == [25, 50, 75, 100]
    assert EvalConfig(every_epochs=0.5).steps(100, 50) == [25, 50, 75, 100]
    assert EvalConfig(every_epochs=0.3).steps(20, 10) == [3, 6, 9, 12, 15, 18, 20]
    assert EvalConfig(every_epochs=0.25).steps(10, 10) == [3, 5, 8, 10]  # rounded up: 2.5, 5, 7.5
    assert EvalConfig(every_epochs=1e-9).steps(3, 10) == [1, 2, 3]
    assert EvalConfig(every_epochs=5).steps(10, 10) == [10]
    assert EvalConfig().steps(90, 50, ASHA.rungs()) == [10, 30, 90]
    assert EvalConfig().steps(100, 50, ASHA.rungs()) == [12, 34, 100]
    assert EvalConfig(every_steps=10).steps(30, 50, (1 / 3,)) == [10, 20, 30]
    assert EvalConfig().steps(1, 50, ASHA.rungs()) == [1]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5000), st.integers(2, 6))
def test_every_rung_is_met_by_the_step_that_is_scored_for_it(total: int, eta: int) -> None:
    config = EarlyStop("asha", reduction_factor=eta)
    steps = EvalConfig().steps(total, total, config.rungs())
    assert steps == sorted(set(steps)) and steps[-1] == total and steps[0] >= 1
    for rung in config.rungs():
        step = next(step for step in steps if step / total >= rung - 1e-9)
        assert step / total - rung < 1 / total + 1e-9
