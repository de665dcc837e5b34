"""Time the packed LoRA kernels against the bare frozen products and plain einsums, on the GPU of this machine.

    python -m benchmarks.kernels sites --out benchmarks/results/kernels_sites.jsonl
    python -m benchmarks.kernels layer --out benchmarks/results/kernels_layer.jsonl
    python -m benchmarks.kernels loop  --out benchmarks/results/kernels_loop.jsonl
    python -m benchmarks.kernels fp8   --out benchmarks/results/kernels-fp8-h200.jsonl
    python -m benchmarks.kernels unit  --out benchmarks/results/kernels-unit-h200.jsonl
    python -m benchmarks.kernels head  --out benchmarks/results/kernels-head-h200.jsonl

Times are the sum of the kernels of a call as CUPTI reports them (host and launch gaps left out), the median of a dozen
calls on random data; `bound` is the goal that docs/benchmarks.md states. Every fused result is checked against float32
products, those of fp8, of the gated unit and of the head against XLA's.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler
from jax.stages import Traced

from pallas_kernels import (
    SHRUNK,
    hopper,
    hopper_rows,
    lora_delta,
    lora_dense_group,
    quantise,
    quantise_weight,
    reference,
    using,
)
from pallas_kernels import fp8 as xla_fp8
from pallas_kernels.choice import config_for, default_device
from pallas_kernels.glu import ACTIVATIONS
from pallas_kernels.hopper_gemm import Extra, GemmConfig, Scales, Shrink, Softmax, Unit, lora_gemm
from pallas_kernels.reference import Site
from plora_jax.training.losses import with_gradient

TOKENS = 8192
SITES = {  # Linear shapes (D, F)
    "7b q/o": (3584, 3584),
    "7b k/v": (3584, 512),
    "7b gate/up": (3584, 18944),
    "7b down": (18944, 3584),
    "3b q/o": (2048, 2048),
    "3b gate/up": (2048, 11008),
    "3b down": (11008, 2048),
}
COPY_BYTES_PER_US = 3.8e6  # device copy, 3.8 TB/s
_keys = iter(jax.random.split(jax.random.key(0), 4096))


def draw(*shape, scale=1.0, dtype=jnp.bfloat16):
    return (jax.random.normal(next(_keys), shape, jnp.float32) * scale).astype(dtype)


def compile_all(jobs):
    """Compile (name, function or its trace, arguments) in parallel; a failure takes the place of the program."""

    def one(job):
        name, function, args = job
        try:
            traced = function if isinstance(function, Traced) else jax.jit(function).trace(*args)
            return name, traced.lower().compile(), args
        except Exception as error:  # reported beside the others
            return name, f"{type(error).__name__}: {error}"[:300], args

    with ThreadPoolExecutor(14) as pool:
        return list(pool.map(one, jobs))


def microseconds(compiled, args, iterations=12, only="") -> float:
    """Return the median device time of a call, or of its kernels whose name contains `only`."""
    _, runs = profiler.measure(compiled, aggregate=False, iterations=iterations)(*args)
    return statistics.median(sum(ms for name, ms in run if only in name) for run in runs) * 1e3


def relative(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


class Log:
    """Write one JSON line a measurement, with device and date, and print it."""

    def __init__(self, path):
        self.file = open(path, "w")  # noqa: SIM115
        self.write(device=jax.devices()[0].device_kind, jax=jax.__version__, date=time.strftime("%Y-%m-%d"))

    def write(self, **row):
        row = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(json.dumps(row), flush=True)


def grid(full: bool):
    for name in SITES:
        wide = name in ("7b q/o", "7b gate/up", "7b down")
        for jobs in (1, 8, 32) if wide else (8,):
            for rank in (8, 32, 64, 128) if full or (wide and jobs == 8) else (8, 64, 128):
                yield name, jobs, rank


def make(d_in, d_out, jobs, rank):
    tokens = TOKENS // jobs
    x, w, dy = draw(jobs, tokens, d_in), draw(d_in, d_out, scale=d_in**-0.5), draw(jobs, tokens, d_out)
    f32 = jnp.float32
    a, b = (
        draw(jobs, rank, d_in, scale=d_in**-0.5, dtype=f32),
        draw(jobs, d_out, rank, scale=rank**-0.5, dtype=f32),
    )
    return x, (Site(w, None, a, b, jnp.full((jobs,), 0.5)),), dy


def frozen_forward(x, sites):
    return x.reshape(-1, x.shape[-1]) @ sites[0].w


def frozen_backward(dy, sites):
    return jnp.einsum("tf,df->td", dy.reshape(-1, dy.shape[-1]), sites[0].w)


def fused(which, d_in, d_out):
    device = default_device()
    config = config_for(which, *((d_in, d_out) if which == "forward" else (d_out, d_in)), device)
    if which == "forward":
        return lambda x, sites: hopper.forward(x, None, sites, config=lambda site: config)[0][0]
    # only dx is used, so the sums for dA and dB are dropped when compiled
    return lambda x, sites, us, dy: hopper.backward(x, None, sites, us, (dy,), config=config)[0]


def plain(what):
    """Return the einsums of the fused forward or dx, compiled."""
    if "forward" in what:
        return jax.jit(lambda x, s: reference.forward(x, None, s)[0][0])
    return jax.jit(lambda x, s, us, dy: reference.backward(x, None, s, us, (dy,))[0])


def sites(log, full):
    """Forward, dx and dA + dB per Linear against the frozen product alone and against einsums."""
    jobs, meta, seen = [], {}, {}
    for name, count, rank in grid(full):
        d_in, d_out = SITES[name]
        x, s, dy = make(d_in, d_out, count, rank)
        us = (draw(*x.shape[:2], rank),)
        f = rank * (d_in + d_out) / (d_in * d_out)
        if name not in seen:
            seen[name] = True
            jobs.append(((name, 0, 0, "frozen forward"), frozen_forward, (x, s)))
            jobs.append(((name, 0, 0, "frozen dx"), frozen_backward, (dy, s)))
        key = (name, count, rank)
        meta[key] = f
        jobs.append(((*key, "fused forward"), fused("forward", d_in, d_out), (x, s)))
        jobs.append(((*key, "fused dx"), fused("backward", d_in, d_out), (x, s, us, dy)))
        if (rank == 32 and count > 1) or (count == 32 and rank == 64):
            jobs.append(((*key, "einsum forward"), plain("forward"), (x, s)))
            jobs.append(((*key, "einsum dx"), plain("dx"), (x, s, us, dy)))
        if rank in (8, 32, 128):  # as XLA products, which the choice leaves them to
            jobs.append(
                ((*key, "dA"), lambda u, x: reference.job_product(u, x, "tk,tn", jnp.float32), (us[0], x))
            )
            jobs.append(
                ((*key, "dB"), lambda dy, u: reference.job_product(dy, u, "tk,tn", jnp.float32), (dy, us[0]))
            )
    times = {}
    for (name, count, rank, what), program, args in compile_all(jobs):
        row = {"site": name, "jobs": count, "rank": rank, "what": what}
        if isinstance(program, str):
            log.write(**row, failed=program)
            continue
        us = times[name, count, rank, what] = microseconds(program, args)
        row["us"] = us
        if what.startswith("fused"):
            frozen = times[name, 0, 0, what.replace("fused", "frozen")]
            bound = 1 + 1.25 * meta[name, count, rank] + 0.03
            if count == 8 and rank == 64:
                row["error"] = relative(program(*args), plain(what)(*args))
            same = bool(jnp.array_equal(program(*args), program(*args)))
            # the rest of `us` is the cast of the float32 adapters, which einsums need too
            kernel = row["kernel_us"] = microseconds(program, args, only="mosaic")
            ratio = kernel / frozen
            row |= {"ratio": ratio, "ratio_with_casts": us / frozen, "bound": bound, "met": ratio <= bound}
            row["same_bits"] = same
        if what.startswith("einsum"):
            frozen = times[name, 0, 0, what.replace("einsum", "frozen")]
            ours = times[name, count, rank, what.replace("einsum", "fused")]
            row |= {"ratio": us / frozen, "cost_cut": (us - frozen) / max(ours - frozen, 1e-3)}
        if what in ("dA", "dB"):
            size = sum(t.nbytes for t in args) + 4 * count * rank * args[1 if what == "dA" else 0].shape[2]
            row |= {
                "bound": 1.5
                * max(size / COPY_BYTES_PER_US, 2 * TOKENS * rank * SITES[name][what == "dB"] / 8e8)
            }
            row["met"] = us <= row["bound"]
        log.write(**row)


def layer_arguments(jobs, tokens, rank, layers=2, d=3584, kv=512, ff=18944):
    shapes = {
        "q": (d, d),
        "k": (d, kv),
        "v": (d, kv),
        "o": (d, d),
        "gate": (d, ff),
        "up": (d, ff),
        "down": (ff, d),
    }
    f32 = jnp.float32
    ws = {n: draw(layers, i, o, scale=i**-0.5) for n, (i, o) in shapes.items()}
    adapters = {
        n: (
            draw(layers, jobs, rank, i, scale=i**-0.5, dtype=f32),
            draw(layers, jobs, o, rank, scale=0.1 * rank**-0.5, dtype=f32),
            jnp.full((layers, jobs), 0.5),
        )
        for n, (i, o) in shapes.items()
    }
    return draw(jobs, tokens, d), ws, adapters


def projections(x, ws, adapters):
    """The seven Linears of a layer for one job, with cheap stand-ins for what lies between."""

    def group(z, *names):
        return lora_dense_group(z, [ws[n] for n in names], [adapters and adapters[n] for n in names])

    q, k, v = group(x, "q", "k", "v")
    x = x + group(jnp.tanh(q) + jnp.tile(k + v, q.shape[-1] // k.shape[-1]), "o")[0]
    gate, up = group(x, "gate", "up")
    return x + group(jax.nn.silu(gate) * up, "down")[0]


def layer(log, full):
    """All seven projections of a 7B layer under vmap, scan and checkpoint, forward and backward."""
    programs = []
    for count, rank in ((8, 32), (32, 32), (8, 8), (8, 128)) if full else ((8, 32),):
        x, ws, adapters = layer_arguments(count, TOKENS // count, rank)

        def loss(adapters, x, ws):
            def body(h, xs):
                keep = jax.checkpoint_policies.save_only_these_names(SHRUNK)
                return jax.checkpoint(projections, policy=keep)(h, *xs), None

            h, _ = jax.lax.scan(body, x, (ws, adapters))
            return jnp.mean(h.astype(jnp.float32) ** 2)

        def step(adapters, x, ws):
            axes = (dict.fromkeys(ws, (1, 1, 1)) if adapters else None, 0, None)

            def total(adapters, x):
                return jnp.sum(jax.vmap(loss, in_axes=axes)(adapters, x, ws))

            return jax.value_and_grad(total, argnums=(0, 1) if adapters else 1)(adapters, x)

        for which in ("hopper", "xla"):
            with using(which):
                traced = jax.jit(step).trace(adapters, x, ws)
            programs.append(((count, rank, which), traced, (adapters, x, ws)))
        programs.append(((count, rank, "frozen"), step, (None, x, ws)))
    times, results = {}, {}
    for (count, rank, which), program, args in compile_all(programs):
        row = {"jobs": count, "rank": rank, "implementation": which}
        if isinstance(program, str):
            log.write(**row, failed=program)
            continue
        times[count, rank, which] = row["us"] = microseconds(program, args, 5)
        if which != "frozen":
            first, second = program(*args), program(*args)
            row["same_bits"] = all(map(jnp.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
            row["same_bits"] = bool(row["same_bits"])
            results[which] = first
        if which == "xla" and "hopper" in results:
            pairs = zip(jax.tree.leaves(results["hopper"]), jax.tree.leaves(results["xla"]), strict=True)
            row["largest_difference"] = max(relative(a, b) for a, b in pairs)
        if which == "frozen":
            ours, einsum = (times.get((count, rank, n), float("nan")) - row["us"] for n in ("hopper", "xla"))
            row |= {"adapters_us": ours, "adapters_einsum_us": einsum, "cost_cut": einsum / ours}
        log.write(**row)


def wall(function, repeat=30) -> float:
    """Return the host's time of a call, in microseconds, launches included."""
    jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready([function() for _ in range(repeat)])
    return (time.perf_counter() - start) / repeat * 1e6


