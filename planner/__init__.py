"""Plan which LoRA jobs train together, on which devices, in what order. Imports no JAX."""

from planner.api import Options, make_plan
from planner.devices import Devices, DeviceSpec, cpu_device, devices
from planner.errors import PlanError
from planner.memory import MemoryModel, StepShape, step_memory
from planner.plan import Assign, Pack, Plan
from planner.render import render_plan
from planner.signature import Signature, fits, signature_of
from planner.specs import JobSpec, ModelShape, decoder_shape, rank_bucket
from planner.time import CostModel, StepCost, cost_model

__all__ = [
    "Assign",
    "CostModel",
    "DeviceSpec",
    "Devices",
    "JobSpec",
    "MemoryModel",
    "ModelShape",
    "Options",
    "Pack",
    "Plan",
    "PlanError",
    "Signature",
    "StepCost",
    "StepShape",
    "cost_model",
    "cpu_device",
    "decoder_shape",
    "devices",
    "fits",
    "make_plan",
    "rank_bucket",
    "render_plan",
    "signature_of",
    "step_memory",
]
