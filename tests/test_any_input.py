"""Anything at all in a sweep or a data file: planned, or refused in one message; never a traceback."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from plora_jax.config.yamlfile import dump_yaml
from tests.refusal import listing, one_message, run
from tests.tiny import write_sweep

DATA = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16}

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LEAVES = [
    *(("data", name) for name in ("train", "eval", "max_length", "metric", "choices", "on_long", "buckets")),
    *(
        ("search", name)
        for name in ("rank", "learning_rate", "alpha_ratio", "sample", "jobs", "seed", "method", "budget")
    ),
    *(("early_stop", name) for name in ("grace_period", "brackets", "every")),
    *(("train", name) for name in ("batch_size", "epochs", "targets", "seeds", "optimizer", "rank_pattern")),
    *((name,) for name in ("model", "data", "search", "train", "precision", "devices", "early_stop", "eval")),
]
any_input = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def survives(directory: Path, sweep: Path) -> None:
    """Whatever the file holds, planning either works or is refused properly; it never breaks or writes."""
    before = listing(directory)
    code, said = run("plan", sweep, "--devices", "cpu-16GB")
    assert listing(directory) == before
    assert code in (0, 2)
    if code == 2:
        one_message(said)


@any_input
@given(place=st.sampled_from(LEAVES), value=junk)
@example(place=("search", "rank"), value={"uniform": [1, float("nan")]})
@example(place=("data", "train"), value="\x00")
@example(place=("model",), value="a" * 5000)
@example(place=("devices",), value="1e9xH100")
def test_any_value_in_any_place(place: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    sweep: dict[str, Any] = {
        "model": "model",
        "data": dict(DATA),
        "search": {"rank": [4, 8]},
        "train": {"batch_size": 2},
        "early_stop": {},
    }
    inner = sweep
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path = write_sweep(tmp_path)
    path.write_text(dump_yaml(sweep), encoding="utf-8", errors="surrogatepass")
    survives(tmp_path, path)


@any_input
@given(content=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_as_a_sweep(content: bytes, tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    path.write_bytes(content)
    survives(tmp_path, path)


@any_input
@given(
    content=st.binary(max_size=80),
    rows=st.lists(junk, max_size=3),
    name=st.sampled_from(["a.jsonl", "a.csv", "a.json"]),
)
def test_any_bytes_as_data(content: bytes, rows: list[Any], name: str, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, data=DATA | {"train": name})
    (tmp_path / name).write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() + content)
    survives(tmp_path, path)
