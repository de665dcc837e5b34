"""PEFT directories: exact keys and configuration on export, strict reading on import. No torch here."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import save_file as save_jax
from safetensors.numpy import load_file, save_file

from plora_jax import adapters as lora
from plora_jax import peft
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.model_card import model_card
from plora_jax.models.config import ModelConfig, config_from_hf
from tests.goldens import peft_recipe as recipe
from tests.peft_cases import GOLDENS, job_of


def config_of(family: str) -> ModelConfig:
    return config_from_hf(recipe.MODELS[family])


def random_adapter(config: ModelConfig, job: Job) -> lora.Adapter:
    """Return an adapter whose B is not zero, at the job's true ranks."""
    rng, shapes = np.random.default_rng(7), {site.name: site for site in config.sites}
    out = {}
    for name, rank in lora.ranks(config, job).items():
        keep = np.arange(rank.max()) < rank[:, None]  # [L, R]: rows above a layer's own rank are zero
        a = rng.standard_normal((*keep.shape, shapes[name].d_in)) * keep[..., None]
        b = rng.standard_normal((len(keep), shapes[name].d_out, keep.shape[1])) * keep[:, None]
        out[name] = lora.Factors(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return out


def equal(one: lora.Adapter, two: lora.Adapter) -> bool:
    return one.keys() == two.keys() and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    )


@pytest.mark.parametrize("name", recipe.SETTINGS)
def test_exported_keys_and_shapes_are_those_that_peft_itself_makes(name: str, tmp_path: Path) -> None:
    family, job = recipe.SETTINGS[name]["model"], job_of(name)
    config = config_of(family)
    peft.export_adapter(tmp_path / "adapter", "org/base", config, job, random_adapter(config, job))
    with safe_open(GOLDENS / "peft_adapters.safetensors", "np") as golden:
        keys = [key for key in golden.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
        expected = {key.removeprefix(f"{name}/"): golden.get_slice(key).get_shape() for key in keys}
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key: list(value.shape) for key, value in ours.items()} == expected
    assert all(value.dtype == np.float32 for value in ours.values())


def test_exported_configuration_says_everything_peft_needs(tmp_path: Path) -> None:
    job = Job(
        rank=12,
        alpha=24.0,
        use_rslora=True,
        dropout=0.05,
        rank_pattern=(("q_proj", 5),),
        alpha_pattern=(("v_proj", 1.5),),
    )
    config = config_of("llama")
    peft.export_adapter(tmp_path / "a", "Qwen/Qwen2.5-7B-Instruct", config, job, random_adapter(config, job))
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "r": 12,
        "lora_alpha": 24,
        "use_rslora": True,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(recipe.SITES),  # explicit: without it PEFT would adapt q and v alone
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {"v_proj": 1.5},
        "modules_to_save": None,
        "use_dora": False,
    }
    assert {key: settings[key] for key in expected} == expected
    assert isinstance(settings["lora_alpha"], int)
    made = json.loads((GOLDENS / "peft_made_llama" / "adapter_config.json").read_text())
    assert set(settings) <= set(made), "a field that PEFT does not know"
    assert sorted(os.listdir(tmp_path / "a")) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_overlapping_patterns_are_exported_so_that_order_does_not_matter(tmp_path: Path) -> None:
    # PEFT takes the first that matches, in sorted order once it has saved the file: ".*" would win
    job = Job(
        rank=2,
        targets=("q_proj", "k_proj"),
        rank_pattern=((".*k_proj|.*q_proj", 3), ("layers.1.self_attn.q_proj", 6)),
    )
    config = config_of("llama")
    peft.export_adapter(tmp_path / "a", "b", config, job, random_adapter(config, job))
    patterns = json.loads((tmp_path / "a" / "adapter_config.json").read_text())["rank_pattern"]
    paths = [path for _, _, path in lora.modules(config) if path.split(".")[-1] in job.targets]
    hits = {
        path: [value for key, value in patterns.items() if lora.match_pattern(key, path)] for path in paths
    }
    assert hits["model.layers.1.self_attn.q_proj"] == [6]
    assert hits["model.layers.0.self_attn.q_proj"] == hits["model.layers.1.self_attn.k_proj"] == [3]


@pytest.mark.parametrize("name", ["plain", "patterns", "two_modules", "rslora_patterns", "mlp_odd_rank"])
def test_import_gives_back_what_export_wrote(name: str, tmp_path: Path) -> None:
    config, job = config_of(recipe.SETTINGS[name]["model"]), job_of(name)
    adapter = random_adapter(config, job)
    peft.export_adapter(tmp_path / "a", "b", config, job, adapter)
    back, fields = peft.import_adapter(tmp_path / "a", config)
    again = replace(Job(), **fields)
    assert equal(back, adapter)
    for mine, theirs in zip(
        lora.scales(config, again).values(), lora.scales(config, job).values(), strict=True
    ):
        assert np.array_equal(mine, theirs)
    assert (
        peft.adapter_config("b", config, again)["target_modules"]
        == peft.adapter_config("b", config, job)["target_modules"]
    )


