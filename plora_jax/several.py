"""`plora plan` of several sweeps: the devices of each, and the commands that run them side by side. Imports no JAX."""

import contextlib
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import planner
from planner.render import aligned, duration, number_of
from plora_jax.config.sweep import Sweep
from plora_jax.engine.rundir import write_atomic
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.planning import find_devices, load_costs, plan_options, sweep_problem, with_fields

GROUPS = "some job needs a group of several devices, which `plora sweep` does not run yet (docs/cluster.md)"


def several_command(read: Sequence[tuple[Sweep, Sequence[Job]]], args: Namespace) -> int:
    """Plan several sweeps for the command line: print the devices of each, and write the plan where it is asked for.

    Raises:
      UserError: the sweeps name different devices and `--devices` names none, or they are to run on a CPU.
    """
    problems = []
    for path, (sweep, jobs) in zip(args.sweep, read, strict=True):
        try:
            problems.append(sweep_problem(sweep, jobs, devices=args.devices, rows=args.rows))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    devices = problems[0].devices
    if any(problem.devices.parts[0].spec.name == "cpu" for problem in problems):
        raise UserError(
            "devices: several sweeps are planned on GPUs, such as 8xH200; on a CPU run one after another"
        )
    if any(problem.devices != devices for problem in problems):
        named = ", ".join(
            f"{path}: {sweep.devices}" for path, (sweep, _) in zip(args.sweep, read, strict=True)
        )
        raise UserError(f"devices: the sweeps are for different ones ({named}); say which with --devices")
    costs = [load_costs(args.cost_model or (), own) for own in problems]
    asked = [
        planner.Problem(str(path), own.specs, own.shape, own.precision, cost, plan_options(own))
        for path, own, cost in zip(args.sweep, problems, costs, strict=True)
    ]
    plan, alone = _plan(asked, devices)
    both = list(zip(plan.sweeps, problems, strict=True))
    plan = replace(
        plan, sweeps=tuple(replace(share, plan=with_fields(own, share.plan)) for share, own in both)
    )
    ways = commands(plan, [sweep for sweep, _ in read], devices.parts[0].spec) if alone else [GROUPS]
    print("\n".join([*summary(plan), "", *ways]))
    if args.explain:
        for (share, own), cost in zip(both, costs, strict=True):
            on = replace(devices.parts[0], count=len(share.devices))
            told = planner.explain_plan(share.placed, own.specs, own.shape, on, cost_model=cost)
            print(f"\n{share.name}: {planner.render_plan(share.placed)}\n\n{told}")
    if args.json:
        write_atomic(args.json, plan.to_json() + "\n")
    if args.svg:
        write_atomic(args.svg, planner.several_svg(plan))
    return 0


def _plan(
    asked: Sequence[planner.Problem], devices: planner.Devices | planner.Mixture
) -> tuple[planner.SeveralPlan, bool]:
    """Plan with a device a pack, as `plora sweep` does; where that is impossible, in groups. Tell which."""
    if isinstance(devices, planner.Devices):
        with contextlib.suppress(planner.PlanError):
            alone = replace(devices, spec=replace(devices.spec, max_degree=1))
            return planner.plan_several(asked, alone), True
    return planner.plan_several(asked, devices), False


def summary(plan: planner.SeveralPlan) -> list[str]:
    """Return when the last sweep ends, a line on each, and what is to be known of them."""
    rows = [("sweep", "model", "devices", "jobs", "packs", "makespan", "bound")]
    for share in plan.sweeps:
        own = share.plan
        sizes = str(len(own.jobs)), str(len(own.packs)), duration(own.makespan_s), duration(own.lower_bound_s)
        rows.append((share.name, own.model, ranges(share.devices), *sizes))
    plans = [share.plan for share in plan.sweeps]
    lines = [
        f"{number_of(len(plans), 'sweep')} on {plan.device_count} × {plan.device}, each on devices of its own: "
        f"makespan {duration(plan.makespan_s)}, lower bound {duration(plan.lower_bound_s)}, "
        f"gap {100 * max(plan.gap, 0.0):.1f} %",
        f"one after another, each on all devices: at least {duration(plan.in_turn_s)}"
        + (", so that may be faster" if plan.in_turn_s < plan.makespan_s else ""),
    ]
    if any(own.expected_s is not None for own in plans):
        ends = [own.makespan_s if own.expected_s is None else own.expected_s for own in plans]
        lines.append(
            f"with early stopping {duration(max(ends))} expected (simulated); the makespan has no stops"
        )
    lines += ["", *aligned(rows), ""]
    if idle := sorted(set(range(plan.device_count)) - {n for share in plan.sweeps for n in share.devices}):
        lines.append(f"note: idle: {ranges(idle)}; planned on more devices, no sweep ended earlier")
    for share in plan.sweeps:
        lines += [f"note: {share.name}: {note}" for note in share.plan.notes]
    return lines


def commands(plan: planner.SeveralPlan, sweeps: Sequence[Sweep], spec: planner.DeviceSpec) -> list[str]:
    """Return the commands that run the sweeps side by side, on this machine or, if they need more hosts, on Ray."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # ours are numbered among these
    ids = visible if len(visible) >= plan.device_count else [str(n) for n in range(plan.device_count)]
    lines, stems = ["run them side by side:"], [Path(share.name).stem for share in plan.sweeps]
    if len(set(stems)) < len(stems):
        stems = [f"{stem}-{k}" for k, stem in enumerate(stems, 1)]
    for k, (share, sweep) in enumerate(zip(plan.sweeps, sweeps, strict=True)):
        words = [
            "plora",
            "sweep",
            share.name,
            "--out",
            f"runs/{stems[k]}",
            "--workers",
            str(len(share.devices)),
        ]
        if plan.device_count > spec.node_size:
            words += ["--launcher", "ray"]
            lines.append(f"  {shlex.join(words)}")
        else:
            own = ",".join(ids[n] for n in share.devices)
            lines.append(f"  CUDA_VISIBLE_DEVICES={own} {shlex.join(words)}")
        if sweep.devices != "auto" and [part.spec.name for part in find_devices(sweep.devices).parts] != [
            spec.name
        ]:
            lines.append(f"    (with devices: auto in {share.name}, which names {sweep.devices})")
    return lines


def ranges(devices: Sequence[int]) -> str:
    """Write device numbers: 0-3, 6."""
    held = set(devices)
    firsts, lasts = sorted(n for n in held if n - 1 not in held), sorted(n for n in held if n + 1 not in held)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
