"""Ask/tell search with the real Optuna: it finds more than random draws, and the same calls give the same jobs."""

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from plora_jax.config.space import Budget, Spent
from plora_jax.config.sweep import Sweep, make_sweep
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.search.configurations import search_jobs
from plora_jax.search.suggest import Suggester

optuna = pytest.importorskip("optuna")

SPACE = {
    "learning_rate": {"log_uniform": [1e-5, 1e-2]},
    "rank": [128, 8, 16, 64, 32],
    "alpha_ratio": [0.25, 0.5, 1, 2, 4],
    "dropout": {"uniform": [0, 0.2]},
    "targets": ["all-linear", ["q_proj", "v_proj"]],
    "batch_size": {"log_uniform": [1, 64]},
}


def sweep_of(
    space: dict[str, object] | None = None, train: dict[str, object] | None = None, **search: object
) -> Sweep:
    search = {"method": "optuna", "budget": {"jobs": 40}} | search
    return make_sweep(model="m", data={"train": "a"}, search=(space or SPACE) | search, train=train or {})


def objective(job: Job) -> float:
    """A bowl in closed form: least, 0, at a learning rate of 10^-3.5, rank 32, ratio 1, no dropout, batch 8."""
    bowl = (math.log10(job.learning_rate) + 3.5) ** 2 + 0.1 * (math.log2(job.batch_size) - 3) ** 2
    bowl += 0.075 * (math.log2(job.rank) - 5) ** 2 + 0.1 * math.log2(job.alpha / job.rank) ** 2
    return bowl + 3 * job.dropout + 0.2 * (job.targets != "all-linear")


def run(sweep: Sweep, slots: int = 4, sign: int = 1) -> list[Job]:
    """Keep `slots` jobs running, the first begun ending first, until no more are suggested."""
    suggester = Suggester(sweep, higher_is_better=sign < 0)
    running, done = suggester.ask(slots), []
    while running:
        job = running.pop(0)
        done.append(job)
        suggester.tell(job.job_id, sign * objective(job))
        running += suggester.ask(slots - len(running))
    return done


def best_five(jobs: list[Job]) -> float:
    return fmean(sorted(map(objective, jobs))[:5])


def test_tpe_beats_random_draws_on_three_seeds() -> None:
    for seed in range(3):
        tpe, draws = run(sweep_of(seed=seed)), run(sweep_of(seed=seed, method="random"))
        assert len(tpe) == len(draws) == 40
        assert best_five(tpe) < 0.75 * best_five(draws)


def test_higher_is_better_finds_the_same() -> None:
    assert run(sweep_of(), sign=-1) == run(sweep_of())


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", "qmc"])
def test_every_draw_is_new_within_the_space_and_repeatable(sampler: str) -> None:
    pytest.importorskip({"cmaes": "cmaes"}.get(sampler, "optuna"))
    sweep = sweep_of(sampler=sampler, budget={"jobs": 10}, seed=5)
    jobs = run(sweep)
    assert len(set(jobs)) == len({job.job_id for job in jobs}) == 10
    for job in jobs:
        assert 1e-5 <= job.learning_rate <= 1e-2 and 0 <= job.dropout <= 0.2 and 1 <= job.batch_size <= 64
        assert job.rank in (8, 16, 32, 64, 128) and job.alpha / job.rank in (0.25, 0.5, 1, 2, 4)
        assert job.targets in ("all-linear", ("q_proj", "v_proj"))
        assert float(f"{job.learning_rate:.4g}") == job.learning_rate
    assert run(sweep) == jobs
    assert run(sweep_of(sampler=sampler, budget={"jobs": 10}, seed=6)) != jobs


def test_gp() -> None:
    pytest.importorskip("torch")
    sweep = sweep_of(sampler="gp", budget={"jobs": 14})
    assert len(set(run(sweep))) == 14 and run(sweep) == run(sweep)


@pytest.mark.skipif(
    "torch" in sys.modules or bool(__import__("importlib.util").util.find_spec("torch")), reason=""
)
def test_gp_without_torch_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"search\.sampler: gp needs the package torch: pip install torch"):
        Suggester(sweep_of(sampler="gp"), False)


