"""Targets, patterns, scales, start and stacking of adapters, against PEFT's rules and closed forms."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax import adapters as lora
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.config import ModelConfig, config_from_hf
from tests.goldens.peft_recipe import MODELS, SITES


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_hf(MODELS["llama"])


def test_all_linear_is_every_layer_linear_and_never_the_head(config: ModelConfig) -> None:
    targets = lora.resolve_targets(config, "all-linear")
    assert tuple(targets) == SITES
    assert all(mask.tolist() == [True, True] for mask in targets.values())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (("q_proj",), {"q_proj": [True, True]}),
        (("self_attn.q_proj", "v_proj"), {"q_proj": [True, True], "v_proj": [True, True]}),
        (("layers.1.mlp.up_proj",), {"up_proj": [False, True]}),
        (("model.layers.0.self_attn.k_proj", "o_proj"), {"k_proj": [True, False], "o_proj": [True, True]}),
    ],
)
def test_targets_match_whole_path_parts_from_the_end(
    config: ModelConfig, entries: tuple, expected: dict
) -> None:
    assert {k: v.tolist() for k, v in lora.resolve_targets(config, entries).items()} == expected


@pytest.mark.parametrize("entry", ["lm_head", "embed_tokens", "proj", "layers.2.self_attn.q_proj", "Q_PROJ"])
def test_a_target_that_names_nothing_is_an_error_that_lists_what_exists(
    config: ModelConfig, entry: str
) -> None:
    with pytest.raises(UserError, match=rf"'{entry}'.*all-linear.*q_proj, k_proj"):
        lora.resolve_targets(config, ("q_proj", entry))


def test_empty_targets_are_an_error(config: ModelConfig) -> None:
    with pytest.raises(UserError, match="empty"):
        lora.resolve_targets(config, ())


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [  # peft 0.21's get_pattern_key: re.match(rf"(.*\.)?({key})$", path)
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("proj", "model.layers.0.self_attn.q_proj", False),
        ("layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", True),
        ("layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
        (r"layers\.\d+\.mlp\..*", "model.layers.7.mlp.up_proj", True),
        ("q_proj|v_proj", "model.layers.0.self_attn.v_proj", True),
        ("^model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("^layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_patterns_match_as_peft_matches(pattern: str, path: str, expected: bool) -> None:
    assert lora.match_pattern(pattern, path) is expected


@pytest.mark.parametrize("reverse", [False, True])
def test_the_most_specific_pattern_wins_in_any_order(config: ModelConfig, reverse: bool) -> None:
    patterns = [(".*_proj", 3), ("q_proj", 5), ("layers.1.self_attn.q_proj", 7)]
    job = Job(rank=2, rank_pattern=tuple(patterns[::-1] if reverse else patterns))
    ranks = lora.ranks(config, job)
    assert ranks["q_proj"].tolist() == [5, 7]
    assert ranks["down_proj"].tolist() == [3, 3]
    assert lora.max_rank(config, job) == 7


def test_of_equally_specific_patterns_the_first_wins_as_in_peft(config: ModelConfig) -> None:
    job = Job(rank=2, rank_pattern=(("q_proj|k_proj", 5), ("k_proj|q_proj", 6)))
    assert lora.ranks(config, job)["q_proj"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": (("qq_proj", 4),)}, "rank_pattern: 'qq_proj' matches none"),
        (
            {"alpha_pattern": (("k_proj", 4.0),), "targets": ("q_proj",)},
            "alpha_pattern: 'k_proj' matches none",
        ),
        ({"rank_pattern": (("q_proj", 0),)}, "'q_proj' is 0; it must be above 0"),
        ({"rank_pattern": (("q_proj(", 4),)}, "not a regular expression"),
    ],
)
def test_bad_patterns_are_errors(config: ModelConfig, changes: dict, message: str) -> None:
    job = Job(**changes)
    with pytest.raises(UserError) as caught:
        lora.scales(config, job)
    assert message in str(caught.value)


def test_scale_is_alpha_over_rank_per_module_and_never_bf16(config: ModelConfig) -> None:
    job = Job(
        rank=12,
        alpha=5.0,
        targets=("q_proj", "layers.0.self_attn.v_proj"),
        rank_pattern=(("layers.1.self_attn.q_proj", 7),),
        alpha_pattern=(("v_proj", 3.3),),
    )
    scales = lora.scales(config, job)
    assert scales["q_proj"].dtype == np.float32
    assert scales["q_proj"].tolist() == [np.float32(5 / 12), np.float32(5 / 7)]
    assert scales["v_proj"].tolist() == [np.float32(3.3 / 12), 0.0]
    assert set(scales) == {"q_proj", "v_proj"}
    rs = lora.scales(config, replace(job, use_rslora=True))
    assert rs["q_proj"].tolist() == [np.float32(5 / math.sqrt(12)), np.float32(5 / math.sqrt(7))]


def test_start_is_kaiming_uniform_with_b_zero() -> None:
    config = config_from_hf(MODELS["llama"] | {"hidden_size": 256, "intermediate_size": 512})
    for name, (a, b) in lora.init_adapter(config, Job(rank=32, seed=3)).items():
        bound = 1 / math.sqrt(a.shape[2])
        assert float(jnp.abs(a).max()) <= bound, name
        # uniform on ±bound: standard deviation bound/√3, and 16k or more draws reach near the edge
        assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert float(jnp.abs(a).max()) > 0.999 * bound
        assert not b.any()
        assert a.dtype == b.dtype == jnp.float32
        assert not np.array_equal(a[0], a[1]), "layers share a draw"


def test_start_depends_on_seed_site_layer_and_rank_alone(config: ModelConfig) -> None:
    full = lora.init_adapter(config, Job(rank=5, seed=1, learning_rate=1e-3))
    part = lora.init_adapter(
        config, Job(rank=5, seed=1, targets=("layers.1.mlp.up_proj", "k_proj"), alpha=3.0)
    )
    assert np.array_equal(part["up_proj"].a[1], full["up_proj"].a[1])
    assert not part["up_proj"].a[0].any()
    assert np.array_equal(part["k_proj"].a, full["k_proj"].a)
    assert not np.array_equal(full["k_proj"].a, full["v_proj"].a), "sites of one shape share a draw"
    other = lora.init_adapter(config, Job(rank=5, seed=2))
    assert not np.array_equal(other["k_proj"].a, full["k_proj"].a)
    mixed = lora.init_adapter(config, Job(rank=2, seed=1, rank_pattern=(("layers.0.mlp.up_proj", 5),)))
    assert np.array_equal(mixed["up_proj"].a[0], full["up_proj"].a[0])
    assert not mixed["up_proj"].a[1, 2:].any()
    assert mixed["up_proj"].a[1, :2].all()


def test_start_does_not_follow_jax_defaults(config: ModelConfig) -> None:
    want = lora.init_adapter(config, Job(rank=4))["q_proj"].a
    with jax.default_prng_impl("rbg"):
        assert np.array_equal(lora.init_adapter(config, Job(rank=4))["q_proj"].a, want)
    with jax.enable_x64(True):
        got = lora.init_adapter(config, Job(rank=4))["q_proj"].a
    assert got.dtype == jnp.float32
    assert np.array_equal(got, want)


def test_stack_pads_and_unstack_gives_back_the_true_ranks(config: ModelConfig) -> None:
    jobs = [
        Job(rank=3, seed=1),
        Job(rank=7, seed=2, targets=("q_proj", "down_proj"), rank_pattern=(("layers.0.mlp.down_proj", 2),)),
    ]
    adapters = [jax.tree.map(lambda x: x + 1.0 * (x != 0), lora.init_adapter(config, job)) for job in jobs]
    stack = lora.stack_adapters([lora.pad_adapter(config, a, 8, SITES) for a in adapters])
    assert stack["down_proj"].a.shape == (2, 2, 8, 48)  # [L, J, R, d_in]
    assert stack["down_proj"].b.shape == (2, 2, 32, 8)
    assert not stack["q_proj"].a[:, 0, 3:].any()
    assert not stack["k_proj"].a[:, 1].any()
    for slot, (job, adapter) in enumerate(zip(jobs, adapters, strict=True)):
        back = lora.unstack_adapter(config, job, stack, slot)
        assert back.keys() == adapter.keys()
        assert all(
            np.array_equal(x, y) for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(adapter), strict=True)
        )
    scales = lora.stack_scales(config, jobs, SITES)
    assert scales["k_proj"].tolist() == [[np.float32(16 / 3), 0.0]] * 2
    assert scales["down_proj"][:, 1].tolist() == [8.0, np.float32(16 / 7)]


def test_a_site_the_pack_lacks_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="k_proj"):
        lora.pad_adapter(config, lora.init_adapter(config, Job(rank=2, targets=("k_proj",))), 8, ("q_proj",))
