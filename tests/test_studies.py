"""The pure parts of scripts/studies: how rows are cut, jobs drawn, and results compared."""

import json

import pytest

from plora_jax.config.sweep import make_sweep
from plora_jax.search.configurations import search_jobs
from plora_jax.search.early_stop import EarlyStop
from scripts.studies import early_stop, four_tasks
from scripts.studies.common import table


def test_train_and_eval_rows_are_cut_from_one_file_and_test_rows_from_the_other(tmp_path):
    task = four_tasks.Task("t", "t_train.jsonl", "t_dev.jsonl", (" no", " yes"))
    for name, count in (("t_train", 20), ("t_dev", 7)):
        lines = [json.dumps({"prompt": f"{name} {i}", "completion": " no"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))

    def parts(**counts):
        paths = four_tasks.split(task, tmp_path, tmp_path / "out", counts)
        return {part: open(path).read().splitlines() for part, path in paths.items()}

    some = parts(train=10, eval=5, test=4)
    assert {part: len(lines) for part, lines in some.items()} == {"train": 10, "eval": 5, "test": 4}
    assert not {*some["train"]} & {*some["eval"]} and all("t_dev" in line for line in some["test"])
    assert parts(train=10, eval=5, test=4) == some  # the same rows every time
    few = parts(train=100, eval=10, test=100)
    assert {part: len(lines) for part, lines in few.items()} == {"train": 16, "eval": 4, "test": 7}


def test_the_papers_space_and_the_defaults_are_jobs_of_one_sweep():
    jobs = four_tasks.drawn(30, seed=0)
    assert jobs == four_tasks.drawn(30, seed=0) != four_tasks.drawn(30, seed=1)
    for job in jobs:
        assert 2e-5 <= job["learning_rate"] <= 4e-4 and job["rank"] in (8, 16, 32, 64, 128)
        assert job["rank"] / 4 <= job["alpha"] <= 4 * job["rank"] and job["batch_size"] in (
            1,
            2,
            4,
            8,
            16,
            32,
        )
    data = {part: f"{part}.jsonl" for part in ("train", "eval", "test")}
    for task in four_tasks.TASKS:
        whole = four_tasks.sections(task, data, [*jobs, four_tasks.DEFAULT])
        made = search_jobs(make_sweep(model="m", **whole))
        assert len(made) == 31 and [four_tasks.is_default(job.to_dict()) for job in made] == [False] * 30 + [
            True
        ]
        assert made[0].scheduler == "cosine" and made[0].warmup_ratio == 0.03
    again = four_tasks.sections(task, data, [four_tasks.listed(made[3].to_dict())], seeds=[1, 2])
    assert [(job.alpha, job.seed) for job in search_jobs(make_sweep(model="m", **again))] == [
        (made[3].alpha, 1),
        (made[3].alpha, 2),
    ]


def test_the_spread_by_hand():
    assert four_tasks.spread([{"score": 0.5}]) == "50.0"
    assert four_tasks.spread([{"score": s} for s in (0.5, 0.6, 0.7)]) == "60.0 ± 10.0"


def test_the_full_sweep_is_scored_at_every_rung_of_the_rule(tmp_path):
    args = early_stop.options().parse_args(["--model", "m", "--work", "w", "--out", "o"])
    data = {part: f"{part}.jsonl" for part in ("train", "eval", "test")}
    full = early_stop.sections(data, args, 1)
    sweep = make_sweep(model="m", **full)
    rule = make_sweep(model="m", **early_stop.stopped(full, 8))
    assert search_jobs(sweep) == search_jobs(rule) and len(search_jobs(sweep)) == 32
    assert sweep.early_stop == EarlyStop() and rule.train.slots == 8
    for total, per_epoch in ((256, 128), (64, 32)):
        scored = sweep.eval.steps(total, per_epoch)
        rungs = rule.eval.steps(total, per_epoch, rule.early_stop.rungs())
        assert len(scored) == 9 and len(rungs) == 3 and {*rungs} <= {*scored}


def test_what_early_stopping_lost():
    full = {"eval_score": 0.9, "test_score": 0.88, "tokens": 1000}
    asha = {"eval_score": 0.895, "test_score": 0.885, "tokens": 260}
    found = early_stop.compared(full, asha)
    assert found == pytest.approx({"eval_points": 0.5, "test_points": -0.5, "token_share": 0.26})


def test_a_table_is_aligned():
    assert table([["task", "n"], ["a", "120"]]) == "task    n\na     120"