@pytest.mark.parametrize(
    ("package", "sampler", "says"),
    [
        (
            "optuna",
            "tpe",
            r"search\.method: optuna needs the package optuna: pip install 'plora-jax\[optuna\]'",
        ),
        (
            "cmaes",
            "cmaes",
            r"search\.sampler: cmaes needs the package cmaes: pip install 'plora-jax\[optuna\]'",
        ),
    ],
)
def test_a_missing_package_is_named(
    package: str, sampler: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    with pytest.raises(UserError, match=says):
        Suggester(sweep_of(sampler=sampler), False)


def test_random_draws_are_those_of_the_sample_and_need_no_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    listed = search_jobs(sweep_of(method="random"))
    assert run(sweep_of(method="random")) == listed
    sampled = {
        name: value for name, value in vars(sweep_of(method="random").search).items() if name == "seed"
    }
    assert (
        search_jobs(make_sweep(model="m", data={"train": "a"}, search=SPACE | {"sample": 40} | sampled))
        == listed
    )


REPLAY = """
import json, sys
from tests.test_suggest import Suggester, objective, sweep_of
suggester = Suggester(sweep_of(), False)
jobs = {}
for call in json.load(sys.stdin):
    if call[0] == "ask":
        jobs |= {job.job_id: job for job in suggester.ask_again(call[1])}
    else:
        suggester.tell(*call[1:])
print(json.dumps([job.job_id for job in suggester.ask(6)]))
"""


def test_a_replay_in_another_process_goes_on_with_the_same_jobs() -> None:
    """Asks of several sizes, tells out of order: completed, pruned, failed and diverged; another hash seed there."""
    suggester, calls, running = Suggester(sweep_of(), False), [], []
    for n in (5, 1, 3, 2, 4, 3, 2, 4):
        asked = suggester.ask(n)
        calls.append(["ask", [job.job_id for job in asked]])
        running += asked
        for k in range(min(n, len(running))):
            job = running.pop(-1 if k % 2 else 0)
            score: float | None = objective(job)
            if len(calls) % 7 == 3:
                score = None if n % 2 else math.nan
            calls.append(["tell", job.job_id, score, 1.0 if len(calls) % 3 else 1 / 9])
            suggester.tell(*calls[-1][1:])
    expected = [job.job_id for job in suggester.ask(6)]
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", REPLAY],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": str(root), "PATH": ""},
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == expected and len(expected) == 6
    again = Suggester(sweep_of(), False)
    assert [job.job_id for job in again.ask_again(calls[0][1])] == calls[0][1]
    with pytest.raises(UserError, match="not those of the run that is resumed"):
        again.ask_again(["r8-lr0.0001-b8-00000000"])


def test_what_is_told_matters() -> None:
    """The same asks, other scores: other jobs; and jobs that are running are kept away from."""

    def next_jobs(scores: list[float | None], fraction: float = 1.0) -> list[Job]:
        suggester = Suggester(sweep_of(), False)
        for job, score in zip(suggester.ask(len(scores)), scores, strict=True):
            suggester.tell(job.job_id, score, fraction)
        return suggester.ask(3)

    rising, falling = [float(n) for n in range(14)], [float(-n) for n in range(14)]
    assert next_jobs(rising) != next_jobs(falling)
    assert next_jobs(rising, 1 / 3) != next_jobs(falling, 1 / 3)  # pruned jobs teach as well
    assert next_jobs([math.nan, *rising[1:]]) != next_jobs(rising)  # a diverged one is bad, not good


def test_diverged_jobs_keep_the_search_away_and_lost_ones_do_not() -> None:
    """Half of the space ends without a score, by two seeds of 40 draws: diverged, or lost with its machine."""

    def there(score: float | None, seed: int) -> int:
        suggester = Suggester(sweep_of(budget={"jobs": 60}, seed=seed), False)
        jobs = []
        for _ in range(60):
            jobs += suggester.ask(1)
            rate = jobs[-1].learning_rate
            suggester.tell(jobs[-1].job_id, score if rate > 10**-3.5 else rate * 1e5 % 1)
        return sum(job.learning_rate > 10**-3.5 for job in jobs[20:])

    assert there(math.nan, 0) + there(math.nan, 1) < 5 < 10 < there(None, 0) + there(None, 1)


def states(suggester: Suggester) -> list[tuple[str, float | None]]:
    assert suggester._study is not None
    return [(trial.state.name, trial.value) for trial in suggester._study._study.trials]


def test_what_optuna_is_told() -> None:
    suggester = Suggester(sweep_of(), False)
    names = [job.job_id for job in suggester.ask(5)]
    for name, score, fraction in zip(names, (1.5, 2.5, None, math.nan), (1.0, 1 / 3, 1.0, 0.1), strict=False):
        suggester.tell(name, score, fraction)
    assert states(suggester) == [
        ("COMPLETE", 1.5),
        ("PRUNED", 2.5),
        ("FAIL", None),
        ("PRUNED", None),
        ("RUNNING", None),
    ]
    with pytest.raises(ValueError, match="told before"):
        suggester.tell(names[0], 1.0)
    with pytest.raises(KeyError):
        suggester.tell("r8-lr0.0001-b8-00000000", 1.0)


