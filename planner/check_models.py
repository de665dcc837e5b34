"""Step time and memory written out a second time, for the checker alone; see planner/time.py and
planner/memory.py.
"""

import math
from collections.abc import Sequence

from planner.devices import Devices
from planner.specs import JobSpec, ModelShape
from planner.time import CostModel

MOMENTS = {"adamw": 4 + 4, "adamw_bf16": 2 + 2, "sgd": 4}  # bytes an adapter parameter
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1.03, "fp8": 1.03, "nf4": 0.56}


def union(jobs: list[JobSpec]) -> frozenset[str] | None:
    """Return the sites any job adapts; None: all."""
    names: set[str] = set()
    for job in jobs:
        if job.targets is None:
            return None
        names.update(job.targets)
    return frozenset(names)


def params_per_rank(shape: ModelShape, targets: frozenset[str] | None) -> int:
    """Count an adapter's parameters for each unit of rank."""
    total = 0
    for name, d_in, d_out in shape.sites:
        if targets is None or name in targets:
            total += d_in + d_out
    return shape.n_layers * total


def layer_params(shape: ModelShape) -> int:
    """Count the parameters that are neither embedding nor head."""
    return shape.n_params - shape.vocab_size * shape.d_model * (1 if shape.tied else 2)


def coefficients(
    shape: ModelShape,
    cost: CostModel,
    degree: int,
    policy: str,
    precision: str,
    S: float,
    targets: frozenset[str] | None,
) -> tuple[float, float, float, float]:
    """Return (t0, seconds a token, seconds a rank, seconds a rank and token) of a step."""
    key = f"{shape.name}/{degree}/{policy}/{precision}"
    if key in cost.fitted:
        t0, c, a0, a1 = cost.fitted[key]
        return t0, c, a0, a1
    wide = 4 if precision == "fp32" else 2
    fast = degree * cost.scaling[str(degree)]
    moved = 0.0
    if policy == "offload":  # the time of "layer", and every layer's input back from the host
        key = f"{shape.name}/{degree}/layer/{precision}"
        moved = shape.n_layers * shape.d_model * wide / degree / cost.host_bytes_s
        policy = "layer"
        if key in cost.fitted:
            t0, c, a0, a1 = cost.fitted[key]
            return t0, c + moved, a0, a1
    flop = 4 * (layer_params(shape) + shape.vocab_size * shape.d_model)
    attention = 6 * shape.n_layers * shape.n_heads * shape.head_dim * S / (cost.attention_flops or cost.flops)
    token = (
        flop * cost.recompute[policy] / cost.precision.get(precision, 1.0) / cost.flops + attention
    ) / fast
    numbers = 7 * shape.d_model + 5 * shape.d_ff + 2 * (shape.n_heads + shape.n_kv_heads) * shape.head_dim
    token += cost.token_passes * shape.n_layers * numbers * wide / cost.bandwidth / degree
    read = 2 * layer_params(shape) * max(WEIGHT_BYTES[precision], wide / 2) / cost.bandwidth / degree
    fixed = cost.step_s + shape.n_layers * cost.layer_s * (1 + 0.25 * math.log2(degree)) + read
    p = params_per_rank(shape, targets)
    return (
        fixed,
        token + moved,
        p * (32 + 3 * wide) / cost.bandwidth / degree,
        6 * p / cost.adapter_flops / fast,
    )


