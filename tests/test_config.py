"""SWEEP.yaml is read whole, and its errors say what a person needs to mend it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.config.space import Range, describe_field, job_field
from plora_jax.config.sweep import Sweep, load_sweep, make_sweep, parse_sweep, resolved, unsupported
from plora_jax.config.yamlfile import dump_yaml, parse_yaml
from plora_jax.errors import UserError
from plora_jax.jobs import JOB_FIELDS
from plora_jax.search.configurations import search_jobs

SWEEPS = Path(__file__).parent.parent / "scripts" / "sweeps"
BASE = "model: org/name\ndata: {train: a.jsonl, eval: b.jsonl}\n"


def faults(text: str) -> list[str]:
    """Return the faults of a sweep, one an item, or fail when there are none."""
    with pytest.raises(UserError) as caught:
        parse_sweep(text)
    lines = str(caught.value).split("\n  - ")
    return lines[1:] or [lines[0].removeprefix("sweep: ")]


def test_the_design_page_example_is_read() -> None:
    sweep = load_sweep(SWEEPS / "paper.yaml")
    assert sweep.model == "Qwen/Qwen2.5-7B-Instruct"
    assert (sweep.data.train, sweep.data.max_length, sweep.data.metric) == (
        "gsm8k_train.jsonl",
        1024,
        "exact_match",
    )
    assert dict(sweep.search.axes)["learning_rate"] == Range("log_uniform", 2e-5, 4e-4)
    assert dict(sweep.search.axes)["alpha_ratio"] == (0.25, 0.5, 1.0, 2.0, 4.0)
    assert (sweep.search.sample, sweep.search.seed) == (120, 0)
    assert dict(sweep.train.fixed)["warmup_ratio"] == 0.03 and sweep.train.keep == "best"
    assert sweep.precision.base == "bf16" and sweep.early_stop.method == "none"
    assert sweep.path("x/y.jsonl") == SWEEPS.absolute() / "x" / "y.jsonl"


def test_defaults_are_the_documented_ones() -> None:
    sweep = parse_sweep(BASE)
    assert (
        sweep.data.metric == "loss" and sweep.data.on_long == "truncate" and sweep.data.on_bad_row == "error"
    )
    assert sweep.precision.base == "auto" and sweep.devices == "auto" and sweep.train.keep == "best"
    assert sweep.search.axes == () and sweep.search.jobs is None


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-5", "0.00002", ".2e-4", "+2e-5", "2.e-5"])
def test_numbers_are_those_of_yaml_1_2(text: str) -> None:
    assert parse_yaml(f"lr: {text}", "x")[0] == {"lr": 2e-5}


@pytest.mark.parametrize(
    "text", ["yes", "no", "on", "off", "1:30", "2020-01-01", "1_000", "0b1", "~x", "nullx"]
)
def test_what_yaml_1_2_calls_text_stays_text(text: str) -> None:
    assert parse_yaml(f"a: {text}", "x")[0] == {"a": text}


def test_core_schema_scalars() -> None:
    value, found = parse_yaml("{a: 010, b: 0o17, c: 0x1F, d: ~, e: , f: True, g: .inf, h: -.INF}", "x")
    inf = float("inf")
    assert value == {"a": 10, "b": 15, "c": 31, "d": None, "e": None, "f": True, "g": inf, "h": -inf}
    assert found.found == []


@pytest.mark.parametrize("quoted", ['"1e-4"', "'1e-4'", "!!str 1e-4"])
def test_a_learning_rate_as_text_is_an_error_that_says_how_to_write_it(quoted: str) -> None:
    [fault] = faults(f"{BASE}search: {{learning_rate: [{quoted}]}}")
    assert fault == (
        "search.learning_rate[0] (line 3): the text '1e-4' is text; write the number without quotes, as 1e-4"
    )


def test_every_fault_is_told_at_once_with_its_line() -> None:
    text = "model: x\nlr: 3\ndata:\n  train: 3\n  metric: acc\nsearch:\n  rank: [8, 0, 8.5]\n"
    text += "train: {scheduler: cos}\n"
    assert faults(text) == [
        "lr (line 2): unknown key here; learning_rate belongs under search or train",
        "data.train (line 4): 3 is not text; expected text, in quotes if need be",
        "data.metric (line 5): the text 'acc' is not known; expected one of loss, choice_accuracy, "
        "exact_match, or module:function",
        "train.scheduler (line 8): the text 'cos' is not known (did you mean cosine?); "
        "expected one of constant, linear, cosine",
        "search.rank[1] (line 7): 0 is too small; expected a whole number from 1 to 1024",
        "search.rank[2] (line 7): 8.5 is not allowed here; expected a whole number from 1 to 1024",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("search: {lr: [1e-4]}", "search.lr (line 3): unknown key; did you mean learning_rate?"),
        ("train: {lora_alpha: 3}", "train.lora_alpha (line 3): unknown key; did you mean alpha?"),
        ("train: {sample: 3}", "train.sample (line 3): unknown key here; sample belongs under search"),
        (
            "search: {max_length: 3}",
            "search.max_length (line 3): unknown key here; max_length belongs under data",
        ),
        ("epoch: 3", "epoch (line 3): unknown key here; epochs belongs under search or train"),
        ("colour: 3", "colour (line 3): unknown key; known here: model, data"),
        ("search: {budget: {job: 3}}", "search.budget.job (line 3): unknown key; did you mean jobs?"),
        (
            "search: {gpu_hours: 3}",
            "search.gpu_hours (line 3): unknown key here; gpu_hours belongs under search.budget",
        ),
        ("search: {n_trials: 3}", "search.n_trials (line 3): unknown key; did you mean budget?"),
        ("early_stop: {eta: 3}", "early_stop.eta (line 3): unknown key; did you mean reduction_factor?"),
        (
            "early_stop: {sampler: tpe}",
            "early_stop.sampler (line 3): unknown key here; sampler belongs under search",
        ),
        ("eval: {every: 3}", "eval.every (line 3): unknown key; did you mean every_epochs?"),
        ("export: {base_modle: x}", "export.base_modle (line 3): unknown key; did you mean base_model?"),
    ],
)
def test_an_unknown_key_says_what_was_meant(text: str, says: str) -> None:
    assert faults(BASE + text)[0].startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {alpha: 8, alpha_ratio: 2}", "train.alpha (line 3): contradicts alpha_ratio"),
        ("train: {epochs: 1, max_steps: 2}", "train.max_steps (line 3): contradicts epochs"),
        ("train: {seed: 1, seeds: [1, 2]}", "train.seed (line 3): contradicts seeds"),
        (
            "train: {warmup_ratio: 0.1}\nsearch: {warmup_steps: [0, 5]}",
            "search.warmup_steps (line 4): contradicts train.",
        ),
        ("jobs: [{seed: 1}]\ntrain: {seeds: [1, 2]}", "jobs[0].seed (line 3): contradicts train.seeds"),
        ("search: {alpha: [8], alpha_ratio: [2]}", "search.alpha (line 3): contradicts alpha_ratio"),
        ("train: {rank: 8}\nsearch: {rank: [8]}", "search.rank (line 4): is fixed under train as well"),
        (
            "train: {init_adapter: a}\nsearch: {rank: [8]}",
            "search.rank (line 4): contradicts train.init_adapter",
        ),
        ("train: {momentum: 0.9}", "train.momentum (line 3): has no effect without optimizer: sgd"),
        (
            "train: {optimizer: sgd, beta1: 0.9}",
            "train.beta1 (line 3): has no effect without optimizer: adamw or adamw_bf16",
        ),
        ("search: {rank: [8], jobs: [{rank: 8}]}", "search.jobs (line 3): a literal list excludes rank"),
        (
            "jobs: [{rank: 8}]\nsearch: {jobs: [{rank: 8}]}",
            "jobs (line 3): is given at the top and under search",
        ),
        ("search: {rank: {uniform: [8, 16]}}", "search.rank (line 3): a range needs `sample: N`"),
        (
            "eval: {every_steps: 1, every_epochs: 1}",
            "eval (line 3): every_epochs and every_steps are both given",
        ),
        (
            "search: {rank: [8, 16], sampler: gp}",
            "search.sampler (line 3): has no effect without method: optuna",
        ),
        (
            "search: {rank: [8, 16], method: grid, sample: 2}",
            "search.sample (line 3): has no effect with method: grid; use method: random",
        ),
        (
            "search: {rank: [8, 16], method: optuna, sample: 2}",
            "search.sample (line 3): has no effect with method: optuna; give budget: {jobs: N}",
        ),
        (
            "search: {rank: [8, 16], budget: {jobs: 2}}",
            "search.budget (line 3): needs method: random or optuna",
        ),
        (
            "search: {rank: [8, 16], sample: 2, budget: {jobs: 2}}",
            "search.sample (line 3): contradicts budget.jobs",
        ),
        (
            "search: {rank: [8, 16], method: random}",
            "search.budget (line 3): is missing; method: random needs",
        ),
        (
            "search: {rank: [8, 16], method: optuna}",
            "search.budget (line 3): is missing; method: optuna needs",
        ),
        (
            "search: {rank: [8, 16], method: optuna, budget: {}}",
            "search.budget (line 3): is missing; method: optuna needs",
        ),
        (
            "search: {rank: [8], method: optuna, budget: {jobs: 2}}",
            "search (line 3): method: optuna needs an axis with two values",
        ),
        (
            "search: {rank: [8, 16], method: random, budget: {jobs: 2}}\ntrain: {seeds: [0, 1, 2]}",
            "search.budget.jobs (line 3): 2 is less than one configuration with each of 3 train.seeds",
        ),
        (
            "search: {jobs: [{rank: 8}], method: optuna}",
            "search.jobs (line 3): a literal list excludes method",
        ),
        (
            "search: {jobs: [{rank: 8}], budget: {jobs: 1}}",
            "search.jobs (line 3): a literal list excludes budget",
        ),
        (
            "search: {rank: {uniform: [8, 16]}, method: grid}",
            "search.rank (line 3): a range needs `sample: N`",
        ),
        (
            "early_stop: {method: asha, patience: 3}",
            "early_stop.patience (line 3): has no effect with method: asha; it belongs to plateau",
        ),
        (
            "early_stop: {grace_period: 0.1}",
            "early_stop.grace_period (line 3): has no effect with method: none; it belongs to median, asha,",
        ),
        (
            "early_stop: {method: asha, brackets: 3}",
            "early_stop.brackets (line 3): 3 is too large; there are 2 rungs to start from",
        ),
        ("model: again", "model (line 1): is given again in line 3"),
        ("train: {eps: 1.0, eps: 2.0}", "train.eps (line 3): is given again in line 3"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, says: str) -> None:
    assert faults(BASE + text)[0].startswith(says)


def test_null_is_not_given() -> None:
    text = "train: {max_steps: null, epochs: 2, warmup_steps: ~}\neval: {every_steps: null, every_epochs: 1}"
    sweep = parse_sweep(BASE + text)
    assert dict(sweep.train.fixed) == {"epochs": 2.0} and sweep.eval.every_epochs == 1
    assert "epochs: 1.0" in resolved(parse_sweep(BASE + "train: {max_steps: null}"))


def test_an_optimizer_setting_is_fine_when_some_job_reads_it() -> None:
    parse_sweep(BASE + "train: {momentum: 0.9, beta1: 0.8}\nsearch: {optimizer: [sgd, adamw_bf16]}")
    parse_sweep(BASE + "train: {momentum: 0.9}\nsearch: {jobs: [{optimizer: sgd}, {rank: 4}]}")


@pytest.mark.parametrize(
    "name", [n for n, f in JOB_FIELDS.items() if f.metadata["low"] is not None and not n.endswith("pattern")]
)
def test_ranges_are_those_of_the_job(name: str) -> None:
    """The bounds of a field come from Job's metadata: the ends are accepted, one step outside is not."""
    meta, kind = JOB_FIELDS[name].metadata, JOB_FIELDS[name].type
    step = 1 if kind in (int, int | None) else 1e-6
    with pytest.raises(ValueError, match="too small"):
        job_field(name, meta["low"] if meta["open_low"] else meta["low"] - step)
    inside = meta["low"] + step if meta["open_low"] else meta["low"]
    assert job_field(name, int(inside) if step == 1 else inside) == pytest.approx(inside)
    if meta["high"] is not None:
        assert job_field(name, meta["high"]) == meta["high"]
        with pytest.raises(ValueError, match="too large"):
            job_field(name, meta["high"] + 1)
    shown = describe_field(name)
    assert "number" in shown and f"{meta['low']:g}" in shown


