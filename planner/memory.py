"""How much device memory a packed step takes: analytic, charged per packed token, corrected by measured
points.

The paper charges a base's activations once and an adapter's by rank; but base activations grow with the
tokens of all packed jobs, so here every slot pays for its own m · S tokens.

On a GPU "none" and "dots" write the layers out. With "none" less is kept than by a loop, and the adapters' gradients
take the place of what backward has used; "dots" keeps what it keeps in a loop.
"""

from dataclasses import dataclass, fields

from planner.devices import DeviceSpec
from planner.signature import LAST_RESORT
from planner.specs import MOMENT_BYTES, PRECISION_BYTES, ModelShape

HEAD_CHUNK = 1024  # positions whose logits exist at one time
TILE_M, TILE_N = 128, 256  # tokens and output features of the fused kernel's tiles
MIN_WAVES, MIN_DEPTH, MAX_ROW_WASTE = 2, 896, 1.07  # what pallas_kernels.choice asks of a product
MIN_ROWS = 256  # and of a head
PINNED = 64e9  # bytes of the host's memory that JAX pins for one process, unless it is told otherwise
TRANSPOSED = 0.4  # of an fp8 base's weights: copies beside them at the peak where backward recomputes


@dataclass(frozen=True)
class StepShape:
    """Give the sizes that memory and time depend on: degree d, J slots of m rows of S tokens, rank bucket,
    policy.
    """

    degree: int
    J: int
    m: int
    S: int
    rank_bucket: int
    policy: str
    optimizers: frozenset[str] = frozenset({"adamw"})  # every slot has the moments of each
    targets: frozenset[str] | None = None
    accumulate: bool = True  # False: every batch ends with its micro-step, and no sum of gradients is kept


