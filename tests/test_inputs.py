"""A changed byte of a file that a run depends on changes its digest, and the change is told by name."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from plora_jax.config.sweep import load_sweep
from plora_jax.engine import inputs
from plora_jax.engine.inputs import file_digest, input_digests
from plora_jax.jobs import Job
from tests import tiny


@pytest.fixture
def sweep(tmp_path):
    """Give a sweep whose model has weights."""
    read = load_sweep(tiny.write_sweep(tmp_path))
    tiny.write_weights(tmp_path / "model")
    return replace(read, model=str(tmp_path / "model"))


def flip(path: Path, at: int) -> None:
    """Change one bit of a file and nothing else that the file system tells."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    assert then.keys() == now.keys()
    return [name for name in then if then[name] != now[name]]


def test_weights_and_configuration_of_the_model_are_named(sweep):
    then = input_digests(sweep, [Job()])
    assert then.keys() == {"model config.json", "model model.safetensors"}
    weights = Path(sweep.model) / "model.safetensors"
    assert then["model model.safetensors"].startswith(f"{weights.stat().st_size} bytes, ")
    (weights.parent / "consolidated.safetensors").write_bytes(b"not read by the loader")
    os.utime(weights)  # copied or touched is not changed
    assert input_digests(sweep, [Job()]) == then
    flip(weights, weights.stat().st_size - 1)
    assert changed(then, input_digests(sweep, [Job()])) == ["model model.safetensors"]


def test_shards_count_as_the_index_names_them(sweep):
    model = Path(sweep.model)
    (model / "a.safetensors").write_bytes(b"a")
    (model / "b.safetensors").write_bytes(b"b")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert input_digests(sweep, []).keys() == {"model config.json", "model a.safetensors"}


def test_adapters_that_jobs_start_from_are_named(sweep, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "README.md").write_text("words")
    jobs = [Job(), Job(init_adapter="adapter")]
    then = input_digests(sweep, jobs)
    (adapter / "README.md").write_text("other words")
    flip(adapter / "adapter_model.safetensors", 3)
    assert changed(then, input_digests(sweep, jobs)) == ["adapter/adapter_model.safetensors"]


def test_a_large_file_is_sampled_from_head_to_tail(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "WHOLE", 1000)
    monkeypatch.setattr(inputs, "BLOCK", 10)
    monkeypatch.setattr(inputs, "BLOCKS", 50)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(10_000))
    then = file_digest(path)
    seen = []
    for at in (0, 159, 5000, 9999):
        flip(path, at)
        seen.append(file_digest(path) != then)
        flip(path, at)
    assert seen[0] and seen[1] and seen[3] and file_digest(path) == then
    path.write_bytes(bytes(9_999))
    assert file_digest(path).split(",")[0] != then.split(",")[0]


def test_what_has_no_files_is_not_named(sweep):
    assert input_digests(replace(sweep, model="in memory"), [Job()]) == {}
    assert input_digests(replace(sweep, model="gone.gguf"), []) == {}
