"""Intervals against published and simulated values; a user's own metric and what can be wrong with it."""

import sys

import numpy as np
import pytest

from plora_jax.errors import UserError
from plora_jax.evaluation.metrics import higher_is_better, load_metric, normal, wilson


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"),
    # Newcombe (1998), Two-sided confidence intervals for the single proportion, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(right, rows, low, high):
    assert wilson(right / rows, rows) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - right / rows, rows) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_normal_of_single_values_is_that_of_the_mean():
    values = np.array([1.0, 2.0, 3.0, 4.0])  # standard deviation √(5/3), standard error √(5/12)
    assert normal(values, np.ones(4)) == pytest.approx(
        (2.5 - 1.96 * 0.645497, 2.5 + 1.96 * 0.645497), abs=1e-4
    )
    assert normal(np.array([2.0, 6.0]), np.array([1, 3])) == pytest.approx((2, 2))  # equal token by token
    assert normal(values[:1], np.ones(1)) is None and normal(values * np.nan, np.ones(4)) is None


def test_normal_of_token_losses_holds_the_true_mean_in_95_of_100_draws():
    draw, held = np.random.default_rng(0), 0
    true = (2 * 0.5 * 10 + 1 * 0.5 * 40) / (
        0.5 * 10 + 0.5 * 40
    )  # half the rows: 10 tokens of loss 2; else 40 of 1
    for _ in range(2000):
        long = draw.random(200) < 0.5
        counts = np.where(long, 40, 10)
        sums = (
            counts * np.where(long, 1.0, 2.0) * (1 + 0.3 * draw.standard_normal(200))
        )  # tokens of a row go together
        low, high = normal(sums, counts)
        held += low <= true <= high
    assert 0.935 < held / 2000 < 0.965


MODULE = """
import math
def overlap(predictions, references):
    return [len(set(p) & set(r)) for p, r in zip(predictions, references)]
def errors(predictions, references):
    return [float(p != r) for p, r in zip(predictions, references)]
errors.higher_is_better = False
def wrong_way(predictions, references): return []
wrong_way.higher_is_better = "yes"
def one(predictions): return []
def short(predictions, references): return [1.0]
def nan(predictions, references): return [0.0] + [math.nan] * (len(predictions) - 1)
def words(predictions, references): return ["good"] * len(predictions)
def number(predictions, references): return 0.5
def fails(predictions, references): raise KeyError("spam")
table = {}
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Write a user's module beside its sweep."""
    (tmp_path / "own_metric.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_metric", "own_broken"):
        sys.modules.pop(name, None)


def test_a_users_metric(directory):
    metric = load_metric("own_metric:overlap", directory)
    assert metric(["abc", "x"], ["cb", "y"]).tolist() == [2, 0] and metric.higher_is_better
    assert higher_is_better("own_metric:overlap", directory)
    assert not higher_is_better("own_metric:errors", directory) and not higher_is_better("loss")
    assert sys.path[0] != str(directory) and sys.path[-1] == str(directory)  # it hides nothing installed


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:f", "no_such_module cannot be imported, neither from .* ModuleNotFoundError"),
        ("own_broken:f", "own_broken cannot be imported.*no_such_module_anywhere"),
        ("own_metric:f", "own_metric has no f; the module is .*own_metric.py"),
        ("own_metric:table", "table is no function"),
        ("own_metric:one", "must take two lists, predictions and references: too many"),
        ("own_metric:wrong_way", "its higher_is_better is 'yes'; True or False is due"),
    ],
)
def test_a_metric_that_cannot_be_used(name, says, directory):
    with pytest.raises(UserError, match=f"metric {name}.*{says}" if "must" not in says else says):
        load_metric(name, directory)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "returned 1 values for 2 rows"),
        ("nan", "returned nan for row 2, prediction 'b'; a finite number is due"),
        ("words", "returned list, not a list of one number a row .*good"),
        ("number", "returned float, not a list of one number a row"),
        ("fails", "raised KeyError .*spam"),
    ],
)
def test_a_metric_that_returns_what_it_should_not(name, says, directory):
    metric = load_metric(f"own_metric:{name}", directory)
    with pytest.raises(UserError, match=f"metric own_metric:{name} {says}"):
        metric(["a", "b"], ["a", "b"])
