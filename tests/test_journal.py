"""What follows from the lines of a journal, whoever wrote them; no model is loaded."""

import pytest

from plora_jax.engine.driver import _unfinished
from plora_jax.engine.journal import Journal
from plora_jax.jobs import Job

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
    journal.append("settings", settings={"scope": "sweep"})
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
