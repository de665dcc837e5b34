"""report.html: everything a run has to show on one page that opens offline and asks nothing of the network."""

import base64
import hashlib
import os
import re
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from planner.render import number_of
from plora_jax.engine.rundir import write_atomic
from plora_jax.errors import UserError
from plora_jax.model_card import peft_code, vllm_command
from plora_jax.report.figures import curves, knobs, parallel, shades
from plora_jax.report.runfiles import RunFiles, entries, job_of, kind, mapping, mappings, number
from plora_jax.report.runview import JobView, RunView, read_view
from plora_jax.report.scale import make_scale, short, span
from plora_jax.report.stats import label
from plora_jax.report.timeline import timeline

PAGE = Path(__file__).parent / "page"
MAX_REASON = 400  # characters of a reason that the page shows
SCORE_PX = 168
NUMBER = re.compile(r"\d+(?:\.\d+)?")
NOTES = {
    "train": "Loss of the optimizer batches, averaged by tokens over short runs of steps.",
    "norm": "Averaged over short runs of steps.",
    "score": "One point an evaluation on the held-out rows.",
    "loss": "One point an evaluation on the held-out rows.",
}
TITLES = {"learning_rate": "lr", "batch_size": "batch", "weight_decay": "decay"}


def write_report(run: Path) -> Path:
    """Write RUN/report.html from what the run directory says now, and return its path.

    Raises:
      UserError: `run` is no run directory, or cannot be written to.
    """
    path = run / "report.html"
    page = render(RunFiles(run))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot write here: {error.strerror}; --serve needs no file") from None
    return path


