"""What the planner is told about a sweep: the model's sizes, the rows and lengths of the data, the devices."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import Plan
from plora_jax.bench.step import measure_step
from plora_jax.config.sweep import Sweep, load_sweep
from plora_jax.data.encode import read_examples
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.machine import Gpu, cores, memory_bytes
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.models.load import load_base
from plora_jax.models.presets import preset
from plora_jax.planning import (
    _widened,
    check_disk,
    disk_bytes,
    find_devices,
    gpu_spec,
    job_spec,
    model_shape,
    solve,
    sweep_problem,
    trained_rows,
)
from plora_jax.search.configurations import search_jobs
from plora_jax.sizes import Size, data_size, token_counter
from plora_jax.training.step import pack_spec
from tests.tiny import ROWS, write_model, write_rows, write_sweep

TURN = {"role": "assistant", "content": "red"}


def planned(sweep: Sweep, devices: str = "cpu-16GB", rows: int | None = None) -> Plan:
    return solve(sweep_problem(sweep, search_jobs(sweep), devices=devices, rows=rows))


def test_the_shape_of_a_public_model() -> None:
    """Qwen2.5-7B as published: 7.61 B parameters, 6.53 B of them without embeddings (its model card)."""
    shape = model_shape(load_config("Qwen/Qwen2.5-7B-Instruct"), "Qwen/Qwen2.5-7B-Instruct")
    assert (shape.n_layers, shape.d_model, shape.d_ff, shape.vocab_size) == (28, 3584, 18944, 152064)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.tied) == (28, 4, 128, False)
    assert round(shape.n_params / 1e9, 2) == 7.62 and round(shape.linear_params / 1e9, 2) == 6.53
    assert {name: (i, o) for name, i, o in shape.sites}["v_proj"] == (3584, 512)
    assert (shape.norms, shape.qk_norm, shape.flash) == (2, False, True)


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("google/gemma-2-2b", (4, False, False)),
        ("google/gemma-3-1b-it", (4, True, True)),
        ("Qwen/Qwen3-4B", (2, True, True)),
        ("allenai/OLMo-2-0425-1B", (2, True, True)),
        ("microsoft/Phi-3-mini-4k-instruct", (2, False, True)),
    ],
)
def test_what_the_layers_of_a_family_keep(model: str, facts: tuple[int, bool, bool]) -> None:
    """Norms over D, norms of queries and keys, whether cuDNN's attention serves (scores with a softcap: no)."""
    shape = model_shape(load_config(model), model)
    assert (shape.norms, shape.qk_norm, shape.flash) == facts


@pytest.mark.parametrize(
    ("fields", "n", "rows"),
    [
        ({"batch_size": 4}, 10, 10),  # 4 + 4 + 2: the last batch is partial
        ({"batch_size": 4, "epochs": 2.0}, 10, 20),
        ({"batch_size": 4, "epochs": 0.5}, 10, 8),  # half of 3 steps, rounded up, of 4 rows each
        ({"batch_size": 4, "epochs": 1.5}, 10, 18),
        ({"batch_size": 4, "max_steps": 1}, 10, 4),
        ({"batch_size": 4, "max_steps": 3}, 10, 10),
        ({"batch_size": 4, "max_steps": 7}, 10, 24),  # 10 + 10 + 4
        ({"batch_size": 32}, 10, 10),
    ],
)
def test_rows_until_the_last_step(fields: dict[str, Any], n: int, rows: int) -> None:
    assert trained_rows(Job(**fields), n) == rows


@pytest.mark.parametrize(
    ("rank", "bucket"), [(1, 8), (9, 16), (129, 256), (300, 512), (600, 768), (1024, 1024)]
)
def test_a_job_is_trained_in_the_bucket_that_was_planned(rank: int, bucket: int) -> None:
    job = Job(rank=rank)
    spec = pack_spec(load_config("HuggingFaceTB/SmolLM2-135M"), [job])
    assert spec.rank == job_spec(job, Size(1, 8, 8, ""), "rows").bucket == bucket


def test_a_job_in_the_planners_words() -> None:
    job = Job(
        rank=8, rank_pattern=(("q_proj", 64),), targets=("q_proj",), dropout=0.1, optimizer="sgd", data_seed=3
    )
    spec = job_spec(job, Size(100, 20.5, 31, ""), "a.jsonl", scored=7)
    assert (spec.job_id, spec.rank, spec.targets) == (job.job_id, 64, frozenset({"q_proj"}))
    assert (spec.row_tokens, spec.max_row_tokens, spec.eval_tokens) == (20.5, 31, 7)
    assert spec.has_dropout and spec.optimizer == "sgd" and spec.data == "a.jsonl order 3"
    assert job_spec(Job(train="b.jsonl"), Size(9, 9, 9, ""), "a.jsonl").data == "b.jsonl order 0"
    assert job_spec(Job(), Size(9, 9, 9, ""), "a").targets is None