@pytest.mark.parametrize("value", [True, None, "x", [], {}, float("nan"), float("inf"), 10**400])
def test_no_other_type_passes_for_a_number(value: object) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        job_field("learning_rate", value)


def test_targets() -> None:
    assert job_field("targets", "q_proj") == ("q_proj",)
    assert (
        job_field("targets", ["v_proj", "q_proj"])
        == ("q_proj", "v_proj")
        == job_field("targets", ["q_proj", "v_proj"])
    )
    assert job_field("targets", ["all-linear"]) == "all-linear"
    for bad in ([], "", ["q_proj", "q_proj"], ["all-linear", "q_proj"], [3], 3, {"a": 1}):
        with pytest.raises(ValueError):
            job_field("targets", bad)


def test_patterns_are_mappings_of_ranks() -> None:
    assert job_field("rank_pattern", {"v_proj": 4, "q_proj": 8}) == (("q_proj", 8), ("v_proj", 4))
    for bad in ({"q_proj": 0}, {"q_proj": "4"}, {"": 4}, [4], 4):
        with pytest.raises(ValueError):
            job_field("rank_pattern", bad)


def test_a_sweep_given_in_python_is_checked_the_same_way() -> None:
    sweep = make_sweep(model="m", data={"train": Path("a.jsonl"), "max_length": 32}, train={"rank": 4})
    assert (sweep.data.train, sweep.data.max_length, sweep.train.fixed) == ("a.jsonl", 32, (("rank", 4),))
    with pytest.raises(UserError, match=r"data\.metrics: unknown key; did you mean metric"):
        make_sweep(model="m", data={"train": "a.jsonl", "metrics": "loss"})