def adapters_alone(x, a, b, dy):
    y, pull = jax.vjp(lambda x, a, b: lora_delta(x, a, b, jnp.float32(0.5)), x, a, b)
    return y, pull(dy)


def eager(x, a, b, dy):
    """The products of one adapter as an eager framework issues them, one by one."""
    u = x @ a.T
    y = u @ b.T * 0.5
    du = dy @ b * 0.5
    return y, (du @ a, du.T @ x, dy.T @ u)


def loop(log, full):
    """Adapters alone (rank 64, 128 tokens each), forward and backward: one after another against packed; wall time."""
    single, packed = jax.jit(adapters_alone), jax.jit(jax.vmap(adapters_alone))
    for d_in, d_out in ((3584, 3584), (3584, 18944), (2048, 2048)) if full else ((3584, 3584),):
        for count in (2, 8, 32):
            x, dy = draw(count, 128, d_in), draw(count, 128, d_out)
            a, b = draw(count, 64, d_in, scale=d_in**-0.5), draw(count, d_out, 64, scale=1 / 8)
            slices = [(x[j], a[j], b[j], dy[j]) for j in range(count)]
            ways = {
                "packed": functools.partial(packed, x, a, b, dy),
                "one after another, compiled": lambda slices=slices: [single(*s) for s in slices],
                "one after another, eager": lambda slices=slices: [eager(*s) for s in slices],
            }
            times = {how: wall(way) for how, way in ways.items()}
            for how, us in times.items():
                gain = us / times["packed"]
                log.write(
                    shape=[d_in, d_out], jobs=count, rank=64, tokens=128, how=how, us=us, times_packed=gain
                )


