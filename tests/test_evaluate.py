"""Scores of adapters, alone and straight from a running pack, against numbers worked out beside them."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from plora_jax.adapters import Factors, pad_adapter, ranks, scales, stack_adapters, stack_scales
from plora_jax.cli import main
from plora_jax.data.encode import read_examples
from plora_jax.evaluation import scorer as scoring
from plora_jax.evaluation.answers import Answer, make_questions
from plora_jax.evaluation.generate import _program
from plora_jax.evaluation.scorer import Scorer, _eval_step, make_eval_set, runtime_for
from plora_jax.jobs import Job
from plora_jax.models.decoder import LoRA
from plora_jax.models.load import load_base
from plora_jax.models.table import checkpoint_table
from plora_jax.peft import export_adapter, import_adapter
from tests import tiny
from tests.models.seeded import seeded
from tests.refusal import refused

NEW, LONGEST = 4, 16
PROMPTS = [
    "what is one ?",
    "what is two ?",
    "is the color red ?",
    "green ?",
    "is one two ?",
    "three : one",
    "the",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Load a tiny model whose words are all its tokenizer knows."""
    model = tiny.write_model(tmp_path_factory.mktemp("eval") / "model", vocab_size=3 + len(tiny.WORDS))
    config = load_base(str(model), random_weights=True).config
    tensors = {k: seeded(k, t.shape) for k, t in checkpoint_table(config).items()}
    save_file(tensors, model / "model.safetensors")
    return load_base(str(model), precision="fp32")


@pytest.fixture(scope="module")
def pack(base):
    """Make the adapters of four slots of rank 8; one of them has rank 4, another targets two modules."""
    jobs = [
        Job(rank=8),
        Job(rank=4, alpha=8.0),
        Job(rank=8, targets=("down_proj", "q_proj")),
        Job(rank=8, seed=1),
    ]
    draw, adapters = np.random.default_rng(0), []
    for job in jobs:
        names = [site for site in base.config.sites if site.name in ranks(base.config, job)]
        a = [
            draw.uniform(-1, 1, (2, job.rank, site.d_in)).astype(np.float32) / site.d_in**0.5
            for site in names
        ]
        b = [0.5 * draw.standard_normal((2, site.d_out, job.rank), np.float32) for site in names]
        adapters.append({site.name: Factors(x, y) for site, x, y in zip(names, a, b, strict=True)})
    sites = [site.name for site in base.config.sites]
    weights = stack_adapters([pad_adapter(base.config, a, 8, sites) for a in adapters])
    return jobs, adapters, weights, stack_scales(base.config, jobs, sites)


@partial(jax.jit, static_argnums=0)
def run(graphdef, params, sites, tokens):
    at = jnp.arange(LONGEST)[None]
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(tokens[None], at, jnp.zeros_like(at), sites))[0]


def logits_of(base, job, adapter, tokens):
    """Run one row by itself, without a cache; what stands after it does not matter to it."""
    sites = {n: LoRA(f.a, f.b, jnp.asarray(scales(base.config, job)[n])) for n, f in adapter.items()}
    padded = jnp.asarray(np.pad(tokens, (0, LONGEST - len(tokens))))
    return np.asarray(run(base.graphdef, base.params, sites, padded), np.float64)[: len(tokens)]


def answer_of(base, job, adapter, prompt):
    """Generate by running the whole text again for every token."""
    text = base.tokenizer.encode(prompt, add_special_tokens=False)
    start = len(text)
    while len(text) < start + NEW and (token := int(logits_of(base, job, adapter, text)[-1].argmax())) != 1:
        text.append(token)
    return base.tokenizer.decode(text[start:], skip_special_tokens=True)


@pytest.fixture(scope="module")
def told(base, pack):
    """Return what every adapter answers to every prompt."""
    return [
        [answer_of(base, job, adapter, p) for p in PROMPTS] for job, adapter in zip(*pack[:2], strict=True)
    ]


