"""The jobs of a sweep: complete, in order, without duplicates, and the same for the same seed."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.config.sweep import Sweep, parse_sweep
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.search.configurations import grid, search_jobs

BASE = "model: org/name\ndata: {train: a.jsonl}\n"


def jobs_of(text: str) -> list[Job]:
    return search_jobs(parse_sweep(BASE + text))


def notes_of(text: str) -> list[str]:
    notes: list[str] = []
    search_jobs(parse_sweep(BASE + text), notes.append)
    return notes


def test_no_search_is_one_job() -> None:
    assert jobs_of("train: {rank: 4}") == [Job(rank=4)]


def test_a_grid_is_the_product_first_axis_slowest() -> None:
    jobs = jobs_of("search: {rank: [8, 16], learning_rate: [1e-4, 1e-3]}\ntrain: {epochs: 2}")
    assert jobs == [Job(rank=r, learning_rate=lr, epochs=2.0) for r in (8, 16) for lr in (1e-4, 1e-3)]


def test_alpha_ratio_times_rank_is_alpha() -> None:
    jobs = jobs_of("search: {rank: [8, 64], alpha_ratio: [0.25, 2]}")
    assert [(j.rank, j.alpha) for j in jobs] == [(8, 2.0), (8, 16.0), (64, 16.0), (64, 128.0)]
    assert jobs_of("train: {alpha_ratio: 2}") == [Job(alpha=32.0)]


def test_duplicates_are_trained_once_and_said() -> None:
    text = "search: {rank: [8, 8, 16], learning_rate: [1e-4, 1e-4]}"
    assert [j.rank for j in jobs_of(text)] == [8, 16]
    assert notes_of(text) == ["4 of 6 jobs are given twice and trained once"]
    assert notes_of("search: {rank: [8, 16]}") == []


def test_every_configuration_is_repeated_with_each_seed() -> None:
    jobs = jobs_of("search: {rank: [8, 16]}\ntrain: {seeds: [0, 7]}")
    assert [(j.rank, j.seed, j.data_seed) for j in jobs] == [(8, 0, 0), (8, 7, 0), (16, 0, 0), (16, 7, 0)]


def test_a_literal_list_keeps_its_order_and_overrides_train() -> None:
    jobs = jobs_of("search: {jobs: [{rank: 32, alpha: 8}, {epochs: 3}]}\ntrain: {rank: 4, alpha_ratio: 2}")
    assert jobs == [Job(rank=32, alpha=8.0), Job(rank=4, alpha=8.0, epochs=3.0)]
    assert jobs_of("jobs: [{rank: 4}]") == [Job(rank=4)]
    train = "train: {warmup_steps: 5, max_steps: 9}"
    assert jobs_of(f"{train}\njobs: [{{warmup_ratio: 0.1}}, {{epochs: 2}}, {{rank: 4}}]") == [
        Job(warmup_ratio=0.1, max_steps=9),
        Job(warmup_steps=5, epochs=2.0),
        Job(warmup_steps=5, max_steps=9, rank=4),
    ]


PAPER = """search:
  learning_rate: {log_uniform: [2e-5, 4e-4]}
  rank: [8, 16, 32, 64, 128]
  alpha_ratio: [0.25, 0.5, 1, 2, 4]
  batch_size: [1, 2, 4, 8, 16, 32]