def test_export_replaces_an_adapter_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    config = config_of("llama")
    (tmp_path / ".adapter.tmp").mkdir()
    (tmp_path / ".adapter.tmp" / "half").write_text("left by a killed run")
    for seed in (1, 2):
        job = Job(rank=2, seed=seed)
        peft.export_adapter(tmp_path / "adapter", "b", config, job, lora.init_adapter(config, job))
    assert os.listdir(tmp_path) == ["adapter"]
    back, _ = peft.import_adapter(tmp_path / "adapter", config)
    assert equal(back, lora.init_adapter(config, Job(rank=2, seed=2)))
    assert not (tmp_path / "adapter" / "half").exists()


def test_a_failed_export_keeps_the_old_adapter(tmp_path: Path) -> None:
    config, job = config_of("llama"), Job(rank=2)
    adapter = lora.init_adapter(config, job)
    peft.export_adapter(tmp_path / "adapter", "b", config, job, adapter)
    with pytest.raises(ValueError, match="adapts"):
        peft.export_adapter(tmp_path / "adapter", "b", config, replace(job, targets=("q_proj",)), adapter)
    assert equal(peft.import_adapter(tmp_path / "adapter", config)[0], adapter)


def test_a_disk_that_takes_no_more_is_told_as_for_any_other_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            peft.save_tensors({"a": np.zeros(4096, np.float32)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("rank", "patterns", "says"),
    [
        (16, (), "vllm serve org/base --enable-lora"),
        (17, (), "--max-lora-rank 32"),
        (200, (), "--max-lora-rank 256"),
        (600, (), "above what vLLM serves"),
        (8, (("q_proj", 4),), "merge this one"),
    ],
)
def test_the_card_says_how_vllm_loads_it(tmp_path: Path, rank: int, patterns: tuple, says: str) -> None:
    config, job = config_of("llama"), Job(rank=rank, targets=("q_proj",), rank_pattern=patterns)
    peft.export_adapter(tmp_path / "a", "org/base", config, job, lora.init_adapter(config, job))
    card = (tmp_path / "a" / "README.md").read_text()
    assert says in card
    assert ("--max-lora-rank" in card) == (16 < rank <= 512)
    assert "base_model: org/base" in card
    assert f"| rank | `{rank}` |" in card


def test_the_card_of_a_gguf_base_loads_in_transformers() -> None:
    assert "from_pretrained('models', gguf_file='m.gguf')" in model_card("models/m.gguf", Job(), 16)


def edit(directory: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    settings = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    change(settings, tensors)
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        {key: np.ascontiguousarray(value) for key, value in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A copy of the adapter on q and v that PEFT saved."""
    return Path(shutil.copytree(GOLDENS / "peft_made_llama", tmp_path / "made"))


_P = "base_model.model."
_Q = _P + "model.layers.0.self_attn.q_proj"


def say(**fields: Any) -> Callable:
    return lambda settings, tensors: settings.update(fields)


def put(key: str, *shape: int) -> Callable:
    return lambda settings, tensors: tensors.update({key: np.ones(shape, np.float32)})


def drop(*keys: str) -> Callable:
    return lambda settings, tensors: [tensors.pop(key) for key in keys]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (say(use_dora=True), "use_dora=True"),
        (say(bias="all"), "bias='all'"),
        (say(lora_bias=True), "lora_bias=True"),
        (say(modules_to_save=["lm_head"]), "modules_to_save=['lm_head']"),
        (say(trainable_token_indices=[1]), "trainable_token_indices=[1]"),
        (say(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (say(layer_replication=[[0, 1]]), "layer_replication"),
        (say(some_future_feature={"x": 1}), "some_future_feature"),
        (say(peft_type="IA3"), "peft_type is 'IA3'"),
        (say(r=0), "r is 0"),
        (say(r="8"), "r is '8'"),
        (say(r=10**30), "it must be a whole number from 1 to 1024"),
        (say(lora_alpha=None), "lora_alpha is None"),
        (say(lora_alpha=float("nan")), "lora_alpha is nan"),
        (say(rank_pattern={"q_proj": "8"}), "rank_pattern is {'q_proj': '8'}"),
        (say(alpha_pattern={"(": 8}), "alpha_pattern is {'(': 8}"),
        (say(target_modules="(q_proj"), "target_modules is '(q_proj'"),
        (say(target_modules=[["q_proj"]]), "a regular expression or a list of names"),
        (say(exclude_modules=3), "exclude_modules is 3"),
        (say(layers_to_transform=0.5), "layers_to_transform is 0.5"),
        (say(r=3), "q_proj.lora_A [2, 32], expected [3, 32]"),
        (say(target_modules=["q_proj", "k_proj"]), "lacks tensors"),
        (say(target_modules=["q_proj"]), "leave out model.layers.0.self_attn.v_proj"),
        (drop(_Q + ".lora_B.weight"), "only one of lora_A and lora_B for model.layers.0"),
        (drop(_Q + ".lora_A.weight", _Q + ".lora_B.weight"), "lacks tensors"),
        (put(_Q + ".lora_A.weight", 2, 30), "[2, 30], expected [2, 32]"),
        (put(_Q + ".lora_B.bias", 32), "trained biases"),
        (put(_Q + ".lora_magnitude_vector", 32), "DoRA tensors"),
        (put(_P + "lm_head.weight", 97, 32), "head tensors"),
        (put(_P + "model.embed_tokens.lora_embedding_A", 2, 97), 
         "trained embedding"),
        (put(_P + "model.layers.2.self_attn.q_proj.lora_A.weight", 2, 32), 
         "this model does not have: base_model.model.model.layers.2"),
        (put(_P + "score.weight", 2, 32), "score.weight"),
    ],
)  # fmt: skip
def test_what_is_not_plain_lora_for_this_model_is_refused_by_name(
    made: Path, change: Callable, message: str
) -> None:
    edit(made, change)
    with pytest.raises(UserError) as caught:
        peft.import_adapter(made, config_of("llama"))
    assert message in str(caught.value)
    assert str(made) in str(caught.value)


def test_broken_directories_are_refused(made: Path) -> None:
    config = config_of("llama")
    with pytest.raises(UserError, match=r"adapter_config\.json is missing"):
        peft.import_adapter(made / "nowhere", config)
    weights = (made / "adapter_model.safetensors").read_bytes()
    (made / "adapter_model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        peft.import_adapter(made, config)
    (made / "adapter_model.safetensors").rename(made / "adapter_model.bin")
    with pytest.raises(UserError, match="is a pickle"):
        peft.import_adapter(made, config)
    shutil.copy(GOLDENS / "peft_made_llama" / "adapter_model.safetensors", made)
    (made / "adapter_config.json").write_text('{"peft_type": ')
    with pytest.raises(UserError, match="not valid JSON"):
        peft.import_adapter(made, config)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "lm_head"]},
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*(k|o|gate|up|down)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"target_modules": None},
    ],
)  # fmt: skip
def test_every_way_to_name_modules_loads(made: Path, change: dict[str, Any]) -> None:
    config = config_of("llama")
    expected, _ = peft.import_adapter(made, config)
    edit(made, lambda settings, tensors: settings.update(change))
    adapter, fields = peft.import_adapter(made, config)
    assert equal(adapter, expected)
    assert fields["targets"] == ("q_proj", "v_proj")


def test_layers_to_transform_leaves_other_layers_without(made: Path) -> None:
    config = config_of("llama")
    edit(made, lambda s, t: (s.update(layers_to_transform=1), [t.pop(k) for k in list(t) if "layers.0" in k]))
    adapter, fields = peft.import_adapter(made, config)
    assert fields["targets"] == ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj")
    assert not adapter["q_proj"].a[0].any()
    assert adapter["q_proj"].a[1].all()
    scales = lora.scales(config, replace(Job(), **fields))
    assert scales["q_proj"].tolist() == [0.0, 2.0]


def test_overlapping_alpha_patterns_mean_what_peft_reads(made: Path) -> None:
    # the first match in the file's order, here the less specific one
    config = config_of("llama")
    edit(
        made,
        lambda s, t: s.update(
            alpha_pattern={".*q_proj|.*v_proj": 6, "layers.1.self_attn.v_proj": 99, "none": 1}
        ),
    )
    _, fields = peft.import_adapter(made, config)
    scales = lora.scales(config, replace(Job(), **fields))
    assert scales["q_proj"].tolist() == scales["v_proj"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_adapters_load_as_float32(made: Path, dtype: Any) -> None:
    file = made / "adapter_model.safetensors"
    full = load_file(file)
    save_jax({key: jnp.asarray(value, dtype) for key, value in full.items()}, file)
    adapter, _ = peft.import_adapter(made, config_of("llama"))
    a = adapter["q_proj"].a
    assert a.dtype == jnp.float32
    assert np.array_equal(a[0], jnp.asarray(full[_Q + ".lora_A.weight"], dtype).astype(jnp.float32))