FP8 = {name: (*shape, 1) for name, shape in SITES.items() if name.startswith("7b") and "k/v" not in name}
FP8["7b gate/up dx"] = (18944, 3584, 2)
ROUNDED = {  # features of the arrays that share one scale a token, and whether W's scales join them
    "7b q/k/v, o, gate/up": ((3584,), False),
    "7b down": ((18944,), False),
    "7b q/k/v, dx": ((3584, 512, 512), True),
    "7b gate/up, dx": ((18944, 18944), True),
}


def fp8(log, full):
    """Products of 8-bit numbers, 8 jobs of rank 32: by cuBLAS, with adapters beside it, and in one launch with them.

    And rounding tokens and gradients to 8 bits, as they are or of the gated unit: by XLA and by the kernel, with the
    share of numbers that are the same (of the unit fewer: XLA does not round it to 16 bits first).
    """
    jobs, tokens, rank, wide = 8, TOKENS // 8, 32, jnp.bfloat16
    cores, programs = default_device().cores, []

    def frozen(xs, ws):
        axes = (((1,), (1,)), ((), ()))
        flat = [x.reshape(-1, x.shape[-1]) for x in xs]
        return [
            jax.lax.dot_general(x, w, axes, preferred_element_type=wide)
            for x, w in zip(flat, ws, strict=True)
        ]

    def beside(xs, ws, rows, columns, us, es):
        y = sum(part.astype(jnp.float32) for part in frozen(xs, ws)) * rows.reshape(-1, 1) * columns
        added = (
            jnp.einsum("jtr,jrn->jtn", *pair, preferred_element_type=wide)
            for pair in zip(us, es, strict=True)
        )
        return (y.reshape(jobs, tokens, -1) + sum(part.astype(jnp.float32) for part in added)).astype(wide)

    def one_launch(xs, ws, rows, columns, us, es):
        extras = [
            Extra((u / rows[..., None]).astype(wide), (e / columns).astype(wide))
            for u, e in zip(us, es, strict=True)
        ]
        scales, config = Scales(rows, columns, wide), GemmConfig(sms=cores)
        pairs = list(zip(xs, ws, strict=True))
        return lora_gemm(pairs, (), extras, scales=scales, transposed=True, config=config)[0]

    for name, (k, n, products) in FP8.items():
        xs, rows = zip(*(quantise(draw(jobs, tokens, k)) for _ in range(products)), strict=True)
        ws, columns = zip(*(quantise_weight(draw(n, k)) for _ in range(products)), strict=True)
        us = [draw(jobs, tokens, rank) for _ in range(products)]
        es = [draw(jobs, rank, n) for _ in range(products)]
        given = (xs, ws, rows[0], columns[0], us, es)
        ways = {"cuBLAS alone": frozen, "cuBLAS, adapters beside it": beside, "one launch": one_launch}
        programs += [((name, how), way, given[: 2 if way is frozen else 6]) for how, way in ways.items()]
    rounding = {"rounded by XLA": xla_fp8, "rounded by the kernel": hopper_rows}
    for name, (sizes, scaled) in ROUNDED.items():
        xs = [draw(TOKENS, size) for size in sizes]
        columns = [jnp.abs(draw(size)) if scaled else None for size in sizes]
        for how, own in rounding.items():
            way = functools.partial(own.round_rows, dtype=jnp.float8_e4m3fn)
            programs.append(((name, how), way, (xs, columns)))
    gate, up, dh = (draw(TOKENS, 18944) for _ in range(3))
    columns = [jnp.abs(draw(18944)) for _ in range(2)]
    for how, own in rounding.items():
        way = functools.partial(own.round_glu, "silu")
        programs.append((("7b silu(gate)·up", how), way, (gate, up)))
        way = functools.partial(own.round_glu_back, "silu", dtype=jnp.float8_e4m3fn)
        programs.append((("7b silu(gate)·up, its gradients", how), way, (gate, up, dh, columns)))
    alone, beside_it = {}, {}
    for (name, how), program, given in compile_all(programs):
        if isinstance(program, str):
            log.write(site=name, how=how, error=program)
            continue
        row, result = {"site": name, "how": how, "us": microseconds(program, given)}, program(*given)
        if how == "rounded by XLA":
            beside_it[name] = result
        elif how == "rounded by the kernel":
            pairs = zip(*(jax.tree.leaves(r) for r in (result, beside_it[name])), strict=True)
            row["same"] = [float(jnp.mean(a.astype(jnp.float32) == b.astype(jnp.float32))) for a, b in pairs]
        elif how == "cuBLAS alone":
            alone[name] = row["us"]
        elif how == "cuBLAS, adapters beside it":
            beside_it[name] = result
        elif name in beside_it:
            row["off"] = relative(result, beside_it[name])
        if name in alone:
            row["over_frozen"] = row["us"] / alone[name]
        log.write(**row)