def test_precision_may_be_one_word() -> None:
    assert parse_sweep(BASE + "precision: fp32").precision.base == "fp32"
    assert "precision.base" in faults(BASE + "precision: fp33")[0]


def test_what_is_planned_but_not_run_is_named() -> None:
    [sentence] = unsupported(parse_sweep(BASE + "precision: nf4"))
    assert "nf4" in sentence and unsupported(parse_sweep(BASE)) == []


def same_but_for_spelled_defaults(one: Sweep, other: Sweep) -> bool:
    return dataclasses.replace(one, train=other.train) == other and search_jobs(one) == search_jobs(other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "search: {rank: [8, 16], learning_rate: {log_uniform: [1e-5, 1e-3]}, sample: 7, seed: 3}",
        "search: {jobs: [{rank: 4, max_steps: 5}, {targets: [q_proj], rank_pattern: {q_proj: 2}}]}",
        "train: {optimizer: sgd, momentum: 0.9, seeds: [1, 2], alpha_ratio: 2, keep: last, warmup_steps: 0}",
        "train: {slots: 4}",
        "search: {rank_pattern: [{q_proj: 4}, {v_proj: 8}], optimizer: [sgd, adamw]}",
        "search: {targets: [[q_proj, v_proj], all-linear]}\ndevices: 2xH100\nprecision: bf16",
        "train: {init_adapter: some/adapter, max_steps: 4}\neval: {every_steps: 2}",
        "export: {base_model: '0x1F'}",
        "search: {rank: [8, 16], method: random, budget: {jobs: 7, gpu_hours: 0.5, tokens: 1e9}}",
        "search: {rank: [8, 16], method: optuna, sampler: cmaes, budget: {jobs: 2}, seed: 3}",
        "early_stop: {method: asha, reduction_factor: 4, brackets: 2, grace_period: 0.01}",
        "early_stop: {method: halving, cohort: 8}",
        "early_stop: {method: plateau, patience: 2, min_delta: 0.01, max_loss_ratio: 3, every: 0.25}",
        "early_stop: {method: median, min_jobs: 5, grace_period: 0.3}\neval: {every_epochs: 0.5}",
    ],
)
def test_the_resolved_file_reads_back_as_the_same_sweep(text: str) -> None:
    sweep = parse_sweep(BASE + text)
    again = parse_sweep(resolved(sweep), Path("/elsewhere"))
    assert same_but_for_spelled_defaults(again, sweep)
    assert resolved(again) == resolved(sweep)
    assert yaml.safe_load(resolved(sweep))["data"]["train"] == "a.jsonl"  # and any YAML reader takes it


