"""`plora doctor` tells what is there, what is missing and what to do, and never hangs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plora_jax import cli, doctor
from plora_jax.machine import Gpu
from tests.tiny import write_model

H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, "580.10")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def jax_says(
    monkeypatch: pytest.MonkeyPatch, stdout: str = "", stderr: str = "", code: int = 0
) -> list[doctor.Finding]:
    """Return the findings when the process that asks JAX ends like this."""
    done = SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    return doctor.accelerator()


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"ok    python      {sys.version.split()[0]}" in said
    assert "HF_HUB_OFFLINE is set" in said and "computes on" in said and "\nready: " in said


def test_a_gpu_that_jax_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [H100, H100])
    assert doctor.driver() == ("gpu driver", "ok", "2 × NVIDIA H100 80GB HBM3, 80 GiB; driver 580.10")
    told = jax_says(monkeypatch, '["cpu", ["cpu"], ["xla", "no kernel for cpu"], null]\n')
    assert [(finding.name, finding.state) for finding in told] == [
        ("jax", "ok"),
        ("jax on gpu", "note"),
        ("kernels", "ok"),
        ("fp8 base", "ok"),
    ]
    assert "slowly" in told[3].text
    assert "plora-jax[cuda]" in told[1].text
    told = jax_says(
        monkeypatch, '["gpu", ["NVIDIA H100", "NVIDIA H100"], ["hopper", "fused kernel"], "capability 8.0"]\n'
    )
    assert told == [
        ("jax", "ok", "computes on gpu: 2 × NVIDIA H100"),
        ("kernels", "ok", "xla in scanned layers; where they are written out, hopper: fused kernel"),
        ("fp8 base", "note", "not here: capability 8.0"),
    ]


def test_a_jax_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = jax_says(monkeypatch, stderr="Traceback\nRuntimeError: driver too old\n", code=1)
    assert told == [("jax", "bad", "does not start: RuntimeError: driver too old")]
    assert doctor.doctor() == 1
    assert "not ready: jax" in capsys.readouterr().out


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    [finding] = doctor.accelerator()
    assert finding.state == "bad" and "JAX_PLATFORMS=cpu" in finding.text


def test_little_memory_and_missing_packages_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 2 * 2**30)
    assert doctor.machine().state == "note" and "2.0 GiB" in doctor.machine().text
    monkeypatch.setattr(doctor, "PACKAGES", ("jax", "no-such-package"))
    missing = next(finding for finding in doctor.packages() if finding.name == "missing")
    assert missing.state == "bad" and "no-such-package" in missing.text


def test_a_model_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jax_says(monkeypatch, '["cpu", ["cpu"], ["xla", "no kernel for cpu"], null]\n')
    write_model(tmp_path / "model")
    assert cli.main(["doctor", "--model", str(tmp_path / "model")]) == 0
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in capsys.readouterr().out
    assert cli.main(["doctor", "--model", str(tmp_path / "gone")]) == 2
    said = capsys.readouterr()
    assert "gone" in said.err and said.out == ""
