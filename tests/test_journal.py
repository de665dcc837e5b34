"""What follows from the lines of a journal, whoever wrote them; no model is loaded."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest

import planner
from plora_jax.engine.driver import _drive, _orphan, _unfinished, _with_work
from plora_jax.engine.journal import Journal
from plora_jax.engine.packrun import PackRun
from plora_jax.engine.progress import make_console
from plora_jax.engine.replan import Replanner, Seen, measured, open_packs, replan
from plora_jax.engine.rundir import RunDirectory
from plora_jax.engine.worker import Worker, smaller
from plora_jax.jobs import Job
from plora_jax.launch.process import Group
from plora_jax.launch.site import Site

JOBS = {job.job_id: job for job in (Job(learning_rate=0.01 * n, rank=4) for n in range(1, 7))}
A, B, C, D, E, F = JOBS


def pack(*jobs, slots=2, device=0, start_s=0.0, step_s=0.1, steps=100, setup_s=5.0):
    """Write a pack as plan.json has it; a slot holds every other job."""
    seconds = step_s * steps
    return {
        "jobs": list(jobs),
        "degree": 1,
        "m": 1,
        "policy": "none",
        "slots": [{"bucket": 8}] * slots,
        "length_buckets": [16],
        "row_tokens": 10.0,
        "step_s": step_s,
        "steps": steps,
        "assign": [
            {
                "job_id": job,
                "slot": i % slots,
                "start_s": start_s,
                "end_s": start_s + seconds,
                "scoring_s": 0.0,
            }
            for i, job in enumerate(jobs)
        ],
        "devices": [device],
        "start_s": start_s,
        "end_s": start_s + setup_s + seconds,
        "setup_s": setup_s,
        "memory_bytes": 1,
        "memory_limit_bytes": 2,
    }


@pytest.fixture
def journal(tmp_path):
    """Hold the journal of a run of two packs of two jobs each."""
    journal = Journal(tmp_path / "journal.jsonl")
    settings = {"scope": "sweep", "reproducible": False, "devices": {"count": 2}}
    journal.append("settings", settings=settings)
    journal.add_plan(
        {name: JOBS[name].to_dict() for name in (A, B, C, D)}, [pack(A, B), pack(C, D, device=1)]
    )
    yield journal
    journal.close()


def place(journal, name, *jobs, at=0):
    journal.append("claim", pack=name, worker="0")
    for slot, job in enumerate(jobs):
        journal.append("place", pack=name, at=at, slot=slot, job_id=job)


def test_a_job_that_another_pack_took_is_lost_with_neither(journal):
    place(journal, "pack-001", A, B)
    journal.append("ended", job_id=A, status="completed", tokens=1)
    journal.append(
        "place", pack="pack-001", at=9, slot=0, job_id=D
    )  # of the second pack, which nobody has begun
    place(journal, "pack-002", C)
    journal.append("ended", job_id=C, status="completed", tokens=1)
    journal.append("done", pack="pack-002")
    path, left = journal.path, [JOBS[name] for name in (A, B, C, D)]
    # a run that goes on leaves D to the pack that has it in a slot, by its checkpoint
    assert [job.job_id for job in _unfinished(path.parent, left)] == [C]  # which left no record
    # and when that pack makes its program smaller, D waits in it, the second pack being over
    journal.append("limit", pack="pack-001", slots=[{"bucket": 8}], m=1, policy="layer")
    assert journal.state.waiting("pack-001") == [B, D]
    assert not journal.state.finished


def claimed(journal, worker):
    """Return the packs that a worker claims one after another, while nobody does them."""
    out, held = [], []
    run = RunDirectory(journal.path.parent)
    one = SimpleNamespace(run=run, journal=journal, name=worker)
    one._packs = partial(Worker._packs, one)
    while found := Worker._claim(one):
        out.append(found[0])
        held.append(found[1])
    for lock in held:
        lock.close()
    return out


def test_a_worker_takes_packs_of_its_own_type_and_of_none_that_is_served(journal):
    """Four packs: of the A100, the H200, a type that this start does not have, and of an older version."""
    mixed = planner.devices("1xA100-40GB+1xH200")
    journal.append("settings", settings={"devices": asdict(mixed)})
    kinds = ("A100-40GB", "H200", "L40S", None)
    packs = [
        pack(job, device=0) | ({"device": kind} if kind else {})
        for job, kind in zip(JOBS, kinds, strict=False)
    ]
    journal.append("packs", packs={f"pack-{n:03d}": pack for n, pack in enumerate(packs, 11)})
    for name in ("pack-001", "pack-002"):
        journal.append("done", pack=name)
    a100, h200, other, old = (f"pack-{n:03d}" for n in range(11, 15))
    assert claimed(journal, "0") == [a100, other, old, "base"]
    assert claimed(journal, "1") == [h200, other, old, "base"]
    for name in ("pack-011", other, old, "base"):
        journal.append("done", pack=name)
    assert claimed(journal, "0") == [], "scores on test rows wait for the packs of the other type too"
    _orphan(journal, ["0", "1"])
    assert claimed(journal, "0") == []
    _orphan(journal, ["0"])
    assert journal.state.orphaned == {"H200"} and claimed(journal, "0") == [h200]
    journal.append("settings", settings={"devices": asdict(mixed)})
    assert claimed(journal, "0") == [], "after a new start the type has workers again"
    journal.append("done", pack=h200)
    assert claimed(journal, "0") == ["test"]


def test_workers_start_for_the_types_that_packs_are_planned_for(journal):
    mixed = planner.devices("1xA100-40GB+1xH200")
    site = Site(None, [Group("0", 1), Group("1", 1)], mixed)
    assert [group.worker for group in _with_work(site, journal)] == ["0", "1"]
    journal.append("packs", packs={"pack-003": pack(C) | {"device": "H200"}})
    assert [group.worker for group in _with_work(site, journal)] == ["1"]
    journal.append("done", pack="pack-003")
    assert [group.worker for group in _with_work(site, journal)] == ["0", "1"]


def test_packs_that_are_added_for_a_type_without_workers_are_for_the_others(journal):
    mixed = planner.devices("1xA100-40GB+1xH200")
    for name in ("pack-001", "pack-002", "base"):
        journal.append("done", pack=name)
    journal.append("packs", packs={"pack-003": pack(C) | {"device": "A100-40GB"}})
    started = []
    launcher = SimpleNamespace(
        start=lambda run, groups: started.append([group.worker for group in groups]),
        alive=lambda: [],
        stop=lambda: None,
    )
    site = Site(launcher, [Group("0", 1), Group("1", 1)], mixed)
    run, watch = RunDirectory(journal.path.parent), SimpleNamespace(journal=journal)
    for _ in range(2):  # a run, and one that goes on
        journal.append("settings", settings={"devices": asdict(mixed)})
        assert not journal.state.orphaned
        _drive(launcher, _with_work(site, journal), run, make_console(), watch)
    assert started == [["0"], ["0"]] and journal.state.orphaned == {"H200"}
    journal.append("packs", packs={"pack-004": pack(D, device=1) | {"device": "H200"}})
    assert claimed(journal, "0") == ["pack-003", "pack-004"]


def test_a_slot_takes_jobs_of_packs_for_its_workers_type_alone(journal):
    """Pack 1 of the A100 is begun; a job is left in an open pack of each type."""
    journal.append("settings", settings={"devices": asdict(planner.devices("1xA100-40GB+1xH200"))})
    packs = {
        "pack-001": pack(A) | {"device": "A100-40GB"},
        "pack-002": pack(B) | {"device": "A100-40GB"},
        "pack-003": pack(C, device=1) | {"device": "H200"},  # the last planned: it would be taken first
    }
    journal.append("packs", packs=packs)
    place(journal, "pack-001", A)
    worker = SimpleNamespace(name="0", item=lambda job_id: job_id)
    one = SimpleNamespace(journal=journal, worker=worker, program=SimpleNamespace(fits=lambda item: True))
    for name in ("_other_packs", "_closed"):
        setattr(one, name, partial(getattr(PackRun, name), one))
    assert PackRun._foreign(one, journal.state) == B and not one._closed()
    journal.append("claim", pack="pack-002", worker="0")
    assert PackRun._foreign(one, journal.state) is None and one._closed()
    _orphan(journal, ["0"])
    assert PackRun._foreign(one, journal.state) == C and not one._closed()


def scored(journal, job_id, step, fraction):
    line = {"job_id": job_id, "step": step, "fraction": fraction}
    journal.append("score", **line, value=1.0, loss=1.0, train_loss=1.0)
    journal.append("verdict", job_id=job_id, step=step, stop=False, reason="")


def test_a_job_that_left_its_pack_at_a_rung_waits_for_the_next_plan(journal):
    place(journal, "pack-001", A, B)
    scored(journal, A, 3, 0.1)
    journal.append("pause", pack="pack-001", job_id=A, step=3)
    assert journal.state.at_rung == [] and journal.state.waiting("pack-001") == []  # its pack is open
    journal.append("limit", pack="pack-001", slots=[{"bucket": 8}], m=1, policy="layer")
    assert journal.state.waiting("pack-001") == [B]  # what A came to stays
    journal.append("place", pack="pack-001", at=0, slot=0, job_id=B)
    for job_id in (B, C, D):
        journal.append("ended", job_id=job_id, status="completed", tokens=1)
    for name in ("pack-001", "pack-002", "base", "test"):
        journal.append("done", pack=name)
    assert journal.state.at_rung == [A] and not journal.state.finished
    left = [JOBS[name] for name in (A, B, C, D)]
    assert [job.job_id for job in _unfinished(journal.path.parent, left)] == [B, C, D]  # they left no record

    journal.add_plan({}, [pack(A) | {"rung": 1}])
    assert journal.state.at_rung == [] and journal.state.waiting("pack-003") == [A]
    place(journal, "pack-003", A)
    assert journal.state.from_step == {("pack-003", A): 3}
    scored(journal, A, 9, 0.3)
    journal.append("limit", pack="pack-003", slots=[{"bucket": 8}], m=1, policy="layer")
    assert journal.state.waiting("pack-003") == [A]  # it begins again from the rung that it came from
    assert [point.step for point in journal.state.points[A]] == [3]
    assert [key for key in (*journal.state.scores, *journal.state.verdicts) if key[0] == A] == [(A, 3)] * 2
    place(journal, "pack-003", A)
    assert journal.state.from_step == {("pack-003", A): 3}
    journal.append("pause", pack="pack-003", job_id=A, step=9)
    assert journal.state.left_paused("pack-003", A) and not journal.state.left_paused("pack-001", A)
    journal.append("done", pack="pack-003")
    journal.append("done", pack="test")
    assert journal.state.at_rung == [A] and not journal.state.finished
    again = Journal(journal.path)
    assert again.refresh() == journal.state
    again.close()
    journal.append("ended", job_id=A, status="stopped", tokens=1)
    assert journal.state.at_rung == [] and journal.state.finished


SPECS = {
    name: planner.JobSpec(name, 4, 4, 400 * n, 9.0, 10, "rows", eval_tokens=30)
    for n, name in enumerate(JOBS, 1)
}
SHAPE = planner.decoder_shape("tiny", 2, 16, 32, 2, 1, 8, 64, tied=True)
CPU = planner.cpu_device(8 * 10**9, 2)


def solve(names, scale, packs, busy_until=(), slots=2):
    """Plan with the real planner, two slots a pack."""
    cost = planner.cost_model(CPU.spec).slowed(scale)
    options = planner.Options(max_slots=slots, baselines=False)
    specs = [SPECS[name] for name in names]
    more = {"cost_model": cost, "options": options, "busy_until": busy_until}
    return planner.make_plan(specs, SHAPE, replace(CPU, count=len(busy_until) or 1), precision="fp32", **more)


@pytest.fixture
def begun(tmp_path):
    """Hold the journal of a run of three planned packs, the first of which a worker trains."""
    journal = Journal(tmp_path / "journal.jsonl")
    settings = {"scope": "sweep", "reproducible": False, "devices": asdict(CPU)}
    journal.append("settings", settings=settings)
    jobs = {name: job.to_dict() for name, job in JOBS.items()}
    journal.add_plan(jobs, [solve(pair, 1.0, []).to_dict()["packs"][0] for pair in ((A, B), (C, D), (E, F))])
    place(journal, "pack-001", A, B)
    yield journal
    journal.close()


def planned(packs):
    return sorted(place["job_id"] for pack in packs for place in pack["assign"])


@pytest.mark.parametrize("pace", [3.0, 1.2, 0.8])
def test_what_nobody_has_begun_is_planned_again_at_the_measured_pace(begun, pace):
    before = copy.deepcopy(begun.state.packs)
    found = replan(begun.state, [Seen("pack-001", 10, pace)], solve)
    assert found and found.replaces == open_packs(begun.state) and found.scale == pytest.approx(pace)
    assert planned(found.packs) == sorted([C, D, E, F])  # each once, and none that is in training
    step_s = {pack["m"]: pack["step_s"] for pack in before.values()}
    assert all(pack["step_s"] == pytest.approx(pace * step_s[pack["m"]]) for pack in found.packs)
    # by hand: the rest of the first pack, then one after another
    first, *rest = before.values()
    left = (first["steps"] - 10) * first["step_s"]
    whole = [pack["end_s"] - pack["start_s"] - pack["setup_s"] for pack in rest]
    setup = sum(pack["setup_s"] for pack in rest)
    assert found.planned_s == pytest.approx(left + setup + sum(whole))
    assert found.kept_s == pytest.approx(pace * left + setup + pace * sum(whole))
    assert found.left_s <= found.kept_s
    assert begun.state.packs == before  # a decision alone changes nothing


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [Seen("pack-001", 10, 1.09)],
        [Seen("pack-001", 10, 0.91)],
        [Seen("base", 0, 3.0)],
        [Seen("pack-001", 10, 3.0), Seen("pack-001", 10, 1.0), Seen("pack-001", 10, 1.0)],  # one slow device
    ],
)
def test_the_plan_stays_when_the_pace_is_that_of_the_plan(begun, seen):
    def never(*_):
        raise AssertionError("nothing is to be solved")

    assert replan(begun.state, seen, never) is None


def test_the_plan_stays_when_no_plan_ends_earlier_or_none_is_found(begun):
    seen = [Seen("pack-001", 10, 2.0)]
    assert replan(begun.state, seen, lambda *_: None) is None
    assert replan(begun.state, seen, lambda names, scale, *_: solve(names, 30 * scale, [])) is None


def test_what_was_begun_or_ended_is_never_planned_again(begun):
    place(begun, "pack-002", C)
    begun.append("yielded", pack="pack-002")
    begun.append(
        "settings", settings={}
    )  # a run that goes on: whoever had a pack is gone, and it has a checkpoint
    begun.append("place", pack="pack-001", at=20, slot=0, job_id=F)  # taken from the third pack
    assert open_packs(begun.state) == {"pack-003": [E]}
    found = replan(begun.state, [Seen("pack-001", 30, 2.0)], solve)
    assert found and found.replaces == {"pack-003": [E]} and planned(found.packs) == [E]
    first, third = begun.state.packs["pack-001"], begun.state.packs["pack-003"]
    left, (span,) = (first["steps"] - 30) * first["step_s"], [p for p in third["assign"] if p["job_id"] == E]
    alone = span["end_s"] - span["start_s"]  # without the pause in which F would be scored
    assert found.kept_s == pytest.approx(2 * left + third["setup_s"] + 2 * alone)
    begun.append("withdraw", job_id=E)
    assert replan(begun.state, [Seen("pack-001", 30, 2.0)], solve) is None


def test_a_new_plan_counts_with_when_each_worker_is_free(begun):
    """One of three trains the first pack: the new plan ends when workers that take packs in turn are done."""
    devices = asdict(replace(CPU, count=3))
    begun.append("settings", settings={**begun.state.settings, "devices": devices})
    place(begun, "pack-001", A, B)
    told = []

    def look(names, scale, packs, busy_until):
        told.append(busy_until)
        return solve(names, scale, packs, busy_until)

    first = begun.state.packs["pack-001"]
    found = replan(begun.state, [Seen("pack-001", 10, 30.0)], look)
    left = 30.0 * (first["steps"] - 10) * first["step_s"]
    assert told == [[0.0, 0.0, pytest.approx(left)]]
    assert found and planned(found.packs) == sorted([C, D, E, F])
    assert all(pack["start_s"] >= told[0][device] for pack in found.packs for device in pack["devices"])
    assert found.left_s == pytest.approx(max([left, *(pack["end_s"] for pack in found.packs)]))


def test_the_journal_folds_to_the_new_packs(begun):
    found = replan(begun.state, [Seen("pack-001", 10, 2.0)], solve)
    assert found
    begun.add_plan({}, found.packs, replaces=list(found.replaces), scale=found.scale)
    names = [name for name in begun.state.packs if name != "pack-001"]
    assert names == [f"pack-{4 + i:03d}" for i in range(len(found.packs))]  # no name is used twice
    assert sorted(job for name in names for job in begun.state.waiting(name)) == sorted([C, D, E, F])
    # the first pack is planned by the cost model, the others for a device half as fast: that is no drift any more
    seen = [Seen("pack-001", 40, 2.0)]
    assert measured(begun.state, seen) == pytest.approx(2.0) and replan(begun.state, seen, solve) is None
    assert measured(begun.state, [Seen(names[0], 9, 1.5)]) == pytest.approx(3.0)
    again = Journal(begun.path)
    assert again.refresh() == begun.state
    again.close()


@pytest.fixture
def replanner(begun, monkeypatch):
    """Give a driver's re-planner whose solver calls `during` first, and the list of events that it writes."""
    told, during = [], []

    def plan_jobs(sweep, config, jobs, *_, cost_model, incumbent, busy_until, begun, rung):
        assert begun is None and rung == 0  # whole jobs
        for act in during:
            act()
        assert [set(pack.jobs) for pack in incumbent] == [{C, D}, {E, F}]
        return solve([job.job_id for job in jobs], 2.0, incumbent, busy_until)

    monkeypatch.setattr("plora_jax.engine.replan.plan_jobs", plan_jobs)
    run = SimpleNamespace(event=lambda kind, **values: told.append((kind, values)))
    task = SimpleNamespace(files={"rows": None}, eval=SimpleNamespace(tokens=30))
    sweep = SimpleNamespace(data=SimpleNamespace(train="rows"))
    one = Replanner(run, begun, sweep, None, task, make_console())
    return partial(one.look, [{"pack": "pack-001", "micro_step": 10, "pace": 2.0}]), told, during