def test_a_configuration_is_told_by_its_mean_over_the_seeds() -> None:
    suggester = Suggester(sweep_of(train={"seeds": [0, 7, 9]}, budget={"jobs": 11}), False)
    jobs = suggester.ask(4)
    assert [job.seed for job in jobs] == [0, 7, 9, 0] and len({job.learning_rate for job in jobs[:3]}) == 1
    for job, score in zip(jobs[:3], (1.0, 2.0, 6.0), strict=True):
        assert states(suggester)[0][0] == "RUNNING"
        suggester.tell(job.job_id, score)
    assert states(suggester)[0] == ("COMPLETE", 3.0)
    jobs += suggester.ask(50)
    assert len(jobs) == 9 and [job.seed for job in jobs[3:]] == [0, 7, 9] * 2  # 11 jobs: three whole ones
    for job, score, fraction in zip(jobs[3:6], (1.0, 2.0, 6.0), (1.0, 1 / 3, 1.0), strict=True):
        suggester.tell(job.job_id, score, fraction)
    for job, score in zip(jobs[6:], (1.0, None, 6.0), strict=True):
        suggester.tell(job.job_id, score)
    assert states(suggester) == [("COMPLETE", 3.0), ("PRUNED", 3.0), ("FAIL", None)]
    assert len(search_jobs(sweep_of(train={"seeds": [0, 7, 9]}, budget={"jobs": 11}))) == 9


@pytest.mark.parametrize("method", ["optuna", "random"])
@pytest.mark.parametrize("ranks", [[4, 8, 16], {"uniform": [4, 6]}])
def test_a_small_space_is_drawn_whole_and_once(method: str, ranks: object) -> None:
    """Optuna proposes the good ones again and again; the others are then drawn at random."""
    space = {"rank": ranks, "batch_size": [1, 2, 4], "targets": [["q_proj"], ["v_proj"]]}
    jobs = run(sweep_of(space, method=method, budget={"jobs": 99}), slots=2)
    assert len(jobs) == len(set(jobs)) == 18


@pytest.mark.parametrize("redraws", [0, 20])
def test_optuna_knows_what_became_of_every_draw(redraws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates are given up at once, and a point drawn at random in their place is told as that point."""
    monkeypatch.setattr("plora_jax.search.suggest.REDRAWS", redraws)
    ranks, batches = [4, 8, 16], [1, 2, 4]
    suggester = Suggester(sweep_of({"rank": ranks, "batch_size": batches}, budget={"jobs": 9}), False)
    expected = {}
    for n in range(9):
        [job] = suggester.ask(1)
        expected[ranks.index(job.rank), batches.index(job.batch_size)] = float(n)
        suggester.tell(job.job_id, float(n))
    trials = suggester._study._study.trials  # type: ignore[union-attr]
    done = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert {(t.params["rank"], t.params["batch_size"]): t.value for t in done} == expected
    assert len(done) == 9 and {t.state.name for t in trials} == {"COMPLETE", *(["FAIL"] if redraws else [])}


def test_a_range_of_few_readable_numbers_comes_to_an_end() -> None:
    space = {"dropout": {"uniform": [0.1, 0.1002]}}
    assert len(run(sweep_of(space, method="random", budget={"jobs": 9}))) == 3


def test_optuna_is_as_loud_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    run(sweep_of(budget={"jobs": 6}))
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert capfd.readouterr() == ("", "")


def test_a_list_is_no_search() -> None:
    with pytest.raises(ValueError, match="known beforehand"):
        Suggester(make_sweep(model="m", data={"train": "a"}, jobs=[{"rank": 4}]), False)


def test_a_budget_ends_at_its_first_limit() -> None:
    assert Budget().left(Spent(10**9, 1e12, 1e30))
    assert Budget(jobs=3).left(Spent(jobs=2, tokens=1e30)) and not Budget(jobs=3).left(Spent(jobs=3))
    assert Budget(gpu_hours=0.5).left(Spent(device_seconds=1799)) and not Budget(gpu_hours=0.5).left(
        Spent(device_seconds=1800)
    )
    assert Budget(tokens=1e6).left(Spent(tokens=999_999)) and not Budget(tokens=1e6).left(Spent(tokens=1e6))
    both = Budget(jobs=3, gpu_hours=1)
    assert both.left(Spent(2, 3599)) and not both.left(Spent(3, 0)) and not both.left(Spent(0, 3600))


def test_what_is_not_known_beforehand_is_planned_as_random_draws() -> None:
    notes: list[str] = []
    jobs = search_jobs(sweep_of(), notes.append)
    assert jobs == search_jobs(sweep_of(method="random")) and len(jobs) == 40
    assert notes == ["search.method: optuna draws as jobs end; planned as 40 random configurations"]
    notes.clear()
    assert len(search_jobs(sweep_of(method="random", budget={"gpu_hours": 2.5}), notes.append)) == 64
    assert notes == ["search.budget ends the draws as it is used up; planned as 64 configurations"]
    notes.clear()
    assert len(search_jobs(sweep_of({"rank": [4, 8]}, budget={"jobs": 9}), notes.append)) == 2
    assert notes[0] == "search.budget asks for 9 configurations and only 2 differ"
