"""What a person sees: text, Gantt, SVG, explanations; and devices as they are written."""

import xml.etree.ElementTree as ET

import pytest

from planner import Options, PlanError, cpu_device, devices, explain_plan, gantt_svg, make_plan, render_plan
from planner.signature import fits, signature_of
from tests.planner.problems import QWEN, TINY, cluster, job

JOBS = [job(i, (8, 64)[i % 2], (2, 4)[i % 2], 1) for i in range(30)]
PLAN = make_plan(JOBS, TINY, cluster(3), options=Options(published=False))


def test_text_has_a_bar_for_every_group_and_all_numbers():
    text = render_plan(PLAN)
    assert text.count("|") == 2 * len({pack.devices for pack in PLAN.packs})
    assert "lower bound" in text and "min_gpu" in text and "GiB" in text
    assert all(len(line) < 200 for line in text.splitlines())
    assert text.startswith("30 jobs of tiny-1B (bf16) on 3 × A100-40GB: ")
    one = make_plan(JOBS[:1], TINY, cluster(1), options=Options(baselines=False))
    assert render_plan(one).startswith("1 job of tiny-1B (bf16) on 1 × A100-40GB: 1 pack, method exact")


def test_svg_is_well_formed_and_has_a_bar_a_job():
    root = ET.fromstring(gantt_svg(PLAN))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(t.startswith("job-") for t in titles) == len(JOBS)


def test_every_pack_is_explained():
    text = explain_plan(PLAN, JOBS, TINY, cluster(3))
    assert text.count("J = ") == text.count("m = ") == len(PLAN.packs)
    assert text.startswith("no plan is shorter than")


def test_memory_is_named_where_it_limits():
    jobs = [job(i, 128, 1, 2) for i in range(12)]
    on = cluster(1, "A100-40GB")
    plan = make_plan(jobs, QWEN, on, options=Options(baselines=False))
    assert len(plan.packs[0].slots) < 12 and "memory:" in explain_plan(plan, jobs, QWEN, on)


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xA100-40GB", "A100-40GB", 8),
        ("h200", "H200", 1),
        ("2 x nvidia H100", "H100", 2),
        ("4*RTX 4090", "RTX4090", 4),
        ("cpu-16GB", "cpu", 1),
    ],
)
def test_devices_as_written(text, name, count):
    found = devices(text)
    assert (found.spec.name, found.count) == (name, count)


def test_groups_are_powers_of_two_within_a_host():
    assert devices("64xH200").degrees == (1, 2, 4, 8)
    assert devices("6xH200").degrees == (1, 2, 4)
    assert cpu_device(8 * 10**9).degrees == (1,)
    with pytest.raises(PlanError, match="too little"):
        cpu_device(1000)


def test_fits_is_the_rule_of_the_signature():
    own = signature_of([job(0, 16, 4, 1), job(1, 8, 8, 0)], J=2, m=4, policy="none", dtype="bf16")
    assert own.rank_bucket == 16 and own.buckets == (128, 256)
    assert fits(own, job(2, 12, 12, 1))
    assert not fits(own, job(2, 17, 4, 1)), "rank"
    assert not fits(own, job(2, 16, 6, 1)), "batch"
    assert not fits(own, job(2, 16, 4, 2)), "length"


def test_duplicates_are_merged_with_a_note_and_clashes_refused():
    plan = make_plan([*JOBS, JOBS[0]], TINY, cluster(3), options=Options(baselines=False))
    assert len(plan.jobs) == len(JOBS) and "planned once" in plan.notes[0]
    with pytest.raises(PlanError, match="two different jobs"):
        make_plan([job(0, 8), job(0, 16)], TINY, cluster(1))


def test_a_search_cut_by_the_clock_says_so():
    jobs = [job(i, 8 * 2 ** (i % 5), 2 ** (i % 4), i % 3, 1 + i % 3) for i in range(60)]
    plan = make_plan(jobs, TINY, cluster(5), options=Options(baselines=False, wall_s=0.0))
    assert plan.truncated
