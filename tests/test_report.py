"""report.html: its numbers are those of the files, its text is text, and it stays small and whole."""

import base64
import hashlib
import json
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plora_jax.errors import UserError
from plora_jax.evaluation.metrics import wilson
from plora_jax.jobs import Job
from plora_jax.report.figures import binned, curves, parallel, path
from plora_jax.report.runfiles import RunFiles
from plora_jax.report.runview import RunView, read_view
from plora_jax.report.scale import Scale
from plora_jax.report.stats import label
from plora_jax.report.timeline import timeline
from plora_jax.report.write import MAX_REASON, render, tokens, write_report
from tests.clock import slowness
from tests.made_run import START, Writer, make_jobs, make_run, write_lines
from tests.page import Node, parse
from tests.test_runview import write_lines_freely

TAGS = "</script></style></title><img src=x onerror=alert(1)>\"'><svg onload=alert(2)>{{7*7}}"
EVIL = TAGS + "\u2028\u2029\ud800 \x1b[31m"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run", count=40, steps=60)


@pytest.fixture(scope="module")
def page(run: Path) -> Node:
    return parse(write_report(run).read_text(encoding="utf-8"))


def view_of(run: Path) -> tuple[RunFiles, RunView]:
    files = RunFiles(run)
    return files, read_view(files, START + 1e6)


def test_the_leaderboard_is_the_leaderboards(run: Path, page: Node) -> None:
    board = json.loads((run / "leaderboard.json").read_text())
    table = page.find("table", id="board")[0]
    head = [cell.text for cell in table.find("thead")[0].find("th")]
    rows = [
        [cell.text for cell in row.children if isinstance(cell, Node)]
        for row in table.find("tbody", class_="jobs")[0].find("tr")
    ]
    assert len(rows) == len(board["jobs"]) == 40
    for place, (cells, job) in enumerate(zip(rows, board["jobs"], strict=True), 1):
        shown = dict(zip(head, cells, strict=True))
        assert shown["#"] == str(place) and shown["job"] == job["job_id"]
        assert shown["score"] == ("–" if job["score"] is None else f"{job['score']:.3f}")
        assert shown["loss"] == ("–" if job["loss"] is None else f"{job['loss']:.3f}")
        assert shown["lr"] == label(job["learning_rate"]) and float(shown["lr"]) == job["learning_rate"]
        assert shown["steps"] == f"{job['steps']:,}" and shown["status"].startswith(job["status"])
        assert job["reason"] in shown["status"]
        if job["score"] is not None:
            low, high = wilson(job["score"], 400)
            assert shown["95 % interval"] == f"{low:.3f} to {high:.3f}"
    base = table.find("tbody", class_="base")[0].text
    assert base == "base model 0.532 2.137"  # 0.5325 and 2.137


def test_the_embedded_data_are_exact(run: Path, page: Node) -> None:
    board = json.loads((run / "leaderboard.json").read_text())["jobs"]
    data = json.loads(page.find("script", id="data")[0].text)
    assert [(one["id"], one["score"], one["tokens"]) for one in data["jobs"]] == [
        (job["job_id"], job["score"], job["tokens"]) for job in board
    ]


def test_tokens_spent_of_full(run: Path, page: Node, tmp_path: Path) -> None:
    board = json.loads((run / "leaderboard.json").read_text())["jobs"]
    spent = sum(job["tokens"] for job in board)
    full = sum(job["tokens"] * 60 / job["steps"] for job in board if job["status"] != "failed")
    found = tokens(view_of(run)[1])
    rows = (
        sum(job["tokens"] * 60 / job["steps"] for job in board if job["status"] != "failed") / 37
    )  # the mean job
    assert found[0] == spent and found[2]  # three failed jobs take what a planned row of the others did
    assert found[1] == pytest.approx(full + 3 * rows, rel=0.2) and found[1] > full
    assert f"{100 * spent / found[1]:.0f} %" in page.find("dl", class_="stats")[0].text
    good = make_run(tmp_path / "good", count=3, steps=20, asha=False)
    view = view_of(good)[1]
    assert {job.status for job in view.jobs} == {"completed"}
    assert tokens(view) == (sum(job.tokens for job in view.jobs), sum(job.tokens for job in view.jobs), False)