"""


def test_a_jobs_id_is_worked_out_once_and_is_its_configurations_alone() -> None:
    job = Job(learning_rate=1e-3)
    assert job.job_id is job.job_id  # it is asked for at every micro-step
    assert replace(job, seed=1).job_id != job.job_id == replace(job).job_id == Job(learning_rate=1e-3).job_id
    assert job == Job(learning_rate=1e-3) and "job_id" not in job.to_dict()


def test_a_sample_is_seeded_distinct_and_within_its_ranges() -> None:
    jobs = jobs_of(PAPER + "  sample: 120\n")
    assert len(jobs) == len(set(jobs)) == len({j.job_id for j in jobs}) == 120
    assert jobs == jobs_of(PAPER + "  sample: 120\n") != jobs_of(PAPER + "  sample: 120\n  seed: 1\n")
    assert all(2e-5 <= j.learning_rate <= 4e-4 for j in jobs)
    assert {j.rank for j in jobs} == {8, 16, 32, 64, 128} and {j.batch_size for j in jobs} == {
        1,
        2,
        4,
        8,
        16,
        32,
    }
    assert {j.alpha / j.rank for j in jobs} == {0.25, 0.5, 1, 2, 4}


def test_a_longer_sample_begins_with_the_shorter_one() -> None:
    assert jobs_of(PAPER + "  sample: 50\n")[:20] == jobs_of(PAPER + "  sample: 20\n")


def test_another_axis_moves_no_other_draw() -> None:
    with_decay = jobs_of(PAPER + "  weight_decay: {uniform: [0, 0.1]}\n  sample: 30\n")
    assert [(j.rank, j.learning_rate) for j in with_decay] == [
        (j.rank, j.learning_rate) for j in jobs_of(PAPER + "  sample: 30\n")
    ]


def test_draws_have_their_distribution() -> None:
    """4,000 draws: quartiles of log-uniform and uniform; each whole number equally often, within 5 sigma."""
    jobs = jobs_of(
        "search: {learning_rate: {log_uniform: [1e-6, 1e-2]}, weight_decay: {uniform: [0, 1]},"
        " rank: {uniform: [1, 4]}, sample: 4000}"
    )
    logs = np.log10([j.learning_rate for j in jobs])
    np.testing.assert_allclose(np.quantile(logs, [0.25, 0.5, 0.75]), [-5, -4, -3], atol=0.16)
    np.testing.assert_allclose(
        np.quantile([j.weight_decay for j in jobs], [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.04
    )
    counts = Counter(j.rank for j in jobs)
    assert set(counts) == {1, 2, 3, 4}
    assert all(abs(n - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for n in counts.values())


def test_log_uniform_whole_numbers_reach_both_ends() -> None:
    drawn = {j.rank for j in jobs_of("search: {rank: {log_uniform: [4, 16]}, sample: 13}")}
    assert drawn == set(range(4, 17))


def test_a_sample_of_a_small_space_is_all_of_it_and_says_so() -> None:
    text = "search: {rank: [4, 8], batch_size: [1, 2, 4], sample: 50}"
    assert len(jobs_of(text)) == 6
    assert notes_of(text) == ["search.sample asks for 50 configurations and only 6 differ"]


def test_a_grid_beyond_reason_is_refused() -> None:
    axis = str(list(range(1, 1000)))
    with pytest.raises(UserError, match="998,001 configurations"):
        jobs_of(f"search: {{rank: {axis}, batch_size: {axis}}}")


def test_the_library_grid() -> None:
    jobs = grid(learning_rate=[1e-4, 2e-4], rank=[8, 32], batch_size=[1, 4], alpha_ratio=2)
    assert len(jobs) == 8 and jobs[0] == Job(learning_rate=1e-4, rank=8, batch_size=1, alpha=16.0)
    assert grid(learning_rate=np.array([1e-4]), rank=np.int64(4), targets="q_proj") == [
        Job(learning_rate=1e-4, rank=4, targets=("q_proj",))
    ]
    assert grid(rank=range(1, 4)) == [Job(rank=r) for r in (1, 2, 3)]
    with pytest.raises(UserError, match="max_steps: contradicts epochs"):
        grid(max_steps=[10], epochs=[1])
    with pytest.raises(UserError) as caught:
        grid(rank=[0, 8], lr=[1e-4], alpha=[1], alpha_ratio=[1], batch_size=[])
    for part in (
        "rank[0]: 0 is too small",
        "lr: unknown key; did you mean learning_rate?",
        "alpha: contradicts",
        "batch_size: is an empty list",
    ):
        assert part in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
)
def test_a_grid_holds_each_combination_exactly_once(
    ranks: list[int], batches: list[int], seeds: list[int]
) -> None:
    sweep: Sweep = parse_sweep(
        f"{BASE}search: {{rank: {ranks}, batch_size: {batches}}}\ntrain: {{seeds: {seeds}}}"
    )
    got = [(j.rank, j.batch_size, j.seed) for j in search_jobs(sweep)]
    assert len(got) == len(set(got))
    assert set(got) == {(r, b, s) for r in ranks for b in batches for s in seeds}
