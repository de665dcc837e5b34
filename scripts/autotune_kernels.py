"""Write the table of tiles for this machine's GPU: python -m scripts.autotune_kernels --out pallas_kernels

For each frozen product of Qwen2.5-7B and 3B, forward and backward, 8 jobs of 1024 tokens and rank 64, time every
candidate and keep the fastest. The table names the device; `pallas_kernels.choose` says when it is in use.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax

from benchmarks.kernels import SITES, compile_all, frozen_backward, frozen_forward, make, microseconds
from pallas_kernels import default_device, hopper
from pallas_kernels.hopper_gemm import DEFAULT

CANDIDATES = (
    {},
    {"minor_n": True},
    {"band": 4},
    {"band": 16},
    {"tile_n": 128, "stages": 6},  # narrow outputs alone
)


def programs(name):
    """Yield ((pass, K, N, candidate), function, arguments) for a site; candidate None is the frozen product alone."""
    d_in, d_out = SITES[name]
    x, sites, dy = make(d_in, d_out, 8, 64)
    us = (dy[..., :64],)
    for which, k, n in (("forward", d_in, d_out), ("backward", d_out, d_in)):
        frozen, operand = (frozen_forward, x) if which == "forward" else (frozen_backward, dy)
        yield (which, k, n, None), frozen, (operand, sites)
        for index, change in enumerate(CANDIDATES):
            if change.get("tile_n") == 128 and n > 1024:
                continue
            config = dataclasses.replace(DEFAULT, sms=default_device().cores, **change)
            if which == "forward":

                def run(x, sites, config=config):
                    return hopper.forward(x, None, sites, config=lambda site: config)[0]

                yield (which, k, n, index), run, (x, sites)
            else:

                def run(x, sites, us, dy, config=config):
                    return hopper.backward(x, None, sites, us, (dy,), config=config)[0]

                yield (which, k, n, index), run, (x, sites, us, dy)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    args = parser.parse_args()
    times: dict[tuple, dict] = {}
    for name in SITES:
        for (which, k, n, index), program, operands in compile_all(programs(name)):
            if not isinstance(program, str):
                times.setdefault((which, k, n), {})[index] = microseconds(program, operands)
            else:
                print(which, k, n, index, program)
    entries = []
    for (which, k, n), found in times.items():
        frozen = found.pop(None)
        best = min(found, key=found.get)
        print(
            which,
            k,
            n,
            {str(i): round(us / frozen, 4) for i, us in found.items()},
            "best",
            CANDIDATES[best],
            flush=True,
        )
        us = {"us": round(found[best], 1), "frozen_us": round(frozen, 1)}
        entries.append({"pass": which, "k": k, "n": n, "config": CANDIDATES[best], **us})
    device = default_device()
    table = {
        "device": device.kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "entries": entries,
    }
    path = args.out / f"tuned_{device.kind.lower().replace(' ', '_')}.json"
    path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