@pytest.fixture(scope="module")
def rows(told):
    """Ask for what the first adapter says to half of the prompts, the second to some more."""
    wanted = [told[0][i] if i % 2 == 0 else told[1][i] if i == 3 else "no" for i in range(len(PROMPTS))]
    assert len({w for w in wanted if w != "no"}) > 1
    return [{"prompt": p, "completion": f" {w or 'no'}"} for p, w in zip(PROMPTS, wanted, strict=True)]


@pytest.fixture(scope="module")
def evals(base, rows, tmp_path_factory):
    """Lay out the rows for exact_match."""
    path = tiny.write_rows(tmp_path_factory.mktemp("rows") / "eval.jsonl", rows)
    examples = read_examples(path, base.tokenizer, max_length=32)
    return make_eval_set(
        examples, questions=make_questions(examples, base.tokenizer, Answer("whole"), new_tokens=NEW)
    )


def test_exact_match_and_loss_with_their_intervals(base, pack, told, rows, evals):
    scored = Scorer(base, runtime_for(base)).score(list(zip(*pack[:2], strict=True)), evals)
    shares = [
        np.mean([a.strip() == r["completion"].strip() for a, r in zip(own, rows, strict=True)])
        for own in told
    ]
    assert [s.score for s in scored] == pytest.approx(shares) and scored[0].score > 0.5 > min(shares)
    p, n = scored[0].score, len(rows)
    ends = np.roots([1 + 1.96**2 / n, -(2 * p + 1.96**2 / n), p * p])  # (p − π)² = z² π (1 − π) / n
    assert (scored[0].low, scored[0].high) == pytest.approx(tuple(sorted(ends)), abs=1e-4)

    job, adapter = pack[0][1], pack[1][1]
    losses, counts = [], []
    for row in rows:
        prompt, end = (
            base.tokenizer.encode(row[f], add_special_tokens=False) for f in ("prompt", "completion")
        )
        text, wanted = [*prompt, *end, 1], [*end, 1]
        log_p = (z := logits_of(base, job, adapter, text)) - np.log(np.exp(z).sum(-1, keepdims=True))
        at = np.arange(len(prompt) - 1, len(text) - 1)
        losses.append(-log_p[at, wanted].sum())
        counts.append(len(wanted))
    loss = sum(losses) / sum(counts)
    assert scored[1].loss == pytest.approx(loss, rel=1e-5) and scored[1].tokens == sum(counts)
    by_loss = make_eval_set_of_loss(evals)
    [only] = Scorer(base, runtime_for(base)).score([(job, adapter)], by_loss)
    spread = math.sqrt(n / (n - 1) * sum((s - loss * c) ** 2 for s, c in zip(losses, counts, strict=True)))
    half = 1.96 * spread / sum(counts)
    assert (only.score, only.low, only.high) == pytest.approx((loss, loss - half, loss + half), rel=1e-4)


def make_eval_set_of_loss(evals):
    """Return the same rows, ranked by their loss."""
    return type(evals)(**{**vars(evals), "questions": None})


def test_slots_of_a_running_pack_score_as_their_exported_adapters(base, pack, evals, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "program_tokens", lambda: 1)  # every size of group is worth a program
    jobs, adapters, weights, stacked = pack
    scorer, done = Scorer(base, runtime_for(base)), []
    step, program = _eval_step(base.graphdef, scorer.runtime), _program(base.graphdef, scorer.runtime, NEW)
    alone = scorer.score(list(zip(jobs, adapters, strict=True)), evals)
    for j in (0, 1, 3):
        export_adapter(tmp_path / str(j), base.name, base.config, jobs[j], adapters[j])
        read, _ = import_adapter(tmp_path / str(j), base.config)
        [alone[j]] = scorer.score([(jobs[j], read)], evals)
    before = step._cache_size(), program._cache_size()
    # every site and the same rank bucket: the same program as for the adapters of all sites, to the bit
    for j in (0, 1, 3):
        assert scorer.score_slots(weights, stacked, [j], evals) == [alone[j]]
    assert (step._cache_size(), program._cache_size()) == before
    for slots in ([2, 0, 1], [3, 1, 0, 2], [1, 3]):
        scores = scorer.score_slots(weights, stacked, slots, evals, advance=done.append)
        for j, score in zip(slots, scores, strict=True):
            assert score.score == alone[j].score and score.loss == pytest.approx(alone[j].loss, rel=1e-6)
    assert len({s.loss for s in alone}) == 4
    # groups of four, as before, and of two
    assert (step._cache_size(), program._cache_size()) == (before[0] + 1, before[1] + 1)
    again = scorer.score_slots(weights, stacked, [0, 2, 3], evals)
    assert [s.loss for s in again] == pytest.approx([alone[j].loss for j in (0, 2, 3)], rel=1e-6)
    assert (step._cache_size(), program._cache_size()) == (before[0] + 1, before[1] + 1)
    assert 9 * evals.requests.tokens < sum(done) <= 9 * evals.tokens  # repeats do not count