def render(files: RunFiles, live: str = "") -> str:
    """Return the page; with `live`, the version that it shows, one that asks its own server for a newer one.

    Raises:
      UserError: the directory is not that of a run.
    """
    view = read_view(files)
    css, js = ((PAGE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = {
        "default-src": "'none'",
        "script-src": f"'{_digest(js)}'",
        "style-src": f"'{_digest(css)}'",
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    page = (
        _environment()
        .get_template("report.html")
        .render(
            policy="; ".join(" ".join(rule) for rule in policy.items()),
            css=css,
            js=js,
            live=live,
            **_content(files, view),
        )
    )
    return page.encode(errors="replace").decode()  # half a surrogate pair in a name cannot be written


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    # json.dumps leaves no character beyond ASCII, and jinja2's filter none of < > & '
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"label": label, "short": short, "span": span, "cut": _cut}
    environment.globals["fixed"] = lambda value, digits=3: "–" if value is None else f"{value:.{digits}f}"
    return environment


def _cut(text: Any, most: int) -> str:
    return str(text) if len(str(text)) <= most else str(text)[: most - 1] + "…"


def _content(files: RunFiles, view: RunView) -> dict[str, Any]:
    varied = view.varied()
    charts = curves(files, view)
    for chart in charts:
        del chart["up"], chart["across"]
    return {
        "view": view,
        "varied": varied,
        "titles": TITLES,
        "notes": NOTES,
        "index": {job.job_id: at for at, job in enumerate(view.jobs)},
        "colours": shades(view.jobs),
        "base": {name: number(view.base.get(name)) for name in ("score", "loss", "rows", "low", "high")},
        "stats": _stats(view),
        "board": _board(view),
        "curves": charts,
        "parallel": parallel(view),
        "knobs": knobs(view),
        "time": timeline(view),
        "reasons": _reasons(view),
        "troubles": _troubles(view),
        "best": _best(files, view),
        "facts": _facts(view, varied),
        "data": {"jobs": [_datum(job, varied) for job in view.jobs], "metric": view.metric},
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _datum(job: JobView, varied: list[str]) -> dict[str, Any]:
    return {
        "id": job.job_id, "status": job.status, "score": job.score, "low": job.low, "high": job.high,
        "loss": job.loss, "tokens": job.tokens, "reason": job.reason[:MAX_REASON],
        "fields": {TITLES.get(name, name): label(job.fields.get(name)) for name in varied},
    }  # fmt: skip


def _stats(view: RunView) -> list[tuple[str, str, str]]:
    """Return the figures at the head of the page: what it is, the number, what it is to be read with."""
    out = []
    best = next((job for job in view.jobs if job.score is not None and job.status != "failed"), None)
    metric, base = view.metric.replace("_", " "), number(view.base.get("score"))
    beside = "" if base is None else f"base model {base:.3f}"
    if best and best.score is not None:
        interval = "" if best.low is None else f"95 % interval {best.low:.3f}–{best.high:.3f}"
        out.append((f"best {metric}", f"{best.score:.3f}", "; ".join(filter(None, [interval, beside]))))
    on_test, of_base = (number(mapping(view.test.get(name)).get("score")) for name in ("best", "base"))
    if on_test is not None:
        beside = "" if of_base is None else f"base model {of_base:.3f}; "
        rows = number(view.test.get("rows")) or 0
        out.append(
            ("the same on test rows", f"{on_test:.3f}", f"{beside}{rows:,.0f} rows that no choice saw")
        )
    ended = Counter(job.status for job in view.jobs)
    order = ("completed", "stopped", "failed", "withdrawn", "running", "unfinished", "waiting")
    parts = [f"{ended[status]} {status}" for status in order if ended[status]]
    over = sum(ended[status] for status in ("completed", "stopped", "failed", "withdrawn"))
    out.append(("jobs ended", f"{over} of {len(view.jobs)}", ", ".join(parts)))
    spent, full, guessed = tokens(view)
    if spent:
        part = f"{100 * spent / full:.0f} %" if full else short(spent)
        about = "about " if guessed else ""
        beside = (
            f"{short(spent)} of {about}{short(full)} that all jobs in full would take"
            if full
            else "labels of all jobs"
        )
        out.append(("trained tokens", part, beside))
    took = view.clock(view.last)
    planned = number(view.plan.get("makespan_s"))
    if took:
        beside = f"planned {span(planned)}" if planned else ""
        out.append(("time", span(took), beside + (", without stops" if planned and _stops(view) else "")))
    return out


def _stops(view: RunView) -> bool:
    return mapping(view.sweep.get("early_stop")).get("method", "none") != "none"


def tokens(view: RunView) -> tuple[int, float, bool]:
    """Return trained tokens, what all jobs trained in full would take (0: not known), and whether that is a guess.

    A job that did not end gives tokens / fraction; one without a fraction takes the tokens a planned row of the others.
    """
    spent, full, guessed = 0, 0.0, False
    plans = mapping(view.plan.get("jobs")).items()
    rows = {name: number(mapping(one).get("rows")) or 0.0 for name, one in plans}
    ratios = [
        job.tokens / job.fraction / rows[job.job_id]
        for job in view.jobs
        if job.fraction and job.tokens and rows.get(job.job_id)
    ]
    for job in view.jobs:
        spent += job.tokens
        if job.fraction and job.tokens:
            full += job.tokens / job.fraction
        elif ratios and rows.get(job.job_id):
            full, guessed = full + sum(ratios) / len(ratios) * rows[job.job_id], True
        else:
            return spent + sum(j.tokens for j in view.jobs[view.jobs.index(job) + 1 :]), 0.0, False
    return spent, full, guessed


def _board(view: RunView) -> dict[str, Any]:
    """Return what the score column draws: a scale for points, intervals and the base model's line."""
    shown = [job for job in view.jobs if job.score is not None and job.status != "failed"]
    base, *ends = (number(view.base.get(name)) for name in ("score", "low", "high"))
    values = [v for job in shown for v in (job.low, job.score, job.high) if v is not None]
    if not any(job.low is not None for job in shown):  # of losses: a few large ones would hide the rest
        values = sorted(values)[: max(len(values) * 9 // 10, 1)]
    scale = make_scale([*values, *(v for v in (base, *ends) if v is not None)], 4, SCORE_PX - 4)

    def clamp(value: float) -> float:
        return min(max(scale(value), 1.0), SCORE_PX - 1.0)

    return {
        "px": SCORE_PX,
        "at": clamp,
        "base": None if base is None else clamp(base),
        "intervals": any(job.low is not None for job in shown),
        "seeds": any(job.seeds > 1 for job in view.jobs),
    }


def _reasons(view: RunView) -> list[dict[str, Any]]:
    """Return the jobs that did not complete, failed ones first; those that ended alike are told together.

    Alike is: at the same share of their training, for reasons that differ in numbers alone.
    """
    order = ("failed", "stopped", "withdrawn")
    groups: dict[tuple[int, str, str], list[JobView]] = {}
    for job in view.jobs:
        if job.status in order:
            at = f"{job.fraction:.2f}" if job.status == "stopped" and job.fraction is not None else ""
            groups.setdefault((order.index(job.status), NUMBER.sub("…", job.reason), at), []).append(job)
    listed = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[0]))
    return [
        {
            "status": order[key[0]],
            "reason": _common([job.reason for job in jobs]),
            "jobs": [j.job_id for j in jobs],
        }
        for key, jobs in listed
    ]


def _common(reasons: list[str]) -> str:
    """Return a reason with an ellipsis for every number that is not the same in all of them."""
    numbers = [NUMBER.findall(reason) for reason in reasons]
    kept = iter([column[0] if len(set(column)) == 1 else "…" for column in zip(*numbers, strict=True)])
    return NUMBER.sub(lambda _: next(kept), reasons[0])[:MAX_REASON] or "no reason was written"


def _troubles(view: RunView) -> list[dict[str, str]]:
    """Return what went wrong with workers and devices, and what was done about it."""
    out = []
    seen = any(kind(line) == "worker_lost" for line in view.log)
    for line in view.log:
        what, when = kind(line), number(line.get("time"))
        if what not in ("lost", "limit", "worker_lost"):
            continue
        if what == "lost" and seen and line.get("cause") == "its worker was killed":
            continue  # told already, when it happened, with the cause
        where = " ".join(
            f"{name} {line[name]}" for name in ("worker", "pack") if line.get(name) not in (None, "")
        )
        if what != "limit":
            text = str(line.get("cause") or "no cause was found")
        else:
            slots, m, policy = (
                len(entries(line.get("slots"))),
                label(line.get("m")),
                label(line.get("policy")),
            )
            text = f"out of device memory; went on with {slots} slots, m {m}, recompute {policy}"
        at = "" if when is None else span(view.clock(when))
        out.append({"at": at, "where": where, "what": text[:MAX_REASON], "job": job_of(line)})
    return out


def _best(files: RunFiles, view: RunView) -> dict[str, str] | None:
    """Return how to load the best adapter; paths start from the folder that holds the run directory."""
    job = next((job for job in view.jobs if job.adapter and job.score is not None), None)
    if job is None:
        return None
    config = files.mapping(f"{job.adapter}/adapter_config.json")
    base = str(config.get("base_model_name_or_path") or view.sweep.get("model") or "BASE_MODEL")
    patterns = mapping(config.get("rank_pattern") or job.fields.get("rank_pattern"))
    ranks = [number(config.get("r")), number(job.fields.get("rank")), *map(number, patterns.values())]
    largest = int(max((rank for rank in ranks if rank), default=0))
    patterned = bool(patterns or config.get("alpha_pattern") or job.fields.get("alpha_pattern"))
    linked = _linked(files, job.adapter)
    where = f"{view.name}/{'best' if linked else job.adapter}"
    sentence, command = vllm_command(base, where, largest, patterned, "best")
    return {
        "job": job.job_id, "where": where, "peft": peft_code(base, where), "rank": str(largest),
        "sentence": sentence.replace("`", ""), "vllm": command,
        "merge": f"plora merge {where} --out merged",
    }  # fmt: skip


def _linked(files: RunFiles, adapter: str) -> bool:
    try:
        return os.path.samefile(files.path / "best", files.path / adapter)
    except (OSError, ValueError):
        return False


def _facts(view: RunView, varied: list[str]) -> list[tuple[str, str]]:
    """Return what the run is made of, in words."""
    plan, sweep, started = view.plan, view.sweep, view.started
    search, data = (mapping(sweep.get(name)) for name in ("search", "data"))
    facts: list[tuple[str, Any]] = [
        ("model", sweep.get("model") or plan.get("model")),
        ("precision of the base", plan.get("precision")),
        ("training rows", data.get("train")),
        ("held-out rows", _joined(data.get("eval"), _rows(view.base.get("rows")))),
        ("test rows", _joined(data.get("test"), _rows(view.test.get("rows")))),
        ("metric", f"{view.metric}, {'higher' if view.higher_is_better else 'lower'} is better"),
        ("search", _listed(search, "sample", "strategy", "budget", "seed")),
        ("seeds of the jobs", _seeds(view)),
        ("early stopping", _listed(mapping(sweep.get("early_stop")))),
        ("device", _device(started)),
        ("plan", _plan_words(plan)),
        ("versions", _versions(started.get("versions"))),
        ("started", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(view.first)) if view.first else ""),
        ("pauses cut out of the time axis", ", ".join(span(b - a) for a, b in view.pauses)),
    ]  # fmt: skip
    same = {name: value for job in view.jobs[:1] for name, value in job.fields.items() if name not in varied}
    shown = [f"{name} {label(value)}" for name, value in same.items() if value not in ("", None, [], {}, ())]
    facts.append(("the same for all jobs", ", ".join(shown)))
    return [(name, str(value)[:2000]) for name, value in facts if value]


def _listed(section: dict[str, Any], *names: str) -> str:
    return ", ".join(f"{key} {label(value)}" for key, value in section.items() if key in names or not names)


def _rows(value: Any) -> str:
    count = number(value)
    return "" if count is None else f"{count:,.0f} rows"


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _seeds(view: RunView) -> str:
    sets = {
        name: sorted({str(job.fields[name]) for job in view.jobs if name in job.fields})
        for name in ("seed", "data_seed")
    }
    words = {"seed": "adapter and dropout", "data_seed": "order of rows"}
    return "; ".join(f"{words[name]} {', '.join(values)}" for name, values in sets.items() if values)


def _plan_words(plan: dict[str, Any]) -> str:
    if not plan.get("device"):
        return ""
    gap, makespan = number(plan.get("gap")), number(plan.get("makespan_s"))
    types = mapping(plan.get("device_types")) or {str(plan["device"]): plan.get("device_count")}
    where = " + ".join(f"{count} × {name}" for name, count in types.items())
    parts = [f"{number_of(len(entries(plan.get('packs'))), 'pack')} on {where}, method {plan.get('method')}"]
    if gap is not None:
        parts.append(f"at most {100 * gap:.1f} % above the best possible ({plan.get('bound')} bound)")
    known = {name: number(value) for name, value in mapping(plan.get("baselines")).items()}
    times = [f"{name.removesuffix('_s')} {span(value)}" for name, value in known.items() if value is not None]
    if makespan and times:
        parts.append(f"predicted {span(makespan)} against {', '.join(times)}")
    return "; ".join(parts)


def _device(started: dict[str, Any]) -> str:
    devices = mapping(started.get("devices"))
    parts = mappings(devices.get("parts")) or [devices]
    found = [
        (mapping(part.get("spec")).get("name") or started.get("device"), number(part.get("count")))
        for part in parts
    ]
    return " + ".join(f"{count:g} × {name}" if count else str(name) for name, count in found if name)


def _versions(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else ""