def pack_bytes(
    shape: ModelShape,
    cost: CostModel,
    devices: Devices,
    precision: str,
    degree: int,
    slots: Sequence[int],
    m: int,
    S: int,
    policy: str,
    moments: int,
    targets: frozenset[str] | None,
    summed: bool,
) -> float:
    """Return the bytes a device needs for a step with slots of the given rank buckets; `summed`: over micro-steps.

    `moments`: bytes an adapter parameter.
    """
    wide = 4 if precision == "fp32" else 2
    factor = cost.memory
    tokens = len(slots) * m * S / degree
    query = shape.n_heads * shape.head_dim
    key_value = 2 * shape.n_kv_heads * shape.head_dim
    everything = 7 * shape.d_model + 5 * shape.d_ff + 2 * query + key_value
    products = 3 * shape.d_model + 2 * shape.d_ff + query + key_value
    if policy == "offload" and tokens * shape.n_layers * shape.d_model * wide > 64e9:
        return math.inf  # more than JAX pins
    kept = tokens * {"layer": shape.d_model, "dots": products, "none": everything, "offload": 0}[policy]
    rows = m * S
    filled = rows % 8 == 0 and math.ceil(rows / 128) * 128 <= 1.07 * rows and max(slots) <= 256
    unit = {"bf16": 64, "fp8": 128}.get(precision, math.inf)
    deep = shape.d_model >= 896 and shape.d_model % unit == 0 and shape.d_ff % unit == 0
    fused = devices.spec.fused and degree == 1 and filled and deep
    gradients = wide  # bytes a number of the adapters, beside what the layers keep
    if policy == "none" and devices.spec.name != "cpu":  # written out
        gradients = 0
        lean = 4 * shape.d_model + 3 * shape.d_ff + 2 * query + key_value
        # norms after attention and MLP, and q and k before theirs
        special = 2 * shape.d_model + query + key_value if shape.norms == 4 else 0
        if shape.qk_norm:
            special += query + key_value // 2
        kept, everything = tokens * (lean + special), everything + special
        if "gate_up_proj" in {name for name, _, _ in shape.sites}:
            some = 256 * devices.spec.fused / math.ceil(shape.d_ff / 128) if fused else tokens
            kept += min(tokens, some) * 2 * shape.d_ff
    layers = layer_params(shape)
    weights = layers * WEIGHT_BYTES[precision] + (shape.n_params - layers) * wide
    one = layers / shape.n_layers * wide
    whole = weights / degree + (2 * one if degree > 1 else 0) + (one if WEIGHT_BYTES[precision] < wide else 0)
    if precision == "fp8" and policy != "none":
        whole += (0.4 if fused or policy != "dots" else 1) * layers / degree
    a_number = 4 * (1 + summed) + moments + (2 if wide == 2 else 0) + gradients
    adapters = sum(slots) * params_per_rank(shape, targets) * a_number / degree
    scores = 0.0
    if devices.spec.name != "cpu" and not shape.flash:
        a_layer = (wide + 4) * tokens * shape.n_heads * S
        scores = a_layer * (shape.n_layers + 1 if policy == "none" else 1)
        if policy in ("layer", "offload"):
            scores += max(a_layer - tokens * 5 * shape.d_ff * wide, 0)
    elif devices.spec.attention == "xla":
        scores = 4 * tokens * shape.n_heads * S * ((shape.n_layers if policy == "none" else 1) + 2)
    at_work = factor.working * tokens * everything * wide
    unrolled = policy in ("none", "dots") and devices.spec.name != "cpu"
    a_logit = (4 + wide) * (4 / 3 if unrolled and not shape.flash else 1)
    head = a_logit * min(tokens, 1024)
    whole_pieces = shape.vocab_size % 64 == 0 and shape.d_model % 64 == 0
    if devices.spec.fused and degree == 1 and unit < math.inf and unrolled and whole_pieces:
        head = max(a_logit * min(tokens, 255), 2 * min(tokens, 1024))
    at_head = factor.logits * head * shape.vocab_size
    one_after_other = policy in ("layer", "offload") and devices.spec.name != "cpu"
    total = (
        factor.fixed_bytes
        + factor.weights * whole
        + factor.adapters * adapters
        + getattr(factor, f"saved_{policy}", 0.0) * shape.n_layers * kept * wide
        + factor.attention * scores
        + (max(at_work, at_head) if one_after_other else at_work + at_head)
    )
    return total * (1 + factor.margin)