def test_a_curve_goes_through_the_means_of_the_log(run: Path) -> None:
    files, view = view_of(run)
    chart = next(chart for chart in curves(files, view) if chart["name"] == "train")
    best = view.jobs[0]
    lines = [json.loads(x) for x in (run / "jobs" / best.job_id / "metrics.jsonl").read_text().splitlines()]
    drawn = next(line for line in chart["lines"] if line["job"] == best.job_id)
    assert drawn["best"] and drawn["class"] == "q7"
    points = np.array([pair.split() for pair in re.split("[ML]", drawn["d"])[1:]], float)
    assert len(points) == len(lines)  # 60 steps need no thinning
    across, up = chart["across"], chart["up"]
    told = np.cumsum([line["tokens"] for line in lines])
    x = across.low + (points[:, 0] - across.start) / (across.end - across.start) * (across.high - across.low)
    np.testing.assert_allclose(x, told, atol=(across.high - across.low) / 4000)
    share = (points[:, 1] - up.start) / (up.end - up.start)
    y = up.low * (up.high / up.low) ** share if up.log else up.low + share * (up.high - up.low)
    np.testing.assert_allclose(y, [line["loss"] for line in lines], rtol=0.01)


def test_thinned_curves_keep_the_mean_and_gaps_stay_gaps() -> None:
    draw = np.random.default_rng(0)
    y, weight, x = draw.uniform(1, 2, 1000), draw.integers(1, 9, 1000).astype(float), np.arange(1000.0)
    bx, by = binned(x, y, weight, 10)
    assert bx.tolist() == list(range(99, 1000, 100))
    np.testing.assert_allclose(
        by, [np.average(y[i : i + 100], weights=weight[i : i + 100]) for i in range(0, 1000, 100)]
    )
    assert path(np.array([1.0]), np.array([2.0]), Scale(0, 1, 0, 10), Scale(0, 4, 0, 10)) == "M10 5h0"
    gaps = np.array([1.0, np.nan, 2.0, 3.0, np.nan, 4.0])
    drawn = path(np.arange(6.0), gaps, Scale(0, 1, 0, 10), Scale(0, 4, 0, 8))
    assert drawn == "M0 2h0M20 4L30 6M50 8h0"
    y[100:200] = np.nan
    y[250] = np.inf
    _, by = binned(x, y, weight, 10)
    assert np.isnan(by[1]) and np.isfinite(by[[0, 2, 3]]).all()


def test_parallel_coordinates_end_at_the_scores(run: Path) -> None:
    _, view = view_of(run)
    figure = parallel(view)
    assert figure is not None and [axis["name"] for axis in figure["axes"]] == [
        *view.varied(),
        "choice_accuracy",
    ]
    ends = {line["job"]: float(line["d"].split()[-1]) for line in figure["lines"]}
    scored = [job for job in view.jobs if job.score is not None]
    heights = [ends[job.job_id] for job in scored]
    assert heights == sorted(heights)  # the best ends highest: y grows downwards
    assert all(ends[job.job_id] == figure["failed"] for job in view.of_status("failed"))


def test_both_gantt_charts_share_an_axis_and_show_every_job(run: Path) -> None:
    _, view = view_of(run)
    figure, plan = timeline(view), json.loads((run / "plan.json").read_text())
    px = (figure["right"] - figure["left"]) / max(plan["makespan_s"], view.clock(view.last))
    planned = {bar["job"]: bar for lane in figure["planned"]["lanes"] for bar in lane["bars"]}
    for pack in plan["packs"]:
        for one in pack["assign"]:
            bar = planned.pop(one["job_id"])
            assert bar["x"] == pytest.approx(figure["left"] + one["start_s"] * px, abs=0.11)
            assert bar["w"] == pytest.approx((one["end_s"] - one["start_s"]) * px, abs=0.21)
    assert not planned
    ran = [bar for lane in figure["ran"]["lanes"] for bar in lane["bars"]]
    assert {bar["job"] for bar in ran} == {job.job_id for job in view.jobs}
    for bar in ran:
        assert bar["x"] == pytest.approx(figure["left"] + bar["start"] * px, abs=0.11)
    assert [lane["name"] for lane in figure["ran"]["lanes"]] == ["worker 0", "worker 1"]
    assert figure["memory"]["of"] == "device_bytes" and figure["memory"]["limit"] is not None


def test_how_to_load_the_best_adapter(run: Path, page: Node) -> None:
    text, best = (
        page.find("section", id="use")[0].text,
        json.loads((run / "leaderboard.json").read_text())["jobs"][0],
    )
    limit = next(rank for rank in (16, 32, 64, 128) if rank >= best["rank"])
    assert f"PeftModel.from_pretrained(base, 'run/{best['adapter']}')" in text
    assert f"vllm serve Qwen/Qwen2.5-7B --enable-lora --lora-modules best=run/{best['adapter']}" in text
    assert limit == 16 or f"--max-lora-rank {limit}" in text