def test_groups_and_lengths_that_are_not_worth_a_program_are_filled_up(base, pack, evals, monkeypatch):
    jobs, adapters, weights, stacked = pack
    loss, worth, groups = make_eval_set_of_loss(evals), 0, []
    monkeypatch.setattr(scoring, "program_tokens", lambda: worth)
    scorer = Scorer(base, runtime_for(base))

    def step(weights, scales, params, tokens, *rest, plain=scorer.step):
        groups.append((jax.tree.leaves(scales)[0].shape[1], tokens.shape[-1]))
        return plain(weights, scales, params, tokens, *rest)

    scorer.step = step
    for worth, size in ((0, 1), (2 * loss.tokens, 2), (2 * loss.tokens + 1, 4), (10**9, 4)):  # noqa: B007
        groups.clear()
        [one] = scorer.score_slots(weights, stacked, [2], loss)
        assert {group for group, _ in groups} == {size}
        [alone] = scorer.score([(jobs[2], adapters[2])], loss)
        assert one.loss == pytest.approx(alone.loss, rel=1e-6)
    lengths = np.array([8] * 200 + [40] * 200 + [64] * 200)
    for jobs_at_once, worth, tops in (  # noqa: B007
        (
            1,
            1,
            [8, 40, 64],
        ),  # 22,400 tokens; by 40 and 64 it is 28,800, by 8 and 64 27,200, by 64 alone 38,400
        (1, 4_799, [8, 40, 64]),
        (1, 4_801, [8, 64]),
        (1, 11_199, [8, 64]),
        (1, 11_201, [64]),
        (4, 11_201, [8, 40, 64]),
    ):
        assert scoring._tops(lengths, jobs_at_once) == tops


def test_a_small_budget_scores_few_rows_at_a_time(base, pack, evals):
    _, _, weights, stacked = pack
    scorer = Scorer(base, runtime_for(base))
    at_once = []

    def step(weights, scales, params, tokens, *rest, plain=scorer.step):
        at_once.append(jax.tree.leaves(scales)[0].shape[1] * tokens.size)
        return plain(weights, scales, params, tokens, *rest)

    scorer.step, loss = step, make_eval_set_of_loss(evals)
    few = scorer.score_slots(weights, stacked, [0, 1, 2], loss, tokens=2 * loss.longest)
    assert max(at_once) == 2 * loss.longest  # two adapters, then one, a row each
    whole = scorer.score_slots(weights, stacked, [0, 1, 2], loss)
    assert [s.loss for s in few] == pytest.approx([s.loss for s in whole], rel=1e-6)


def write_module(directory):
    (directory / "own_score.py").write_text(
        "def shared(predictions, references):\n"
        "    return [len(set(p.split()) & set(r.split())) / 2 for p, r in zip(predictions, references)]\n"
        "shared.higher_is_better = False\n"
        "def broken(predictions, references):\n    return [1.0]\n"
    )


