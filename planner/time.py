"""How long a packed step takes: T = t0(d) + c(d, policy, S) · tokens + Σ slots · a(d, m · S) · rank bucket,
in seconds.

Coefficients come from a device table (planner/tables/*.json, every number marked measured or estimated), from
a file written by `plora profile`, or from a fit (planner/fit.py); a fitted entry wins over the formula.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from planner.devices import Devices, DeviceSpec, Mixture
from planner.errors import PlanError
from planner.memory import MemoryModel, saved_elements
from planner.signature import LAST_RESORT
from planner.specs import MOMENT_BYTES, PRECISION_BYTES, ModelShape

TABLES = Path(__file__).parent / "tables"


class StepCost(NamedTuple):
    """Hold the coefficients of one (degree, policy, precision): T = t0 + c·tokens + J·(a0 + a1·m·S)·rank
    bucket.
    """

    t0: float
    c: float
    a0: float
    a1: float

    def seconds(self, J: float, m: int, S: float, bucket: int) -> float:
        """Return the time of one micro-step."""
        return self.t0 + J * (self.c * m * S + (self.a0 + self.a1 * m * S) * bucket)


@dataclass(frozen=True)
class CostModel:
    """Hold one device type's speeds, and the memory factors measured with them.

    `flops` and `adapter_flops` are sustained FLOP/s on frozen products and on adapters; `bandwidth` is in
    bytes/s; `layer_s` is the part of a step that no token pays for, per layer; `scaling[d]` is the efficiency
    of d devices; `recompute[policy]` multiplies the time of frozen products. `token_passes` is how often each number
    that a layer makes of a token is read or written between products. `state_bytes_s` is in bytes/s, to
    and from the disk that jobs wait on between two packs, `host_bytes_s` to or from the host's pinned memory.
    `launch_s` is the least time of a baseline's step for 28 layers and `baseline_rate` its throughput as a share of
    ours (paper and hardware figures, see docs).
    `fitted` maps "model/degree/policy/precision" to [t0, c, a0, a1] and wins over the formula.
    """

    device: str
    flops: float
    adapter_flops: float
    bandwidth: float
    layer_s: float
    step_s: float = 0.002
    attention_flops: float = 0.0  # 0: as flops
    token_passes: float = 0.0
    scaling: dict[str, float] = field(default_factory=lambda: {"1": 1.0})
    precision: dict[str, float] = field(default_factory=lambda: {"bf16": 1.0})
    recompute: dict[str, float] = field(default_factory=lambda: {"none": 1.0, "dots": 1.0, "layer": 1.2})
    load_bytes_s: float = 2e9
    load_s: float = 3.0
    state_bytes_s: float = 1e9
    host_bytes_s: float = 25e9
    compile_s: float = 30.0
    export_s: float = 0.3
    launch_s: float = 0.15
    baseline_rate: float = 0.59
    padding: float = 0.0  # padding as a share of a row's tokens, jobs in lockstep on one data set
    mixed_padding: float = 0.1  # more of it where a pack mixes data sets or orders
    fitted: dict[str, list[float]] = field(default_factory=dict)
    memory: MemoryModel = field(default_factory=MemoryModel)
    sources: dict[str, str] = field(
        default_factory=dict
    )  # name of a number: measured or estimated, and where

    def to_json(self) -> str:
        """Return the model as indented JSON."""
        return json.dumps({"schema": 1, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str, where: str = "cost model") -> "CostModel":
        """Read a cost model.

        Raises:
            PlanError: broken JSON, a missing or unknown field, or a number that is not positive.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{where}: not JSON: {error}") from None
        if not isinstance(raw, dict) or raw.pop("schema", 1) != 1:
            raise PlanError(f"{where}: expected an object with schema 1")
        known = {f.name for f in fields(CostModel)}
        if unknown := set(raw) - known:
            raise PlanError(f"{where}: unknown fields {sorted(unknown)}; allowed: {sorted(known)}")
        try:
            memory = MemoryModel(**raw.pop("memory", {}))
            model = CostModel(**raw, memory=memory)
        except TypeError as error:
            raise PlanError(f"{where}: {error}") from None
        positive = (
            "flops",
            "adapter_flops",
            "bandwidth",
            "load_bytes_s",
            "state_bytes_s",
            "host_bytes_s",
            "baseline_rate",
        )
        for name in positive:
            value = getattr(model, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PlanError(f"{where}: {name} is {value!r}; a positive number is needed")
        for name in (
            "layer_s",
            "step_s",
            "attention_flops",
            "token_passes",
            "load_s",
            "compile_s",
            "export_s",
            "launch_s",
        ):
            value = getattr(model, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise PlanError(f"{where}: {name} is {value!r}; a number of at least 0 is needed")
        if not isinstance(model.fitted, dict):
            raise PlanError(f"{where}: fitted is {model.fitted!r}; an object is needed")
        for name, values in model.fitted.items():
            numbers = values if isinstance(values, list) else []
            sound = [v for v in numbers if isinstance(v, int | float) and math.isfinite(v) and v >= 0]
            if len(numbers) != 4 or len(sound) != 4 or not any(sound):
                raise PlanError(
                    f"{where}: fitted {name} is {values!r}; four numbers of at least 0 are needed, not all 0"
                )
        return model

    @staticmethod
    def load(path: str | Path) -> "CostModel":
        """Read a cost model from a JSON file (`--cost-model FILE.json`)."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cost model {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise PlanError(f"cost model {path}: not JSON: not valid UTF-8") from None
        return CostModel.from_json(text, f"cost model {path}")

    def step_cost(
        self,
        shape: ModelShape,
        degree: int,
        policy: str,
        precision: str,
        S: float,
        targets: frozenset[str] | None = None,
    ) -> StepCost:
        """Return the coefficients of a step; the time of frozen products counts forward and dx, never dW.

        "offload" takes as long as "layer" and the transfer of each layer's input from the host; that to it is hidden.
        """
        key = f"{shape.name}/{degree}/{policy}/{precision}"
        if key in self.fitted:
            return StepCost(*self.fitted[key])
        if policy == LAST_RESORT:
            layer = self.step_cost(shape, degree, "layer", precision, S, targets)
            moved = shape.n_layers * shape.d_model * (4.0 if precision == "fp32" else 2.0)
            return layer._replace(c=layer.c + moved / self.host_bytes_s / degree)
        speedup = degree * self.efficiency(degree)
        factor = self.recompute[policy] / self.precision.get(precision, 1.0)
        products = 4.0 * (shape.linear_params + shape.vocab_size * shape.d_model)  # FLOP a token
        scores = 6.0 * shape.n_layers * shape.n_heads * shape.head_dim * S  # causal: half of 2·(1+2)·2·S·H·N
        attention = scores / (self.attention_flops or self.flops)
        compute = 4.0 if precision == "fp32" else 2.0
        between = (
            self.token_passes * shape.n_layers * saved_elements(shape, "none") * compute / self.bandwidth
        )
        weights = 2 * shape.linear_params * max(PRECISION_BYTES[precision], compute / 2)  # read twice a step
        fixed = shape.n_layers * self.layer_s * (1 + 0.25 * math.log2(degree))
        params = shape.adapter_params(1, targets)
        # the optimizer reads and writes parameter, states and gradient in fp32; forward and backward read a
        # copy
        traffic = params * (2.0 * (8 + MOMENT_BYTES["adamw"]) + 3 * compute) / self.bandwidth
        return StepCost(
            t0=self.step_s + fixed + weights / self.bandwidth / degree,
            c=(products / self.flops * factor + attention) / speedup + between / degree,
            a0=traffic / degree,
            a1=6.0 * params / self.adapter_flops / speedup,
        )

    def slowed(self, factor: float) -> "CostModel":
        """Return the model of a device whose every step takes `factor` times as long; loading, compiling and
        export stay as they are.
        """
        return replace(
            self,
            flops=self.flops / factor,
            adapter_flops=self.adapter_flops / factor,
            attention_flops=self.attention_flops / factor,
            bandwidth=self.bandwidth / factor,
            host_bytes_s=self.host_bytes_s / factor,
            layer_s=self.layer_s * factor,
            step_s=self.step_s * factor,
            fitted={key: [factor * number for number in numbers] for key, numbers in self.fitted.items()},
        )

    def efficiency(self, degree: int) -> float:
        """Return the efficiency of a group of d devices; sizes the table lacks follow its last step."""
        if str(degree) in self.scaling:
            return self.scaling[str(degree)]
        known = sorted(int(d) for d in self.scaling if int(d) < degree)
        last = self.scaling[str(known[-1])]
        ratio = last / self.scaling[str(known[-2])] if len(known) > 1 else 0.9
        return last * ratio ** math.log2(degree / known[-1])

    def load_seconds(self, shape: ModelShape, degree: int, precision: str) -> float:
        """Return the time to bring the base onto a group; its devices read their shards side by side."""
        weights = shape.linear_params * PRECISION_BYTES[precision] + shape.embedding_params * 2
        return self.load_s + weights / degree / self.load_bytes_s

    def eval_seconds(self, cost: StepCost, tokens: int, state_bytes: int = 0) -> float:
        """Return the time to score a job: a forward pass, half of a training token each, the export, and what it
        moves of its state.
        """
        return self.export_s + 0.5 * cost.c * tokens + state_bytes / self.state_bytes_s


def cost_model(spec: DeviceSpec) -> CostModel:
    """Return the shipped table of a device type; a CPU's speeds grow with its cores."""
    if spec.name == "cpu":
        base = CostModel.load(TABLES / "cpu.json")
        cores = max(spec.cores, 1)
        return CostModel(
            **{
                **{f.name: getattr(base, f.name) for f in fields(base)},
                "flops": base.flops * cores,
                "adapter_flops": base.adapter_flops * cores,
            }
        )
    path = TABLES / f"{spec.name.lower()}.json"
    if not path.exists():
        raise PlanError(
            f"no cost table for {spec.name}; make one with `plora profile` and pass --cost-model FILE.json"
        )
    return CostModel.load(path)


def cost_models(
    devices: Devices | Mixture, given: CostModel | Mapping[str, CostModel] | None = None
) -> dict[str, CostModel]:
    """Return the cost model of each type by its name: the one given for it, else the shipped table.

    Raises:
        PlanError: a model is given for a type that is not there, or for a mixture without saying which type's it is.
    """
    names = [part.spec.name for part in devices.parts]
    if isinstance(given, CostModel):
        if len(names) > 1 and given.device not in names:
            raise PlanError(f"the cost model is one of {given.device!r}; the devices are {', '.join(names)}")
        given = {given.device if len(names) > 1 else names[0]: given}
    given = dict(given or {})
    if unknown := sorted(given.keys() - set(names)):
        raise PlanError(f"cost model of {', '.join(unknown)}: the devices are {', '.join(names)}")
    return {part.spec.name: given.get(part.spec.name) or cost_model(part.spec) for part in devices.parts}