def test_reasons_and_troubles_are_told(page: Node) -> None:
    text = page.find("section", id="ends")[0].text
    assert "failed 3 10 gradients in a row were not finite" in text
    assert "killed by signal 9 (out of host memory?)" in text
    facts = page.find("section", id="facts")[0].text
    assert "early stopping method asha" in facts and "jax 0.11.2" in facts and "dev.jsonl, 400 rows" in facts


def test_reasons_that_differ_in_numbers_alone_are_one(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    board = json.loads((copy / "leaderboard.json").read_text())
    stopped = [row for row in board["jobs"] if row["status"] == "stopped"]
    for place, row in enumerate(stopped, 3):
        row["reason"] = f"rank {place} of 48 at {row['steps'] / 60:.3f} of its training"
    (copy / "leaderboard.json").write_text(json.dumps(board))
    page = parse(write_report(copy).read_text(encoding="utf-8"))
    table = page.find("section", id="ends")[0].find("table")[0]
    shown = [row.text for row in table.find("tr") if row.text.startswith("stopped")]
    rungs = Counter(f"{row['steps'] / 60:.3f}" for row in stopped).most_common()
    assert len(shown) == len(rungs) > 1 and rungs[0][1] > 5
    assert shown[0].startswith(f"stopped {rungs[0][1]} rank … of 48 at {rungs[0][0]} of its training")


def test_the_page_forbids_the_network_and_all_scripts_but_its_own(run: Path, page: Node) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    [policy] = [node.attributes["content"] for node in page.find("meta") if "http-equiv" in node.attributes]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    for name, body in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert (
        rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    )
    assert "unsafe" not in policy and "http" not in policy
    for node in page.walk():
        for name, value in node.attributes.items():
            assert not name.startswith("on") and name != "style"
            assert name not in ("src", "href", "action", "srcset") or value.startswith(("#", "data:,"))
    assert "//" not in style and "url(" not in style.replace("url(#", "")
    assert "fetch(" not in script.replace("fetch(`state.json", "")


def hostile(run: Path) -> Path:
    """Write a run whose every text is an attack."""
    jobs = [replace(job, train=TAGS, targets=(TAGS,)) for job in make_jobs(6)] + [Job(init_adapter=TAGS)]
    make_run(run, jobs, steps=20, asha=False)
    board = json.loads((run / "leaderboard.json").read_text())
    for row in board["jobs"]:
        row |= {"reason": EVIL, "status": "failed" if row["rank"] == 8 else row["status"], "adapter": EVIL}
    board["jobs"][0] |= {"job_id": EVIL, "status": EVIL}
    (run / "leaderboard.json").write_text(json.dumps(board | {"metric": EVIL}))
    plan = json.loads((run / "plan.json").read_text())
    for name in ("model", "device", "precision", "method", "bound"):
        plan[name] = EVIL
    plan["packs"][0]["devices"] = [EVIL]
    plan["jobs"][EVIL] = {"learning_rate": EVIL, "rank": EVIL}
    (run / "plan.json").write_text(json.dumps(plan))
    quoted = json.dumps(EVIL)
    (run / "sweep.yaml").write_text(
        f"model: {quoted}\ndata: {{train: {quoted}}}\nearly_stop: {{method: {quoted}}}\n"
    )
    log = Writer(run)
    for kind in ("started", "claim", "place", "ended", "lost", "worker_lost", "limit", "sample", "finished"):
        fields = {"worker": EVIL, "pack": EVIL, "job": EVIL, "cause": EVIL, "policy": EVIL, "device": EVIL}
        log.note(5, kind, **fields, versions={EVIL: EVIL}, tokens_per_s=3.0, device_bytes=1)
        log.event(9, kind, **fields, versions={EVIL: EVIL}, tokens_per_s=3.0, device_bytes=1)
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in log.events))
    with (run / "journal.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in log.journal))
    return run.rename(run.with_name("<img src=x onerror=alert(3)>"))


def test_a_hostile_run_stays_text(tmp_path: Path) -> None:
    page = write_report(hostile(tmp_path / "run")).read_text(encoding="utf-8")
    tree, plain = parse(page), parse(render(RunFiles(make_run(tmp_path / "plain", count=7, steps=20))))
    assert {node.tag for node in tree.walk()} <= {node.tag for node in plain.walk()} | {"bdi"}
    assert len(tree.find("script")) == 2 and len(tree.find("style")) == 1 and not tree.find("img")
    assert not any(name.startswith("on") for node in tree.walk() for name in node.attributes)
    assert "onerror=alert(1)" in tree.find("table", id="board")[0].text and "{{7*7}}" in tree.text
    data = tree.find("script", id="data")[0].text
    assert not re.search("[<>&\u2028\u2029]", data) and json.loads(data)["jobs"]


def test_long_texts_are_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=8, steps=20)
    size = len(write_report(run).read_text())
    board = json.loads((run / "leaderboard.json").read_text())
    for row in board["jobs"]:
        row["reason"] = "x" * 1_000_000
    (run / "leaderboard.json").write_text(json.dumps(board))
    assert len(write_report(run).read_text()) < size + 8 * 4 * MAX_REASON