def test_the_command_scores_by_generation_and_by_a_users_metric(
    base, pack, told, rows, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_module(tmp_path)
    tiny.write_rows(tmp_path / "eval.jsonl", rows)
    export_adapter(tmp_path / "adapter", base.name, base.config, pack[0][0], pack[1][0])
    common = [
        "eval",
        "--model",
        base.name,
        "--adapter",
        "adapter",
        "--data",
        "eval.jsonl",
        "--json",
        "out.json",
    ]
    common += ["--max-length", "32", "--max-new-tokens", str(NEW)]
    wanted = [row["completion"].strip() for row in rows]
    assert main([*common, "--metric", "exact_match", "--answer", r"regex:(\S+)$"]) == 0
    read = [(t.split() or [""])[-1] == w.split()[-1] for t, w in zip(told[0], wanted, strict=True)]
    plain, adapter = json.loads((tmp_path / "out.json").read_text())
    assert adapter["score"] == pytest.approx(np.mean(read)) and plain["score"] != adapter["score"]
    assert adapter["low"] < adapter["score"] < adapter["high"] and adapter["metric"] == "exact_match"

    assert main([*common, "--metric", "own_score:shared"]) == 0
    values = [len(set(t.split()) & set(w.split())) / 2 for t, w in zip(told[0], wanted, strict=True)]
    _, adapter = json.loads((tmp_path / "out.json").read_text())
    assert adapter["score"] == pytest.approx(np.mean(values)) and adapter["score"] > 0
    half = 1.96 * np.std(values, ddof=1) / math.sqrt(len(values))
    assert adapter["high"] == pytest.approx(np.mean(values) + half, rel=1e-4)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--metric", "bleu"],
            "--metric bleu: allowed are loss, choice_accuracy, exact_match, or module:function",
        ),
        (["--answer", "last_number"], "--answer last_number has no effect with the metric loss"),
        (
            ["--metric", "exact_match", "--answer", "regex:("],
            "--answer regex:(: '(' is not a regular expression",
        ),
        (
            ["--metric", "exact_match", "--answer", "last_number"],
            "eval.jsonl, line 1: data.answer last_number finds",
        ),
        (["--metric", "own_score:broken"], "metric own_score:broken returned 1 values for"),
        (["--metric", "own_score:none"], "own_score has no none"),
    ],
)
def test_the_command_refuses(argv, says, base, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_module(tmp_path)
    tiny.write_rows(tmp_path / "eval.jsonl", rows)
    assert says in refused(tmp_path, "eval", "--model", base.name, "--data", "eval.jsonl", *argv)


def sweep_of(base, rows, directory, **data):
    """Write a sweep of two jobs on the tiny model."""
    tiny.write_rows(directory / "train.jsonl", [{"prompt": p, "completion": " yes yes"} for p in PROMPTS])
    tiny.write_rows(directory / "eval.jsonl", [{"prompt": r["prompt"], "completion": " yes"} for r in rows])
    files = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 32, "max_new_tokens": NEW}
    return tiny.write_sweep(
        directory,
        model=base.name,
        data=files | data,
        search={"rank": [8], "learning_rate": [1e-6, 0.05]},
        train={"batch_size": 7, "epochs": 6},
    )


@pytest.mark.slow
def test_a_sweep_is_ranked_by_what_its_adapters_answer(base, rows, tmp_path):
    how = {"metric": "exact_match", "answer": {"regex": r"^(\w+)"}}
    sweep = sweep_of(base, rows, tmp_path, **how)
    assert main(["sweep", str(sweep), "--out", str(tmp_path / "run")]) == 0
    board = json.loads((tmp_path / "run" / "leaderboard.json").read_text())
    best, last = board["jobs"]
    assert best["learning_rate"] == 0.05 and best["score"] == 1.0 > last["score"] == board["base"]["score"]
    assert (best["low"], best["high"]) == pytest.approx((7 / (7 + 1.96**2), 1.0), abs=1e-4)
    assert board["higher_is_better"] and board["metric"] == "exact_match"
    adapter, _ = import_adapter(tmp_path / "run" / best["adapter"], base.config)
    assert answer_of(base, Job(rank=8), adapter, PROMPTS[0]).split()[:2] == ["yes", "yes"]


def test_a_metric_that_fails_is_found_before_anything_is_trained(base, rows, tmp_path):
    write_module(tmp_path)
    sweep = sweep_of(base, rows, tmp_path, metric="own_score:broken")
    says = refused(tmp_path, "sweep", sweep, "--out", tmp_path / "run")
    assert "metric own_score:broken returned 1 values for 4 rows" in says