def test_a_pack_that_a_worker_claims_while_the_driver_plans_is_not_replaced(begun, replanner):
    look, told, during = replanner
    worker = Journal(begun.path)

    def claim():
        worker.append("claim", pack="pack-002", worker="1")
        worker.append("place", pack="pack-002", at=0, slot=0, job_id=C)
        begun.refresh()  # as anything that reads the state does

    during.append(claim)
    look()
    worker.close()
    assert told == [] and list(begun.refresh().packs) == ["pack-001", "pack-002", "pack-003"]
    assert begun.state.waiting("pack-002") == [D]


def test_a_fault_while_the_driver_plans_ends_no_sweep(begun, replanner):
    look, told, during = replanner

    def fail():
        raise ZeroDivisionError("in a solver")

    during.append(fail)
    look()
    assert [kind for kind, _ in told] == ["error", "drift"] and told[0][1][
        "cause"
    ] == "planning again: in a solver"
    during.clear()
    begun.append("done", pack="pack-001")
    look()
    assert len(told) == 2  # nobody trains


def test_a_mixture_is_told_of_a_drift_and_keeps_its_plan(begun, replanner):
    look, told, _ = replanner
    devices = asdict(planner.devices("1xA100-40GB+1xH200"))
    begun.append("settings", settings={**begun.state.settings, "devices": devices})
    before = list(begun.state.packs)
    look()
    assert list(begun.state.packs) == before and [kind for kind, _ in told] == ["drift"]