def test_a_thousand_jobs_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=1000, steps=12, workers=8, slots=16)
    path = write_report(run)
    assert path.stat().st_size < 5_000_000
    assert len(parse(path.read_text(encoding="utf-8")).find("tbody", class_="jobs")[0].find("tr")) == 1000


def test_long_logs_are_thinned(tmp_path: Path) -> None:
    files, view = view_of(make_run(tmp_path / "run", count=2, steps=4000, asha=False))
    charts = {chart["name"]: chart for chart in curves(files, view)}
    for name in ("train", "norm"):
        assert 1 < max(len(re.findall("[ML]", line["d"])) for line in charts[name]["lines"]) <= 64
    assert len(render(files)) < 150_000


@pytest.mark.long
def test_a_report_takes_less_than_a_second(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=120, steps=1000, workers=4, slots=8)
    write_report(run)
    used = time.process_time()
    write_report(run)
    assert time.process_time() - used < slowness()


def test_runs_of_little_or_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    Writer(empty).write()
    assert "No job is known yet" in parse(write_report(empty).read_text()).text
    one = parse(write_report(make_run(tmp_path / "one", count=1, steps=30)).read_text())
    assert len(one.find("tbody", class_="jobs")[0].find("tr")) == 1 and not one.find("svg", class_="parallel")
    failed = [Job(learning_rate=rate, rank=4, alpha=4.0) for rate in (0.01, 0.1, 1.0)]
    page = parse(write_report(make_run(tmp_path / "failed", failed, steps=30)).read_text())
    assert page.find("section", id="ends") and not page.find("section", id="use")
    assert "jobs ended 3 of 3 3 failed" in page.text and "best choice accuracy" not in page.text
    running = make_run(tmp_path / "running", count=12, steps=30, until=200.0)
    assert "running" in parse(write_report(running).read_text()).find("header")[0].text


def test_half_a_run_and_wild_values_still_give_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=8, steps=12)
    names = ["leaderboard.json", "plan.json", "sweep.yaml", "base.json", "journal.jsonl", "events.jsonl"]
    for gone in names:
        copy = shutil.copytree(run, tmp_path / gone)
        (copy / gone).unlink()
        parse(render(RunFiles(copy)))
        (copy / gone).write_text('{"jobs": [{"job_id": ')  # torn
        parse(render(RunFiles(copy)))
    wild = [None, 3, "x", [1], {"a": [1]}, float("nan"), -1, 10**400]
    copy = shutil.copytree(run, tmp_path / "wild")
    write_lines_freely(copy / "journal.jsonl", "kind", wild)
    parse(render(RunFiles(copy)))
    plan, board = (json.loads((run / name).read_text()) for name in ("plan.json", "leaderboard.json"))
    for value in wild:
        changed = {**plan, **{name: value for name in plan if name not in ("packs", "jobs")}}
        changed["packs"] = [dict.fromkeys(pack, value) for pack in plan["packs"]] + [
            {**pack, "assign": [dict.fromkeys(one, value) for one in pack["assign"]]}
            for pack in plan["packs"]
        ]
        changed["jobs"] = dict.fromkeys(plan["jobs"], value)
        (copy / "plan.json").write_text(json.dumps(changed))
        rows = [dict.fromkeys(row, value) | {"job_id": row["job_id"]} for row in board["jobs"]]
        (copy / "leaderboard.json").write_text(json.dumps({**dict.fromkeys(board, value), "jobs": rows}))
        parse(render(RunFiles(copy)))


def test_what_is_no_run_and_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        write_report(tmp_path)
    run = make_run(tmp_path / "run", count=2, steps=20)
    (run / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot write here"):
        write_report(run)
    write_lines(run / "events.jsonl", [])