UNITS = {  # jobs, tokens, D, F, rank
    "7b": (8, 1024, 3584, 18944, 32),
    "7b, 32 jobs": (32, 128, 3584, 18944, 32),
    "3b": (32, 1024, 2048, 11008, 32),
    "0.5b": (32, 1024, 896, 4864, 32),
    "llama 8b": (4, 1536, 4096, 14336, 16),
}


def unit(log, full):
    """The launches of up and of down's dx, with the gated unit and without it, and XLA's unit beside them."""

    def silu(gate, up):
        return ACTIVATIONS["silu"](gate) * up

    def xla_back(gate, up, dh, again):
        h, pull = jax.vjp(silu, gate, up)
        return (*pull(dh), h) if again else pull(dh)

    def forward(config, x, w, u, e, *gate):
        made = Unit("silu", *gate) if gate else None
        return lora_gemm([(x, w)], (), [Extra(u, e)], unit=made, config=config)[0]

    def backward(config, dy, w, b, scale, a, *gate_up, again=False):
        made = Unit("silu", *gate_up, again) if gate_up else None
        shrinks, extras = [Shrink(0, b, scale)], [Extra(0, a)]
        return lora_gemm([(dy, w)], shrinks, extras, unit=made, transposed=True, config=config)[0]

    for name, (jobs, tokens, d, f, rank) in UNITS.items():
        here, back = (
            functools.partial(way, config_for(which, d, f, default_device()))
            for way, which in ((forward, "forward"), (backward, "backward"))
        )
        x, dy, u = draw(jobs, tokens, d), draw(jobs, tokens, d), draw(jobs, tokens, rank)
        gate, up = draw(jobs, tokens, f), draw(jobs, tokens, f)
        w, e = draw(d, f, scale=d**-0.5), draw(jobs, rank, f, scale=rank**-0.5)
        down, a = draw(f, d, scale=d**-0.5), draw(jobs, rank, f, scale=rank**-0.5)
        b, scale = draw(jobs, rank, d, scale=d**-0.5), jnp.full((jobs, rank), 2.0)

        ins, outs = (x, w, u, e), (dy, down, b, scale, a)
        programs = [
            ("forward alone", here, ins),
            ("forward with the unit", here, (*ins, gate)),
            ("forward, XLA's unit", silu, (gate, up)),
            ("backward alone", back, outs),
            ("backward with the unit", back, (*outs, gate, up)),
            ("backward, XLA's unit", functools.partial(xla_back, again=False), (gate, up, up)),
            (
                "backward with the unit, made again",
                functools.partial(back, again=True),
                (*outs, gate, up),
            ),
            ("backward, XLA's unit, made again", functools.partial(xla_back, again=True), (gate, up, up)),
        ]
        results = {}
        for how, program, given in compile_all(programs):
            if isinstance(program, str):
                log.write(shape=name, how=how, error=program)
                continue
            row, results[how] = (
                {"shape": name, "how": how, "us": microseconds(program, given)},
                program(*given),
            )
            wide = [t.astype(jnp.float32) for t in (gate, up)]
            if how == "forward with the unit":
                y = results["forward alone"].astype(jnp.float32)
                row["off"] = [
                    relative(t, own) for t, own in zip(results[how], (y, silu(wide[0], y)), strict=True)
                ]
            elif how.startswith("backward with the unit"):
                want = xla_back(*wide, results["backward alone"].astype(jnp.float32), how.endswith("again"))
                row["off"] = [relative(t, own) for t, own in zip(results[how], want, strict=True)]
            log.write(**row)


