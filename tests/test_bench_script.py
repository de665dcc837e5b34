"""`benchmarks/step.py` goes through its cases whatever happens in one, and its plans are cases that exist."""

import json

import pytest

from benchmarks import step
from plora_jax.models.presets import PRESETS
from tests import tiny


@pytest.mark.long
def test_a_case_that_fails_or_ends_its_process_leaves_the_others(tmp_path, capsys, monkeypatch):
    model = str(tiny.write_model(tmp_path / "model", num_hidden_layers=3))
    good = step.shape(model, 2, 1, 16, rank=8, repeats=2)
    cases = [
        good | {"label": "unrolled", "runtime": {"unroll": "all"}, "recompute": "dots", "micro_steps": 2},
        good | {"label": "wrong", "recompute": "nothing"},
        good | {"label": "crash", "crash": True},
        step.peft(model, (1, 16), (2, 8)),
        good | {"label": "compiled", "repeats": 0, "accumulate": True, "head_chunk": 4},
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    out = tmp_path / "out.jsonl"
    arguments = [
        "step",
        "--cases",
        str(tmp_path / "cases.json"),
        "--out",
        str(out),
        "--set",
        '{"repeats": 3}',
    ]
    monkeypatch.setattr("sys.argv", arguments)
    assert step.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in rows] == [
        "unrolled",
        "wrong",
        "crash",
        f"PEFT {model.rsplit('/', 1)[-1]}",
        "compiled",
    ]
    assert rows[0]["unroll"] == 3 and rows[0]["ms"][0] > 0 and rows[0]["micro_steps"] == 2
    assert rows[0]["tokens_s"] == pytest.approx(2 * 16 / (rows[0]["ms"][0] / 1e3))
    assert "nothing" in rows[1]["error"] or "recompute" in rows[1]["error"]
    assert rows[2]["error"] in ("the worker ended with code 9", "the worker had ended")
    if "error" in rows[3]:
        assert "not installed" in rows[3]["error"]
    else:
        assert [(p["m"], p["length"]) for p in rows[3]["peft"]] == [(1, 16), (2, 8)]
        assert all(p["tokens_s"] > 0 for p in rows[3]["peft"])
    assert rows[4]["total_bytes"] > 0 and "ms" not in rows[4] and rows[4]["accumulate"]
    assert "tokens/s" in capsys.readouterr().out


def test_time_that_is_up_leaves_cases_out_and_says_so(tmp_path):
    rows = step.run([step.shape("m", 1, 1, 8)], tmp_path / "out.jsonl", 0.0, {})
    assert rows == [{"label": "m 1x1x8", "skipped": "no time left"}]


def test_plans_name_known_models_and_settings_reach_every_case():
    for plan in step.PLANS.values():
        for case in plan():
            assert case["model"] in PRESETS
            settled = step.settle(case, {"runtime": {"unroll": "all"}, "repeats": 4})
            if case.get("peft"):
                assert set(settled) == {"label", "peft", "model", "rank"}
            else:
                own = case.get("runtime", {}).get("unroll")
                layers = PRESETS[case["model"]]["num_hidden_layers"]
                assert settled["runtime"]["unroll"] == (own or layers)
                assert settled["repeats"] == case.get("repeats", 4)
    points = {(c["jobs"], c["length"], c["rank"]) for c in step.planner_points()}
    assert len(points) == len(step.planner_points()) >= 16
