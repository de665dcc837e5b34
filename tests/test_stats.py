"""The report's statistics against closed forms and against scipy."""

import numpy as np
import pytest
from scipy import stats as reference

from plora_jax.evaluation.metrics import wilson
from plora_jax.report.stats import GROUPS, group_values, importance, label


@pytest.mark.parametrize(("right", "rows"), [(0, 7), (7, 7), (1, 3), (358, 400), (213, 400), (1, 100_000)])
def test_the_interval_of_an_accuracy_is_wilsons(right: int, rows: int) -> None:
    want = reference.binomtest(right, rows).proportion_ci(method="wilson")
    assert wilson(right / rows, rows) == pytest.approx((want.low, want.high), abs=1e-12)


def test_eta_squared_by_hand() -> None:
    # means 2 and 6 about 4: between = 3·4 + 3·4 = 24, total = 9 + 4 + 1 + 0 + 1 + 25 = 40
    one = importance("rank", [8, 16, 8, 16, 8, 16], np.array([1.0, 4, 2, 5, 3, 9]))
    assert one is not None and one.eta2 == pytest.approx(24 / 40)
    assert one.share == pytest.approx((24 - 16 / 4) / 40)  # (between − (k − 1)·mean square within) / total
    assert [(g.label, g.mean, g.jobs) for g in one.groups] == [("8", 2.0, 3), ("16", 6.0, 3)]


def test_the_correction_takes_the_bias_out_and_chance_is_that_of_the_f_distribution() -> None:
    draw = np.random.default_rng(1)
    n, k = 60, 4
    values = [str(i % k) for i in range(n)]
    found = [importance("x", values, draw.standard_normal(n)) for _ in range(60)]
    raw = np.mean([one.eta2 for one in found if one])
    assert raw == pytest.approx((k - 1) / (n - 1), abs=0.012)  # what η² is of nothing
    assert np.mean([one.share for one in found if one]) < 0.03
    f = reference.f.ppf(0.95, k - 1, n - k)
    eta2 = f * (k - 1) / (f * (k - 1) + n - k)
    want = 1 - (1 - eta2) * (n - 1) / (n - k)
    assert np.mean([one.chance for one in found if one]) == pytest.approx(want, rel=0.06)
    above = np.mean([one.share > one.chance for one in found if one])
    assert above < 0.15  # one in twenty, of sixty


def test_many_numbers_are_cut_into_groups_of_equal_count_and_equal_ones_stay_together() -> None:
    members, names = group_values([float(x) for x in range(100)])
    assert np.bincount(members).tolist() == [20] * GROUPS and names[0][0] == "0–19"
    assert (np.diff(members) >= 0).all()
    members, names = group_values([1e-4] * 50 + [float(x) for x in range(1, 11)])
    assert len(set(members[:50].tolist())) == 1 and names[0] == ("1e-4", "1e-4")
    values = [True, False, None, "a", [1, 2], {"q": 4}]
    members, names = group_values(values)
    assert [names[m][0] for m in members] == ["yes", "no", "none", "a", "1, 2", "q: 4"]


@pytest.mark.parametrize(
    ("values", "scores"),
    [([], []), ([1], [0.5]), ([1, 1, 1], [0.1, 0.2, 0.3]), ([1, 2], [0.1, 0.9]), ([1, 1, 2, 2], [0.3] * 4)],
)
def test_what_cannot_be_measured_is_not(values: list[int], scores: list[float]) -> None:
    assert importance("x", values, np.array(scores, float)) is None


def test_numbers_are_written_short_and_exact_enough() -> None:
    shown = [
        label(x) for x in (1.54e-4, 1e-4, 0.001, 0.00107, 128.0, 1e38, 0.0, -2e-5, 8, True, None, "", [])
    ]
    assert shown == [
        "1.54e-4",
        "1e-4",
        "0.001",
        "0.00107",
        "128",
        "1e38",
        "0",
        "-2e-5",
        "8",
        "yes",
        "none",
        "none",
        "none",
    ]
