"""A job: one LoRA configuration to train. Its fields are defined here once; everything else reads them."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

LINEAR = "all-linear"


def _f(
    default: Any, doc: str, low: float | None = None, high: float | None = None, open_low: bool = False
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "open_low": open_low})


@dataclass(frozen=True)
class Job:
    """Describe one LoRA training run; defaults are PEFT's and transformers' where they have one.

    The metadata of each field (`doc`, `low`, `high`, `open_low`) is the source of the YAML schema, the command
    line help, the docs table and the leaderboard columns.
    """

    learning_rate: float = _f(2e-4, "peak learning rate", 0.0, None, True)
    rank: int = _f(16, "LoRA rank r", 1, 1024)
    alpha: float = _f(
        16.0, "LoRA alpha; the adapter's scale is alpha/r (alpha/sqrt(r) with use_rslora)", 0.0, None, True
    )
    use_rslora: bool = _f(False, "scale by alpha/sqrt(r) instead of alpha/r")
    dropout: float = _f(0.0, "dropout on the adapter's input", 0.0, 0.999)
    targets: tuple[str, ...] | str = _f(
        LINEAR, "modules that get an adapter: all-linear, or a list such as [q_proj, v_proj]"
    )
    rank_pattern: tuple[tuple[str, int], ...] = _f((), "ranks of single modules, by PEFT pattern", 1, 1024)
    alpha_pattern: tuple[tuple[str, float], ...] = _f(
        (), "alphas of single modules, by PEFT pattern", 0.0, None, True
    )
    batch_size: int = _f(8, "examples per optimizer step", 1, 65_536)
    epochs: float = _f(1.0, "passes over the training rows", 0.0, 1_000_000, True)
    max_steps: int | None = _f(None, "optimizer steps; when given, epochs is ignored", 1, 2**31 - 1)
    optimizer: Literal["adamw", "adamw_bf16", "sgd"] = _f(
        "adamw", "adamw_bf16 keeps AdamW's moments in bfloat16, stochastically rounded"
    )
    beta1: float = _f(0.9, "AdamW beta1 (momentum for sgd is `momentum`)", 0.0, 0.9999999)
    beta2: float = _f(0.999, "AdamW beta2", 0.0, 0.9999999)
    eps: float = _f(1e-8, "AdamW epsilon, outside the root", 0.0, None, True)
    momentum: float = _f(0.0, "SGD momentum", 0.0, 0.9999999)
    weight_decay: float = _f(0.0, "decoupled weight decay", 0.0, None)
    max_grad_norm: float = _f(
        1.0, "clip the gradient norm of this job alone; 0 turns clipping off", 0.0, None
    )
    scheduler: Literal["constant", "linear", "cosine"] = _f("cosine", "learning-rate schedule after warmup")
    warmup_ratio: float = _f(0.0, "share of the optimizer steps spent warming up, rounded up", 0.0, 1.0)
    warmup_steps: int | None = _f(
        None, "optimizer steps of warmup; when given, warmup_ratio is ignored", 0, 2**31 - 1
    )
    seed: int = _f(0, "draws the adapter's A and the dropout masks", 0, 2**31 - 1)
    data_seed: int = _f(0, "draws the order of the training rows", 0, 2**31 - 1)
    train: str = _f("", "training data of this job; empty: the sweep's")
    init_adapter: str = _f("", "PEFT adapter directory to start from (its rank and alpha apply)")

    @cached_property
    def job_id(self) -> str:
        """Name the job: short, stable, and a function of its configuration alone."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"r{self.rank}-lr{self.learning_rate:.2g}-b{self.batch_size}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values: patterns as dictionaries, targets as a list or text."""
        out = asdict(self)
        out["targets"] = self.targets if isinstance(self.targets, str) else list(self.targets)
        out["rank_pattern"] = dict(self.rank_pattern)
        out["alpha_pattern"] = dict(self.alpha_pattern)
        return out

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Job":
        """Build the job that `to_dict` describes."""
        patterns = {name: tuple(values[name].items()) for name in ("rank_pattern", "alpha_pattern")}
        targets = values["targets"]
        return Job(**values | patterns | {"targets": targets if isinstance(targets, str) else tuple(targets)})


JOB_FIELDS = {f.name: f for f in fields(Job)}