def test_a_sweep_says_how_many_slots_a_pack_may_have(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", ROWS)
    search = {"rank": [4], "learning_rate": [n * 1e-4 for n in range(1, 7)]}
    free = planned(load_sweep(write_sweep(tmp_path, search=search)))
    few = planned(load_sweep(write_sweep(tmp_path, search=search, train={"slots": 2})))
    assert [len(pack.slots) for pack in free.packs] == [6] and {len(pack.slots) for pack in few.packs} == {2}


def test_rows_are_counted_and_tokenised(tmp_path: Path) -> None:
    """Lengths are those of a tokenizer that splits on words: counted here by hand."""
    sweep = load_sweep(write_sweep(tmp_path))
    count = token_counter(sweep.model)
    assert count is not None
    rows = [{"prompt": "what is one ?", "completion": " red"}] * 3 + [{"prompt": "one", "completion": " red"}]
    write_rows(
        tmp_path / "train.jsonl", [*rows, {"prompt": "one", "completion": "  "}]
    )  # the last is dropped
    size = data_size(sweep, "train.jsonl", count)
    assert size[:3] == (4, (6 * 3 + 3) / 4, 6)  # words and EOS
    untokenised = data_size(sweep, "train.jsonl", None)
    assert untokenised[:3] == (4, 16, 16) and "max_length" in untokenised.how


def test_long_rows_are_cut_or_dropped_as_the_sweep_says(tmp_path: Path) -> None:
    long = {"prompt": "one " * 40, "completion": " red"}
    data = {"train": "train.jsonl", "max_length": 16}
    for on_long, expected in (("truncate", (2, (6 + 16) / 2, 16)), ("drop", (1, 6, 6))):
        sweep = load_sweep(write_sweep(tmp_path, data=data | {"on_long": on_long}))
        write_rows(tmp_path / "train.jsonl", [ROWS[0], long])
        assert data_size(sweep, "train.jsonl", token_counter(sweep.model))[:3] == expected


def test_a_row_too_long_is_refused_by_the_plan_as_by_the_sweep(tmp_path: Path) -> None:
    """Words are tokens: 16 and EOS pass the plan, which does not know what the model's tokenizer adds; 41 do not."""
    data = {"train": "train.jsonl", "max_length": 16, "on_long": "error"}
    sweep = load_sweep(write_sweep(tmp_path, data=data))
    rows = [{"prompt": "one " * n, "completion": " red"} for n in (3, 15, 40)]
    train = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(UserError) as planned_:
        planned(sweep)
    write_rows(train, [rows[0], rows[2]])
    with pytest.raises(UserError) as swept:
        read_examples(train, load_tokenizer(sweep.model), max_length=16, on_long="error")
    said = str(planned_.value).replace("line 3", "line 2").replace("41 tokens", "TOKENS")
    assert said == re.sub(r"4[123] tokens", "TOKENS", str(swept.value)) and "line 3" in str(planned_.value)
    write_rows(train, rows[:2])
    assert len(planned(sweep).jobs) == 4
    write_rows(train, [{"messages": [{"role": "user", "content": "one " * 40}, TURN]}])
    assert len(planned(sweep).jobs) == 4, "how long a conversation is only the sweep knows"


def test_a_large_file_is_sampled_and_its_longest_row_is_found(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path, data={"train": "train.jsonl", "max_length": 64}))
    rows = [{"prompt": "one", "completion": " red " * (1 + i % 3)} for i in range(9000)]
    rows[4321] = {"prompt": "one", "completion": " red" * 50}
    write_rows(tmp_path / "train.jsonl", rows)
    size = data_size(sweep, "train.jsonl", token_counter(sweep.model))
    exact = sum(min(64, 2 + row["completion"].count("red")) for row in rows) / 9000
    assert (size.rows, size.max_row_tokens) == (9000, 52) and size.row_tokens == pytest.approx(
        exact, rel=0.02
    )


def test_missing_data_needs_a_row_count(tmp_path: Path) -> None:
    data = {"train": "gone.jsonl", "max_length": 16}
    sweep = load_sweep(write_sweep(tmp_path, data=data))
    with pytest.raises(UserError, match=r"gone.jsonl: no such file.*give --rows N"):
        planned(sweep)
    plan = planned(sweep, rows=50)
    assert {job["rows"] for job in plan.jobs.values()} == {50}
    sweep = load_sweep(write_sweep(tmp_path, data=data | {"rows": 60}))
    plan = planned(sweep)
    assert {job["rows"] for job in plan.jobs.values()} == {60}