HEADS = {  # width, vocabulary
    "0.5b": (896, 151_936),
    "3b": (2048, 151_936),
    "7b": (3584, 152_064),
    "llama 8b": (4096, 128_256),
}


def head(log, full):
    """The loss at a chunk of positions with its gradient, and the launch of its first product with other tiles."""

    def launch(config, h, shift, w):
        softmax = None if shift is None else Softmax(shift[None])
        return lora_gemm([(h[None], w)], softmax=softmax, transposed=True, config=config)[0]

    plain = GemmConfig(sms=default_device().cores)
    others = {"cluster": 1, "tile_n": 128, "minor_n": True, "band": 2, "out_slots": 1} if full else {}
    for name, (d, v) in HEADS.items():
        for rows in (1024, 4096) if full else (1024,):
            h, w = draw(rows, d), draw(v, d, scale=d**-0.5)
            t = jax.random.randint(next(_keys), (rows,), -1, v)
            shift = jnp.full((rows,), 8.0)
            programs = [
                ("XLA", with_gradient(0.0, "xla"), (h, t, w)),
                ("with the kernel", with_gradient(0.0, "auto"), (h, t, w)),
                ("its launch", functools.partial(launch, plain), (h, shift, w)),
                ("the launch of the product alone", functools.partial(launch, plain), (h, None, w)),
                ("the product as XLA launches it, float32", xla_product(jnp.float32), (h, w)),
                ("the product as XLA launches it, bfloat16", xla_product(jnp.bfloat16), (h, w)),
            ]
            for key, value in others.items():
                config = dataclasses.replace(plain, **{key: value})
                programs.append(
                    (f"its launch, {key} {value}", functools.partial(launch, config), (h, shift, w))
                )
            want = None
            for how, program, given in compile_all(programs):
                if isinstance(program, str):
                    log.write(shape=name, rows=rows, how=how, error=program)
                    continue
                row = {"shape": name, "rows": rows, "how": how, "us": microseconds(program, given)}
                if how in ("XLA", "with the kernel"):
                    made = program(*given)
                    want = made if want is None else want
                    row["off"] = [relative(got, own) for got, own in zip(made, want, strict=True)]
                log.write(**row)


def xla_product(dtype):
    return lambda h, w: jnp.einsum("nd,vd->nv", h, w, preferred_element_type=dtype)


WHAT = {"sites": sites, "layer": layer, "loop": loop, "fp8": fp8, "unit": unit, "head": head}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--out", required=True, help="file for the JSON lines")
    parser.add_argument("--full", action="store_true", help="every rank and job count")
    args = parser.parse_args()
    WHAT[args.what](Log(args.out), args.full)


if __name__ == "__main__":
    main()
