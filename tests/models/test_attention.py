"""Attention against float64 numpy, cuDNN's lowering on any machine, and cuDNN's numbers where there is a GPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.models.attention import FULL, attend, choose_attention, visible
from plora_jax.models.config import config_from_hf
from plora_jax.models.presets import preset
from tests.models.tiny import LLAMA

CONFIG = config_from_hf({**LLAMA, "head_dim": 16})
SOFTCAP = config_from_hf({**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 4})
WINDOW = config_from_hf({**LLAMA, "model_type": "mistral", "head_dim": 16, "sliding_window": 7})


def draw(*lead, S, seed=0, dtype=jnp.float32):
    """Draw q, k, v of 4 heads in 2 groups, and rows of three examples and padding."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (*lead, S, n, 16), dtype) for key, n in zip(keys, (4, 2, 2), strict=True)
    )
    one = np.repeat([5, 2, 9, -1], [S // 4, S // 2, S - S // 4 - S // 2 - 3, 3]).astype(np.int32)
    return q, k, v, jnp.broadcast_to(one, (*lead, S))


def reference(q, k, v, rows, config, window=None):
    """Attend query by query in float64, as the formula reads."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    out = np.zeros(q.shape)
    for b, s, n in np.ndindex(q.shape[:3]):
        first = 0 if window is None else max(0, s - window + 1)
        seen = [t for t in range(first, s + 1) if rows[b, t] == rows[b, s]]
        scores = k[b, seen, n // 2] @ q[b, s, n] * config.attn_scale
        if config.attn_softcap:
            scores = config.attn_softcap * np.tanh(scores / config.attn_softcap)
        weights = np.exp(scores - scores.max())
        out[b, s, n] = weights / weights.sum() @ v[b, seen, n // 2]
    return out


def run(q, k, v, rows, config, implementation="xla", segments=True, window=None):
    seen = visible(rows, segments, implementation)
    return attend(q, k, v, seen, window, config, implementation)


@pytest.mark.parametrize(
    ("config", "window"), [(CONFIG, None), (SOFTCAP, None), (WINDOW, 7)], ids=["plain", "softcap", "window"]
)
def test_xla_is_the_formula(config, window):
    q, k, v, rows = draw(2, S=24)
    width = None if window is None else jnp.int32(window)
    out = run(q, k, v, rows, config, window=width)
    np.testing.assert_allclose(out, reference(q, k, v, rows, config, window), atol=2e-6)


def test_a_full_window_is_no_window():
    q, k, v, rows = draw(2, S=24)
    full = run(q, k, v, rows, CONFIG, window=jnp.int32(FULL))
    np.testing.assert_array_equal(full, run(q, k, v, rows, CONFIG))


def test_chosen_by_device_dtype_and_model():
    assert choose_attention(CONFIG, jnp.bfloat16, "gpu") == "cudnn"
    assert choose_attention(CONFIG, jnp.float32, "gpu") == "xla"
    assert choose_attention(CONFIG, jnp.bfloat16, "cpu") == "xla"
    assert choose_attention(SOFTCAP, jnp.bfloat16, "gpu") == "xla"
    assert choose_attention(WINDOW, jnp.bfloat16, "gpu") == "cudnn"
    assert choose_attention(preset("Qwen/Qwen2.5-7B-Instruct"), jnp.bfloat16, "gpu") == "cudnn"


@pytest.fixture
def as_if_cudnn(monkeypatch):
    """Let tracing and lowering for CUDA go on where no GPU is; nothing is run."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability", lambda capability: True
    )


@pytest.mark.parametrize("segments", [True, False], ids=["segments", "one example"])
@pytest.mark.parametrize("config", [CONFIG, WINDOW], ids=["plain", "window"])
def test_cudnn_lowers_with_jobs_in_the_batch(as_if_cudnn, config, segments):
    q, k, v, rows = draw(3, 2, S=64, dtype=jnp.bfloat16)
    window = jnp.int32(7) if config is WINDOW else None

    def loss(q, k, v, rows):
        return run(q, k, v, rows, config, "cudnn", segments, window).astype(jnp.float32).sum()

    step = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))
    text = step.trace(q, k, v, rows).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(__cudnn\$fmha\w*)\(.*?\) .*?: \((.*?)\) ->", text)
    names = {name for name, _ in calls}
    kind = "ScaleBias" if segments else ""
    assert {f"__cudnn$fmha{kind}Softmax", f"__cudnn$fmha{kind}SoftmaxBackward"} == names
    assert all("tensor<6x64x4x16xbf16>" in types for _, types in calls)  # 3 jobs of 2 sequences
    assert segments == any("6x4x64x64xbf16" in types for _, types in calls)
    widths = set(map(int, re.findall(r"sliding_window_length\\22: (\d+)", text)))
    assert widths == ({0, 7} if config is WINDOW else {0})  # one branch for each kind of layer


@pytest.mark.gpu
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("segments", [True, False], ids=["segments", "one example"])
@pytest.mark.parametrize("config", [CONFIG, WINDOW], ids=["plain", "window"])
@pytest.mark.parametrize("S", [64, 128, 192, 256, 320, 512])
def test_cudnn_agrees_with_xla_forward_and_backward(S, config, segments, jobs):
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    q, k, v, rows = draw(jobs, 2, S=S, dtype=jnp.bfloat16)
    rows = rows if segments else jnp.where(rows < 0, rows, 0)
    weight = (rows >= 0)[..., None, None]  # what padding computes is free
    window = jnp.int32(7) if config is WINDOW else None

    def loss(q, k, v, rows, weight, implementation, dtype):
        q, k, v = (t.astype(dtype) for t in (q, k, v))
        out = run(q, k, v, rows, config, implementation, segments, window).astype(jnp.float32)
        return (jnp.sin(3 * out) * weight).sum(), out * weight

    def gradients(implementation, dtype):
        """Return the loss and the outputs of every job, and the gradients."""
        per_job = partial(loss, implementation=implementation, dtype=dtype)
        both = jax.jit(jax.vmap(jax.value_and_grad(per_job, argnums=(0, 1, 2), has_aux=True)))
        return both(q, k, v, rows, weight)

    exact, rounded, ours = (
        gradients("xla", jnp.float32),
        gradients("xla", jnp.bfloat16),
        gradients("cudnn", jnp.bfloat16),
    )
    wrong = {}
    for name, want, near, got in zip(
        ("loss", "out", "dq", "dk", "dv"), *map(jax.tree.leaves, (exact, rounded, ours)), strict=True
    ):
        want, near, got = (np.asarray(t, np.float64) for t in (want, near, got))
        if name == "loss":
            losses = got
            continue
        if name == "out":
            # A sum whose terms cancel may be off by more than another rounding's error for no reason but chance (in 1
            # to 7 of 100 draws here), so the loss is held against the outputs, and these against the exact ones.
            terms = np.sin(3 * got) * np.asarray(weight)
            size = np.abs(terms).sum((1, 2, 3, 4))
            assert (np.abs(losses - terms.sum((1, 2, 3, 4))) < 1e-5 * size).all()
        noise = np.linalg.norm(near - want) / np.linalg.norm(want)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error < 3 * noise + 1e-3:
            wrong[name] = (error, noise)
    assert not wrong