def test_held_out_rows_are_charged_for(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path))
    plan = planned(sweep)
    count = token_counter(sweep.model)
    assert count is not None
    rows = [*ROWS, {"prompt": "eval.jsonl", "completion": " yes"}]
    tokens = sum(count([row["prompt"] + row["completion"]])[0] + 1 for row in rows)
    assert {job["eval_tokens"] for job in plan.jobs.values()} == {tokens}


def test_early_stopping_is_simulated_where_it_can_be(tmp_path: Path) -> None:
    plans = {}
    for method in ("none", "asha", "median"):
        plans[method] = planned(load_sweep(write_sweep(tmp_path, early_stop={"method": method})))
    assert plans["none"].expected_s is None and plans["median"].expected_s is None
    assert any("median is not simulated" in note for note in plans["median"].notes)
    asha = plans["asha"]
    assert 0 < (asha.expected_s or 0) < asha.makespan_s and asha.whole is None
    assert asha.makespan_s > plans["none"].makespan_s  # two more evaluations a job
    tokens = [{job["eval_tokens"] for job in plans[method].jobs.values()} for method in ("none", "asha")]
    assert tokens[1] == {3 * n for n in tokens[0]}


def test_a_mixture_is_refused_what_one_of_its_types_cannot(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp8 cannot run on A100-40GB"):
        planned(load_sweep(write_sweep(tmp_path, precision="fp8")), "1xH200+1xA100-40GB")
    with pytest.raises(
        UserError, match=r"early_stop.pause: always .* 1 × H200 \+ 1 × A100-40GB; use auto or never"
    ):
        paused = {"method": "asha", "pause": "always"}
        planned(load_sweep(write_sweep(tmp_path, early_stop=paused)), "1xH200+1xA100-40GB")
    plan = planned(load_sweep(write_sweep(tmp_path, early_stop={"method": "asha"})), "1xH200+1xA100-40GB")
    assert plan.device_types == {"H200": 1, "A100-40GB": 1} and plan.expected_s is not None


@pytest.mark.parametrize(("devices", "precision"), [("cpu-16GB", "fp32"), ("A10", "bf16")])
def test_precision_auto_follows_the_device(devices: str, precision: str, tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path))
    assert planned(sweep, devices).precision == precision