def some(name: str) -> st.SearchStrategy[Any]:
    """Draw a valid value of a job field, as YAML has it, from the field's own limits."""
    field = JOB_FIELDS[name]
    low, high = field.metadata["low"], field.metadata["high"]
    whole = st.integers(low or 0, high or 10**6)
    if name.endswith("pattern"):
        return st.dictionaries(
            st.sampled_from(["q_proj", "layers.3.mlp", "^x$"]), st.integers(1, 9), min_size=1
        )
    if name == "targets":
        return st.lists(st.sampled_from(["q_proj", "v_proj", "o_proj"]), min_size=1, unique=True)
    if field.type is float:
        return st.floats(low, high or 1e6, exclude_min=field.metadata["open_low"])
    if get_origin(field.type) is Literal:
        return st.sampled_from(get_args(field.type))
    return {bool: st.booleans(), str: st.text(min_size=1, max_size=6)}.get(field.type, whole)


FREE = [
    "learning_rate",
    "rank",
    "use_rslora",
    "dropout",
    "targets",
    "rank_pattern",
    "alpha_pattern",
    "batch_size",
]
FREE += [
    "epochs",
    "optimizer",
    "weight_decay",
    "max_grad_norm",
    "scheduler",
    "warmup_ratio",
    "data_seed",
    "train",
]


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.data())
def test_any_sweep_reads_back_as_itself(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(FREE), unique=True))
    split = data.draw(st.integers(0, len(names)))
    fixed = {name: data.draw(some(name)) for name in names[:split] if name != "train"}
    axes = {name: data.draw(st.lists(some(name), min_size=1, max_size=2)) for name in names[split:]}
    sweep = make_sweep(model="m", data={"train": "a", "choices": []}, train=fixed, search=axes)
    again = parse_sweep(resolved(sweep))
    assert same_but_for_spelled_defaults(again, sweep) and resolved(again) == resolved(sweep)


def test_the_resolved_file_spells_out_the_defaults() -> None:
    train = yaml.safe_load(resolved(parse_sweep(BASE)))["train"]
    assert (
        train["rank"] == JOB_FIELDS["rank"].default
        and train["scheduler"] == "cosine"
        and train["beta2"] == 0.999
    )
    assert "momentum" not in train and "max_steps" not in train  # nothing that no job reads


text_or_number = (
    st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans()
)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6), text_or_number | st.lists(text_or_number, max_size=3), min_size=1
    )
)
def test_what_is_written_is_read_back_equal(value: dict[str, object]) -> None:
    again, found = parse_yaml(dump_yaml(value), "x")
    assert again == value and found.found == []


def test_aliases_are_read_and_may_not_hold_themselves() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: *x", "x")[0] == {"a": [1, 2], "b": [1, 2]}
    assert parse_yaml("a: &x [1, *x]", "x")[0] == {"a": [1, None]}
    bomb = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert len(faults(BASE + bomb)) == 30  # 9^29 ones when written out; read in no time


def test_a_tag_that_would_run_code_is_refused() -> None:
    assert "not accepted" in faults(BASE + "devices: !!python/object/apply:os.getcwd ''")[0]
