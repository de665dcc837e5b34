"""Metrics: which way is better, a user's own function, and how sure a score is. Imports no JAX."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from plora_jax.data.files import one_line
from plora_jax.errors import UserError

BUILT_IN = {"loss": False, "choice_accuracy": True, "exact_match": True}  # is higher better
USERS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function
Z95 = 1.959963984540054  # the normal distribution holds 95 % within ± this many standard deviations

Interval = tuple[float, float]


class UserMetric(NamedTuple):
    """Hold a user's metric: `function(predictions: list[str], references: list[str]) -> list[float]`, one a row."""

    name: str
    function: Callable[[list[str], list[str]], Sequence[float]]
    higher_is_better: bool

    def __call__(self, predictions: Sequence[str], references: Sequence[str]) -> Float[np.ndarray, " rows"]:
        """Return the value of each row.

        Raises:
          UserError: the function raises, or returns something else than one finite number a row.
        """
        what = f"metric {self.name}"
        try:
            returned = self.function(list(predictions), list(references))
        except Exception as error:
            raise UserError(f"{what} raised {_told(error)}") from error
        try:
            values = [float(value) for value in returned]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{what} returned {type(returned).__name__}, not a list of one number a row ({one_line(error)})"
            ) from None
        if len(values) != len(predictions):
            raise UserError(f"{what} returned {len(values)} values for {len(predictions)} rows")
        for row, value in enumerate(values):
            if not math.isfinite(value):
                raise UserError(
                    f"{what} returned {value} for row {row + 1}, prediction {predictions[row][:80]!r}; "
                    "a finite number is due"
                )
        return np.array(values)


def _told(error: Exception) -> str:
    return f"{type(error).__name__} ({one_line(error)})"


def load_metric(name: str, directory: Path = Path(".")) -> UserMetric:
    """Import a user's metric, `module:function`; the module may lie in `directory`.

    Raises:
      UserError: there is no such module or function, importing it fails, or it cannot be called with two lists.
    """
    module_name, _, function_name = name.partition(":")
    place = str(directory.absolute())
    sys.path.insert(0, place)  # the sweep's directory comes first for the module itself …
    try:
        module = import_module(module_name)
    except Exception as error:
        raise UserError(
            f"metric {name}: {module_name} cannot be imported, neither from {directory} nor as an installed "
            f"module: {_told(error)}"
        ) from error
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)  # … and last for what it imports later, so that it hides nothing installed
    found = f"the module is {getattr(module, '__file__', None) or 'built in'}"
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(f"metric {name}: {module_name} has no {function_name}; {found}")
    if not callable(function):
        raise UserError(f"metric {name}: {function_name} is no function; {found}")
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise UserError(
            f"metric {name} must take two lists, predictions and references: {one_line(error)}"
        ) from None
    except ValueError:  # a built-in without a signature
        pass
    higher = getattr(function, "higher_is_better", True)
    if not isinstance(higher, bool):
        raise UserError(f"metric {name}: its higher_is_better is {higher!r}; True or False is due")
    return UserMetric(name, function, higher)


def higher_is_better(metric: str, directory: Path = Path(".")) -> bool:
    """Tell which way is better; of a user's metric its attribute `higher_is_better` tells, True without one."""
    return BUILT_IN[metric] if metric in BUILT_IN else load_metric(metric, directory).higher_is_better


def wilson(share: float, rows: int) -> Interval:
    """Return the 95 % interval of a share of `rows` rows (Wilson 1927)."""
    z2 = Z95 * Z95 / rows
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows))
    return max(0.0, middle - half), min(1.0, middle + half)


def normal(sums: Float[np.ndarray, " rows"], counts: Float[np.ndarray, " rows"]) -> Interval | None:
    """Return the 95 % interval of Σ sums / Σ counts, rows being drawn independently; None if it is not known.

    With all counts 1 it is the mean ± 1.96 standard errors. Else it is the ratio estimator's (Cochran 1977, 6.4):
    a row's tokens go together.
    """
    rows, total = len(sums), float(counts.sum())
    mean = float(sums.sum()) / total
    if rows < 2 or not math.isfinite(mean):
        return None
    spread = float(((sums - mean * counts) ** 2).sum()) * rows / (rows - 1)
    half = Z95 * math.sqrt(spread) / total
    return mean - half, mean + half
