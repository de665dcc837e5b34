"""The yardstick of `plora bench step --compare peft`: PEFT and PyTorch, eager, one job after another.

Run as a process of its own, so that PyTorch and JAX never hold the device's memory together.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plora_jax.errors import UserError

WARM, TIMED = 3, 8


Shapes = Sequence[tuple[int, int]]  # m sequences of so many tokens


def run_peft(
    model: str, shapes: Shapes, rank: int, precision: str = "auto", seconds: float | None = None
) -> list[dict[str, Any]]:
    """Time one job's steps of each shape in a process of its own; return what `measure_peft` does.

    Equal jobs one after another take as many times longer as there are jobs: their tokens/s is that of one.

    Raises:
      UserError: torch, transformers or peft is missing, or the run failed or took more than `seconds`.
    """
    if missing := [name for name in ("torch", "transformers", "peft") if not importlib.util.find_spec(name)]:
        raise UserError(
            f"--compare peft: {', '.join(missing)} not installed; pip install {' '.join(missing)}"
        )
    command = [sys.executable, "-m", "plora_jax.bench.peft", model, json.dumps(shapes), str(rank), precision]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"--compare peft: not done within {seconds:.0f} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"--compare peft: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_peft(model: str, shapes: Shapes, rank: int, precision: str = "auto") -> list[dict[str, Any]]:
    """Time PEFT's training step: random weights, seven projections, AdamW, no recomputation.

    On a GPU in bf16 two ways are timed, adapters in bf16 and float32 adapters under autocast, and the faster counts.

    Returns:
      A dict a shape: "m", "length", "tokens_s", "ms" (median, least, most), "adapters", "ways": {way: tokens_s},
      "torch", "peft", "peak_bytes" (of all).
    """
    import peft
    import torch

    cuda = torch.cuda.is_available()
    bf16 = precision == "bf16" or (precision == "auto" and cuda)
    ways = {"bf16": (False, False), "fp32 under autocast": (True, True)} if bf16 else {"fp32": (True, False)}
    times = {way: _steps(model, shapes, rank, bf16, *settings) for way, settings in ways.items()}
    peak = torch.cuda.max_memory_allocated() if cuda else None
    out = []
    for i, (m, length) in enumerate(shapes):
        rates = {way: m * length / statistics.median(seconds[i]) for way, seconds in times.items()}
        best = max(rates, key=lambda way: rates[way])
        out.append(
            {
                "m": m,
                "length": length,
                "tokens_s": rates[best],
                "ms": [1e3 * f(times[best][i]) for f in (statistics.median, min, max)],
                "adapters": best,
                "ways": rates,
                "torch": torch.__version__,
                "peft": peft.__version__,
                "peak_bytes": peak,
            }
        )
    return out


def _steps(
    model: str, shapes: Shapes, rank: int, bf16: bool, float_adapters: bool, autocast: bool
) -> list[list[float]]:
    """Return the seconds of each shape's steps, all on one model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = _config(model)
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if bf16 else torch.float32, attn_implementation="sdpa"
        )
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    net = get_peft_model(net, settings, autocast_adapter_dtype=float_adapters).train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    out = []
    for shape in shapes:
        tokens = torch.randint(0, config.vocab_size, tuple(shape), device=device)
        times = []
        for _ in range(WARM + TIMED):
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        out.append(times[WARM:])
    del net, optimizer
    if device == "cuda":
        torch.cuda.empty_cache()
    return out


def _config(model: str) -> Any:
    from transformers import AutoConfig

    from plora_jax.models.presets import PRESETS

    if model in PRESETS:
        fields = dict(PRESETS[model])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoConfig.from_pretrained(Path(model))


if __name__ == "__main__":
    name, shapes, rank, precision = sys.argv[1:5]
    print(json.dumps(measure_peft(name, json.loads(shapes), int(rank), precision)))
