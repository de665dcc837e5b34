"""Plan which LoRA jobs train together, on which devices, in what order. Imports no JAX."""

from planner.api import Effort, Options, make_plan
from planner.check import check_plan, check_several
from planner.devices import Devices, DeviceSpec, Mixture, cpu_device, devices, devices_from, mix
from planner.errors import PlanError
from planner.explain import explain_plan
from planner.fit import fit_memory, fit_time, read_memory_points
from planner.memory import MemoryModel, StepShape, step_memory
from planner.plan import Assign, Pack, Plan
from planner.render import render_plan
from planner.rungs import Ladders, Rungs, rest, state_bytes
from planner.several import Problem, SeveralPlan, Share, plan_several
from planner.signature import Signature, fits, signature_of
from planner.simulate import Ladder, World, asha_stops, expected_makespan, simulate, stretch
from planner.specs import MOMENT_BYTES, JobSpec, ModelShape, decoder_shape, rank_bucket
from planner.svg import gantt_svg, several_svg
from planner.time import CostModel, StepCost, cost_model

__all__ = [
    "MOMENT_BYTES",
    "Assign",
    "CostModel",
    "DeviceSpec",
    "Devices",
    "Effort",
    "JobSpec",
    "Ladder",
    "Ladders",
    "MemoryModel",
    "Mixture",
    "ModelShape",
    "Options",
    "Pack",
    "Plan",
    "PlanError",
    "Problem",
    "Rungs",
    "SeveralPlan",
    "Share",
    "Signature",
    "StepCost",
    "StepShape",
    "World",
    "asha_stops",
    "check_plan",
    "check_several",
    "cost_model",
    "cpu_device",
    "decoder_shape",
    "devices",
    "devices_from",
    "expected_makespan",
    "explain_plan",
    "fit_memory",
    "fit_time",
    "fits",
    "gantt_svg",
    "make_plan",
    "mix",
    "plan_several",
    "rank_bucket",
    "read_memory_points",
    "render_plan",
    "rest",
    "several_svg",
    "signature_of",
    "simulate",
    "state_bytes",
    "step_memory",
    "stretch",
]
