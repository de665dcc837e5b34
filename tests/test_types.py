"""A sweep on devices of two types: workers, which compute on the CPU here, keep to the packs of their own type."""

import json
from dataclasses import replace
from functools import partial

import pytest

import planner
from plora_jax.cli import main
from plora_jax.engine import driver
from plora_jax.launch.pool import Pool, Restarts
from plora_jax.launch.process import WORKER, Group, WorkerProcess
from plora_jax.launch.site import Site
from tests import tiny

ROWS = [
    {"prompt": f"what is {word} ?", "completion": f" {word[:3]}"} for word in ("red", "green", "blue", "one")
]
ON = planner.devices("1xA100-40GB+1xH200")


def in_turn(plan_jobs, *args, **more):
    """Plan, and give every job a pack of its own, every other on the other device."""
    plan = plan_jobs(*args, **more)
    places = [(pack, place) for pack in plan.packs for place in pack.assign]
    packs = [
        replace(
            pack,
            jobs=(place.job_id,),
            assign=(replace(place, slot=0),),
            devices=(n % 2,),
            device=ON.type_of(n % 2).name,
        )
        for n, (pack, place) in enumerate(places)
    ]
    return replace(plan, packs=tuple(packs))


def spawn(broken, run, group):
    return WorkerProcess(run, group, "plora_jax.nowhere" if group.worker == broken else WORKER)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", ["", "1"])
def test_a_worker_takes_packs_of_its_own_type_and_others_where_that_has_no_worker(
    tmp_path, monkeypatch, broken
):
    tiny.write_model(tmp_path / "model")
    tiny.write_weights(tmp_path / "model")
    for name, rows in (("train", ROWS), ("eval", ROWS[1:])):
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    jobs = [{"rank": 4, "learning_rate": 0.01 * n} for n in range(1, 5)]
    data = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16}
    sweep = tiny.write_sweep(tmp_path, data=data, search={"jobs": jobs}, train={"slots": 1}, precision="fp32")
    launcher = Pool(partial(spawn, broken), restarts=partial(Restarts, first_s=0.1))
    site = Site(launcher, [Group("0", threads=1), Group("1", threads=1)], ON)
    monkeypatch.setattr(driver, "_site", lambda *_: site)
    monkeypatch.setattr(driver, "plan_jobs", partial(in_turn, driver.plan_jobs))
    out = tmp_path / "run"
    assert main(["sweep", str(sweep), "--out", str(out), "--no-reproducible"]) == 0
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    packs = {name: pack for line in lines if line["kind"] == "packs" for name, pack in line["packs"].items()}
    assert len(packs) == 4
    claims = {line["pack"]: line["worker"] for line in lines if line["kind"] == "claim"}
    orphaned = [line["device"] for line in lines if line["kind"] == "orphaned"]
    if broken:
        assert orphaned == ["H200"] and {claims[name] for name in packs} == {"0"}
    else:
        assert not orphaned and all(claims[name] == str(pack["devices"][0]) for name, pack in packs.items())
    board = json.loads((out / "leaderboard.json").read_text())
    assert [job["status"] for job in board["jobs"]] == ["completed"] * 4
    assert "1 × A100-40GB + 1 × H200" in (out / "report.html").read_text()
    assert "pack 2 on H200: 1 jobs" in (out / "report.html").read_text()