def test_the_driver_journals_another_plan(begun, replanner):
    look, told, _ = replanner
    look()
    ((kind, values),) = told
    assert kind == "replanned" and values["replaces"] == ["pack-002", "pack-003"] and values["factor"] == 2.0
    assert list(begun.state.packs)[:2] == ["pack-001", "pack-004"]


def test_the_base_model_is_scored_once_however_many_ask(tmp_path):
    run, scored = RunDirectory(tmp_path), []
    (tmp_path / "claims").mkdir()

    def score(*_):
        scored.append(1)
        time.sleep(0.2)
        return [SimpleNamespace(loss=2.0)]

    worker = SimpleNamespace(
        run=run,
        status=lambda **_: None,
        scorer=SimpleNamespace(score=score),
        task=lambda: SimpleNamespace(eval=None),
    )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Worker.score_base, [worker] * 4))
    assert len(scored) == 1 and run.read_json("base.json") == {"loss": 2.0}


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_out_of_memory_puts_layer_inputs_on_the_host_last(monkeypatch, backend):
    monkeypatch.setattr("jax.default_backend", lambda: backend)

    def steps(**was):
        while was := smaller(was):
            yield len(was["slots"]), was["m"], was["policy"]

    last = [(1, 1, "offload")] if backend == "gpu" else []
    assert [*steps(slots=[8] * 4, m=6, policy="none", jobs=[])] == [
        (4, 6, "dots"), (4, 6, "layer"), (2, 6, "layer"), (1, 6, "layer"), (1, 3, "layer"), (1, 1, "layer"), *last
    ]  # fmt: skip
    assert [*steps(slots=[8, 8], m=1, policy="offload")] == [(1, 1, "offload")]