@pytest.mark.parametrize(
    ("name", "mib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA A10G", 23028, "A10"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA RTX A6000", 49140, "L40S"),  # not known: planned as the next smaller one
        ("Tesla T4", 15360, "A10"),  # smaller than all: the nearest
        ("NVIDIA B100", 150000, "H200"),
    ],
)
def test_a_gpu_is_planned_as_its_kind_with_its_own_memory(name: str, mib: int, known: str) -> None:
    spec = gpu_spec(Gpu(name, mib, "580"))
    assert (spec.name, spec.memory_bytes) == (known, mib * 2**20)
    assert spec.fused == (132 if name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200") else 0)


def test_disk_need_is_every_adapter_and_three_checkpoints(tmp_path: Path) -> None:
    """By hand: 2 layers × r × Σ(in + out) of q 16+16, k and v 16+8, o 16+16, gate and up 16+32, down 32+16."""
    sweep = load_sweep(write_sweep(tmp_path))
    plan = planned(sweep)
    per_rank = 2 * (32 + 24 + 24 + 32 + 48 + 48 + 48)
    needed = disk_bytes(load_config(sweep.model), plan)
    (pack,) = plan.packs
    assert pack.slots == (8, 8, 8, 8)
    state = (4 + 4 + 4 + 4) * per_rank * (8 + 8 + 8 + 8)  # float32: weights, gradients, two moments
    assert needed == 4 * per_rank * (4 + 4 + 8 + 8) + 3 * state
    kinds = {"learning_rate": [1e-3], "rank": [4], "optimizer": ["adamw", "adamw_bf16", "sgd"]}
    (pack,) = (mixed := planned(load_sweep(write_sweep(tmp_path, search=kinds)))).packs
    state = (
        (4 + 4 + 8 + 4 + 4) * per_rank * sum(pack.slots)
    )  # a slot has the moments of each optimizer in the pack
    assert disk_bytes(load_config(sweep.model), mixed) == 4 * per_rank * (4 + 4 + 4) + 3 * state
    check_disk(tmp_path / "new" / "run", needed)
    with pytest.raises(UserError, match=r"the run needs 1000000\.0 GB on disk"):
        check_disk(tmp_path / "new" / "run", 10**15)


def test_this_machine() -> None:
    devices = find_devices("cpu")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory_bytes() <= total and math.isclose(
        devices.spec.memory_bytes, memory_bytes(), rel_tol=0.2
    )
    assert devices.count == 1 and devices.spec.cores == cores() >= 1
    with pytest.raises(UserError, match="devices: device 'TPU' is not known"):
        find_devices("4xTPU")


def test_what_is_planned_is_what_is_compiled() -> None:
    """The planner's signature of a pack and the step's specification are two words for one program."""
    config = preset("HuggingFaceTB/SmolLM2-135M-Instruct")
    jobs = [
        Job(rank=4, batch_size=4, targets=("layers.0.self_attn.q_proj", "v_proj")),
        Job(rank=8, batch_size=8, dropout=0.1, rank_pattern=(("down_proj", 12),), targets=("down_proj",)),
        Job(rank=600, batch_size=2, optimizer="sgd", targets=("v_proj",)),
    ]
    size = Size(10, 5.0, 9, "")
    for chosen in ([jobs[2]], [jobs[0]], jobs[:2], jobs):
        signature = planner.signature_of(
            [job_spec(job, size, "rows") for job in chosen], len(chosen), 2, "none", "fp32"
        )
        spec = pack_spec(config, chosen, m=2)
        assert spec.slots == signature.J and spec.rank == signature.rank_bucket
        assert set(spec.sites) == signature.targets and spec.optimizers == signature.optimizers
        assert spec.has_dropout == signature.has_dropout
        assert spec.accumulate == signature.accumulate == (chosen != [jobs[2]])
        for job in jobs:  # and a job that fits the signature needs no other program
            if planner.fits(signature, job_spec(job, size, "rows")):
                assert pack_spec(config, [*chosen, job], slots=spec.slots, m=2) == spec
    assert planner.fits(signature, job_spec(jobs[1], size, "rows"))


def test_summed_gradients_are_planned_where_they_are_kept(tmp_path: Path) -> None:
    """Where rows share sequences, and in places for jobs of any batch size, m may be a batch and they still are."""
    write_rows(tmp_path / "train.jsonl", ROWS)
    search = {"rank": [4, 8]}
    for packing in (False, True):
        data = {"train": "train.jsonl", "max_length": 16, "packing": packing}
        sweep = load_sweep(write_sweep(tmp_path, search=search, data=data))
        specs = sweep_problem(sweep, search_jobs(sweep)).specs
        assert {spec.accumulate for spec in specs} == {packing}
    size = Size(10, 5.0, 9, "")
    for batches in ((4, 4), (4, 8)):
        corners = [job_spec(Job(batch_size=b), size, "rows") for b in batches]
        (place,) = _widened(corners[:1], corners)
        assert place.batch_size == 4 and place.accumulate == (batches == (4, 8)) == place.sums(4)


@pytest.mark.parametrize("sizes", [(4, 2, 16, 64), (8, 1, 8, 128)])
def test_a_buffer_of_summed_gradients_is_charged_as_it_is_compiled(tmp_path: Path, sizes) -> None:
    """Four bytes a number of the adapters, by the planner; as XLA counts them on a CPU, within a fifth."""
    J, m, S, rank = sizes
    path = str(write_model(tmp_path / "model"))
    base = load_base(path, random_weights=True, precision="fp32")
    shape = model_shape(base.config, path)
    real, charged = (
        [
            measure_step(base, jobs=J, m=m, length=S, rank=rank, repeats=0, accumulate=summed)["total_bytes"]
            for summed in (True, False)
        ],
        [
            planner.step_memory(
                shape,
                planner.StepShape(1, J, m, S, rank, "none", accumulate=summed),
                "fp32",
                planner.cpu_device(2**34).spec,
                planner.MemoryModel(margin=0.0),
            )
            for summed in (True, False)
        ],
    )
    assert charged[0] - charged[1] == pytest.approx(4 * J * shape.adapter_params(rank))
    assert real[0] - real[1] == pytest.approx(charged[0] - charged[1], rel=0.2)


@pytest.mark.parametrize("name", ["nothing.*", "layers.9.self_attn.q_proj"])
def test_a_path_that_names_no_module_is_no_plan(tmp_path: Path, name: str) -> None:
    bad = load_sweep(write_sweep(tmp_path, train={"targets": [name]}))
    with pytest.raises(UserError, match=f"targets: '{re.escape(name)}' names no module"):
        planned(bad)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_no_module_is_no_plan(tmp_path: Path, field: str) -> None:
    """As in training, where it is an error of the sweep; one that matches is planned at its rank."""
    bad = load_sweep(write_sweep(tmp_path, search=None, jobs=[{"rank": 4, field: {"qq_proj": 8}}]))
    with pytest.raises(UserError, match=f"{field}: 'qq_proj' matches none"):
        planned(bad)
    good = load_sweep(write_sweep(tmp_path, search=None, jobs=[{"rank": 4, field: {"q_proj": 32}}]))
    assert planned(good).packs[0].slots == (32 if field == "rank_pattern" else 8,)
