"""Compile the packed step for an H200, described or there, and write what the compiler says of its memory.

usage: python -m scripts.planner.memory_points OUT.json [--fused | --fp8 | --offload | --families]
           [--policy POLICY] [--here]
       (pip install 'plora-jax[cuda]'; no GPU, but for --here, which compiles for the one that is there)

All but what recomputes whole layers has its layers written out, as on a GPU: one without the fused kernel, or one with
it (--fused, a list of its own); --fp8: with it, on an fp8 base; --offload: long rows, their layers' inputs on the host,
and on the device; --families: models of other layers than Llama's, each as the list says. Nothing is tuned for a
described GPU, which changes no size where layers are written out: on a card the compiler said the same. With --policy
the file is read first, and only that policy's points are made anew.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

if "--here" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import Device, choice
from planner.signature import LAST_RESORT, POLICIES
from plora_jax.bench.step import random_batch
from plora_jax.jobs import Job
from plora_jax.models.attention import choose_attention
from plora_jax.models.decoder import Runtime
from plora_jax.models.load import abstract_base
from plora_jax.planning import model_shape
from plora_jax.training.recompute import needed_bytes
from plora_jax.training.step import empty_pack, make_train_step, pack_spec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" runtime_version { major: 13 } dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""
DEVICE, WITHOUT_KERNEL = Device("NVIDIA H200", "9.0", 132), Device("a GPU without kernels", "", 132)
MODELS = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B")}
MODELS["8B"] = "meta-llama/Llama-3.1-8B-Instruct"
MODELS |= {f"gemma-{size}": f"google/gemma-{size}-it" for size in ("2-2b", "2-9b", "3-270m", "3-1b")}
MODELS |= {f"Qwen3-{size}": f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B")}
MODELS |= {"Phi-3": "microsoft/Phi-3-mini-4k-instruct", "OLMo-2": "allenai/OLMo-2-0425-1B-Instruct"}
# (model, jobs, m, length, rank, policy[, gradients summed]); every third is held out from the fit
CASES: list[tuple[Any, ...]] = [
    ("1.5B", 4, 1, 1024, 64, "dots"),
    ("0.5B", 1, 1, 1024, 8, "none"),
    ("3B", 8, 1, 1024, 16, "dots"),
    ("0.5B", 8, 1, 1024, 32, "none"),
    ("7B", 8, 1, 1024, 32, "dots"),
    ("0.5B", 32, 1, 128, 32, "none"),
    ("8B", 8, 1, 512, 64, "dots"),
    ("0.5B", 32, 1, 1024, 32, "none"),
    ("1.5B", 16, 1, 512, 128, "layer"),
    ("0.5B", 24, 1, 192, 16, "none"),
    ("3B", 32, 1, 256, 32, "layer"),
    ("7B", 8, 1, 1024, 32, "none"),
    ("7B", 8, 1, 1024, 32, "layer"),
    ("1.5B", 8, 1, 1024, 32, "none"),
    ("0.5B", 32, 1, 1024, 32, "layer"),
    ("3B", 12, 1, 512, 64, "none"),
    ("8B", 2, 4, 512, 8, "layer"),
    ("0.5B", 16, 2, 256, 64, "dots"),
    ("1.5B", 24, 1, 192, 32, "dots"),
    ("3B", 4, 8, 128, 128, "dots"),
    ("7B", 32, 1, 256, 32, "layer"),
    ("8B", 6, 1, 1024, 16, "dots"),
    ("0.5B", 4, 4, 512, 16, "layer"),
    ("1.5B", 8, 2, 1024, 32, "layer"),
    ("3B", 16, 1, 1024, 8, "layer"),
    ("7B", 4, 2, 512, 128, "dots"),
    ("8B", 12, 2, 128, 128, "layer"),
    ("7B", 8, 1, 1024, 32, "dots", True),
    ("1.5B", 16, 1, 512, 128, "layer", True),
    ("3B", 32, 1, 1024, 32, "layer"),
    ("0.5B", 32, 1, 1024, 32, "dots"),
    ("7B", 32, 1, 128, 32, "dots"),
    ("1.5B", 6, 1, 512, 16, "none"),
]
FUSED: list[tuple[Any, ...]] = [
    ("3B", 1, 1, 1024, 32, "none"),
    ("7B", 8, 1, 1024, 32, "none"),
    ("8B", 4, 1, 1536, 16, "none"),
    ("1.5B", 8, 4, 256, 8, "none"),
    ("8B", 16, 1, 256, 32, "none"),
    ("1.5B", 2, 1, 2048, 16, "none"),
    ("3B", 12, 1, 512, 64, "none"),
    ("7B", 32, 1, 128, 32, "none"),
    ("1.5B", 8, 1, 1024, 32, "none"),
    ("3B", 8, 1, 1024, 32, "none"),
    ("7B", 16, 1, 256, 64, "none"),
    ("1.5B", 16, 2, 256, 64, "none"),
    ("7B", 32, 1, 256, 32, "none"),
    ("1.5B", 32, 1, 128, 16, "none"),
    ("3B", 8, 1, 128, 256, "none"),
    ("1.5B", 8, 1, 192, 32, "none"),
    ("0.5B", 8, 1, 64, 256, "none"),
    ("0.5B", 16, 1, 512, 64, "none"),
    ("7B", 4, 1, 2048, 16, "none"),
    ("7B", 8, 1, 1024, 32, "dots"),
    ("1.5B", 8, 1, 1024, 32, "dots"),
    ("3B", 12, 1, 512, 64, "dots"),
]
FP8: list[tuple[Any, ...]] = [
    ("7B", 8, 1, 1024, 32, "none"),
    ("7B", 8, 1, 1024, 32, "dots"),
    ("1.5B", 8, 1, 1024, 32, "none"),
    ("1.5B", 8, 4, 256, 64, "dots"),
    ("3B", 12, 1, 512, 64, "none"),
    ("7B", 8, 1, 1024, 32, "layer"),
]
FAMILIES: list[tuple[Any, ...]] = [  # the last word says what is asked of `point`
    ("gemma-2-2b", 8, 1, 512, 32, "none", "fp8"),
    ("gemma-2-2b", 8, 1, 1024, 32, "layer", "fused"),
    ("gemma-3-1b", 8, 1, 512, 32, "none", "fused"),
    ("gemma-2-2b", 8, 1, 1024, 32, "none", "fused"),
    ("gemma-3-1b", 8, 1, 1024, 32, "layer", "fused"),
    ("gemma-2-2b", 8, 1, 512, 32, "layer", "fp8"),
    ("gemma-2-2b", 16, 2, 256, 16, "dots", "fp8"),
    ("Qwen3-1.7B", 8, 1, 1024, 32, "none", "fused"),
    ("gemma-2-2b", 4, 1, 1024, 64, "dots", "fused"),
    ("gemma-3-1b", 8, 1, 1024, 32, "dots", "fused"),
    ("Phi-3", 8, 1, 512, 32, "none", "fused"),
    ("gemma-3-1b", 16, 1, 256, 64, "none", "fp8"),
    ("gemma-3-270m", 32, 1, 512, 16, "none", "fused"),
    ("Qwen3-0.6B", 16, 1, 512, 64, "dots", "fused"),
    ("OLMo-2", 8, 1, 512, 32, "none", "fused"),
    ("gemma-2-9b", 8, 1, 512, 32, "layer", "fp8"),
    ("gemma-3-270m", 8, 4, 1024, 8, "layer", "fused"),
    ("Qwen3-4B", 8, 1, 1024, 32, "layer", "fused"),
    ("gemma-3-1b", 4, 1, 2048, 16, "none", "fused"),
    ("gemma-2-2b", 8, 4, 256, 16, "none", "fused"),
    ("gemma-2-2b", 2, 1, 2048, 16, "layer", "fused"),
    ("gemma-2-2b", 4, 1, 256, 8, "none", "fp8"),
    ("Qwen3-0.6B", 8, 1, 512, 16, "none", "fp8"),
    ("gemma-2-2b", 2, 2, 1024, 16, "none", "xla"),
    ("gemma-2-9b", 4, 1, 512, 16, "none", "fused"),
    ("gemma-2-2b", 1, 1, 1024, 16, "none", "fp8"),
    ("gemma-3-1b", 2, 1, 512, 8, "none", "xla"),
    ("Qwen3-0.6B", 8, 1, 256, 32, "none", "xla"),
    ("gemma-2-2b", 2, 1, 2048, 8, "dots", "fused"),
    ("gemma-2-2b", 2, 1, 512, 16, "none", "xla"),
    ("gemma-3-1b", 4, 1, 384, 16, "none", "fused"),
    ("gemma-3-1b", 4, 1, 512, 16, "none", "xla"),
    ("gemma-3-270m", 2, 1, 1024, 16, "none", "fused"),
    ("Phi-3", 8, 1, 512, 32, "none", "xla"),
    ("Phi-3", 1, 1, 512, 16, "none", "xla"),
]
OFFLOAD: list[tuple[Any, ...]] = [
    (*sizes, policy)
    for sizes in (
        ("7B", 8, 1, 4096, 32),
        ("14B", 1, 1, 8192, 16),
        ("14B", 1, 1, 16384, 16),
        ("7B", 1, 1, 32768, 8),
        ("3B", 4, 1, 8192, 64),
        ("8B", 8, 2, 1024, 16),
        ("1.5B", 8, 1, 4096, 128),
        ("0.5B", 4, 1, 1024, 16),
    )
    for policy in ("layer", "offload")
]


def point(
    here: bool,
    asked: str,
    size: str,
    J: int,
    m: int,
    S: int,
    rank: int,
    policy: str,
    accumulate: bool = False,
) -> dict[str, Any]:
    """Compile one step, `asked` being xla, fused or fp8, and return its memory point as planner.fit reads it."""
    if not here:
        choice.default_device = lambda: WITHOUT_KERNEL if asked == "xla" else DEVICE
    base = abstract_base(MODELS[size], precision="fp8" if asked == "fp8" else "bf16")
    jobs = [Job(rank=rank, batch_size=m, max_steps=1, scheduler="constant")] * J
    spec = dataclasses.replace(pack_spec(base.config, jobs, m=m), accumulate=accumulate)
    attention = choose_attention(base.config, jnp.bfloat16, "gpu")
    runtime = Runtime(attention, policy, jnp.bfloat16, segments=False)  # type: ignore[arg-type]
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    if asked == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    if policy in ("none", "dots"):
        runtime = dataclasses.replace(runtime, unroll=base.config.n_layers, kernels="auto")
        options["xla_gpu_enable_triton_gemm"] = False
    there, platforms = None, None
    if not here:
        topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
        there, platforms = SingleDeviceSharding(topology.devices[0]), ("cuda",)
    state = jax.eval_shape(lambda: empty_pack(base.config, spec))
    batch = jax.eval_shape(lambda: random_batch(base.config.vocab_size, J, m, S))
    arguments = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=there), (state, base.params, batch)
    )
    lowered = make_train_step(base, spec, runtime).trace(*arguments).lower(lowering_platforms=platforms)  # type: ignore[attr-defined]
    compiled = lowered.compile(compiler_options=None if here else options)
    taken, host = needed_bytes(compiled), compiled.memory_analysis().host_temp_size_in_bytes
    print(MODELS[size], J, m, S, rank, policy, f"{taken / 2**30:.2f} GiB", flush=True)
    jax.clear_caches()
    return {
        "model": dataclasses.asdict(model_shape(base.config, MODELS[size])),
        "degree": 1, "optimizer": "adamw", "bytes": taken, "host_bytes": host,
        "precision": base.precision, "attention": attention,
        "fused": 0 if asked == "xla" else DEVICE.cores,
        "accumulate": accumulate, "J": J, "m": m, "S": S, "rank_bucket": spec.rank, "policy": policy,
    }  # fmt: skip


def main() -> None:
    """Compile every case and write the points as one JSON list, after each anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fused", action="store_true", help="the steps with the fused kernel")
    which.add_argument("--fp8", action="store_true", help="steps on an fp8 base")
    which.add_argument("--offload", action="store_true", help="long rows, layer inputs on the host or not")
    which.add_argument("--families", action="store_true", help="Gemma, Qwen3, Phi-3 and OLMo 2")
    parser.add_argument("--here", action="store_true", help="compile for the GPU of this machine, tuned")
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, LAST_RESORT),
        help="none, dots, layer or offload: make only these points anew",
    )
    args = parser.parse_args()
    if args.here and (args.fused or args.fp8 or args.families):
        parser.error("--here is for what runs in a loop: layer and offload")
    if args.policy and not args.out.is_file():
        parser.error(f"--policy: there is no {args.out} to make points anew in")
    if not args.here:  # asked of the device that is there otherwise
        cudnn.check_cudnn_version = lambda: 91200
        cudnn.check_compute_capability = lambda capability: True
    asked = "fused" if args.fused else "fp8" if args.fp8 else "xla"
    listed = OFFLOAD if args.offload else {"fused": FUSED, "fp8": FP8, "xla": CASES}[asked]
    cases = [(asked, *case) for case in listed]
    if args.families:
        cases = [(kind, *case) for *case, kind in FAMILIES]
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.policy else []
    points = []
    for number, case in enumerate(cases):
        keep = number < len(known) and case[6] != args.policy  # without --policy nothing is known
        points.append(known[number] if keep else point(args.here, *case))
        rest = known[number + 1 :]
        args.out.write_text(json.dumps(points + rest, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
