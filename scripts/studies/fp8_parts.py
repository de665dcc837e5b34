"""Say what each part of an fp8 base does to a model's next-token distribution: the KL divergence from the fp32 model's.

usage: python -m scripts.studies.fp8_parts --model GGUF --data ROWS.jsonl --out FILE.json [--rows N] [--length S]

It is the mean over all positions, in nats: what the loss is expected to rise by where the model was right. Rounding is
done on float32 numbers, so that any part can be left out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import api, quantise, reference
from plora_jax.data.encode import read_examples
from plora_jax.engine.rundir import write_json
from plora_jax.evaluation.scorer import runtime_for
from plora_jax.models.config import SOURCES
from plora_jax.models.load import load_base

Rounding = Callable[[Array], Array]
AT_ONCE = 8  # rows


def e4m3(x: Array) -> Array:
    """Round over the last axis as an fp8 base does, whose weights have scales of fewer bits."""
    values, scale = quantise(x)
    return values.astype(x.dtype) * scale[..., None]


def power_of_two(x: Array) -> Array:
    """Round to E4M3 with the least power of two for a scale."""
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(x), -1, keepdims=True) / 448)))
    return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def int8(x: Array) -> Array:
    """Round to 8-bit integers with a scale over the last axis."""
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    return jnp.round(x / scale) * scale


def kept(x: Array) -> Array:
    """Round nothing."""
    return x


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", required=True, help="model with weights")
    cli.add_argument("--data", type=Path, required=True, help="rows")
    cli.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    cli.add_argument("--rows", type=int, default=16, metavar="N")
    cli.add_argument("--length", type=int, default=128, metavar="S")
    args = cli.parse_args(argv)
    base = load_base(args.model, precision="fp32")
    examples = read_examples(args.data, base.tokenizer, max_length=args.length)
    tokens, rows = (np.full((args.rows, args.length), fill, np.int32) for fill in (0, -1))
    for i, row in enumerate(examples.tokens[: args.rows]):
        tokens[i, : len(row)], rows[i, : len(row)] = row, 0
    positions = np.broadcast_to(np.arange(args.length, dtype=np.int32), (AT_ONCE, args.length))
    runtime = runtime_for(base)

    def log_p(token_rounding: Rounding, weight_rounding: Rounding, but: set[tuple[int, int]]) -> np.ndarray:
        def frozen(x: Array, w: Array) -> Array:
            return x @ w if w.shape in but else token_rounding(x) @ weight_rounding(w.T).T

        jax.clear_caches()  # of what was traced with another rounding
        api._lora.cache_clear()
        before, reference._frozen = reference._frozen, frozen
        try:

            @jax.jit
            def run(params: object, tokens: Array, rows: Array) -> Array:
                model = base.model(params)  # type: ignore[arg-type]
                hidden = model.hidden(tokens, positions, rows, runtime=runtime)
                return jax.nn.log_softmax(model.logits(hidden))

            parts = [slice(i, i + AT_ONCE) for i in range(0, args.rows, AT_ONCE)]
            return np.concatenate(
                [np.asarray(run(base.params, tokens[p], rows[p]))[rows[p] >= 0] for p in parts]
            )
        finally:
            reference._frozen = before

    want = log_p(kept, kept, set())
    result = {"rows": args.rows, "positions": len(want), "kl": {}}
    by_source = {s: {(site.d_in, site.d_out) for site in base.config.sites_of(s)} for s in SOURCES}
    cases = {
        "weights and tokens": (e4m3, e4m3, set()),
        "weights alone": (kept, e4m3, set()),
        "tokens alone": (e4m3, kept, set()),
        "tokens alone, powers of two": (power_of_two, kept, set()),
        "weights and tokens, powers of two": (power_of_two, power_of_two, set()),
        **{f"all but {source}": (e4m3, e4m3, sites) for source, sites in by_source.items()},
        "tokens in fp8, weights in 8-bit integers": (e4m3, int8, set()),
        "both in 8-bit integers": (int8, int8, set()),
    }
    for name, case in cases.items():
        got = log_p(*case)
        kl = [float((np.exp(w) * (w - g)).sum()) for w, g in zip(want, got, strict=True)]
        result["kl"][name] = float(np.mean(kl))  # type: ignore[index]
        print(f"{name:42s} {np.mean(kl):.4f}", flush=True)
        write_json(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