@dataclass(frozen=True)
class MemoryModel:
    """Hold the factors on each analytic term; all 1 until fitted on `compiled.memory_analysis()` points.

    `margin` is added to every prediction: the largest error, as a share, seen on held-out points.
    `saved` factors are per policy: what the backward pass keeps for each token and layer; "offload" keeps nothing.
    """

    weights: float = 1.0
    adapters: float = 1.0
    saved_none: float = 1.0
    saved_dots: float = 1.0
    saved_layer: float = 1.0
    working: float = 1.0
    attention: float = 1.0
    logits: float = 1.0
    fixed_bytes: float = 256 * 2**20
    margin: float = 0.05
    source: str = "analytic, not fitted"

    def to_dict(self) -> dict:
        """Return the factors as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def saved_elements(shape: ModelShape, policy: str) -> float:
    """Count the numbers that a loop over layers keeps for the backward pass, per token and layer.

    layer: the residual stream; offload: the same, in the host's memory. dots: and every matrix product's output.
    none: and norms, rotary, activations; the count agrees within 5 % with a plain-XLA step of Qwen2.5-7B on an H200
    (54.8 GiB at 8 × 1024 tokens).
    """
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    residual = shape.d_model
    dots = q + 2 * kv + 2 * shape.d_model + 2 * shape.d_ff
    rest = 3 * shape.d_ff + 4 * shape.d_model + q
    return residual + (dots if policy in ("none", "dots") else 0) + (rest if policy == "none" else 0)


def offloaded_bytes(shape: ModelShape, step: StepShape, precision: str) -> int:
    """Return the bytes of the host's pinned memory that "offload" takes for each device: every layer's input."""
    tokens = step.J * step.m * step.S / step.degree
    return int(tokens * shape.n_layers * shape.d_model * (4 if precision == "fp32" else 2))


def _beyond(shape: ModelShape) -> int:
    """Count the numbers a token that a layer written out keeps beyond Llama's: q and k before their norms; inputs of
    second norms, and beside these the frozen products of q, k and v.
    """
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    second = 2 * shape.d_model + q + 2 * kv if shape.norms > 2 else 0
    return second + (q + kv if shape.qk_norm else 0)


def _written_out(shape: ModelShape, step: StepShape, precision: str, device: DeviceSpec) -> float:
    """Return the numbers that layers written out keep for the backward pass of a packed step, all in all.

    A token's, per layer: both residuals, both norms, q and the attention's output, k and v, gate, up and their product;
    what a layer unlike Llama's keeps beyond; and of gate and up in one site the parts of their sums, where XLA makes
    these: without the fused kernel, or of too few tokens for it.
    """
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    tokens = few = step.J * step.m * step.S / step.degree
    if may_fuse(shape, step, precision, device):
        few = min(tokens, MIN_WAVES * device.fused * TILE_M / -(-2 * shape.d_ff // TILE_N))
    parts = 2 * shape.d_ff if any(name == "gate_up_proj" for name, *_ in shape.sites) else 0
    own = 4 * shape.d_model + 2 * q + 2 * kv + 3 * shape.d_ff + _beyond(shape)
    return shape.n_layers * (tokens * own + few * parts)


def may_fuse(shape: ModelShape, step: StepShape, precision: str, device: DeviceSpec) -> bool:
    """Say whether the fused kernel serves gate and up of this step, given slots enough, as `pallas_kernels.choose`."""
    rows, unit = step.m * step.S, 128 if precision == "fp8" else 64
    return (
        device.fused > 0
        and step.degree == 1
        and precision in ("bf16", "fp8")
        and step.rank_bucket <= 256
        and rows % 8 == 0
        and -(-rows // TILE_M) * TILE_M <= MAX_ROW_WASTE * rows
        and shape.d_model >= MIN_DEPTH
        and shape.d_model % unit == shape.d_ff % unit == 0
    )


def _score_bytes(shape: ModelShape, step: StepShape, precision: str) -> float:
    """Return the bytes of scores [B, N, S, S] on a GPU whose cuDNN cannot serve the model: float32, and their softmax.

    "none" keeps those of every layer, and their gradients join them in one. Where a layer is recomputed whole, they do
    when what its MLP works with is gone.
    """
    compute = 4.0 if precision == "fp32" else 2.0
    tokens = step.J * step.m * step.S / step.degree
    one = (4.0 + compute) * tokens * shape.n_heads * step.S
    if step.policy == "none":
        return (shape.n_layers + 1) * one
    return one if step.policy == "dots" else one + max(0.0, one - 5 * tokens * shape.d_ff * compute)


def logits_bytes(shape: ModelShape, tokens: float, precision: str) -> float:
    """Return the bytes of the logits that exist at one time, in float32, and of their gradient."""
    return (8.0 if precision == "fp32" else 6.0) * min(tokens, HEAD_CHUNK) * shape.vocab_size


def _written_out_logits(shape: ModelShape, step: StepShape, precision: str, device: DeviceSpec) -> float:
    """Return the same beside layers written out: where the fused kernel serves the head, exponentials in 16 bits.

    Of few positions XLA does. A model that caps its scores caps its logits, too, and holds both.
    """
    tokens = step.J * step.m * step.S / step.degree
    beside = 1.0 if shape.flash else 8 / 6
    if may_fuse_head(shape, step, precision, device):
        few = beside * logits_bytes(shape, min(tokens, MIN_ROWS - 1), precision)
        return max(few, 2.0 * min(tokens, HEAD_CHUNK) * shape.vocab_size)
    return beside * logits_bytes(shape, tokens, precision)


def may_fuse_head(shape: ModelShape, step: StepShape, precision: str, device: DeviceSpec) -> bool:
    """Say whether the fused kernel serves the head of this step, given tokens enough, as `choose_head`."""
    return (
        device.fused > 0
        and step.degree == 1
        and precision in ("bf16", "fp8")
        and shape.d_model % 64 == shape.vocab_size % 64 == 0
    )


def memory_terms(shape: ModelShape, step: StepShape, precision: str, device: DeviceSpec) -> dict[str, float]:
    """Return the bytes a device needs for each part of a packed step, before any factor."""
    compute = 4.0 if precision == "fp32" else 2.0
    tokens = step.J * step.m * step.S / step.degree
    params = step.J * shape.adapter_params(step.rank_bucket, step.targets) / step.degree
    moments = sum(MOMENT_BYTES[kind] for kind in step.optimizers)
    # fp32: parameter, running sum of gradients; moments; a compute copy
    adapters = params * (4.0 * (1 + step.accumulate) + moments + compute % 4)
    working = tokens * saved_elements(shape, "none") * compute
    logits = logits_bytes(shape, tokens, precision)
    if step.policy in ("none", "dots") and device.name != "cpu":
        logits = _written_out_logits(shape, step, precision, device)
    if step.policy == "none" and device.name != "cpu":
        saved = _written_out(shape, step, precision, device) * compute
        working += tokens * _beyond(shape) * compute
    else:
        saved = tokens * shape.n_layers * saved_elements(shape, step.policy) * compute
        adapters += params * compute  # all layers' gradients
    embedding = shape.n_params - shape.linear_params
    weights = shape.linear_params * PRECISION_BYTES[precision] + embedding * compute
    gathered = 0.0 if step.degree == 1 else 2 * shape.linear_params / shape.n_layers * compute
    if PRECISION_BYTES[precision] < compute:
        gathered += shape.linear_params / shape.n_layers * compute  # one layer, dequantised
    if precision == "fp8" and step.policy != "none":
        # some of them transposed, too; all, as seen in a loop that keeps products, without the fused kernel
        whole = step.policy == "dots" and not may_fuse(shape, step, precision, device)
        gathered += (1.0 if whole else TRANSPOSED) * shape.linear_params / step.degree
    scores = 0.0
    if not shape.flash and device.name != "cpu":
        scores = _score_bytes(shape, step, precision)
    elif device.attention == "xla":  # [B, N, S, S] float32, kept per layer unless the layer is recomputed
        layers = shape.n_layers if step.policy == "none" else 1
        scores = 4.0 * tokens * shape.n_heads * step.S * (layers + 2)
    terms = {
        "weights": weights / step.degree + gathered,
        "adapters": adapters,
        "working": working,
        "attention": scores,
        "logits": logits,
    }
    return terms if step.policy == LAST_RESORT else {**terms, f"saved_{step.policy}": saved}


def head_is_done(policy: str, device: DeviceSpec) -> bool:
    """Say whether logits are gone when a layer's backward pass begins, so that only the larger of both counts."""
    return policy in ("layer", LAST_RESORT) and device.name != "cpu"


def step_memory(
    shape: ModelShape,
    step: StepShape,
    precision: str,
    device: DeviceSpec,
    model: MemoryModel | None = None,
) -> int:
    """Predict the bytes each device of the group needs, with the model's margin on top."""
    model = model or MemoryModel()
    terms = memory_terms(shape, step, precision, device)
    parts = {name: getattr(model, name) * value for name, value in terms.items()}
    if head_is_done(step.policy, device):
        parts[min(("working", "logits"), key=parts.__getitem__)] = 0.0
    return int((model.fixed_bytes + sum(parts.values())) * (1 + model.margin))
