"""The page on SWEEP.yaml says what the code does."""

import re

from plora_jax.config import parse_sweep
from plora_jax.early_stop import EarlyStop, expected_fraction
from plora_jax.jobs import JOB_FIELDS
from plora_jax.search import search_jobs
from scripts.docs_config import PAGE, page

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_fields() -> None:
    assert page(TEXT) == TEXT, "run: python -m scripts.docs_config"


def test_every_job_field_is_described_with_its_default() -> None:
    for name, field in JOB_FIELDS.items():
        [row] = re.findall(rf"^\| `{name}` \|.*\| {re.escape(field.metadata['doc'])} \|$", TEXT, re.MULTILINE)
        assert isinstance(field.default, (bool, tuple, str, type(None))) or f"`{field.default}`" in row


def test_the_sweep_of_the_readme_is_one() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", (PAGE.parent.parent / "README.md").read_text(), re.DOTALL)
    assert len(search_jobs(parse_sweep(example))) == 3 * 2 * 2


def test_the_example_is_a_sweep() -> None:
    example = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0]
    jobs = search_jobs(parse_sweep(example))
    assert len(jobs) == 40 and {job.warmup_ratio for job in jobs} == {0.03}


def test_the_page_on_search_holds_a_sweep_and_true_costs() -> None:
    text = (PAGE.parent / "search.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    sweep = parse_sweep("model: m\ndata: {train: a, eval: b}\n" + example)
    assert len(search_jobs(sweep)) == 64 and sweep.early_stop.rungs() == (1 / 9, 1 / 3)
    told = re.search(
        r"(\d+) % with η = 2, (\d+) % with 3,\s+(\d+) % with 4; (\d+) % with η = 3 and two", text
    )
    rules = [EarlyStop("asha", reduction_factor=eta) for eta in (2, 3, 4)] + [EarlyStop("asha", brackets=2)]
    costs = [expected_fraction(rule, 100_000, 100_000) or 0 for rule in rules]
    assert told and [round(100 * cost) for cost in costs] == [int(n) for n in told.groups()]
